"""Connectionist temporal classification: the loss of sequences without alignment.

Graves et al., Connectionist Temporal Classification, ICML 2006."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.rules import require
from mlvm.eager.control.loops import scan
from mlvm.eager.functions.arguments import integer, span, type_of
from mlvm.eager.functions.creation import arange, full_like
from mlvm.eager.functions.elements import take_along_axis, where
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.functions.losses import Reduction, reduced
from mlvm.eager.functions.shapes import broadcast_to, expand_dims, pad, part, reshape, stack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public
from mlvm.renamed import old_names


@public
@in_f32
def ctc_loss(
    log_predictions: Tensor,
    labels: Tensor,
    lengths: Tensor,
    label_lengths: Tensor,
    /,
    *,
    blank: int = 0,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute -log of the probability of the labels, summed over all alignments of labels to steps.

    In an alignment a label may be repeated. `blank` may separate labels, and must separate equal
    labels. The loss is computed by the forward algorithm in logarithms (Graves et al., ICML 2006,
    section 4.1), as a scan along time.

    For each sequence, only the first `lengths` steps and `label_lengths` labels are used. If there
    are too few steps, the loss is inf and its gradient is 0; where(isinf(loss), 0, loss) removes
    such losses. "mean" averages the losses; PyTorch first divides each by the number of labels.

    log_predictions: f[time, batch, K], such as the result of `log_softmax`; labels: i[batch, S];
    lengths and label_lengths: i[batch] -> f[batch], or f[] with "mean" or "sum". Raises
    `ShapeError` if the shapes do not fit; `PositionError` if a label is not one of the K classes,
    or `label_lengths` exceeds S; `DTypeError` if the predictions are not floats, or the other
    operands are not integers; `ArgumentError` if `blank` is not one of the classes or the reduction
    is unknown.

        >>> even = ml.log(ml.full((3, 1, 2), 0.5))
        >>> ml.exp(-ml.ctc_loss(even, [[1]], [3], [1]))
        Tensor([0.75], f32[1])

    Invalid calls:
        ml.ctc_loss(ml.zeros((4, 1, 2)), [[1]], [3], [1], blank=2)  # ArgumentError
        ml.ctc_loss(ml.zeros((4, 1, 2)), [[5]], [3], [1])  # PositionError
    """
    require("float", type_of(log_predictions))
    require("integer", type_of(labels), type_of(lengths), type_of(label_lengths))
    number = integer(blank, "blank")
    batch = labels.shape[:1]
    if (
        (log_predictions.ndim, labels.ndim) != (3, 2)
        or log_predictions.shape[1:2] != batch
        or not (batch == lengths.shape == label_lengths.shape)
    ):
        raise ShapeError(
            f"expected log_predictions [time, batch, classes], labels [batch, S] and two lengths "
            f"[batch], got {log_predictions.shape}, {labels.shape}, {lengths.shape} and "
            f"{label_lengths.shape}"
        )
    time, n, classes = log_predictions.shape
    if not 0 <= number < classes:
        raise ArgumentError(f"expected blank as one of the {classes} classes, got {number}")
    size, count = labels.shape[1], 2 * labels.shape[1] + 1
    counts = expand_dims(label_lengths, axis=1)
    # rejected below, like a number that is too large
    counts = where(op.less(counts, 0), size + 1, counts)
    labels = where(op.less(arange(size, dtype=labels.dtype), counts), labels, number)
    # -1 does not select the last class, and is rejected
    labels = where(op.less(labels, 0), classes, labels)
    states = reshape(stack([full_like(labels, number), labels], axis=-1), (n, count - 1))
    states = pad(states, ((0, 0), (0, 1)), number)
    before = part(pad(states, ((0, 0), (2, 0)), number), 1, span(count))
    skips = op.logical_and(op.not_equal(states, number), op.not_equal(states, before))
    emitted_classes = broadcast_to(states, (time, n, count))
    emitted = take_along_axis(log_predictions, emitted_classes, axis=-1)
    steps = arange(time, dtype=lengths.dtype)
    counted = expand_dims(op.less(expand_dims(steps, axis=1), lengths), axis=2)

    def turn(paths: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        """Advance the log probabilities of all paths to each state by one step."""
        emission, counts = row
        padded = pad(paths, ((0, 0), (2, 0)), -math.inf)
        previous, skipped = (part(padded, 1, span(i, i + count)) for i in (1, 0))
        skipped = where(skips, skipped, -math.inf)
        after = op.logaddexp(op.logaddexp(paths, previous), skipped) + emission
        return where(counts, after, paths), None

    first = broadcast_to(op.equal(arange(count), 0), (n, count))
    begin = op.astype(where(first, 0.0, -math.inf), dtype=emitted.dtype)
    paths, _ = scan(turn, begin, (emitted, counted))
    last = 2 * counts
    ends = take_along_axis(paths, last, axis=1)
    with_label = take_along_axis(paths, op.maximum(last - 1, 0), axis=1)
    with_label = where(op.greater(counts, 0), with_label, -math.inf)
    total = reshape(op.logaddexp(ends, with_label), (n,))
    return reduced(where(op.equal(total, -math.inf), math.inf, -total), reduction)


if not TYPE_CHECKING:  # otherwise type checkers would allow any name
    __getattr__ = old_names(__name__, "ml", globals())
