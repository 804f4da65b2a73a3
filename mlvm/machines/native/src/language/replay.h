/* Launches of captured functions on known tensors: see replay.c. */
#ifndef MLVM_REPLAY_H
#define MLVM_REPLAY_H

#include "../limited_api.h"

int replay_init(PyObject *module);

#endif
