"""Planners: each file prepares the kernels of the file in `kernels/` with the same name."""
