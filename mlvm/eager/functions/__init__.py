"""The functions of the Array API standard, and JAX's where it is silent."""
