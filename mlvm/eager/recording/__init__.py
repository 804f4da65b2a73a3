"""Launches that are noted and not run."""
