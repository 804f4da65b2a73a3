"""Programs as data: the instruction set, its text, its bytes, and a builder."""
