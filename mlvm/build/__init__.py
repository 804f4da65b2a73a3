"""A planned step as a C program: no Python, no memory but the caller's, the same bits."""
