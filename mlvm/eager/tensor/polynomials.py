"""Algebra of lengths: sums and products of integers in a normal form.

Two formulas of a trace that are equal for all sizes are the same polynomial. A comparison of them
therefore needs no guard, and a shape that is computed in two ways results in the same type.
"""

from __future__ import annotations

from typing import TypeAlias

Monomial: TypeAlias = tuple[int, ...]
"""The numbers of the atoms in a product, in order."""

Polynomial: TypeAlias = tuple[tuple[Monomial, int], ...]
"""The terms of a sum, in order: a product of atoms, and a nonzero factor."""


def polynomial(value: int) -> Polynomial:
    """Return the polynomial of a constant."""
    return (((), value),) if value else ()


def atom(number: int) -> Polynomial:
    """Return the polynomial that consists of a single atom."""
    return (((number,), 1),)


def constant_of(p: Polynomial) -> int | None:
    """Return the value of a polynomial without atoms; None for any other."""
    if not p:
        return 0
    return p[0][1] if len(p) == 1 and not p[0][0] else None


def added(p: Polynomial, q: Polynomial, times: int = 1) -> Polynomial | None:
    """Return p + times * q; None if it has more than 16 terms."""
    terms = dict(p)
    for monomial, factor in q:
        terms[monomial] = terms.get(monomial, 0) + times * factor
    return _canonical(terms)


def multiplied(p: Polynomial, q: Polynomial) -> Polynomial | None:
    """Return p * q; None if it has more than 16 terms."""
    terms: dict[Monomial, int] = {}
    for left, a in p:
        for right, b in q:
            monomial = tuple(sorted(left + right))
            terms[monomial] = terms.get(monomial, 0) + a * b
    return _canonical(terms)


def divided(p: Polynomial, q: Polynomial) -> Polynomial | None:
    """Return p / q for a q with one term that divides each term of p; otherwise None."""
    if len(q) != 1:
        return None
    [(divisor, by)] = q
    terms: dict[Monomial, int] = {}
    for monomial, factor in p:
        if factor % by:
            return None
        rest = list(monomial)
        for each in divisor:
            if each not in rest:
                return None
            rest.remove(each)
        terms[tuple(rest)] = factor // by
    return _canonical(terms)


def _canonical(terms: dict[Monomial, int]) -> Polynomial | None:
    p = tuple(sorted((monomial, factor) for monomial, factor in terms.items() if factor))
    return p if len(p) <= 16 else None
