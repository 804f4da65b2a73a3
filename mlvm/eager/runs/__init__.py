"""Runs as data: recording, comparison and replay of steps, and a debugger."""
