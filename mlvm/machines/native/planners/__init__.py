"""The twins of the op rooms: each file prepares the kernels of `src/kernels/` of its name."""
