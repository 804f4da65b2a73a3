"""What a tensor is, and how one call becomes a launch."""
