"""What was read at a recording, and is checked at a call."""
