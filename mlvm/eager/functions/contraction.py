"""`einsum`: sums of products of tensors with labelled axes.

The operands are multiplied pairwise; the pair with the smallest product is multiplied first. An
axis that the result does not contain is summed as soon as no other operand needs it. Each
multiplication is a batched matrix product: axes of only one operand are rows or columns, shared
axes that are kept are the batch.
"""

from __future__ import annotations

import itertools
import math
import operator
import string
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from mlvm.core.errors import ArgumentError, ShapeError, counted, with_article
from mlvm.core.types import Shape
from mlvm.eager.functions.arguments import type_of
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.matrices import diagonal_of
from mlvm.eager.functions.shapes import permute_dims, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
@through_f32
def einsum(subscripts: str, /, *operands: Tensor) -> Tensor:
    """Sum products of operands by subscripts such as "ij,jk->ik", like numpy's `einsum`.

    A letter labels an axis of each operand; axes with the same letter have equal lengths, or length
    1. A letter that occurs twice in one operand selects the diagonal. The letters after "->" are
    the axes of the result, and all other axes are summed. Without "->" the result has the letters
    that occur once, in alphabetical order. "..." represents the axes without letters, which
    broadcast. dtypes promote.

    "ij,jk->ik": [m, k], [k, n] -> [m, n]. Raises `ArgumentError` if the subscripts are invalid, or
    for a wrong number of operands; `ShapeError` if the operands do not fit them; `DTypeError` if
    bools would be added or multiplied.

        >>> ml.einsum("ij,j->i", ml.ones((2, 3)), ml.arange(3))
        Tensor([3., 3.], f32[2])

    Invalid calls:
        ml.einsum("ij,jk->ik", x)  # ArgumentError
        ml.einsum("i,i->", bools, bools)  # DTypeError
    """
    shapes = tuple([type_of(x).shape for x in operands])
    if not isinstance(subscripts, str):
        raise ArgumentError(
            f"expected subscripts as a string, got {with_article(type(subscripts).__name__)}"
        )
    values = [*operands]
    for fn, places in _Contraction(subscripts, shapes).steps:
        values.append(fn(*[values[i] for i in places]))
    return values[-1]


# --- the subscripts ------------------------------------------------------------------

Labels = tuple[str, ...]
"""Labels of axes: letters, and "-1", "-2", ...

for the axes of an ellipsis, counted from the last."""


def _parsed(subscripts: str, ndims: tuple[int, ...]) -> tuple[tuple[Labels, ...], Labels]:
    """Parse subscripts into the labels of the result and of operands with `ndims` dimensions.

    Raises `ArgumentError`, and `ShapeError` for a wrong number of dimensions."""
    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if len(parts) != len(ndims):
        raise ArgumentError(
            f"{subscripts!r}: expected {counted(len(parts), 'operand')}, got {len(ndims)}"
        )
    dots = [ndim - len(part.replace("...", "")) for part, ndim in zip(parts, ndims, strict=True)]
    for part, ndim, rest in zip(parts, ndims, dots, strict=True):
        if rest < 0 or (rest and "..." not in part):
            raise ShapeError(
                f"expected an operand with the axes {part!r} of {subscripts!r}, got "
                f"{counted(ndim, 'dimension')}"
            )
    labels = tuple(_labels(part, rest, subscripts) for part, rest in zip(parts, dots, strict=True))
    listed = [label for each in labels for label in each]
    dotted = [sum(label[0] == "-" for label in each) for each in labels]
    broadcast = _ellipsis(max(dotted, default=0))
    if not arrow:
        once = sorted(label for label in {*listed} - {*broadcast} if listed.count(label) == 1)
        return labels, (*broadcast, *once)
    out = _labels(result, len(broadcast), subscripts)
    if len({*out}) < len(out) or not {*out} <= {*listed}:
        wrong = next(label for label in out if label not in listed or out.count(label) > 1)
        raise ArgumentError(
            f"{subscripts!r}: expected each letter of the result in an operand, and once in the "
            f"result, got {wrong!r}"
        )
    if not {*broadcast} <= {*out}:
        raise ArgumentError(
            f"{subscripts!r}: expected ... in the result, as in the operands, got {subscripts}"
        )
    return labels, out


def _labels(part: str, dots: int, subscripts: str) -> Labels:
    """Return the axis labels of an operand or the result; an ellipsis represents `dots` axes."""
    before, ellipsis, behind = part.partition("...")
    if not {*before, *behind} <= {*string.ascii_letters}:
        raise ArgumentError(
            f"expected letters as subscripts, and ... once for each operand, got {subscripts!r}"
        )
    return (*before, *(_ellipsis(dots) if ellipsis else ()), *behind)


def _ellipsis(count: int) -> Labels:
    return tuple([str(i) for i in range(-count, 0)])


