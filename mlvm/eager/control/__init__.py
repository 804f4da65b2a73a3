"""Control flow: what it means eagerly, and the blocks that a recording makes of it."""
