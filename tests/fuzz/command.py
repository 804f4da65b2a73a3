"""Shared pieces of the fuzzers' command lines."""

from __future__ import annotations

import argparse


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of the fuzzer in that module."""
    name = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz {name}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def limit_memory(most: int) -> None:
    """Limit the addresses of this process: a program that asks for too much gets an error."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
