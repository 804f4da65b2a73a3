"""Control flow: its eager semantics, and the blocks that a recording makes from it."""
