"""What other libraries know of mlvm, and mlvm of them."""
