"""Kernels and a loop in C, which replace the reference versions if the extension is built."""
