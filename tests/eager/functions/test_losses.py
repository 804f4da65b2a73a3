"""The losses: beside plain numpy and PyTorch, their gradients, reductions, and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import DTypeError
from tests.brief import cases, refuses
from tests.eager.functions.rows import CHECKS, Row
from tests.slopes import check_slopes

Array = np.ndarray[Any, Any]
Loss = Callable[..., ml.Tensor]

RNG = np.random.default_rng(6)
X = RNG.normal(size=(4, 3)) * 3
Y = RNG.normal(size=(4, 3))
P = RNG.dirichlet(np.ones(3), size=4)
BITS = (Y > 0).astype(np.float64)
LOG_P = np.log(RNG.dirichlet(np.ones(3), size=4))
LABELS = np.array([2, 0, 1, 2])

t = ml.asarray
untyped: Any = ml  # for calls that type checkers would refuse


def _each(of: Callable[..., float]) -> Callable[..., Array]:
    return lambda *xs: np.array(
        [of(*row) for row in zip(*[x.flat for x in xs], strict=True)]
    ).reshape(xs[0].shape)


def _huber(delta: float) -> Callable[..., Array]:
    def of(x: float, y: float) -> float:
        d = abs(x - y)
        return 0.5 * d * d if d <= delta else delta * (d - 0.5 * delta)

    return _each(of)


def _binary(x: float, target: float) -> float:
    p = 1 / (1 + math.exp(-x))
    return -target * math.log(p) - (1 - target) * math.log(1 - p)


def _kl(log_p: Array, targets: Array) -> Array:
    return np.array(
        [
            sum(b * (math.log(b) - a) for a, b in zip(*row, strict=True) if b)
            for row in zip(log_p, targets, strict=True)
        ]
    )


def _smoothed(x: Array, smoothing: float) -> Array:
    log_p = x - np.log(np.sum(np.exp(x), -1, keepdims=True))
    target = (1 - smoothing) * np.eye(3)[LABELS] + smoothing / 3
    result: Array = -np.sum(target * log_p, -1)
    return result


LOSSES: dict[str, tuple[Loss, tuple[Array, ...], Callable[..., Any], str, dict[str, Any]]] = {
    "mean_squared_error": (
        lambda *xs, **k: ml.mean_squared_error(*xs, **{"reduction": "none", **k}),
        (X, Y),
        _each(lambda x, y: (x - y) ** 2),
        "mse_loss",
        {},
    ),
    "l1": (ml.l1, (X, Y), _each(lambda x, y: abs(x - y)), "l1_loss", {}),
    "huber": (ml.huber, (X, Y), _huber(1.0), "huber_loss", {}),
    "huber 2.5": (
        lambda *xs, **k: ml.huber(*xs, delta=2.5, **k),
        (X, Y),
        _huber(2.5),
        "huber_loss",
        {"delta": 2.5},
    ),
    "binary": (
        ml.binary_cross_entropy_with_logits,
        (X, P),
        _each(_binary),
        "binary_cross_entropy_with_logits",
        {},
    ),
    "kl_divergence": (ml.kl_divergence, (LOG_P, P), _kl, "kl_div", {}),
    "softmax_cross_entropy": (
        lambda x, **k: ml.softmax_cross_entropy(x, t(LABELS), **k),
        (X,),
        lambda x: _smoothed(x, 0.0),
        "cross_entropy",
        {},
    ),
    "smoothed": (
        lambda x, **k: ml.softmax_cross_entropy(x, t(LABELS), label_smoothing=0.3, **k),
        (X,),
        lambda x: _smoothed(x, 0.3),
        "cross_entropy",
        {"label_smoothing": 0.3},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_reductions(name: str) -> None:
    loss, inputs, expected, _, _ = LOSSES[name]
    name_of = {"f8": "float64", "f4": "float32"}
    for dtype, tolerance in (("f8", 1e-12), ("f4", 1e-5)):
        xs = [x.astype(dtype) for x in inputs]
        reference = expected(*[x.astype("f8") for x in xs])
        for reduction, of in (("none", np.asarray), ("mean", np.mean), ("sum", np.sum)):
            result = loss(*map(t, xs), reduction=reduction).numpy()
            assert (result.dtype.name, result.shape) == (name_of[dtype], np.shape(of(reference)))
            np.testing.assert_allclose(result, of(reference), rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(
            loss(*map(t, xs)).numpy(), loss(*map(t, xs), reduction="none").numpy()
        )


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    loss, inputs, _, _, _ = LOSSES[name]
    check_slopes(loss, *map(t, inputs), order=2)
    check_slopes(lambda *xs: loss(*xs, reduction="mean"), *map(t, inputs))


@pytest.mark.parametrize("name", LOSSES)
def test_of_nothing(name: str) -> None:
    loss, inputs, _, _, _ = LOSSES[name]
    empty = [t(x[:0]) for x in inputs]
    if "cross" in name or name == "smoothed":
        labels = t(LABELS[:0])
        assert ml.softmax_cross_entropy(empty[0], labels, label_smoothing=0.1).shape == (0,)
        assert math.isnan(ml.softmax_cross_entropy(empty[0], labels, reduction="mean").item())
    else:
        assert loss(*empty).shape[0] == 0
        assert loss(*empty, reduction="sum").item() == 0
        assert math.isnan(loss(*empty, reduction="mean").item())


@pytest.mark.parametrize("name", LOSSES)
def test_beside_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    loss, inputs, _, theirs, options = LOSSES[name]
    for reduction in ("mean", "sum"):
        leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
        extra = [torch.tensor(LABELS)] if theirs == "cross_entropy" else []
        how = "batchmean" if theirs == "kl_div" and reduction == "mean" else reduction
        function = getattr(torch.nn.functional, theirs)
        expected = function(*leaves, *extra, reduction=how, **options)
        expected.backward()
        value, gradients = ml.value_and_grad(
            lambda *xs, by=reduction: loss(*xs, reduction=by), tuple(range(len(inputs)))
        )(*map(t, inputs))
        np.testing.assert_allclose(value.numpy(), expected.detach().numpy(), rtol=1e-12)
        for gradient, leaf in zip(gradients, leaves, strict=True):
            np.testing.assert_allclose(gradient.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


# --- a row each ---------------------------------------------------------------------------

Z = RNG.normal(size=(4, 3))
SIGNS = np.where(Y > 0, 1.0, -1.0)
COUNTS = RNG.poisson(2.0, size=(4, 3)).astype(np.float64)
WEIGHT, CLASS_WEIGHT = RNG.uniform(0.5, 2.0, (4, 3)), RNG.uniform(0.5, 2.0, 3)
T_LABELS, T_SIGNS, T_FIRST_SIGNS = t(LABELS), t(SIGNS), t(SIGNS[:, 0].astype(int))
T_IGNORED = t(np.array([2, -1, 1, -1]))

STEPS = RNG.normal(size=(6, 3, 5))
STEPS -= np.log(np.exp(STEPS).sum(-1, keepdims=True))
WORDS, WORD_COUNTS = np.array([[1, 1, 2], [4, 3, 9], [1, 2, 3]]), np.array([3, 2, 0])
STEP_COUNTS = np.array([6, 3, 4])
CTC = t(WORDS), t(STEP_COUNTS), t(WORD_COUNTS)


T_COUNTS = t(COUNTS)
BITS_TENSOR = t(BITS)


def bits_like(like: ml.Tensor) -> ml.Tensor:
    return ml.astype(BITS_TENSOR, like.dtype)


def log_softmax(x: Array) -> Array:
    result: Array = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def norm(x: Array, p: float = 2.0) -> Array:
    result: Array = (np.abs(x) ** p).sum(-1) ** (1 / p)
    return result


def cosine(x: Array, y: Array) -> Array:
    result: Array = (x * y).sum(-1) / norm(x) / norm(y)
    return result


def cross_entropy(x: Array, target: Array, weight: Any = 1.0) -> Array:
    result: Array = -(log_softmax(x) * target * weight).sum(-1)
    return result


def all_ways(steps: Array) -> Array:
    """The probability of each sequence's labels: of all strings of classes, those that say them."""

    def collapsed(string: Any) -> list[int]:
        return [c for c, _ in itertools.groupby(string) if c != 0]

    losses = []
    for i, (length, count) in enumerate(zip(STEP_COUNTS, WORD_COUNTS, strict=True)):
        total = sum(
            np.exp(sum(steps[time, i, c] for time, c in enumerate(string)))
            for string in itertools.product(range(5), repeat=length)
            if collapsed(string) == WORDS[i, :count].tolist()
        )
        losses.append(-np.log(total))
    return np.array(losses)


