"""Recording of launches instead of running them, and checking of launches for errors."""
