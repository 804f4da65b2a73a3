"""Loss functions.

A loss function accepts two tensors of the same shape (predictions, then targets) and returns one
loss per element, or per distribution. `reduction="mean"` or `"sum"` reduces them to one number.
Only `mean_squared_error` returns the mean by default. Losses of half-precision tensors are computed
in f32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeAlias, get_args

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.rules import is_real, require
from mlvm.core.types import TensorType, bool_
from mlvm.eager.functions.arguments import integer, type_of
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.functions.shapes import broadcast_arrays
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public
from mlvm.renamed import old_names

P = ParamSpec("P")

Reduction: TypeAlias = Literal["none", "mean", "sum"]


def _loss(fn: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Declare a loss: a public function that computes in f32."""
    return public(in_f32(fn))


@_loss
def mean_squared_error(
    predictions: Tensor, targets: Tensor, /, *, reduction: Reduction = "mean"
) -> Tensor:
    """Compute the mean of (predictions - targets)^2, or a different reduction, for floats.

    Predictions and targets: f[...] -> f[], or f[...] with "none". Raises `ShapeError` unless both
    have the same shape: operands do not broadcast; `DTypeError` if an operand is not of floats;
    `ArgumentError` if the reduction is unknown.

        >>> ml.mean_squared_error(ml.asarray([0.5, 3.0]), ml.zeros(2))
        Tensor(4.625, f32[])

    Invalid calls:
        ml.mean_squared_error(x, half, reduction="most")  # ArgumentError
    """
    _require_alike(predictions, targets)
    return reduced(op.square(predictions - targets), reduction)


@_loss
def l1_loss(predictions: Tensor, targets: Tensor, /, *, reduction: Reduction = "none") -> Tensor:
    """Compute |predictions - targets|, for floats of the same shape.

    Both: f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have the
    same shape: operands do not broadcast; `DTypeError` if an operand is not of floats;
    `ArgumentError` if the reduction is unknown.

        >>> ml.l1_loss(ml.asarray([0.5, 3.0]), ml.zeros(2))
        Tensor([0.5, 3. ], f32[2])

    Invalid calls:
        ml.l1_loss(x, half, reduction="most")  # ArgumentError
    """
    _require_alike(predictions, targets)
    return reduced(op.abs(predictions - targets), reduction)


@_loss
def huber_loss(
    predictions: Tensor, targets: Tensor, /, *, delta: float = 1.0, reduction: Reduction = "none"
) -> Tensor:
    """Compute d^2 / 2 for a difference |d| <= delta, else delta (|d| - delta / 2).

    Huber, Ann. Math. Statist. 35, 1964. Both: floats of the same shape, f[...] -> f[...], or f[]
    with "mean" or "sum". Raises `ShapeError` unless both have the same shape: operands do not
    broadcast; `DTypeError` if an operand is not of floats; `ArgumentError` if the reduction is
    unknown or delta <= 0.

        >>> ml.huber_loss(ml.asarray([0.5, 3.0]), ml.zeros(2))
        Tensor([0.125, 2.5  ], f32[2])

    Invalid calls:
        ml.huber_loss(x, half, delta=0.0)  # ArgumentError
    """
    _require_alike(predictions, targets)
    limit = _positive(delta, "delta")
    d = predictions - targets
    inner = op.clip(d, -limit, limit)
    return reduced(inner * (d - 0.5 * inner), reduction)


@_loss
def smooth_l1_loss(
    predictions: Tensor, targets: Tensor, /, *, beta: float = 1.0, reduction: Reduction = "none"
) -> Tensor:
    """Compute d^2 / (2 beta) for a difference |d| <= beta, else |d| - beta / 2.

    It equals `huber_loss` divided by beta (Girshick, arXiv 1504.08083). Both: floats of the same
    shape, f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have the
    same
    shape: operands do not broadcast; `DTypeError` if an operand is not of floats; `ArgumentError`
    if the reduction is unknown or beta <= 0.

        >>> ml.smooth_l1_loss(ml.asarray([0.5, 3.0]), ml.zeros(2), beta=2.0)
        Tensor([0.0625, 2.    ], f32[2])

    Invalid calls:
        ml.smooth_l1_loss(x, half, beta=0.0)  # ArgumentError
    """
    beta = _positive(beta, "beta")
    return huber_loss(predictions, targets, delta=beta, reduction=reduction) / beta


