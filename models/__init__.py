"""Reference models and the command that trains them, written with `mlvm.eager` only."""