def _lengths(labels: Sequence[Labels], shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the length of each axis.

    Raises `ShapeError` if axes with the same label do not broadcast."""
    lengths: dict[str, int] = {}
    for named, shape in zip(labels, shapes, strict=True):
        here: dict[str, int] = {}
        for label, n in zip(named, shape, strict=True):
            length = lengths.get(label, 1)
            if (n != length and 1 not in (n, length)) or here.setdefault(label, n) != n:
                axis = "an axis of ..." if label[0] == "-" else f"axis {label!r}"
                raise ShapeError(f"expected equal lengths for {axis}, got {length} and {n}")
            lengths[label] = n if length == 1 else length
    return lengths


# --- the steps ------------------------------------------------------------------------


class _Term(NamedTuple):
    """Index of a value, and the axis labels.

    Axes of length 1 that broadcast are omitted."""

    value: int
    labels: Labels


Step: TypeAlias = tuple[Callable[..., Tensor], tuple[int, ...]]
"""Function and the indices of the input values; the operands have the first indices."""


class _Contraction:
    """The `steps` for operands of these shapes; the last step computes the result."""

    def __init__(self, subscripts: str, shapes: tuple[Shape, ...]) -> None:
        self.noperands = len(shapes)
        self.steps: list[Step] = []
        labels, out = _parsed(subscripts, tuple(map(len, shapes)))
        self.lengths = _lengths(labels, shapes)
        terms = [
            self.without_diagonals(_Term(i, named), shape)
            for i, (named, shape) in enumerate(zip(labels, shapes, strict=True))
        ]
        while len(terms) > 1:
            i, j = self.cheapest(terms, out)
            second, first = terms.pop(j), terms.pop(i)
            needed = {*out}.union(*[term.labels for term in terms])
            terms.append(self.product(first, second, needed))
        value, named = self.summed(terms[0], {*out})
        self.add(permute_dims, value, axes=tuple([named.index(label) for label in out]))

    def add(self, fn: Callable[..., Tensor], *values: int, **keywords: Any) -> int:
        """Append a step, and return the index of the new value."""
        self.steps.append((partial(fn, **keywords), values))
        return self.noperands + len(self.steps) - 1

    def size(self, labels: Iterable[str]) -> int:
        return math.prod(self.lengths[label] for label in labels)

    def reshaped(self, value: int, labels: Iterable[str]) -> int:
        return self.add(reshape, value, shape=tuple([self.lengths[label] for label in labels]))

    def without_diagonals(self, term: _Term, shape: Shape) -> _Term:
        """Reduce the term to diagonals: each label occurs once, and no axis broadcasts."""
        x, labels = term
        whole = [label for label, n in zip(labels, shape, strict=True) if n == self.lengths[label]]
        if len(whole) < len(labels):
            x, labels = self.reshaped(x, whole), tuple(whole)
        for label in dict.fromkeys(labels):
            while labels.count(label) > 1:
                i = labels.index(label)
                j = labels.index(label, i + 1)
                rest = [k for k in range(len(labels)) if k not in (i, j)]
                x = self.add(diagonal_of, self.add(permute_dims, x, axes=(*rest, i, j)))
                labels = (*[labels[k] for k in rest], label)
        return _Term(x, labels)

    def cheapest(self, terms: Sequence[_Term], out: Labels) -> tuple[int, int]:
        """Return the indices of the next two terms to multiply: the pair with the smallest product.

        If there are several, return the first."""

        def size(pair: tuple[int, int]) -> int:
            others = [term.labels for i, term in enumerate(terms) if i not in pair]
            both = {*terms[pair[0]].labels, *terms[pair[1]].labels}
            return self.size(both & {*out}.union(*others))

        return min(itertools.combinations(range(len(terms)), 2), key=size)

    def summed(self, term: _Term, needed: Iterable[str]) -> _Term:
        """Sum the term over the axes that are not needed."""
        x, labels = term
        axes = tuple(i for i, label in enumerate(labels) if label not in needed)
        if axes:
            x = self.add(_sum, x, axes=axes)
        return _Term(x, tuple(label for label in labels if label in needed))

    def grouped(self, term: _Term, *groups: Sequence[str]) -> int:
        """Merge each group of axes into one axis."""
        x, labels = term
        order = tuple([labels.index(label) for group in groups for label in group])
        if order != tuple(range(len(labels))):
            x = self.add(permute_dims, x, axes=order)
        if any(len(group) != 1 for group in groups):
            x = self.add(reshape, x, shape=tuple([self.size(group) for group in groups]))
        return x

    def product(self, x: _Term, y: _Term, needed: set[str]) -> _Term:
        """Multiply two terms and sum over the axes that no other term needs."""
        x, y = self.summed(x, needed | {*y.labels}), self.summed(y, needed | {*x.labels})
        shared = [label for label in x.labels if label in y.labels]
        batch = [label for label in shared if label in needed]
        inner = [label for label in shared if label not in needed]
        rows = [label for label in x.labels if label not in shared]
        columns = [label for label in y.labels if label not in shared]
        batches = [batch] if batch else []

        def matrices(term: _Term, first: Sequence[str], last: Sequence[str]) -> tuple[int, bool]:
            """Return the matrices of a term, one per batch index, and whether they are transposed.

            The matrices are [first, last]; they are transposed if the term is stored as [last,
            first]."""
            turned = (*batch, *last, *first) == term.labels and bool(first and last)
            groups = (last, first) if turned else (first, last)
            return self.grouped(term, *batches, *groups), turned

        if inner:
            left, transpose_x = matrices(x, rows, inner)
            right, transpose_y = matrices(y, inner, columns)
            transposes = {"transpose_x": transpose_x, "transpose_y": transpose_y}
            product = self.add(op.matmul, left, right, **transposes)
            groups = [*batches, rows, columns]
        else:
            left = self.grouped(x, batch, rows, [])
            right = self.grouped(y, batch, [], columns)
            product = self.add(operator.mul, left, right)
            groups = [batch, rows, columns]
        labels = (*batch, *rows, *columns)
        if any(len(group) != 1 for group in groups):
            product = self.reshaped(product, labels)
        return _Term(product, labels)


def _sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return op.sum(x, axis=axes, dtype=x.dtype)