def torch_of(x: Array) -> Any:
    import torch

    return torch.tensor(x)


ONES = np.eye(3)[LABELS]

ROWS = {
    "smooth_l1": Row(
        lambda x, y: ml.smooth_l1(x, y, beta=2.0),
        (X, Y),
        lambda x, y: np.where(abs(x - y) < 2, (x - y) ** 2 / 4, np.maximum(abs(x - y), 1e-9) - 1),
        lambda F, x, y: F.smooth_l1_loss(x, y, beta=2.0, reduction="none"),
    ),
    "binary_cross_entropy": Row(
        ml.binary_cross_entropy,
        (P, BITS * 0.9 + 0.05),
        lambda p, y: -y * np.log(p) - (1 - y) * np.log(1 - p),
        lambda F, p, y: F.binary_cross_entropy(p, y, reduction="none"),
    ),
    "binary_cross_entropy, weight": Row(
        lambda p, w: ml.binary_cross_entropy(p, bits_like(p), weight=w, reduction="mean"),
        (P, CLASS_WEIGHT),
        lambda p, w: np.mean(w * np.where(BITS > 0, -np.log(p), -np.log(1 - p))),
    ),
    "binary_cross_entropy_with_logits, weights": Row(
        lambda x, w, p: ml.binary_cross_entropy_with_logits(
            x, bits_like(x), weight=w, pos_weight=p, reduction="mean"
        ),
        (X, WEIGHT, CLASS_WEIGHT),
        lambda x, w, p: np.mean(
            w * np.where(BITS > 0, p * np.log1p(np.exp(-x)), np.log1p(np.exp(x)))
        ),
    ),
    "nll": Row(
        lambda x: ml.nll(x, T_LABELS),
        (LOG_P,),
        lambda x: -(x * ONES).sum(-1),
        lambda F, x: F.nll_loss(x, torch_of(LABELS), reduction="none"),
    ),
    "nll, weight": Row(
        lambda x, w: ml.nll(x, T_LABELS, weight=w),
        (LOG_P, CLASS_WEIGHT),
        lambda x, w: -(x * ONES * w).sum(-1),
    ),
    "nll, mean": Row(
        lambda x, w: ml.nll(x, T_IGNORED, weight=w, ignore_index=-1, reduction="mean"),
        (LOG_P, CLASS_WEIGHT),
        lambda x, w: -(x[0, 2] * w[2] + x[2, 1] * w[1]) / (w[2] + w[1]),
    ),
    "softmax_cross_entropy, weight": Row(
        lambda x, w: ml.softmax_cross_entropy(x, T_LABELS, weight=w),
        (X, CLASS_WEIGHT),
        lambda x, w: cross_entropy(x, ONES, w),
    ),
    "softmax_cross_entropy, weight, smoothed": Row(
        lambda x, w: ml.softmax_cross_entropy(x, T_LABELS, weight=w, label_smoothing=0.3),
        (X, CLASS_WEIGHT),
        lambda x, w: cross_entropy(x, 0.7 * ONES + 0.1, w),
    ),
    "softmax_cross_entropy, weight, mean": Row(
        lambda x, w: ml.softmax_cross_entropy(
            x, T_IGNORED, weight=w, label_smoothing=0.3, ignore_index=-1, reduction="mean"
        ),
        (X, CLASS_WEIGHT),
        lambda x, w: (
            cross_entropy(x[[0, 2]], 0.7 * np.eye(3)[[2, 1]] + 0.1, w).sum() / (w[2] + w[1])
        ),
    ),
    "softmax_cross_entropy, distributions": Row(
        ml.softmax_cross_entropy,
        (X, P),
        cross_entropy,
        lambda F, x, p: F.cross_entropy(x, p, reduction="none"),
    ),
    "softmax_cross_entropy, distributions, weight": Row(
        lambda x, p, w: ml.softmax_cross_entropy(
            x, p, weight=w, label_smoothing=0.3, reduction="mean"
        ),
        (X, P, CLASS_WEIGHT),
        lambda x, p, w: cross_entropy(x, 0.7 * p + 0.1, w).mean(),
    ),
    "cosine_similarity": Row(
        ml.cosine_similarity, (X, Y), cosine, lambda F, x, y: F.cosine_similarity(x, y, dim=-1)
    ),
    "cosine_similarity, axis 0": Row(
        lambda x, y: ml.cosine_similarity(x, y, 0), (X, Y[:, :1]), lambda x, y: cosine(x.T, y.T)
    ),
    "cosine_similarity along a stretched axis": Row(
        lambda x, y: ml.cosine_similarity(x, y, 0),
        (X[:1], Y),
        lambda x, y: cosine(np.repeat(x, 4, 0).T, y.T),
        lambda F, x, y: F.cosine_similarity(x, y, dim=0),
    ),
    "cosine_embedding": Row(
        lambda x, y: ml.cosine_embedding(x, y, T_FIRST_SIGNS, margin=-0.7),
        (X, Y),
        lambda x, y: np.where(SIGNS[:, 0] > 0, 1 - cosine(x, y), np.maximum(cosine(x, y) + 0.7, 0)),
        lambda F, x, y: F.cosine_embedding_loss(
            x, y, torch_of(SIGNS[:, 0]), margin=-0.7, reduction="none"
        ),
    ),
    "triplet_margin": Row(
        lambda x, y, z: ml.triplet_margin(x, y, z, margin=2.0),
        (X, Y, Z),
        lambda x, y, z: np.maximum(norm(x - y + 1e-6) - norm(x - z + 1e-6) + 2, 0),
        lambda F, x, y, z: F.triplet_margin_loss(x, y, z, margin=2.0, reduction="none"),
    ),
    "triplet_margin, swap": Row(
        lambda x, y, z: ml.triplet_margin(x, y, z, margin=9.0, p=3.0, swap=True),
        (X, Y, Z),
        lambda x, y, z: (
            norm(x - y + 1e-6, 3) - np.minimum(norm(x - z + 1e-6, 3), norm(y - z + 1e-6, 3)) + 9
        ),
        lambda F, x, y, z: F.triplet_margin_loss(
            x, y, z, margin=9.0, p=3.0, swap=True, reduction="none"
        ),
    ),
    "triplet_margin, p=1": Row(
        lambda x, y, z: ml.triplet_margin(x, y, z, margin=9.0, p=1.0, reduction="sum"),
        (X, Y, Z),
        lambda x, y, z: np.maximum(norm(x - y, 1) - norm(x - z, 1) + 9, 0).sum(),
    ),
    "margin_ranking": Row(
        lambda x, y: ml.margin_ranking(x, y, ml.astype(T_SIGNS, x.dtype), margin=0.5),
        (X, Y),
        lambda x, y: np.maximum(-SIGNS * (x - y) + 0.5, 0),
        lambda F, x, y: F.margin_ranking_loss(x, y, torch_of(SIGNS), margin=0.5, reduction="none"),
    ),
    "hinge": Row(
        lambda x: ml.hinge(x, ml.astype(T_SIGNS, x.dtype)),
        (X,),
        lambda x: np.maximum(1 - SIGNS * x, 0),
    ),
    "poisson_nll": Row(
        ml.poisson_nll,
        (X, COUNTS),
        lambda x, n: np.exp(x) - n * x,
        lambda F, x, n: F.poisson_nll_loss(x, n, reduction="none"),
    ),
    "poisson_nll, full": Row(
        lambda x: ml.poisson_nll(x, ml.astype(T_COUNTS, x.dtype), log_input=False, full=True),
        (WEIGHT,),
        lambda x: (
            x
            - COUNTS * np.log(x + 1e-8)
            + np.where(COUNTS > 1, COUNTS * np.log(np.maximum(COUNTS, 1)) - COUNTS, 0)
            + np.where(COUNTS > 1, np.log(2 * np.pi * np.maximum(COUNTS, 1)) / 2, 0)
        ),
        lambda F, x: F.poisson_nll_loss(
            x, torch_of(COUNTS), log_input=False, full=True, reduction="none"
        ),
    ),
    "gaussian_nll": Row(
        lambda x, y, v: ml.gaussian_nll(x, y, v, full=True),
        (X, Y, WEIGHT),
        lambda x, y, v: ((x - y) ** 2 / v + np.log(v) + np.log(2 * np.pi)) / 2,
        lambda F, x, y, v: F.gaussian_nll_loss(x, y, v, full=True, reduction="none"),
    ),
    "ctc": Row(
        lambda x: ml.ctc(ml.log_softmax(x), *CTC),
        (RNG.normal(size=(6, 3, 5)),),
        lambda x: all_ways(log_softmax(x)),
        lambda F, x: F.ctc_loss(
            x.log_softmax(-1),  # whose gradient is part of theirs
            torch_of(np.minimum(WORDS, 4)),
            torch_of(STEP_COUNTS),
            torch_of(WORD_COUNTS),
            reduction="none",
        ),
    ),
}


