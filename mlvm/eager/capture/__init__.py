"""Compile a function of tensors: trace it once and replay the recorded program."""
