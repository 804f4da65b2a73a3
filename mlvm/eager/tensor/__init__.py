"""Tensors, and the path of one call from operands to a launch."""