@cases("check", *CHECKS)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, check: Any) -> None:
    check(ROWS[name])


def test_logarithms_of_certain_outcomes_are_finite() -> None:
    """As in PyTorch, but for the gradient, which is 0 where the logarithm is cut off."""
    p, y = t(np.array([0.0, 0.0, 1.0, 1.0])), t(np.array([0.0, 1.0, 0.0, 1.0]))
    value, pullback = ml.vjp(lambda p: ml.binary_cross_entropy(p, y), p)
    np.testing.assert_array_equal(value.numpy(), [0, 100, 100, 0])
    assert np.isfinite(pullback(ml.ones(4, dtype="f64"))[0].numpy()).all()
    assert np.isnan(
        ml.binary_cross_entropy(t(np.array([-0.5, 1.5])), ml.ones(2, dtype="f64"))
    ).all()


def test_vectors_of_zeros_have_a_cosine_and_a_gradient() -> None:
    x, y = t(np.zeros((1, 3))), t(Y[:1])
    value, pullback = ml.vjp(ml.cosine_similarity, x, y)
    assert value.numpy().tolist() == [0.0]
    assert all(np.isfinite(slope.numpy()).all() for slope in pullback(ml.ones(1, dtype="f64")))


def test_labels_for_which_there_are_too_few_steps() -> None:
    lengths = t(np.array([3, 1, 0]))
    losses, slopes = ml.vjp(
        lambda x: ml.where(ml.isinf(y := ml.ctc(x, CTC[0], lengths, CTC[2])), 0.0, y), t(STEPS)
    )
    assert ml.ctc(t(STEPS), CTC[0], lengths, CTC[2]).numpy().tolist() == [math.inf, math.inf, 0.0]
    assert losses.numpy().tolist() == [0.0] * 3
    assert not slopes(ml.ones(3, dtype="f64"))[0].numpy().any()


