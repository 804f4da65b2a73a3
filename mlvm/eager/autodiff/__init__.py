"""Reverse-mode and forward-mode differentiation: the tape, the ops' rules, and gradient checks."""
