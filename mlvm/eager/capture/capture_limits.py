"""Limits of the caches of a captured function; docs/architecture.md describes the caches."""

from __future__ import annotations

from typing import Final, NamedTuple


class CaptureLimits(NamedTuple):
    """Maximum numbers of entries. The last two are thresholds of the traces."""

    matchers: int = 4
    guard_sets: int = 8
    programs: int = 64  # with dynamic sizes, and as many without
    changed_numbers: int = 256
    families: int = 128
    traces: int = 8  # of a family: of calls that differ only in sizes
    plans: int = 8  # of a trace
    choices: int = 8  # of kernels, of an open program
    site_calls: int = 64  # of a site of an open program
    sizes: int = 3  # number of different sizes at which an axis becomes dynamic
    warning: int = 8  # number of programs of a function at which the warning is issued


LIMITS: Final = CaptureLimits()
