"""Kernels and a loop in C, which take the place of the reference ones where they were built."""
