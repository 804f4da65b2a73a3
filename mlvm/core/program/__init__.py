"""Programs as data: instruction set, assembly text, bytes, and a builder."""
