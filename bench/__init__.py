"""Benchmarks: `python -m bench dispatch [--quick] [--json FILE]`. Not part of the package."""
