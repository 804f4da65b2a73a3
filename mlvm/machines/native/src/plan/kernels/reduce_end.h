/* Forgets what a reduction was defined by, for the next. */
#undef REDUCE
#undef A
#undef LIFT
#undef COMBINE
#undef IDENTITY
#undef DECIDED
#undef UNLESS_NAN
#undef ANY_ORDER
#undef ROUNDED
#undef FINISH
#undef REPAIR
