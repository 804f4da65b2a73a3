"""The losses: beside plain numpy and PyTorch, their gradients, reductions, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import cases

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
        wanted = expected(*[x.astype("f8") for x in xs])
        for reduction, of in (("none", np.asarray), ("mean", np.mean), ("sum", np.sum)):
            result = loss(*map(t, xs), reduction=reduction).numpy()
            assert (result.dtype.name, result.shape) == (name_of[dtype], np.shape(of(wanted)))
            np.testing.assert_allclose(result, of(wanted), rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(
            loss(*map(t, xs)).numpy(), loss(*map(t, xs), reduction="none").numpy()
        )


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    loss, inputs, _, _, _ = LOSSES[name]
    ml.testing.check_gradients(loss, *map(t, inputs), order=2)
    ml.testing.check_gradients(lambda *xs: loss(*xs, reduction="mean"), *map(t, inputs))


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
    loss, inputs, _, theirs, given = LOSSES[name]
    for reduction in ("mean", "sum"):
        leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
        extra = [torch.tensor(LABELS)] if theirs == "cross_entropy" else []
        how = "batchmean" if theirs == "kl_div" and reduction == "mean" else reduction
        function = getattr(torch.nn.functional, theirs)
        expected = function(*leaves, *extra, reduction=how, **given)
        expected.backward()
        value, gradients = ml.value_and_grad(
            lambda *xs, by=reduction: loss(*xs, reduction=by), tuple(range(len(inputs)))
        )(*map(t, inputs))
        np.testing.assert_allclose(value.numpy(), expected.detach().numpy(), rtol=1e-12)
        for gradient, leaf in zip(gradients, leaves, strict=True):
            np.testing.assert_allclose(gradient.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


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
    kept = labels != number

    def loss(x: ml.Tensor, reduction: Any) -> ml.Tensor:
        return ml.softmax_cross_entropy(
            x, t(labels), label_smoothing=smoothing, ignore_index=number, reduction=reduction
        )

    expected = np.where(kept, _smoothed(X, smoothing), 0)
    np.testing.assert_allclose(loss(t(X), "none").numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(loss(t(X), "sum").numpy(), expected.sum(), rtol=1e-12)
    mean, gradient = ml.value_and_grad(lambda x: loss(x, "mean"))(t(X))
    if not kept.any():
        assert math.isnan(mean.item())
    else:
        np.testing.assert_allclose(mean.numpy(), expected.sum() / kept.sum(), rtol=1e-12)
        assert not gradient.numpy()[~kept].any()
        ml.testing.check_gradients(lambda x: loss(x, "mean"), t(X))
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
    if kept.any():
        np.testing.assert_allclose(gradient.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


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
        for given, expected in zip(captured(*args), losses(*args), strict=True):
            np.testing.assert_array_equal(given.numpy(), expected.numpy())


@cases(
    "call, error, text",
    (
        lambda: ml.mean_squared_error(ml.zeros((3, 1)), ml.zeros(3)),
        ml.errors.ShapeError,
        r"mean_squared_error\(f32\[3,1\], f32\[3\]\): .* must be of one shape",
    ),
    (lambda: ml.l1(ml.zeros(3), ml.arange(3)), ml.errors.DTypeError, r"^l1.*not i64"),
    (lambda: untyped.l1(ml.zeros(3), "123"), ml.errors.DTypeError, "asarray"),
    (lambda: ml.huber(t(X), t(Y), delta=0), ml.errors.AttributeRefused, "> 0, not 0"),
    (lambda: untyped.huber(t(X), t(Y), delta="a"), ml.errors.AttributeRefused, "huber"),
    (
        lambda: untyped.huber(t(X), t(Y), reduction="average"),
        ml.errors.AttributeRefused,
        "huber.*one of 'none', 'mean', 'sum', not 'average'",
    ),
    (
        lambda: ml.kl_divergence(ml.zeros(()), ml.zeros(())),
        ml.errors.ShapeError,
        "kl_divergence.*a distribution has an axis",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS), label_smoothing=1.5),
        ml.errors.AttributeRefused,
        "from 0 to 1, not 1.5",
    ),
    (
        lambda: untyped.softmax_cross_entropy(t(X), t(LABELS), ignore_index=0.5),
        ml.errors.AttributeRefused,
        "ignore_index is an int",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS - 1), ignore_index=7),
        ml.errors.OperandValueError,
        "label -1",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(LABELS[:2]), ignore_index=7),
        ml.errors.ShapeError,
        "labels must have",
    ),
    (
        lambda: ml.softmax_cross_entropy(t(X), t(Y), ignore_index=7),
        ml.errors.DTypeError,
        "integer",
    ),
    (
        lambda: untyped.softmax_cross_entropy(t(X), t(LABELS), ignore_index=7, reduction="average"),
        ml.errors.AttributeRefused,
        "softmax_cross_entropy.*not 'average'",
    ),
)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