def test_ctc_of_other_blanks_and_means() -> None:
    """With the classes in another order nothing changes."""
    turned = np.roll(STEPS, 2, axis=-1)
    expected = all_ways(STEPS)
    words = (WORDS + 2) % 5
    loss = ml.ctc(t(turned), t(words), *CTC[1:], blank=2)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)
    check_slopes(lambda x: ml.ctc(x, t(words), *CTC[1:], blank=2), t(turned))
    loss = ml.ctc(t(turned), t(words), *CTC[1:], blank=2, reduction="mean")
    np.testing.assert_allclose(loss.numpy(), expected.mean(), rtol=1e-12)


# --- at the edges -----------------------------------------------------------------------


def test_the_mean_squared_error_is_a_mean() -> None:
    assert ml.mean_squared_error(t([1.0, 2.0]), t([0.0, 4.0])).item() == 2.5


def test_large_logits_do_not_overflow() -> None:
    x = t(np.array([1e4, -1e4, 80.0, -80.0, 50.0], np.float32))
    targets = t(np.array([1, 0, 1, 0, 0], np.float32))
    loss = ml.binary_cross_entropy_with_logits(x, targets).numpy()
    np.testing.assert_allclose(loss, [0, 0, math.exp(-80), math.exp(-80), 50], rtol=1e-5)
    gradient = ml.grad(lambda x: ml.binary_cross_entropy_with_logits(x, targets, reduction="sum"))(
        x
    )
    np.testing.assert_allclose(gradient.numpy(), [0, 0, 0, 0, 1], atol=1e-6)


