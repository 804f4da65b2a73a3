"""`einsum`: sums of products of tensors, named by their axes.

The operands are multiplied two at a time, those first whose product is smallest. An axis that the
result does not have is summed as soon as nothing else needs it. The rest is a batched matrix
product: axes that only one operand has are rows or columns, axes that both keep are the batch.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.types import TensorType
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
    """Sum products of operands by subscripts such as "ij,jk->ik", as numpy's `einsum` does.

    A letter names an axis of each operand; axes of one letter are of one length, or of length 1.
    Twice in one operand it takes the diagonal. The letters after "->" are the result's axes, and
    all others are summed over; without "->" they are those that occur once, in alphabetical order.
    "..." stands for the axes that are not named, which broadcast. dtypes promote.

    "ij,jk->ik": [m, k], [k, n] -> [m, n]. Raises `ArgumentError` if the subscripts are invalid,
    or for another number of operands; `ShapeError` if the operands do not fit them; `DTypeError` if
    bools would be added or multiplied.

        >>> ml.einsum("ij,j->i", ml.ones((2, 3)), ml.arange(3))
        Tensor([3., 3.], f32[2])

    Refuses:
        ml.einsum("ij,jk->ik", x)  # ArgumentError
        ml.einsum("i,i->", bools, bools)  # DTypeError
    """
    types = [type_of(x) for x in operands]
    if not isinstance(subscripts, str):
        raise ArgumentError(f"expected subscripts as a string, got a {type(subscripts).__name__}")
    labels, out = _parsed(subscripts, tuple([type.ndim for type in types]))
    lengths = _lengths(labels, types)
    terms = [
        _without_diagonals(_Term(x, named), lengths)
        for x, named in zip(operands, labels, strict=True)
    ]
    while len(terms) > 1:
        i, j = _cheapest(terms, out, lengths)
        second, first = terms.pop(j), terms.pop(i)
        needed = {*out}.union(*[term.labels for term in terms])
        terms.append(_product(first, second, needed, lengths))
    [term] = terms
    x, named = _summed(term, {*out})
    return permute_dims(x, [named.index(label) for label in out])


# --- the subscripts ------------------------------------------------------------------

Labels = tuple[str, ...]
"""Names of axes: letters, and for those of an ellipsis "-1", "-2", ... from the last one."""


@lru_cache(maxsize=1024)
def _parsed(subscripts: str, ndims: tuple[int, ...]) -> tuple[tuple[Labels, ...], Labels]:
    """Parse subscripts: the labels of operands with `ndims` dimensions, and of the result. Raises
    `ArgumentError`, and `ShapeError` for another number of dimensions."""
    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if len(parts) != len(ndims):
        raise ArgumentError(f"{subscripts!r}: expected {len(parts)} operands, got {len(ndims)}")
    dots = [ndim - len(part.replace("...", "")) for part, ndim in zip(parts, ndims, strict=True)]
    for part, ndim, rest in zip(parts, ndims, dots, strict=True):
        if rest < 0 or (rest and "..." not in part):
            raise ShapeError(f"{part!r} of {subscripts!r} does not fit {ndim} dimensions")
    labels = tuple(_labels(part, rest, subscripts) for part, rest in zip(parts, dots, strict=True))
    counted = [label for each in labels for label in each]
    dotted = [sum(label[0] == "-" for label in each) for each in labels]
    broadcast = _ellipsis(max(dotted, default=0))
    if not arrow:
        once = sorted(label for label in {*counted} - {*broadcast} if counted.count(label) == 1)
        return labels, (*broadcast, *once)
    out = _labels(result, len(broadcast), subscripts)
    if len({*out}) < len(out) or not {*out} <= {*counted}:
        wrong = next(label for label in out if label not in counted or out.count(label) > 1)
        raise ArgumentError(f"{subscripts!r}: {wrong!r} is in no operand, or twice in the result")
    if not {*broadcast} <= {*out}:
        raise ArgumentError(f"{subscripts!r}: the result lacks the ... of the operands")
    return labels, out


def _labels(part: str, dots: int, subscripts: str) -> Labels:
    """Return the axis labels of an operand or the result; its ellipsis stands for `dots` axes."""
    before, ellipsis, behind = part.partition("...")
    if not {*before, *behind} <= {*string.ascii_letters}:
        raise ArgumentError(
            f"expected letters as subscripts, and ... once for each operand, got {subscripts!r}"
        )
    return (*before, *(_ellipsis(dots) if ellipsis else ()), *behind)


def _ellipsis(count: int) -> Labels:
    return tuple([str(i) for i in range(-count, 0)])


def _lengths(labels: Sequence[Labels], types: Sequence[TensorType]) -> dict[str, int]:
    """Return the length of each axis. Raises `ShapeError` if axes of one name do not broadcast."""
    lengths: dict[str, int] = {}
    for named, type in zip(labels, types, strict=True):
        here: dict[str, int] = {}
        for label, n in zip(named, type.shape, strict=True):
            length = lengths.get(label, 1)
            if (n != length and 1 not in (n, length)) or here.setdefault(label, n) != n:
                axis = "an axis of ..." if label[0] == "-" else f"axis {label!r}"
                raise ShapeError(f"{axis} has lengths {length} and {n}")
            lengths[label] = n if length == 1 else length
    return lengths


# --- what is done --------------------------------------------------------------------


class _Term(NamedTuple):
    """Tensor and the labels of its axes. Axes of length 1 that broadcast are left out."""

    x: Tensor
    labels: Labels


def _without_diagonals(term: _Term, lengths: dict[str, int]) -> _Term:
    """Reduce the term to its diagonals: each label once, and no axes that broadcast."""
    x, labels = term
    axes = [i for i, label in enumerate(labels) if x.shape[i] == lengths[label]]
    x, labels = reshape(x, [x.shape[i] for i in axes]), tuple([labels[i] for i in axes])
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            rest = [k for k in range(x.ndim) if k not in (i, j)]
            x = diagonal_of(permute_dims(x, (*rest, i, j)))
            labels = (*[labels[k] for k in rest], label)
    return _Term(x, labels)


def _cheapest(terms: Sequence[_Term], out: Labels, lengths: dict[str, int]) -> tuple[int, int]:
    """Return the indices of the two terms to multiply next: the first pair with the smallest
    product."""

    def size(pair: tuple[int, int]) -> int:
        others = [term.labels for i, term in enumerate(terms) if i not in pair]
        both = {*terms[pair[0]].labels, *terms[pair[1]].labels}
        return math.prod(lengths[label] for label in both & {*out}.union(*others))

    return min(itertools.combinations(range(len(terms)), 2), key=size)


def _summed(term: _Term, needed: Iterable[str]) -> _Term:
    """Sum the term over the axes that are not needed."""
    x, labels = term
    summed = tuple(i for i, label in enumerate(labels) if label not in needed)
    if summed:
        x = op.sum(x, axis=summed, dtype=x.dtype)
    return _Term(x, tuple(label for label in labels if label in needed))


def _product(x: _Term, y: _Term, needed: set[str], lengths: dict[str, int]) -> _Term:
    """Multiply two terms and sum over the axes that no other term needs."""
    x, y = _summed(x, needed | {*y.labels}), _summed(y, needed | {*x.labels})
    shared = [label for label in x.labels if label in y.labels]
    batch = [label for label in shared if label in needed]
    inner = [label for label in shared if label not in needed]
    rows = [label for label in x.labels if label not in shared]
    columns = [label for label in y.labels if label not in shared]

    def size(labels: Iterable[str]) -> int:
        return math.prod(lengths[label] for label in labels)

    def shaped(term: _Term, *groups: Sequence[str]) -> Tensor:
        """Reshape the term so that each group of axes is one axis."""
        order = [term.labels.index(label) for group in groups for label in group]
        return reshape(permute_dims(term.x, order), [size(group) for group in groups])

    def matrices(term: _Term, first: Sequence[str], last: Sequence[str]) -> tuple[Tensor, bool]:
        """Return a matrix [first, last] for each index of the batch, or its transpose if the term
        is laid out so, and whether it is transposed."""
        turned = (*batch, *last, *first) == term.labels and bool(first and last)
        groups = (batch, last, first) if turned else (batch, first, last)
        matrix = shaped(term, *groups)
        return (matrix if batch else reshape(matrix, matrix.shape[1:])), turned

    if inner:
        left, transpose_x = matrices(x, rows, inner)
        right, transpose_y = matrices(y, inner, columns)
        product = op.matmul(left, right, transpose_x=transpose_x, transpose_y=transpose_y)
    else:
        left = reshape(shaped(x, batch, rows), (size(batch), size(rows), 1))
        right = reshape(shaped(y, batch, columns), (size(batch), 1, size(columns)))
        product = left * right
    labels = (*batch, *rows, *columns)
    return _Term(reshape(product, [lengths[label] for label in labels]), labels)
