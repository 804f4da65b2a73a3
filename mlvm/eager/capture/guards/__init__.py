"""What a captured function read when it was recorded, and whether a call would read the same."""
