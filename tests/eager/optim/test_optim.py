"""Optimizers against numpy and torch, schedules against their formulas, and what both refuse."""

from __future__ import annotations

import gc
import inspect
import math
import re
import weakref
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    HandleError,
    NonFiniteError,
    PathError,
    ShapeError,
    StaleTensorError,
)
from mlvm.core.types import Array
from mlvm.core.vm import VM
from mlvm.eager import nn, optim, random
from mlvm.eager.autodiff.grad import grad, value_and_grad, vjp
from mlvm.eager.capture.capture import capture
from mlvm.eager.functions import shapes
from mlvm.eager.functions.creation import asarray
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.context import default_vm
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.machines.local import LocalVM
from tests.brief import Patch, cases, count_calls, refuses

STEPS = 20
SHAPES = {"kernel": (3, 4), "bias": (4,), "gain": ()}
RNG = np.random.default_rng(11)
START = {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()}
GRADIENTS = [
    {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)
]


def tensors(arrays: dict[str, Array], dtype: str = "f64") -> dict[str, Tensor]:
    numpy = {"f32": np.float32, "f64": np.float64}[dtype]
    return {name: from_array(np.asarray(x, numpy)) for name, x in arrays.items()}


# --- references: p after updates with the gradients gs -------------------------------


def sgd(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    v, momentum = np.zeros_like(p), hyper.get("momentum", 0.0)
    for t, g in enumerate(gs):
        g = (-g if hyper.get("maximize") else g) + hyper.get("weight_decay", 0.0) * p
        v = momentum * v + (1 - hyper.get("dampening", 0.0) * (t > 0)) * g
        p = p - rate * (g + momentum * v if hyper.get("nesterov") else v)
    return p


def moments(gs: list[Array], hyper: Hyper) -> Iterator[tuple[int, Array, Array, Array]]:
    """Number, gradient, and means of gradients and of their squares, of each update."""
    beta1, beta2 = hyper.get("betas", (0.9, 0.999))
    m, v = np.zeros_like(gs[0]), np.zeros_like(gs[0])
    for t, g in enumerate(gs, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        yield t, g, m, v


def adam(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 1 of arXiv 1412.6980, with the decay of arXiv 1711.05101."""
    beta1, beta2 = hyper.get("betas", (0.9, 0.999))
    for t, _, m, v in moments(gs, hyper):
        step = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + hyper.get("eps", 1e-8))
        p = p - rate * (step + hyper.get("weight_decay", 0.0) * p)
    return p


def coupled_adam(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 1 of arXiv 1412.6980 of g + weight_decay p, with the v of arXiv 1904.09237."""
    (beta1, beta2), m = hyper.get("betas", (0.9, 0.999)), np.zeros_like(p)
    v, largest = m, m
    for t, g in enumerate(gs, 1):
        g = (-g if hyper.get("maximize") else g) + hyper.get("weight_decay", 0.0) * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        largest = np.maximum(largest, v) if hyper.get("amsgrad") else v
        root = np.sqrt(largest / (1 - beta2**t)) + hyper.get("eps", 1e-8)
        p = p - rate * m / (1 - beta1**t) / root
    return p


def rprop(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """As the documentation of torch.optim.Rprop writes it."""
    before, step = np.zeros_like(p), np.full_like(p, rate)
    (less, more), sizes = hyper.get("etas", (0.5, 1.2)), hyper.get("step_sizes", (1e-6, 50.0))
    for g in gs:
        agree = np.sign(g * before)
        step = np.clip(step * np.select([agree > 0, agree < 0], [more, less], 1.0), *sizes)
        before = np.where(agree < 0, 0.0, g)
        p = p - np.sign(before) * step
    return p


def asgd(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """As the documentation of torch.optim.ASGD writes it."""
    decay, alpha = hyper.get("lambd", 1e-4), hyper.get("alpha", 0.75)
    for t, g in enumerate(gs):
        g = g + hyper.get("weight_decay", 0.0) * p
        eta = rate / (1 + decay * rate * t) ** alpha
        p = (1 - decay * eta) * p - eta * g
    return p


def rmsprop(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """As the documentation of torch.optim.RMSprop writes it."""
    alpha, eps = hyper.get("alpha", 0.99), hyper.get("eps", 1e-8)
    v, mean, buffer = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for g in gs:
        g = g + hyper.get("weight_decay", 0) * p
        v = alpha * v + (1 - alpha) * g**2
        mean = alpha * mean + (1 - alpha) * g
        variance = v - mean**2 if hyper.get("centered") else v
        buffer = hyper.get("momentum", 0) * buffer + g / (np.sqrt(variance) + eps)
        p = p - rate * buffer
    return p


def lion(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 2 of arXiv 2302.06675."""
    m, (beta1, beta2) = np.zeros_like(p), hyper["betas"]
    for g in gs:
        c = beta1 * m + (1 - beta1) * g
        p = p - rate * (np.sign(c) + hyper["weight_decay"] * p)
        m = beta2 * m + (1 - beta2) * g
    return p


def adagrad(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    total = np.zeros_like(p)
    for g in gs:
        g = g + hyper.get("weight_decay", 0.0) * p
        total = total + g**2
        p = p - rate * g / (np.sqrt(total) + hyper.get("eps", 1e-10))
    return p


def adadelta(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 1 of arXiv 1212.5701."""
    rho, eps = hyper.get("rho", 0.9), hyper.get("eps", 1e-6)
    squares, steps = np.zeros_like(p), np.zeros_like(p)
    for g in gs:
        g = g + hyper.get("weight_decay", 0.0) * p
        squares = rho * squares + (1 - rho) * g**2
        step = -np.sqrt(steps + eps) / np.sqrt(squares + eps) * g
        steps = rho * steps + (1 - rho) * step**2
        p = p + rate * step
    return p


def adamax(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 2 of arXiv 1412.6980."""
    (beta1, beta2), u = hyper.get("betas", (0.9, 0.999)), np.zeros_like(p)
    for t, g, m, _ in moments(gs, hyper):
        u = np.maximum(beta2 * u, np.abs(g) + hyper.get("eps", 1e-8))
        p = p - rate / (1 - beta1**t) * m / u
    return p


def nadam(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 2 of Dozat (2016), with one mu for all steps."""
    mu, nu = hyper.get("betas", (0.9, 0.999))
    for t, g, m, n in moments(gs, hyper):
        m_hat = mu * m / (1 - mu ** (t + 1)) + (1 - mu) * g / (1 - mu**t)
        p = p - rate * m_hat / (np.sqrt(n / (1 - nu**t)) + hyper.get("eps", 1e-8))
    return p


def radam(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 2 of arXiv 1908.03265, with 5 in the place of 4."""
    beta1, beta2 = hyper.get("betas", (0.9, 0.999))
    most = 2 / (1 - beta2) - 1
    for t, _, m, v in moments(gs, hyper):
        length = most - 2 * t * beta2**t / (1 - beta2**t)
        step = m / (1 - beta1**t)
        if length > 5:
            r = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
            step = np.sqrt(r) * step / (np.sqrt(v / (1 - beta2**t)) + hyper.get("eps", 1e-8))
        p = p - rate * step
    return p


def lamb(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithm 2 of arXiv 1904.00962, with phi(x) = x."""
    beta1, beta2 = hyper.get("betas", (0.9, 0.999))
    for t, _, m, v in moments(gs, hyper):
        r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + hyper.get("eps", 1e-6))
        u = r + hyper.get("weight_decay", 0.0) * p
        p = p - rate * np.linalg.norm(p) / np.linalg.norm(u) * u
    return p


def adafactor(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """Algorithms 4 and 5 of arXiv 1804.04235."""
    eps1, eps2 = hyper.get("eps", (1e-30, 1e-3))
    r, c, v = np.zeros(p.shape[:-1]), np.zeros(p.shape[-1:]), np.zeros_like(p)
    for t, g in enumerate(gs, 1):
        rho, beta = min(rate, 1 / math.sqrt(t)), 1 - t ** -hyper.get("decay_rate", 0.8)
        alpha = max(eps2, float(np.sqrt(np.mean(p**2)))) * rho
        p = p * (1 - rate * hyper.get("weight_decay", 0.0))
        if p.ndim == 2:
            r = beta * r + (1 - beta) * (g**2 + eps1).sum(1)
            c = beta * c + (1 - beta) * (g**2 + eps1).sum(0)
            v = np.outer(r, c) / r.sum()
        else:
            v = beta * v + (1 - beta) * (g**2 + eps1)
        u = g / np.sqrt(v)
        clipping = hyper.get("clipping_threshold", 1.0)
        p = p - alpha * u / max(1, float(np.sqrt(np.mean(u**2))) / clipping)
    return p


def muon(p: Array, gs: list[Array], rate: float, hyper: Hyper) -> Array:
    """The steps of Jordan et al. (2024), scaled by equation 4 of arXiv 2502.16982."""
    hyper = {"weight_decay": 0.1, **hyper}
    if p.ndim != 2 or not hyper.get("orthogonal", True):
        return adam(p, gs, rate, hyper)
    v, momentum = np.zeros_like(p), hyper.get("momentum", 0.95)
    for g in gs:
        v = momentum * v + g
        x = g + momentum * v if hyper.get("nesterov", True) else v
        x = x / np.linalg.norm(x)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        scale = 0.2 * math.sqrt(max(p.shape))
        p = p - rate * (scale * x + hyper["weight_decay"] * p)
    return p


Make = Callable[[Any], optim.Optimizer]
Hyper = dict[str, Any]
Groups = list[tuple[Any, Hyper]]

REFERENCES = {
    "SGD": sgd,
    "RMSProp": rmsprop,
    "Adagrad": adagrad,
    "Adadelta": adadelta,
    "Adam": coupled_adam,
    "Rprop": rprop,
    "ASGD": asgd,
    "AdamW": adam,
    "Adamax": adamax,
    "NAdam": nadam,
    "RAdam": radam,
    "Lion": lion,
    "Lamb": lamb,
    "Adafactor": adafactor,
    "Muon": muon,
}
ADAM_CASES: list[Hyper] = [
    {},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    {"betas": (0.0, 0.99)},
    {"betas": (0.9, 0.0)},
    {"betas": (0.99, 0.99999)},
]
CASES: list[tuple[str, Hyper]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "maximize": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "betas": (0.9, 0.5)}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Rprop", {}),
    ("Rprop", {"etas": (0.3, 1.5), "step_sizes": (0.015, 0.05)}),
    ("ASGD", {}),
    ("ASGD", {"lambd": 0.1, "alpha": 0.5, "t0": 3.0, "weight_decay": 0.1}),
    ("RMSProp", {}),
    ("RMSProp", {"alpha": 0.5, "eps": 1e-3}),
    ("RMSProp", {"momentum": 0.9}),
    ("RMSProp", {"centered": True}),
    ("RMSProp", {"centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    *(("Adam", hyper) for hyper in ADAM_CASES),
    *(("AdamW", {"weight_decay": 0.2, **hyper}) for hyper in ADAM_CASES),
    *(
        (name, hyper)
        for name in ("Adamax", "NAdam", "RAdam", "Lamb")
        for hyper in [*ADAM_CASES[:3], ADAM_CASES[-1]]
    ),
    ("RAdam", {"betas": (0.9, 0.0)}),
    ("RAdam", {"betas": (0.9, 0.75)}),
    ("Lamb", {"weight_decay": 0.2}),
    ("Adagrad", {}),
    ("Adagrad", {"eps": 0.1}),
    ("Adadelta", {}),
    ("Adadelta", {"rho": 0.5, "eps": 1e-3}),
    ("Adafactor", {}),
    ("Adafactor", {"decay_rate": 0.5, "clipping_threshold": 1.5, "weight_decay": 0.1}),
    ("Adafactor", {"eps": (1e-3, 0.9)}),
    ("Muon", {}),
    ("Muon", {"momentum": 0.5, "nesterov": False, "weight_decay": 0.0, "betas": (0.5, 0.9)}),
    ("Muon", {"orthogonal": False}),
    *(
        ("Lion", {"betas": betas, "weight_decay": decay})
        for betas in [(0.9, 0.99), (0.5, 0.0), (0.0, 0.9)]
        for decay in (0.0, 0.3)
    ),
]
GROUPED: list[tuple[str, Hyper, Groups]] = [
    ("SGD", {"momentum": 0.9}, [("bias", {"learning_rate": 0.5}), ("g*", {"momentum": 0.0})]),
    ("SGD", {}, [(lambda path, x: x.ndim < 2, {"momentum": 0.9, "nesterov": True})]),
    ("RMSProp", {}, [("bias", {"centered": True}), ("kernel", {"alpha": 0.5, "eps": 1e-3})]),
    ("Adam", {}, [("bias", {"betas": (0.5, 0.9)}), ("*", {"learning_rate": 0.5})]),
    ("AdamW", {"weight_decay": 0.5}, [(lambda path, x: x.ndim < 2, {"weight_decay": 0.0})]),
    ("Adagrad", {}, [("bias", {"eps": 0.5})]),
    ("Adadelta", {}, [("bias", {"rho": 0.5})]),
    ("Adamax", {}, [("bias", {"betas": (0.5, 0.9)})]),
    ("NAdam", {}, [("bias", {"betas": (0.5, 0.9)})]),
    ("RAdam", {"eps": 0.0}, [("bias", {"betas": (0.5, 0.5)})]),
    ("Lamb", {}, [("bias", {"weight_decay": 0.5})]),
    ("Adafactor", {"weight_decay": 0.5}, [("bias", {"clipping_threshold": 1.5})]),
    ("Muon", {}, [("bias", {"learning_rate": 0.5}), ("kernel", {"orthogonal": False})]),
    ("Muon", {}, [("bias", {"weight_decay": 0.0})]),
    ("LBFGS", {"history_size": 4}, [("bias", {"history_size": 2}), ("kernel", {})]),
    ("Lion", {"weight_decay": 0.5}, [("[bg]*", {"weight_decay": 0, "betas": (0.5, 0.5)})]),
]


def trained(make: Make, dtype: str) -> dict[str, Array]:
    params = tensors(START, dtype)
    optimizer = make(params)
    for gradients in GRADIENTS:
        optimizer.update(tensors(gradients, dtype))
    return {name: x.numpy() for name, x in params.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [("f64", 1e-12), ("f32", 2e-5)])
@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_an_optimizer_is_its_formula(name: str, hyper: Hyper, dtype: str, tolerance: float) -> None:
    result = trained(lambda params: getattr(optim, name)(params, 0.02, **hyper), dtype)
    if name == "RAdam":  # the reference has digits that cancel, too
        tolerance = max(tolerance, 1e-9)
    for path, x in result.items():
        expected = REFERENCES[name](START[path], [g[path] for g in GRADIENTS], 0.02, hyper)
        assert x.dtype == np.dtype(f"f{4 if dtype == 'f32' else 8}")
        np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)


def test_the_average_of_asgd_begins_after_t0() -> None:
    w = asarray(np.array([1.0]))
    optimizer, seen = optim.ASGD({"w": w}, 0.1, t0=1.0), list[float]()
    for _ in range(5):
        optimizer.update({"w": asarray(np.array([1.0]))})
        seen.append(w.item())
    average = 0.0
    for t, p in enumerate(seen):
        average += (p - average) / max(1.0, t - 1.0)
    np.testing.assert_allclose(optimizer.state()["average/w"].numpy(), [average], rtol=1e-12)


def test_a_line_search_minimizes_where_full_steps_diverge() -> None:
    def loss_of(params: dict[str, Tensor]) -> Tensor:
        x, y = params["w"][0], params["w"][1]
        return 100.0 * (y - x * x) ** 2 + (1.0 - x) ** 2  # Rosenbrock's

    for sign in (1.0, -1.0):
        params = {"w": asarray(np.array([-1.2, 1.0]))}
        optimizer = optim.LBFGS(params, 1.0, maximize=sign < 0)
        calls = 0

        def loss_and_grads(params: Any = params, sign: float = sign) -> Any:
            nonlocal calls
            calls += 1
            return value_and_grad(lambda each: sign * loss_of(each))(params)

        for _ in range(40):
            loss = optimizer.search(loss_and_grads)
        assert abs(loss.item()) < 1e-20
        assert calls < 150
        np.testing.assert_allclose(params["w"].numpy(), [1.0, 1.0], rtol=1e-9)


def test_a_line_search_that_raises_leaves_the_parameters_as_they_are() -> None:
    w = asarray([3.0, -2.0])
    gradient = {"w": w * 2.0}
    optimizer = optim.LBFGS({"w": w}, 1.0)
    loss = (w * w).sum()
    for pair in ((loss * math.nan, gradient), (loss * math.inf, gradient), (loss, {"w": w / 0.0})):
        refuses(
            NonFiniteError,
            "is not finite; find the op",
            optimizer.search,
            partial(next, iter([pair])),
        )
    refuses(StopIteration, "", optimizer.search, partial(next, iter([(loss, gradient)])))
    assert w.tolist() == [3.0, -2.0]
    nowhere = iter([(loss, gradient), *[(loss * -math.inf, gradient)] * 9])
    assert optimizer.search(partial(next, nowhere), max_calls=9).item() == 13.0
    assert w.tolist() == [3.0, -2.0]


# --- a quasi-Newton method -----------------------------------------------------------

HILLS = {name: 1 + 9 * RNG.random(shape) for name, shape in SHAPES.items()}


def slopes(params: dict[str, Array]) -> dict[str, Array]:
    """The gradient of a loss that is not quadratic."""
    return {k: HILLS[k] * x + x**3 for k, x in params.items()}


def lbfgs(start: dict[str, Array], steps: int, rate: float, size: int) -> list[dict[str, Array]]:
    """Algorithm 7.4 of Nocedal and Wright, with two loops, and PyTorch's first step."""

    def flat(arrays: dict[str, Array]) -> Array:
        return np.concatenate([arrays[name].reshape(-1) for name in SHAPES])

    def parts(x: Array) -> dict[str, Array]:
        ends = np.cumsum([math.prod(shape) for shape in SHAPES.values()])
        pieces = zip(SHAPES.items(), np.split(x, ends), strict=False)
        return {name: piece.reshape(shape) for (name, shape), piece in pieces}

    x, iterates = flat(start), [start]
    pairs: list[tuple[Array, Array]] = []
    before: Any = None
    for step in range(steps):
        g = flat(slopes(parts(x)))
        if before is not None:
            s, y = x - before[0], g - before[1]
            if s @ y > 1e-10:
                pairs = [*pairs, (s, y)][-size:]
        q, alphas = g.copy(), []
        for s, y in reversed(pairs):
            alphas.append(s @ q / (s @ y))
            q -= alphas[-1] * y
        if pairs:
            s, y = pairs[-1]
            q *= s @ y / (y @ y)
        for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
            q += (alpha - y @ q / (s @ y)) * s
        before = x, g
        x = x - (rate if step else min(1.0, 1 / np.abs(g).sum()) * rate) * q
        iterates.append(parts(x))
    return iterates


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_lbfgs_is_its_two_loops(size: int, rate: float) -> None:
    params = tensors(START)
    optimizer = optim.LBFGS(params, rate, history_size=size)
    expected = lbfgs(START, STEPS, rate, size)
    for step in range(STEPS):
        for k, x in params.items():
            np.testing.assert_allclose(x.numpy(), expected[step][k], rtol=1e-6, atol=1e-8)
        optimizer.update(tensors(slopes({k: x.numpy() for k, x in params.items()})))
    assert max(float(ml.max(ml.abs(x))) for x in params.values()) < 1e-2


def test_lbfgs_stays_where_there_is_no_slope() -> None:
    w = asarray([1.0, -2.0])
    optimizer = optim.LBFGS(w, 1.0)
    for _ in range(3):
        optimizer.update(asarray([0.0, 0.0]))
    assert w.tolist() == [1.0, -2.0]
    mixed = {"a": asarray([1.0]), "b": asarray(np.float64(-2.0))}
    optimizer = optim.LBFGS(mixed, 1.0)
    for _ in range(8):
        optimizer.update({"a": mixed["a"] * 3.0, "b": mixed["b"] * 5.0})
    assert abs(mixed["a"].item()) < 1e-3
    assert abs(mixed["b"].item()) < 1e-3


def test_lion_leaves_alone_what_has_no_gradient() -> None:
    w = asarray([1.0, -0.0, math.inf])
    optim.Lion(w, 0.5).update(asarray([0.0, 0.0, -0.0]))
    assert str(w.tolist()) == "[1.0, -0.0, inf]"


def test_parameters_of_several_dtypes() -> None:
    single, double = tensors(START, "f32"), tensors(START, "f64")
    optimizer = optim.AdamW({"single": single, "double": double}, optim.constant(0.01))
    for gradients in GRADIENTS:
        optimizer.update({"single": tensors(gradients, "f32"), "double": tensors(gradients, "f64")})
    for name, x in single.items():
        assert x.dtype.name == "f32"
        np.testing.assert_allclose(x.numpy(), double[name].numpy(), rtol=1e-4, atol=1e-5)
    assert optimizer.state()["square_sum/double/kernel"].dtype.name == "f64"


def test_the_rate_now_is_a_number() -> None:
    params = tensors({"w": np.zeros(())})
    rates: list[tuple[Any, list[float]]]
    rates = [(0.5, [0.5, 0.5]), (optim.cosine(0.5, 2), [0.5, 0.25])]
    for rate, expected in rates:
        optimizer = optim.SGD(params, rate)
        for each in expected:
            assert type(optimizer.learning_rate) is float
            assert optimizer.learning_rate == pytest.approx(each, rel=1e-6)
            optimizer.update(tensors({"w": np.ones(())}))
    optimizer.learning_rate = 2
    assert optimizer.learning_rate == 2.0


def test_a_shared_parameter_is_updated_once() -> None:
    x = asarray(np.float64(3.0))
    params = {"a": x, "b": [x]}
    optimizer = optim.SGD(params, 0.1)
    optimizer.update(grad(lambda params: params["a"] * params["b"][0])(params))
    assert math.isclose(float(x), 3 - 0.1 * 6)


# --- memory and cost -----------------------------------------------------------------


@pytest.fixture
def weights() -> Iterator[Arena]:
    arena = Arena(VM("training"), "weights")
    with arena.allocating():
        yield arena


def mlp() -> nn.Module:
    layers = nn.Linear(3, 8, key=random.key(1)), nn.Linear(8, 1, key=random.key(2))
    return nn.Sequential(layers[0], ml.relu, layers[1])


@cases(
    "make",
    lambda model: optim.SGD(model, 0.05, momentum=0.9),
    lambda model: optim.Adam(model, 0.02),
    lambda model: optim.AdamW(model, optim.one_cycle(0.05, 60)),
    lambda model: optim.Adam(model, optim.cosine(0.05, 60, warmup_steps=5)),
)
def test_training_learns_and_allocates_nothing_after_the_first_step(
    weights: Arena, make: Make
) -> None:
    model = mlp()
    optimizer = make(model)
    batch = Arena(weights.vm, "batch")
    constants = prepare_constants(weights.vm).arena
    arenas = (weights, batch, constants)
    xs = RNG.standard_normal((32, 3)).astype(np.float32)
    ys = xs @ np.array([[1], [-2], [3]], np.float32)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return op.mean(op.square(model(x) - y))

    losses, sizes = [], []
    for _ in range(60):
        with batch:
            loss, grads = value_and_grad(loss_of)(model, from_array(xs), from_array(ys))
            optimizer.update(optim.clip_by_global_norm(grads, 10.0))
            losses.append(float(loss))
            del loss, grads
        sizes.append([(a.capacity, a.views_created, a.high_water) for a in arenas])
    assert losses[-1] < 0.1 * losses[0]
    assert sizes[1:] == sizes[:1] * 59
    assert float(optimizer.count) == 60


def test_state_lives_beside_the_parameters_and_survives_resets(weights: Arena) -> None:
    other = Arena(weights.vm, "other")
    with other.allocating():
        far = from_array(np.ones(4))
    near = from_array(np.ones(3))
    with Arena(weights.vm, "batch"):
        optimizer = optim.Adam({"near": near, "far": far}, 0.1)
        optimizer.update(tensors({"near": np.ones(3), "far": np.ones(4)}))
    state = optimizer.state()
    assert {path: x.arena.name for path, x in state.items()} == {
        "count": "weights",
        "gradient_sum/near": "weights",
        "gradient_sum/far": "other",
        "square_sum/near": "weights",
        "square_sum/far": "other",
    }
    np.testing.assert_array_equal(state["square_sum/far"].numpy(), np.ones(4))


@cases(
    "make, each, once",
    (lambda params: optim.SGD(params, 0.1), 1, 2),
    (lambda params: optim.SGD(params, 0.1, momentum=0.9), 2, 2),
    (lambda params: optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1), 3, 2),
    (lambda params: optim.Adam(params, 0.1), 7, 13),
    (lambda params: optim.AdamW(params, 0.1), 8, 15),
)
def test_launches_of_an_update(make: Make, each: int, once: int, monkeypatch: Patch) -> None:
    """The launches for each parameter, and those beside them, are a fixed number. The native
    machine makes the same launches, by a way that nothing can count."""
    vm = LocalVM(native=False)
    launches = count_calls(monkeypatch, vm, "launch")
    for n in (1, 5):
        with Arena(vm, f"of {n}"):
            params = tensors({f"p{i}": np.ones(3) for i in range(n)}, "f32")
            optimizer, grads = make(params), tensors({f"p{i}": np.ones(3) for i in range(n)}, "f32")
            launches.clear()
            optimizer.update(grads)
        assert launches["launch"] == once + n * each


# --- checkpoints ---------------------------------------------------------------------


@cases(
    "make",
    lambda params: optim.SGD(params, 0.1, momentum=0.9),
    lambda params: optim.AdamW(params, optim.cosine(0.1, STEPS)),
    *[
        lambda params, name=name: getattr(optim, name)(params, 0.1)
        for name in [*REFERENCES, "LBFGS"]
    ],
)
def test_training_resumes_from_state(make: Make) -> None:
    params = tensors(START)
    optimizer = make(params)
    for gradients in GRADIENTS[:7]:
        optimizer.update(tensors(gradients))
    resumed = tensors({name: x.numpy() for name, x in params.items()})
    again = make(resumed)
    again.load_state({path: x.numpy() for path, x in optimizer.state().items()})
    for gradients in GRADIENTS[7:]:
        optimizer.update(tensors(gradients))
        again.update(tensors(gradients))
    for name, x in params.items():
        np.testing.assert_array_equal(resumed[name].numpy(), x.numpy())


# --- what is refused -----------------------------------------------------------------

PARAMS = tensors(START)


def test_a_constructor_takes_the_fields_of_its_class() -> None:
    assert str(inspect.signature(optim.AdamW)) == (
        "(params: 'Tree', learning_rate: 'float | Schedule', *, betas: 'tuple[float, float]' = "
        "(0.9, 0.999), eps: 'float' = 1e-08, weight_decay: 'float' = 0.01, "
        "amsgrad: 'bool' = False, maximize: 'bool' = False, groups: 'Groups' = (), "
        "where: 'Where | None' = None)"
    )
    make: Any = optim.SGD
    for name, message in [
        ("rate", "got an unexpected keyword argument 'rate'"),
        ("betas", "got an unexpected keyword argument 'betas'"),
        ("lr", "lr= is not supported; use learning_rate="),
    ]:
        refuses(TypeError, rf"SGD(\.__init__)?\(\):? {message}", make, PARAMS, 0.1, **{name: 0.5})
    refuses(TypeError, r"SGD\(\): missing .*'learning_rate'; expected params, l", make, PARAMS)
    with pytest.raises(TypeError, match="too many positional arguments; expected params, learn"):
        make(PARAMS, 0.1, 0.9)


def test_a_class_of_ones_own_may_have_a_constructor_of_its_own() -> None:
    class Halved(optim.SGD):
        purpose: str = "to be seen"

        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, rate / 2, momentum=0.5)

    params = {"w": asarray([1.0])}
    optimizer = Halved(params, 1.0)
    optimizer.update({"w": asarray([1.0])})
    assert params["w"].tolist() == [0.5]
    assert repr(optimizer).startswith("<Halved of 1 tensors: learning_rate=0.5, momentum=0.5,")


def test_a_class_without_a_rule_of_its_own_has_the_hyperparameters_of_its_base() -> None:
    class Noted(optim.SGD):
        notes: list[Elsewhere] = []  # type: ignore[name-defined]  # noqa: F821, RUF012
        strength: ClassVar[int] = 3

    optimizer = Noted({"w": asarray([1.0])}, 0.5)
    assert repr(optimizer).endswith(
        "learning_rate=0.5, momentum=0.0, nesterov=False, weight_decay=0.0, "
        "dampening=0.0, maximize=False>"
    )
    with pytest.raises(TypeError, match="Optimizer has no update rule"):
        optim.Optimizer({"w": asarray([1.0])}, 0.5)


def test_a_parameter_that_is_a_view_moves() -> None:
    x = from_array(np.ones(4))
    params = {"a": x, "b": shapes.reshape(x, (2, 2))}
    optim.SGD(params, 0.5).update({"a": from_array(np.ones(4)), "b": from_array(np.zeros((2, 2)))})
    assert [each.tolist() for each in params.values()] == [[0.5] * 4, [[1.0, 1.0]] * 2]


def test_parameters_on_several_vms() -> None:
    with Arena(VM("elsewhere"), "weights").allocating():
        far = from_array(np.ones(3))
    with pytest.raises(HandleError, match="on one VM, got default, elsewhere"):
        optim.SGD({"near": from_array(np.ones(3)), "far": far}, 0.1)


def stale(shape: tuple[int, ...]) -> Tensor:
    with Arena(default_vm(), "batch"):
        return from_array(np.ones(shape))


@cases(
    "rate, change, error, message",
    (0.1, {"gain": None}, PathError, "missing gradient 'gain'"),
    (0.1, {"other": from_array(np.ones(1))}, PathError, "unknown gradient 'other'"),
    (0.1, {"gain": 1.0}, DTypeError, "expected a tensor as leaf, got a float at gain"),
    (
        0.1,
        {"gain": asarray(np.float32(1))},
        DTypeError,
        "gradient 'gain': expected f64[], got f32[]; convert it with astype('float64')",
    ),
    (0.1, {"gain": from_array(np.ones(1))}, ShapeError, "'gain': expected f64[], got f64[1]; a"),
    (0.1, {"gain": stale(())}, StaleTensorError, "the arena was reset"),
    (lambda count: 0.1, {}, DTypeError, "Adam: expected a schedule that returns an f32[], got flo"),
    (lambda count: op.astype(count, dtype="f64"), {}, DTypeError, "returns an f32[], got f64[]"),
)
def test_gradients_and_rates_that_do_not_fit_change_nothing(
    rate: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    params = tensors(START)
    optimizer = optim.Adam(params, rate)
    refuses(error, re.escape(message), optimizer.update, {**tensors(GRADIENTS[0]), **change})
    assert_untouched(params, optimizer)


def assert_untouched(params: dict[str, Tensor], optimizer: optim.Optimizer) -> None:
    for name, x in params.items():
        np.testing.assert_array_equal(x.numpy(), START[name])
    assert not any(x.numpy().any() for x in optimizer.state().values())


@pytest.mark.parametrize("path", ["layers_0/bias", "extra"])
def test_a_parameter_that_was_replaced_is_not_left_behind(path: str) -> None:
    model: Any = mlp()
    optimizer = optim.SGD(model, 0.1)
    grads = model.parameters()
    before = model[2].bias.numpy()
    if path == "extra":
        vars(model).update(extra=asarray(1.0))
    else:
        model[0].bias = asarray(np.zeros(8, np.float32))
    with pytest.raises(
        DTypeError, match=f"SGD: parameter '{path}' was replaced after the optimizer was created"
    ):
        optimizer.update(grads)
    np.testing.assert_array_equal(model[2].bias.numpy(), before)
    assert float(optimizer.count) == 0


def test_an_update_in_a_differentiated_function_changes_nothing() -> None:
    params = tensors(START)
    optimizer = optim.Adam(params, 0.1)

    def loss(x: Tensor) -> Tensor:
        optimizer.update(tensors(GRADIENTS[0]))
        return x

    with pytest.raises(GradientError, match="Adam: an update in place has no gradient"):
        grad(loss)(asarray(np.float64(1)))
    assert_untouched(params, optimizer)


def test_an_update_while_a_tape_needs_a_parameter() -> None:
    params = tensors(START)
    optimizer = optim.Adam(params, 0.1)
    _, pullback = vjp(lambda x: x * x, params["gain"])
    optimizer.update(tensors(GRADIENTS[0]))
    [g] = pullback(from_array(np.ones_like(START["gain"])))
    np.testing.assert_array_equal(g.numpy(), 2 * START["gain"])
    again = tensors(START)
    optim.Adam(again, 0.1).update(tensors(GRADIENTS[0]))
    assert params["gain"].tolist() == again["gain"].tolist()


def test_an_update_outside_of_the_arenas_of_its_vm(weights: Arena) -> None:
    params = tensors(START)
    optimizer = optim.Adam(params, 0.1)
    grads = tensors(GRADIENTS[0])
    with (
        Arena(default_vm(), "batch"),
        pytest.raises(HandleError, match="arena 'batch' is on default, the parameters are on tra"),
    ):
        optimizer.update(grads)
    assert_untouched(params, optimizer)


def test_an_update_of_parameters_that_have_ended() -> None:
    with Arena(default_vm(), "batch"):
        params = tensors(START)
        optimizer = optim.SGD(params, 0.1)
    refuses(
        StaleTensorError, "the arena was reset", lambda: optimizer.update(tensors(GRADIENTS[0]))
    )


def test_repr_names_the_hyperparameters() -> None:
    optimizer = optim.AdamW(PARAMS, 0.1)
    assert repr(optimizer) == (
        "<AdamW of 3 tensors: learning_rate=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, "
        "amsgrad=False, maximize=False>"
    )
    groups = [("bias", {"weight_decay": 0.5})]
    table = optim.AdamW(ml.nn.Linear(2, 3), optim.cosine(0.1, 5), groups=groups)._repr_html_()
    cells = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("</tr>")]
    assert cells[0] == ["AdamW", "1 tensors", "1 tensors"]
    assert ["weight_decay", "0.5", "0.01"] in cells
    assert ["learning_rate", *["&lt;cosine(0.1, 5)&gt;"] * 2] in cells


# --- groups --------------------------------------------------------------------------


def first_group(groups: Groups, path: str, x: Any) -> Hyper:
    for which, options in groups:
        if which(path, x) if callable(which) else fnmatch(path, which):
            return options
    return {}


@pytest.mark.parametrize(("name", "hyper", "groups"), GROUPED)
def test_groups_are_optimizers_of_their_own(name: str, hyper: Hyper, groups: Groups) -> None:
    together = trained(
        lambda params: getattr(optim, name)(params, 0.05, **hyper, groups=groups), "f64"
    )
    for path, start in START.items():
        params = tensors({path: start})
        options = {"learning_rate": 0.05, **hyper, **first_group(groups, path, start)}
        alone = getattr(optim, name)(params, **options)
        for gradients in GRADIENTS:
            alone.update(tensors({path: gradients[path]}))
        assert params[path].numpy().tobytes() == together[path].tobytes(), path


def test_an_unknown_hyperparameter_is_not_assigned() -> None:
    optimizer: Any = optim.SGD(
        {"w": asarray([1.0, 2.0]), "b": asarray([3.0])}, 0.1, groups=[("b", {})]
    )
    for owner, name in ((optimizer, "SGD"), (optimizer.groups[0], "a group")):
        with pytest.raises(ArgumentError, match=f"{name} has no hyperparameter 'lr'; expected"):
            owner.lr = 0.2
        owner.learning_rate = 0.3


def test_what_is_no_learning_rate_is_not_assigned() -> None:
    """It was once, and the next update ended in a StopIteration."""
    optimizer: Any = optim.SGD(tensors(START), 0.1, momentum=0.5, groups=[("bias", {})])
    for owner, name in ((optimizer, "SGD"), (optimizer.groups[0], "a group")):
        for value in ("0.1", b"0.1", None, -1, math.nan):
            text = f"{name}: expected learning_rate"
            refuses(ArgumentError, text, setattr, owner, "learning_rate", value)
        refuses(ArgumentError, "expected momentum in", setattr, owner, "momentum", 1)
        owner.learning_rate = optim.constant(0.5)
        owner.learning_rate = 2
    assert (optimizer.learning_rate, optimizer.momentum) == (2, 0.5)
    optimizer.update(tensors(GRADIENTS[0]))


OPTIMIZERS: dict[str, Any] = {
    name: kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
}
INVALID: list[Any] = [
    *(-1, math.nan, math.inf, "0.1", b"1", None, [], {}, object(), 1j, 10**400),
    np.array([0.1, 0.2]),
    *(asarray(x) for x in (-1.0, math.nan, [0.1], [0.1, 0.2], 1j)),
]


@cases("name", *OPTIMIZERS)
def test_an_invalid_hyperparameter_is_refused_when_it_is_given(name: str) -> None:
    kind, params = OPTIMIZERS[name], tensors(START)
    optimizer = kind(params, 0.1, groups=[("bias", {})])
    for option in ("learning_rate", *kind._kinds):
        for value in [*INVALID, *[(0.5, x) for x in INVALID], (), (0.5,)]:
            given = {"learning_rate": 0.1, option: value}
            refuses(ArgumentError, f"expected {option}", partial(kind, params, **given))
            group = [("bias", {option: value})]
            refuses(ArgumentError, f"expected {option}", kind, params, 0.1, groups=group)
            for owner in (optimizer, optimizer.groups[0]):
                refuses(ArgumentError, f"expected {option}", setattr, owner, option, value)
        if option != "learning_rate":
            for value in (asarray(0.1), asarray(1)):
                refuses(ArgumentError, f"expected {option}", setattr, optimizer, option, value)
    assert repr(optimizer) == repr(kind(params, 0.1, groups=[("bias", {})]))


ARGUMENTS: dict[str, dict[str, Any]] = {
    "constant": {"rate": 0.1},
    "cosine": {"peak": 0.1, "total_steps": 9, "warmup_steps": 2, "final": 0.0},
    "cosine_restarts": {"peak": 0.1, "first_steps": 3, "factor": 2.0, "final": 0.0},
    "exponential": {"initial": 0.1, "decay_rate": 0.5, "transition_steps": 2},
    "step": {"initial": 0.1, "decay_rate": 0.5, "step_size": 3},
    "warmup": {"schedule": 0.1, "warmup_steps": 3, "initial": 0.0},
    "one_cycle": {
        "peak": 0.1,
        "total_steps": 9,
        "warmup_fraction": 0.3,
        "initial_divisor": 25.0,
        "final_divisor": 1e4,
    },
    "Plateau": {
        "rate": 0.1,
        "factor": 0.5,
        "patience": 1,
        "threshold": 0.0,
        "cooldown": 0,
        "min_rate": 0.0,
    },
    "EMA": {"params": tensors(START), "decay": 0.9, "warmup": False},
    "LossScale": {
        "init_scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
    },
    "MultiSteps": {"optimizer": optim.SGD(tensors(START), 0.1), "every": 2},
    "clip_by_global_norm": {"grads": tensors(START), "max_norm": 1.0},
}


@cases("name", *ARGUMENTS)
def test_an_invalid_argument_is_refused(name: str) -> None:
    arguments = ARGUMENTS[name]
    assert [*arguments] == [*inspect.signature(getattr(optim, name)).parameters]
    getattr(optim, name)(**arguments)
    for argument in arguments:
        if argument not in ("params", "optimizer", "grads"):
            for value in INVALID:
                given = {**arguments, argument: value}
                refuses(ArgumentError, "expected", partial(getattr(optim, name), **given))


def test_a_tensor_is_assigned_as_the_learning_rate() -> None:
    params, others = tensors(START), tensors(START)
    optimizer: Any = optim.SGD(params, 0.1)
    other = optim.SGD(others, 0.25)
    optimizer.learning_rate = asarray(0.25)
    optimizer.update(tensors(GRADIENTS[0]))

    @capture
    def step(rate: Tensor, grads: dict[str, Tensor]) -> None:
        optimizer.learning_rate = rate
        optimizer.update(grads)
        optimizer.learning_rate = 0.1

    step(asarray(0.25), tensors(GRADIENTS[1]))
    for gradients in GRADIENTS[:2]:
        other.update(tensors(gradients))
    for path, x in params.items():
        assert x.tolist() == others[path].tolist()
    expected = r"learning_rate as a number or f32\[\], got f32\[1\]"
    refuses(ArgumentError, expected, step, asarray([0.1]), params)


def test_state_that_was_not_made_is_missed_before_anything_is_written() -> None:
    params = tensors(START)
    optimizer = optim.SGD(params, 0.1)
    optimizer.momentum = 0.9
    with pytest.raises(ArgumentError, match=r"'kernel' has no state 'momentum'.* a new optimizer"):
        optimizer.update(tensors(GRADIENTS[0]))
    assert params["kernel"].numpy().tolist() == START["kernel"].tolist()
    assert optimizer.count.item() == 0


def test_an_optimizer_ends_with_its_last_reference() -> None:
    optimizer = optim.AdamW(tensors(START), 0.1, groups=[("bias", {"weight_decay": 0})])
    state = weakref.ref(optimizer.state()["gradient_sum/bias"])
    with uncollected():
        del optimizer
        assert state() is None


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("name", "hyper", "groups"), GROUPED)
def test_captured_updates_are_eager_ones(
    name: str, hyper: Hyper, groups: Groups, fuse: bool
) -> None:
    runs = []
    for captured in (False, True):
        params = tensors(START, "f32")
        rate = optim.cosine(0.1, total_steps=5)
        optimizer = getattr(optim, name)(params, rate, **hyper, groups=groups)
        update = capture(optimizer.update, fuse=fuse) if captured else optimizer.update
        for gradients in GRADIENTS[:5]:
            update(tensors(gradients, "f32"))
        assert not captured or update.signatures == 1
        runs.append({**params, **optimizer.state()})
    for path, x in runs[0].items():
        assert x.numpy().tobytes() == runs[1][path].numpy().tobytes(), path


def test_an_optimizer_in_its_own_tree_is_freed() -> None:
    class Net(ml.nn.Module):
        def __init__(self) -> None:
            self.w = ml.ones(3)
            self.optimizer: ml.optim.Optimizer | None = None

    net = Net()
    net.optimizer = ml.optim.SGD(net, 0.1)
    for _ in range(3):
        net.optimizer.update({"w": ml.ones(3)})
    alive = weakref.ref(net.optimizer)
    del net
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_does_not_move_by_a_gradient_whose_square_overflows(centered: bool) -> None:
    w = asarray([1.0, -2.0])
    optim.RMSProp({"w": w}, 0.01, centered=centered).update({"w": asarray([1e25, -1e25])})
    assert w.tolist() == [1.0, -2.0]
