"""Compilation of a recorded step to one planned program."""
