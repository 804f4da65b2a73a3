"""The reference machine: it verifies, links and runs programs, and finds functions by name."""
