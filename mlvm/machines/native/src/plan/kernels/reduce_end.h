/* Undefine the macros of a reduction. */
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