@_loss
def binary_cross_entropy_with_logits(
    logits: Tensor,
    targets: Tensor,
    /,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute -t log(p) - (1 - t) log(1 - p) for p = sigmoid(logits) and targets 0 <= t <= 1.

    It is computed from -log(p) = log(1 + e^-x) and -log(1 - p) = log(1 + e^x), which are accurate
    and finite for all finite logits. Losses are multiplied by `weight`, the term of t by
    `pos_weight`: for n negative and m positive samples, n / m balances them.

    Both: f[...] -> f[...], or f[] with "mean" or "sum"; weights broadcast to that. Raises
    `ShapeError` unless both have the same shape, and the weights broadcast to it; `DTypeError` if x
    is not of floats; `ArgumentError` if the reduction is unknown.

        >>> ml.binary_cross_entropy_with_logits(ml.asarray([0.0, 9.0]), ml.asarray([1.0, 1.0]))
        Tensor([6.9314718e-01, 1.2340219e-04], f32[2])

    Invalid calls:
        ml.binary_cross_entropy_with_logits(x, half, reduction="most")  # ArgumentError
    """
    type = _require_alike(logits, targets)
    positive = targets * op.logaddexp(-logits, 0.0)
    if pos_weight is not None:
        positive = positive * _require_weight(pos_weight, type, "pos_weight")
    losses = positive + (1.0 - targets) * op.logaddexp(logits, 0.0)
    return reduced(_weighed(losses, weight), reduction)


@_loss
def binary_cross_entropy(
    predictions: Tensor,
    targets: Tensor,
    /,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute -t log(p) - (1 - t) log(1 - p) for predictions 0 <= p <= 1 and targets 0 <= t <= 1.

    The losses are multiplied by `weight`. Logarithms are at least -100, as in PyTorch, and nan for
    p outside of 0 .. 1. `binary_cross_entropy_with_logits` is more accurate.

    Both: f[...] -> f[...], or f[] with "mean" or "sum"; a weight broadcasts to that. Raises
    `ShapeError` unless both have the same shape, and the weight broadcasts to it; `DTypeError` if x
    is not of floats; `ArgumentError` if the reduction is unknown.

        >>> ml.binary_cross_entropy(ml.asarray([0.5, 0.0]), ml.asarray([1.0, 0.0]))
        Tensor([0.6931472, 0.       ], f32[2])

    Invalid calls:
        ml.binary_cross_entropy(half, half, reduction="most")  # ArgumentError
    """
    _require_alike(predictions, targets)
    losses = -targets * _log(predictions) - (1.0 - targets) * _log(1.0 - predictions)
    return reduced(_weighed(losses, weight), reduction)


def _log(p: Tensor) -> Tensor:
    """Return log(p), at least -100."""
    never = op.equal(p, 0.0)
    log_p = op.log(op.where(never, constant(1.0, p.dtype), p))
    return op.where(never, constant(-100.0, p.dtype), op.maximum(log_p, -100.0))


@_loss
def kl_divergence(
    log_predictions: Tensor, targets: Tensor, /, *, reduction: Reduction = "none"
) -> Tensor:
    """Compute sum(t (log(t) - log_predictions)) along the last axis, one value per distribution t.

    Where a target t is 0, the term is 0 (Kullback and Leibler, Ann. Math. Statist. 22, 1951). The
    predictions are logarithms, such as the result of `log_softmax`. PyTorch's "batchmean"
    corresponds to "mean".

    Both: f[..., K] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have the
    same shape: operands do not broadcast; `DTypeError` if an operand is not of floats;
    `ArgumentError` if the reduction is unknown.

        >>> ml.kl_divergence(ml.log(ml.asarray([0.5, 0.5])), ml.asarray([1.0, 0.0]))
        Tensor(0.6931472, f32[])

    Invalid calls:
        ml.kl_divergence(x, half, reduction="most")  # ArgumentError
    """
    type = _require_alike(log_predictions, targets)
    if not type.ndim:
        raise ShapeError("expected distributions along a last axis, got a scalar")
    never = op.equal(targets, 0.0)
    log_targets = op.log(op.where(never, constant(1.0, targets.dtype), targets))
    log_ratio = log_targets - op.where(never, constant(0.0, type.dtype), log_predictions)
    return reduced(op.sum(targets * log_ratio, axis=-1), reduction)


@_loss
def nll_loss(
    log_predictions: Tensor,
    labels: Tensor,
    /,
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute -log_predictions[label] along the last axis, one loss per label.

    It is the negative log likelihood of classes, from log probabilities such as the result of
    `log_softmax`. `weight`, `ignore_index` and the mean work as in `softmax_cross_entropy`, which
    is more accurate for logits.

    log_predictions: f[..., K], labels: i[...], weight: f[K] -> f[...], or f[] with "mean" or "sum".
    Raises `OperandValueError` if a label is not a class number; `ShapeError` if the shapes do not
    fit; `DTypeError` if predictions or weights are not floats, or labels not integers;
    `ArgumentError` if the reduction is unknown.

        >>> ml.nll_loss(ml.log(ml.asarray([[0.5, 0.5], [0.25, 0.75]])), ml.asarray([1, 0]))
        Tensor([0.6931472, 1.3862944], f32[2])

    Invalid calls:
        ml.nll_loss(x, ml.asarray([0, 1, 2, 3]), reduction="most")  # ArgumentError
        ml.nll_loss(x, ml.asarray([0, 1, 2, 9]))  # OperandValueError
    """
    require("float", type_of(log_predictions))
    require("integer", type_of(labels))
    if not log_predictions.ndim or labels.shape != log_predictions.shape[:-1]:
        raise ShapeError(
            f"expected labels of shape {log_predictions.shape[:-1]}, which is the shape of the "
            f"predictions without the last axis, got {labels.shape}"
        )
    if weight is not None:
        _require_class_weight(weight, log_predictions.type)
    labels, ignored = _counted(labels, ignore_index)
    chosen = op.one_hot(labels, num_classes=log_predictions.shape[-1], dtype=bool_)
    none = constant(0.0, log_predictions.dtype)
    losses = -op.sum(op.where(chosen, log_predictions, none), axis=-1)
    weights = None if weight is None else op.take(weight, labels, axis=0)
    return _of_labels(losses if weights is None else losses * weights, weights, ignored, reduction)


@_loss
def softmax_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    /,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute log(sum(exp(logits))) - logits[label] along the last axis, one loss per label.

    `labels` contains either class indices or distributions. For class indices 0 .. K-1, the loss of
    the class `ignore_index` is 0. For distributions t, floats with the shape of the logits, the
    loss is -sum(t log_softmax(logits)). With `label_smoothing` s, the target is (1 - s) for the
    label plus s / K for each class (Szegedy et al., arXiv 1512.00567).

    The term of a class is multiplied by the class's `weight`. With class indices, the mean is a
    weighted mean over the labels that are not ignored, as in PyTorch, and nan if there are none.
    With distributions, it is the mean over all of them.

    logits: f[..., K], labels: i[...] or f[..., K], weight: f[K] -> f[...], or f[] with "mean" or
    "sum". Raises `OperandValueError` if a label is not a class number; `ShapeError` unless class
    numbers have the shape of the logits without the last axis, distributions have the shape of the
    logits, and `weight` has one number per class; `DTypeError` if logits or weights are not floats;
    `ArgumentError` if the smoothing is not in [0, 1], `ignore_index` is used with distributions, or
    the reduction is unknown.

        >>> ml.softmax_cross_entropy(ml.asarray([[0.0, 0.0], [9.0, 0.0]]), ml.asarray([1, 0]))
        Tensor([6.931472e-01, 1.233740e-04], f32[2])

    Invalid calls:
        ml.softmax_cross_entropy(x, ml.asarray([0, 1, 2, 3]), label_smoothing=2.0)  # ArgumentError
        ml.softmax_cross_entropy(x, ml.asarray([0, 1, 2, 9]))  # OperandValueError
    """
    if type_of(labels).dtype.is_float and type_of(logits).dtype.is_integer:
        raise DTypeError(
            "expected logits first and labels second, got them in reverse order: exchange them"
        )
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise ArgumentError(
            f"expected label_smoothing as a number from 0 to 1, got {brief(label_smoothing)}"
        )
    smoothing = float(label_smoothing)
    if weight is not None:
        _require_class_weight(weight, logits.type)
    if labels.dtype.is_float:
        if ignore_index is not None:
            raise ArgumentError(
                "ignore_index needs class indices as labels, got distributions; omit it"
            )
        if labels.shape != logits.shape or not labels.ndim:
            raise ShapeError(
                f"expected float labels (distributions) of shape {logits.shape}, got "
                f"{labels.shape}; pass class "
                "numbers as integers"
            )
        if smoothing:
            labels = labels * (1.0 - smoothing) + smoothing / labels.shape[-1]
        terms = labels * op.log_softmax(logits, axis=-1)
        return reduced(-op.sum(terms if weight is None else terms * weight, axis=-1), reduction)
    labels, ignored = _counted(labels, ignore_index)
    losses, weights = op.softmax_cross_entropy(logits, labels), None
    if weight is not None:
        weights = op.take(weight, labels, axis=0)
        losses = losses * weights
    if smoothing:
        log_sums = op.logsumexp(logits, axis=-1)
        if weight is None:
            of_all = log_sums - op.mean(logits, axis=-1)
        else:
            of_all = log_sums * op.mean(weight) - op.mean(logits * weight, axis=-1)
        losses = losses * (1.0 - smoothing) + of_all * smoothing
    return _of_labels(losses, weights, ignored, reduction)


@_loss
def cosine_similarity(x: Tensor, y: Tensor, /, axis: int = -1, *, eps: float = 1e-8) -> Tensor:
    """Compute sum(x y) / (max(|x|, eps) max(|y|, eps)) along the axis.

    It is the cosine of the angle between two vectors, and 0 if one of them is 0.

    x and y: f[..., n], shapes that broadcast -> f[...]. Raises `ShapeError` if the shapes do not
    fit; `AxisError` if an operand has no such axis; `DTypeError` if an operand is not of floats;
    `ArgumentError` unless eps > 0.

        >>> ml.cosine_similarity(ml.asarray([3.0, 4.0]), ml.asarray([3.0, 0.0]))
        Tensor(0.6, f32[])

    Invalid calls:
        ml.cosine_similarity(x, half, eps=0.0)  # ArgumentError
    """
    require("float", type_of(x), type_of(y))
    least = _positive(eps, "eps") ** 2
    x, y = broadcast_arrays(x, y)
    product = op.sum(x * y, axis=axis)
    for each in (x, y):
        product = product * op.rsqrt(op.maximum(op.sum(op.square(each), axis=axis), least))
    return product


@_loss
def cosine_embedding_loss(
    x: Tensor, y: Tensor, targets: Tensor, /, *, margin: float = 0.0, reduction: Reduction = "none"
) -> Tensor:
    """Compute 1 - cos for similar vectors (target 1), max(cos - margin, 0) for others (target -1).

    cos is the `cosine_similarity` of the last axes.

    x and y: f[..., n], targets: [...], floats or integers -> f[...], or f[] with "mean" or "sum".
    Raises `ShapeError` if the shapes do not fit; `DTypeError` if an operand is not of floats;
    `ArgumentError` if the reduction is unknown.

        >>> x, y = ml.asarray([[1.0, 0.0], [1.0, 0.0]]), ml.asarray([[0.0, 1.0], [1.0, 0.0]])
        >>> ml.cosine_embedding_loss(x, y, ml.asarray([1, -1]))
        Tensor([1., 1.], f32[2])

    Invalid calls:
        ml.cosine_embedding_loss(x, half, ml.ones(4), reduction="most")  # ArgumentError
    """
    type = _require_alike(x, y)
    if not type.ndim or type_of(targets).shape != type.shape[:-1]:
        raise ShapeError(
            f"expected one target per pair of vectors, {list(type.shape[:-1])}, got "
            f"{list(targets.shape)}"
        )
    cosine = cosine_similarity(x, y)
    dissimilar = op.maximum(cosine - margin, 0.0)
    return reduced(op.where(op.greater(targets, 0), 1.0 - cosine, dissimilar), reduction)


@_loss
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    /,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    swap: bool = False,
    eps: float = 1e-6,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute max(d(anchor, positive) - d(anchor, negative) + margin, 0).

    d is the p-norm of the difference, plus eps, along the last axis (Balntas et al., BMVC 2016).
    With `swap`, d(anchor, negative) is replaced by d(positive, negative) if that is smaller.

    All: f[..., n] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless all have the
    same shape; `DTypeError` if an operand is not of floats; `ArgumentError` if the reduction is
    unknown or unless p > 0.

        >>> x = ml.asarray([[0.0, 0.0]])
        >>> ml.triplet_margin_loss(x, x + 1.0, x + 2.0, margin=2.0)
        Tensor([0.5857864], f32[1])

    Invalid calls:
        ml.triplet_margin_loss(x, half, half, p=0.0)  # ArgumentError
    """
    if not _require_alike(anchor, positive, negative).ndim:
        raise ShapeError("expected vectors along a last axis, got a scalar")
    power = _positive(p, "p")

    def distance(x: Tensor, y: Tensor) -> Tensor:
        d = op.abs(x - y + eps)
        if power == 1.0:
            return op.sum(d, axis=-1)
        if power == 2.0:
            return op.sqrt(op.sum(op.square(d), axis=-1))
        return op.pow(op.sum(op.pow(d, power), axis=-1), 1.0 / power)

    far = distance(anchor, negative)
    if swap:
        far = op.minimum(far, distance(positive, negative))
    return reduced(op.maximum(distance(anchor, positive) - far + margin, 0.0), reduction)


@_loss
def margin_ranking_loss(
    x: Tensor, y: Tensor, targets: Tensor, /, *, margin: float = 0.0, reduction: Reduction = "none"
) -> Tensor:
    """Compute max(-target (x - y) + margin, 0).

    A target of 1 ranks x above y by the margin, -1 ranks y above x.

    All: f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless all have the same
    shape; `DTypeError` if an operand is not of floats; `ArgumentError` if the reduction is
    unknown.

        >>> ml.margin_ranking_loss(ml.ones(1), ml.asarray([3.0]), ml.ones(1), margin=0.5)
        Tensor([2.5], f32[1])

    Invalid calls:
        ml.margin_ranking_loss(x, half, half, reduction="most")  # ArgumentError
    """
    _require_alike(x, y, targets)
    return reduced(op.maximum(targets * (y - x) + margin, 0.0), reduction)


@_loss
def hinge_loss(predictions: Tensor, targets: Tensor, /, *, reduction: Reduction = "none") -> Tensor:
    """Compute max(1 - target prediction, 0), for targets that are -1 or 1.

    Cortes and Vapnik, Machine Learning 20, 1995. Both: f[...] -> f[...], or f[] with "mean" or
    "sum". Raises `ShapeError` unless both have the same shape: operands do not broadcast;
    `DTypeError` if an operand is not of floats; `ArgumentError` if the reduction is unknown.

        >>> ml.hinge_loss(ml.asarray([0.5, 3.0]), ml.asarray([-1.0, 1.0]))
        Tensor([1.5, 0. ], f32[2])

    Invalid calls:
        ml.hinge_loss(x, half, reduction="most")  # ArgumentError
    """
    _require_alike(predictions, targets)
    return reduced(op.maximum(1.0 - targets * predictions, 0.0), reduction)


@_loss
def poisson_nll_loss(
    predictions: Tensor,
    targets: Tensor,
    /,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute e^x - t x, the negative log likelihood of a count t under a Poisson distribution.

    The rate is e^x; terms that depend only on t are omitted. If `log_input` is False, x is the rate
    and the loss is x - t log(x + eps). With `full`, Stirling's formula adds the terms of t: t
    log(t) - t + log(2 pi t) / 2 for t > 1.

    Both: f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless both have the
    same shape: operands do not broadcast; `DTypeError` if an operand is not of floats;
    `ArgumentError` if the reduction is unknown.

        >>> ml.poisson_nll_loss(ml.asarray([0.0, 1.0]), ml.asarray([2.0, 1.0]))
        Tensor([1.       , 1.7182817], f32[2])

    Invalid calls:
        ml.poisson_nll_loss(x, half, reduction="most")  # ArgumentError
    """
    type = _require_alike(predictions, targets)
    if log_input:
        losses = op.exp(predictions) - targets * predictions
    else:
        losses = predictions - targets * op.log(predictions + eps)
    if full:
        many = op.greater(targets, 1.0)
        t = op.where(many, targets, constant(1.0, targets.dtype))
        rest = t * op.log(t) - t + 0.5 * op.log(2 * math.pi * t)
        losses = losses + op.where(many, rest, constant(0.0, type.dtype))
    return reduced(losses, reduction)


@_loss
def gaussian_nll_loss(
    predictions: Tensor,
    targets: Tensor,
    variances: Tensor,
    /,
    *,
    full: bool = False,
    eps: float = 1e-6,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute (log(v) + (prediction - target)^2 / v) / 2 with v = max(variance, eps).

    It is the negative log likelihood of a normal distribution (Nix and Weigend, ICNN 1994). `full`
    adds log(2 pi) / 2.

    All: f[...] -> f[...], or f[] with "mean" or "sum". Raises `ShapeError` unless all have the same
    shape: operands do not broadcast; `DTypeError` if an operand is not of floats; `ArgumentError`
    if the reduction is unknown or eps <= 0.

        >>> ml.gaussian_nll_loss(ml.asarray([1.0]), ml.asarray([3.0]), ml.asarray([4.0]))
        Tensor([1.1931472], f32[1])

    Invalid calls:
        ml.gaussian_nll_loss(x, half, half, eps=0.0)  # ArgumentError
    """
    _require_alike(predictions, targets, variances)
    v = op.maximum(variances, _positive(eps, "eps"))
    distance = predictions - targets
    losses = 0.5 * (op.log(v) + distance * (distance / v))
    return reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


def _positive(value: float, name: str) -> float:
    if not is_real(value) or not value > 0:
        raise ArgumentError(f"expected {name} as a number > 0, got {brief(value)}")
    return float(value)


def _weighed(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply losses by a weight that broadcasts to them."""
    return losses if weight is None else losses * _require_weight(weight, losses.type, "weight")


def _require_weight(weight: Tensor, type: TensorType, name: str) -> Tensor:
    require("float", type_of(weight))
    behind = zip(weight.shape[::-1], type.shape[::-1], strict=False)
    if weight.ndim > type.ndim or any(n not in (1, length) for n, length in behind):
        raise ShapeError(
            f"expected a {name} that broadcasts to the losses, {list(type.shape)}, got "
            f"{list(weight.shape)}"
        )
    return weight


def _require_class_weight(weight: Tensor, type: TensorType) -> None:
    require("float", type_of(weight))
    if weight.shape != type.shape[-1:]:
        raise ShapeError(
            f"expected a weight with one number per class, {list(type.shape[-1:])}, got "
            f"{list(weight.shape)}"
        )


def _counted(labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the labels, with 0 for `ignore_index`, and the mask of ignored labels."""
    if ignore_index is None:
        return labels, None
    ignored = op.equal(labels, integer(ignore_index, "ignore_index"))
    return op.where(ignored, constant(0, labels.dtype), labels), ignored


def _of_labels(
    losses: Tensor, weights: Tensor | None, ignored: Tensor | None, reduction: Reduction
) -> Tensor:
    """Reduce losses of labels; the mean is weighted and excludes ignored labels."""
    none = constant(0.0, losses.dtype)
    counted = weights
    if ignored is not None:
        losses = op.where(ignored, none, losses)
        ones = constant(1.0, losses.dtype) if weights is None else weights
        counted = op.where(ignored, none, ones)
    if reduction != "mean" or counted is None:
        return reduced(losses, reduction)
    return op.sum(losses) / op.sum(counted)


def _require_alike(*tensors: Tensor) -> TensorType:
    """Return the type of the first tensor, the predictions."""
    types = [type_of(x) for x in tensors]
    for type in types:
        if not type.dtype.is_float:
            raise DTypeError(f"expected floats, got {type.dtype.name}; convert with astype")
        if type.shape != types[0].shape:
            raise ShapeError(
                f"expected predictions and targets of the same shape, got {list(types[0].shape)} "
                f"and {list(type.shape)}"
            )
    return types[0]


def reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    """Apply the reduction to losses."""
    if reduction == "none":
        return losses
    if reduction == "mean":
        return op.mean(losses)
    if reduction == "sum":
        return op.sum(losses)
    choices = ", ".join(map(repr, get_args(Reduction)))
    raise ArgumentError(f"expected reduction as one of {choices}, got {reduction!r}")


if not TYPE_CHECKING:  # otherwise type checkers would allow any name
    __getattr__ = old_names(__name__, "ml", globals())
