"""Transformations of functions: batching, directional derivatives, and custom derivatives."""
