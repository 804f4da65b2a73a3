"""Functions made of functions: many lanes of one at once."""
