/* Launches as messages, and messages as launches: see posts.c. */
#ifndef MLVM_POSTS_H
#define MLVM_POSTS_H

#include "../limited_api.h"

typedef struct Outbox Outbox;

int posts_init(PyObject *module);
int is_outbox(PyObject *object);

/* Seconds of a clock that only moves forward. */
double now(void);

/* Add a launch of the program with that number, from the current line of Python. Return whether the box
 * should be sent now, or -1 with an exception set. */
int outbox_launch(Outbox *box, long long number, const int64_t *handles, int count);

#endif
