"""Control flow: eager semantics, and the blocks that a recording makes from it."""
