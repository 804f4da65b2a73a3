"""Runs of captured functions as data: programs op by op, their execution, and a debugger."""
