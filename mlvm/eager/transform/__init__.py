"""Functions made of functions: of batches, of directions, with derivatives of their own."""
