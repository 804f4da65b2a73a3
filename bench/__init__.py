"""Benchmarks: `python -m bench NAME [--quick] [--json FILE]`. Not part of the package."""
