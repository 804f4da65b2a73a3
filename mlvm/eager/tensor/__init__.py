"""Tensors, and the path of a call from its operands to a launch."""
