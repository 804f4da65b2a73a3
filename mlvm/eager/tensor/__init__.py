"""Tensors, and the path of a call from operands to a launch."""
