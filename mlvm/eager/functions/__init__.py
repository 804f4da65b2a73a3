"""Functions of the Array API standard, and functions of JAX that are not in the standard."""
