"""The planners of the op rooms: each file prepares the kernels of `kernels/` of its name."""
