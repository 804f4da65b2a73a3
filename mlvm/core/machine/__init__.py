"""Reference machine: it verifies, links and runs programs, and looks up functions by name."""
