"""Trains the models: the command, its loop, checkpoints and pictures."""
