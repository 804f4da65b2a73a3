"""Gradients: the tape, the rules of the ops, and what checks them."""
