"""Runs as data: recordings of steps, their comparison and replay, and a debugger."""
