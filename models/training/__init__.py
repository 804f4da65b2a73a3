"""Training of the models: command, loop, checkpoints and plots."""