def test_second_derivatives_where_a_formula_has_a_kink() -> None:
    zero = t(np.zeros(()))
    for loss, expected in ((ml.huber, 1.0), (ml.binary_cross_entropy_with_logits, 0.25)):
        second = ml.grad(ml.grad(lambda x, of=loss: of(x, zero)))(zero)
        assert second.item() == expected
    edge = ml.grad(lambda x: ml.sum(ml.huber(x, ml.zeros(3))))(t([1.0, -1.0, 5.0]))
    assert edge.numpy().tolist() == [1.0, -1.0, 1.0]


def test_a_divergence_from_a_target_of_zero_is_finite() -> None:
    log_p = t(np.array([[0.0, -math.inf, -math.inf], [math.log(0.5), math.log(0.5), -math.inf]]))
    targets = t(np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    np.testing.assert_allclose(ml.kl_divergence(log_p, targets).numpy(), [0.0, math.log(2)])
    gradient = ml.grad(lambda x: ml.kl_divergence(x, targets, reduction="sum"))(log_p)
    assert gradient.numpy().tolist() == [[-1, 0, 0], [-1, 0, 0]]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignored", [[], [1], [0, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("number", [-100, 1])
def test_ignored_labels_count_for_nothing(
    ignored: list[int], smoothing: float, number: int
) -> None:
    labels = LABELS.copy()
    labels[ignored] = number
    counted = labels != number

    def loss(x: ml.Tensor, reduction: Any) -> ml.Tensor:
        return ml.softmax_cross_entropy(
            x, t(labels), label_smoothing=smoothing, ignore_index=number, reduction=reduction
        )

    expected = np.where(counted, _smoothed(X, smoothing), 0)
    np.testing.assert_allclose(loss(t(X), "none").numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(loss(t(X), "sum").numpy(), expected.sum(), rtol=1e-12)
    mean, gradient = ml.value_and_grad(lambda x: loss(x, "mean"))(t(X))
    if not counted.any():
        assert math.isnan(mean.item())
    else:
        np.testing.assert_allclose(mean.numpy(), expected.sum() / counted.sum(), rtol=1e-12)
        assert not gradient.numpy()[~counted].any()
        check_slopes(lambda x: loss(x, "mean"), t(X))
    try:
        import torch
    except ImportError:
        return
    leaf = torch.tensor(X, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(
        leaf, torch.tensor(labels), ignore_index=number, label_smoothing=smoothing
    )
    theirs.backward()
    np.testing.assert_allclose(mean.numpy(), theirs.detach().numpy(), rtol=1e-12)
    if counted.any():
        np.testing.assert_allclose(gradient.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_weights_beside_torch() -> None:
    torch = pytest.importorskip("torch")
    F, bits, w = torch.nn.functional, torch.tensor(BITS), torch.tensor(CLASS_WEIGHT)
    labels, ignored = torch.tensor(LABELS), torch.tensor([2, -1, 1, -1])
    every, x, p = torch.tensor(WEIGHT), torch.tensor(X), torch.tensor(P)
    of_logits = ml.binary_cross_entropy_with_logits
    options: dict[str, Any] = {"weight": t(CLASS_WEIGHT), "reduction": "mean"}
    some: dict[str, Any] = {"ignore_index": -1, **options}
    for ours, theirs in (
        (
            of_logits(t(X), t(BITS), weight=t(WEIGHT), pos_weight=t(CLASS_WEIGHT)),
            F.binary_cross_entropy_with_logits(x, bits, every, reduction="none", pos_weight=w),
        ),
        (ml.binary_cross_entropy(t(P), t(BITS), **options), F.binary_cross_entropy(p, bits, w)),
        (ml.nll(t(X), T_LABELS, **options), F.nll_loss(x, labels, w)),
        (ml.nll(t(X), T_IGNORED, **some), F.nll_loss(x, ignored, w, ignore_index=-1)),
        (
            ml.softmax_cross_entropy(t(X), T_IGNORED, label_smoothing=0.2, **some),
            F.cross_entropy(x, ignored, w, ignore_index=-1, label_smoothing=0.2),
        ),
        (
            ml.softmax_cross_entropy(t(X), t(P), label_smoothing=0.2, **options),
            F.cross_entropy(x, p, w, label_smoothing=0.2),
        ),
    ):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12)


def test_a_captured_loss_is_the_eager_one() -> None:
    def losses(x: ml.Tensor, y: ml.Tensor, labels: ml.Tensor) -> list[ml.Tensor]:
        return [
            ml.mean_squared_error(x, y),
            ml.huber(x, y, reduction="mean"),
            ml.binary_cross_entropy_with_logits(x, y, reduction="mean"),
            ml.kl_divergence(ml.log_softmax(x), ml.softmax(y), reduction="mean"),
            ml.softmax_cross_entropy(
                x, labels, label_smoothing=0.1, ignore_index=-1, reduction="mean"
            ),
        ]

    captured = ml.capture(losses)
    for _ in range(2):
        args = t(RNG.normal(size=(4, 3))), t(RNG.normal(size=(4, 3))), t([0, -1, 2, 1])
        for result, expected in zip(captured(*args), losses(*args), strict=True):
            np.testing.assert_array_equal(result.numpy(), expected.numpy())


@cases(
    "call, error, text",
    (
        lambda: ml.mean_squared_error(ml.zeros((3, 1)), ml.zeros(3)),
        ml.errors.ShapeError,
        r"mean_squared_error\(f32\[3,1\], f32\[3\]\): .* of one shape",
    ),
    (lambda: ml.l1(ml.zeros(3), ml.arange(3)), ml.errors.DTypeError, r"^l1.*got i64"),
    (lambda: untyped.l1(ml.zeros(3), "123"), ml.errors.DTypeError, "asarray"),
    (lambda: ml.huber(t(X), t(Y), delta=0), ml.errors.ArgumentError, "> 0, got 0"),
    (lambda: untyped.huber(t(X), t(Y), delta="a"), ml.errors.ArgumentError, "huber"),
    (
        lambda: untyped.huber(t(X), t(Y), reduction="average"),
        ml.errors.ArgumentError,
        "huber.*one of 'none', 'mean', 'sum', got 'average'",
    ),
    (
        lambda: ml.kl_divergence(ml.zeros(()), ml.zeros(())),
        ml.errors.ShapeError,
        "kl_divergence.*a distribution has an axis",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS), label_smoothing=1.5),
        ml.errors.ArgumentError,
        "from 0 to 1, got 1.5",
    ),
    (
        lambda: untyped.softmax_cross_entropy(t(X), t(LABELS), ignore_index=0.5),
        ml.errors.ArgumentError,
        "ignore_index as an int",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS - 1), ignore_index=7),
        ml.errors.PositionRefused,
        "label -1",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS[:2]), ignore_index=7),
        ml.errors.ShapeError,
        "expected labels of",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(Y), ignore_index=7),
        ml.errors.ArgumentError,
        "of class numbers, not of distributions",
    ),
    (lambda: ml.softmax_cross_entropy(t(X), t(Y > 0)), ml.errors.DTypeError, "integer"),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS.astype("f8"))),
        ml.errors.ShapeError,
        "labels that are floats are distributions",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS), weight=t(np.ones(4))),
        ml.errors.ShapeError,
        "one number for each class",
    ),
    (lambda: ml.nll(t(LOG_P), t(LABELS - 1)), ml.errors.OperandValueError, "index -1"),
    (lambda: ml.nll(t(LOG_P), t(LABELS[:2])), ml.errors.ShapeError, "expected labels of"),
    (
        lambda: ml.binary_cross_entropy(t(P), t(BITS), weight=t(np.ones((2, 4, 3)))),
        ml.errors.ShapeError,
        r"a weight that broadcasts to the losses, \[4, 3\]",
    ),
    (
        lambda: ml.binary_cross_entropy_with_logits(t(X), t(BITS), pos_weight=t(np.ones(4))),
        ml.errors.ShapeError,
        "a pos_weight that broadcasts",
    ),
    (
        lambda: ml.smooth_l1(t(X), t(Y), beta=-1.0),
        ml.errors.ArgumentError,
        "expected beta as a number > 0",
    ),
    (
        lambda: ml.cosine_embedding(t(X), t(Y), t(X)),
        ml.errors.ShapeError,
        "one target for each pair",
    ),
    (lambda: ml.triplet_margin(t(X), t(Y), t(Y[:2])), ml.errors.ShapeError, "of one shape"),
    (
        lambda: ml.ctc(t(STEPS), t(WORDS), t(STEP_COUNTS), t(WORD_COUNTS), blank=7),
        ml.errors.ArgumentError,
        "ctc.*blank as one of the 5 classes, got 7",
    ),
    (
        lambda: ml.ctc(t(STEPS), t(WORDS - 2), t(STEP_COUNTS), t(WORD_COUNTS)),
        ml.errors.OperandValueError,
        "5",
    ),
    (
        lambda: ml.ctc(t(STEPS), t(WORDS), t(STEP_COUNTS), t(WORD_COUNTS - 2)),
        ml.errors.OperandValueError,
        "out of range",
    ),
    (
        lambda: ml.ctc(t(STEPS), t(WORDS), t(STEP_COUNTS), t(WORD_COUNTS[:1])),
        ml.errors.ShapeError,
        r"labels \[batch, S\], two lengths",
    ),
    (
        lambda: untyped.softmax_cross_entropy(t(X), t(LABELS), ignore_index=7, reduction="average"),
        ml.errors.ArgumentError,
        "softmax_cross_entropy.*got 'average'",
    ),
)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_labels_are_tensors() -> None:
    labels: Any = 2
    refuses(DTypeError, "expected a tensor", ml.softmax_cross_entropy, ml.zeros(3), labels)
