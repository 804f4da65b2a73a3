"""Losses. A loss has two tensors of one shape (predictions, then targets) and gives one loss for
each element, or for each row of a distribution; `reduction="mean"` or `"sum"` makes one number of
them. Only `mean_squared_error` is a mean unless told otherwise, as its name says. A loss of halves
is computed in f32, and what is given back is rounded once.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from mlvm.core.errors import AttributeRefused, DTypeError, ShapeError, brief
from mlvm.core.rules import is_real
from mlvm.core.types import TensorType
from mlvm.eager.functions.arguments import integer, type_of
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Reduction: TypeAlias = Literal["none", "mean", "sum"]


@public
@in_f32
def mean_squared_error(
    predictions: Tensor, targets: Tensor, /, *, reduction: Reduction = "mean"
) -> Tensor:
    """(predictions - targets)^2, of floats of one shape; their mean unless `reduction` differs.

    Predictions and targets: f[...] -> f[], or f[...] with "none". Raises `ShapeError` unless
    both have one shape (nothing broadcasts), `DTypeError` for other than floats, `AttributeRefused`
    for another reduction.

        >>> ml.mean_squared_error(ml.asarray([0.5, 3.0]), ml.zeros(2))
        Tensor(4.625, f32[])
    """
    _require_pair(predictions, targets)
    return _reduced(op.square(predictions - targets), reduction)


@public
@in_f32
def l1(predictions: Tensor, targets: Tensor, /, *, reduction: Reduction = "none") -> Tensor:
    """|predictions - targets|, of floats of one shape.

    Both: f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have one
    shape (nothing broadcasts), `DTypeError` for other than floats, `AttributeRefused` for another
    reduction.

        >>> ml.l1(ml.asarray([0.5, 3.0]), ml.zeros(2))
        Tensor([0.5, 3. ], f32[2])
    """
    _require_pair(predictions, targets)
    return _reduced(op.abs(predictions - targets), reduction)


@public
@in_f32
def huber(
    predictions: Tensor, targets: Tensor, /, *, delta: float = 1.0, reduction: Reduction = "none"
) -> Tensor:
    """d^2 / 2 for a difference |d| <= delta, else delta (|d| - delta / 2), of floats of one shape
    (Huber, Ann. Math. Statist. 35, 1964).

    Both: f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have one
    shape (nothing broadcasts), `DTypeError` for other than floats, `AttributeRefused` for another
    reduction, and unless delta > 0.

        >>> ml.huber(ml.asarray([0.5, 3.0]), ml.zeros(2))
        Tensor([0.125, 2.5  ], f32[2])
    """
    _require_pair(predictions, targets)
    if not is_real(delta) or not delta > 0:
        raise AttributeRefused(f"delta is a number > 0, not {brief(delta)}")
    d = predictions - targets
    inner = op.clip(d, -float(delta), float(delta))
    return _reduced(inner * (d - 0.5 * inner), reduction)


@public
@in_f32
def binary_cross_entropy_with_logits(
    logits: Tensor, targets: Tensor, /, *, reduction: Reduction = "none"
) -> Tensor:
    """-t log(p) - (1 - t) log(1 - p) for p = sigmoid(logits) and targets 0 <= t <= 1, floats of one
    shape; computed from -log(p) = log(1 + e^-x) and -log(1 - p) = log(1 + e^x), which are accurate
    and finite for all finite logits.

    Both: f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have one
    shape (nothing broadcasts), `DTypeError` for other than floats, `AttributeRefused` for another
    reduction.

        >>> ml.binary_cross_entropy_with_logits(ml.asarray([0.0, 9.0]), ml.asarray([1.0, 1.0]))
        Tensor([6.9314718e-01, 1.2340219e-04], f32[2])
    """
    _require_pair(logits, targets)
    losses = targets * op.logaddexp(-logits, 0.0) + (1.0 - targets) * op.logaddexp(logits, 0.0)
    return _reduced(losses, reduction)


@public
@in_f32
def kl_divergence(
    log_predictions: Tensor, targets: Tensor, /, *, reduction: Reduction = "none"
) -> Tensor:
    """sum(t (log(t) - log_predictions)) along the last axis, one divergence for each distribution t
    of the targets (Kullback and Leibler, Ann. Math. Statist. 22, 1951). Where t is 0, the term is
    0. The predictions are logarithms, as `log_softmax` gives them; PyTorch's "batchmean" is a mean
    here.

    Both: f[..., K] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have one
    shape (nothing broadcasts), `DTypeError` for other than floats, `AttributeRefused` for another
    reduction.

        >>> ml.kl_divergence(ml.log(ml.asarray([0.5, 0.5])), ml.asarray([1.0, 0.0]))
        Tensor(0.6931472, f32[])
    """
    type = _require_pair(log_predictions, targets)
    if not type.ndim:
        raise ShapeError("a distribution has an axis, which a scalar lacks")
    never = op.equal(targets, 0.0)
    log_targets = op.log(op.where(never, constant(1.0, targets.dtype), targets))
    log_ratio = log_targets - op.where(never, constant(0.0, type.dtype), log_predictions)
    return _reduced(op.sum(targets * log_ratio, axis=-1), reduction)


@public
@in_f32
def softmax_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    /,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: Reduction = "none",
) -> Tensor:
    """log(sum(exp(logits))) - logits[label] along the last axis, one loss per label.

    `labels` holds class numbers 0 .. K-1 for logits of K classes; any other raises
    `OperandValueError`, but for `ignore_index`, whose loss is 0. With `label_smoothing` s, the loss
    is that of a target of (1 - s) for the label plus s / K for each class (Szegedy et al., arXiv
    1512.00567). The mean is over the labels that are not ignored, and nan of none, as in PyTorch.

    logits: f[..., K], labels: i[...] -> f[...], or f[] with "mean" or "sum". Raises
    `OperandValueError` for a label that is none of the classes, `ShapeError` for labels of another
    shape than the logits without their last axis, `DTypeError` for logits that are no floats and
    labels that are no integers, `AttributeRefused` for a smoothing that is not in [0, 1], or
    another reduction.

        >>> ml.softmax_cross_entropy(ml.asarray([[0.0, 0.0], [9.0, 0.0]]), ml.asarray([1, 0]))
        Tensor([6.931472e-01, 1.233740e-04], f32[2])
    """
    if type_of(logits).dtype.is_integer and type_of(labels).dtype.is_float:
        raise DTypeError("takes the logits first and then the labels: they change places")
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise AttributeRefused(
            f"label_smoothing is a number from 0 to 1, not {brief(label_smoothing)}"
        )
    ignored = None
    if ignore_index is not None:
        number = integer(ignore_index, "ignore_index")
        ignored = op.equal(labels, number)
        labels = op.where(ignored, constant(0, labels.dtype), labels)
    losses = op.softmax_cross_entropy(logits, labels)
    if label_smoothing:
        of_all = op.logsumexp(logits, axis=-1) - op.mean(logits, axis=-1)
        losses = losses * (1.0 - label_smoothing) + of_all * float(label_smoothing)
    if ignored is None:
        return _reduced(losses, reduction)
    losses = op.where(ignored, constant(0.0, losses.dtype), losses)
    if reduction != "mean":
        return _reduced(losses, reduction)
    counted = op.astype(op.logical_not(ignored), dtype=losses.dtype)
    return op.sum(losses) / op.sum(counted)


def _require_pair(predictions: Tensor, targets: Tensor) -> TensorType:
    """The type of the predictions. Raises `DTypeError` and `ShapeError`."""
    types = [type_of(x) for x in (predictions, targets)]
    for type in types:
        if not type.dtype.is_float:
            raise DTypeError(f"takes floats, not {type.dtype}; convert with astype")
    if types[0].shape != types[1].shape:
        raise ShapeError("predictions and targets must be of one shape")
    return types[0]


def _reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    """The losses themselves, or what the reduction makes of them."""
    if reduction == "none":
        return losses
    if reduction == "mean":
        return op.mean(losses)
    if reduction == "sum":
        return op.sum(losses)
    known = ", ".join(map(repr, get_args(Reduction)))
    raise AttributeRefused(f"reduction is one of {known}, not {reduction!r}")
