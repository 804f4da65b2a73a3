"""Cost of small eager calls: the Array API, `nn` and `optim`, one thread.

`eager.txt` lists the calls. Each is timed in two modes. `repeated_us` is the time of the same call,
repeated. `types_us` is the mean time of the call on operands of 100 types in turn, after one call
with each type. The calls of the last section take a number, which is new in every call: `new_us`.
The numbers of all these calls are interleaved, so all measure the same lengths.

Minima of the rounds are compared. A round ends when its last result is computed. Images have the
channels last, in PyTorch first. JAX's functions are called eagerly, without `jit`. JAX compiles
each op for each type, which would take hours for 100 types, so its calls are only repeated or have
new numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.harness import Contender, Contest, Round, Suite, microseconds

ROUND_US: Final = 4e3
"""Time that a round of one mode aims at."""
MOST_CALLS: Final = 3000
"""Most calls of a round of one mode."""
MOST_NUMBERS: Final = 20
"""Most new numbers in a round: they are also lengths, and all libraries should have short ones."""
TYPES: Final = 100
QUICK_TYPES: Final = 3
LONG: Final = 1 << 16
"""Rows of the tensor that new numbers index."""

Space = dict[str, Any]
"""The names of the expressions."""


class Sizes(NamedTuple):
    """Sizes of the operands of one type: `n` is f32[r,c], `s` is f32[p,q], `h` is f32[q,p,p]."""

    r: int = 32
    c: int = 64
    p: int = 4
    q: int = 4
    u: int = 16

    @classmethod
    def numbered(cls, number: int) -> Sizes:
        """Return the sizes of the type of that number; the first 100 differ, and have the usual
        sizes on average."""
        return cls(
            r=22 + number % 20,
            c=56 + 4 * (number // 20),
            p=2 + number // 10,
            q=2 + number % 10,
            u=10 + number,
        )


class Call(NamedTuple):
    """A line of `eager.txt`."""

    section: str
    name: str
    expressions: Mapping[str, str]
    """The expressions, by contender."""

    @property
    def takes_number(self) -> bool:
        return self.section == "new numbers"


def _calls() -> Iterator[Call]:
    section = ""
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        if line.startswith("== "):
            section = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            name, mlvm, torch, numpy, jax = line.split(" | ")
            columns = {"mlvm": mlvm, "torch": torch, "numpy": numpy, "jax": jax}
            if jax == "=":
                columns["jax"] = numpy
            yield Call(section, name, {k: each for k, each in columns.items() if each != "-"})


CALLS: Final = {call.name: call for call in _calls()}


def arrays(sizes: Sizes) -> Space:
    """Return the operands of all calls as numpy arrays."""
    r, c, p, q, _ = sizes
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    square = normal(q, p, p)
    n = normal(r, c)
    return {
        "n": n, "o": n.copy(), "m": n > 0, "s": normal(p, q), "w": normal(c, c), "b": normal(c),
        "z": np.zeros((p, q), np.float32), "e": normal(p + q), "edges": np.sort(normal(c)),
        "h": square @ square.swapaxes(1, 2) + p * np.eye(p, dtype=np.float32),
        "h2": np.exp(normal(p, q)), "g": normal(2, p + 4, q + 4, 3),
        "i": rng.integers(0, r, 8), "j": rng.integers(0, c, (r, 3)), "y": rng.integers(0, c, r),
        "img": normal(2, p + 4, q + 4, 3), "k": normal(3, 3, 3, 8), "qkv": normal(1, 4, r, 16),
    }  # fmt: skip


def common(sizes: Sizes) -> Space:
    """Return the names that all libraries share: sizes and what is not yet a tensor."""
    array = np.random.default_rng(1).standard_normal((sizes.r, sizes.c), dtype=np.float32)
    numbers = [float(each) for each in range(1, sizes.p)]
    return {
        **sizes._asdict(), "every": slice(None), "array": array, "numbers": numbers, "np": np,
        "increment": increment,
    }  # fmt: skip


def increment(x: Any, i: int, value: float) -> None:
    x[i] += value


@cache
def long_array() -> Any:
    """Return an f32[LONG,8]."""
    return np.random.default_rng(2).standard_normal((LONG, 8), dtype=np.float32)


def numpy_space(sizes: Sizes) -> Space:
    rng = np.random.default_rng(3)
    return {**common(sizes), **arrays(sizes), "rng": rng, **_long(np.asarray)}


def mlvm_space(sizes: Sizes) -> Space:
    import mlvm.eager as ml

    tensors = {name: ml.asarray(array) for name, array in arrays(sizes).items()}
    mlp, features = mlvm_layers(sizes.c)
    gradient = features["gradient"]

    def step(n: Any, y: Any) -> Any:
        loss, gradients = gradient(n, y)
        features["plain"].update(gradients)
        return loss

    _, gradients = gradient(tensors["n"], tensors["y"])
    optimizers = {
        name: partial(features[name].update, gradients)
        for name in ("adamw", "sgd", "momentum", "adam")
    }
    state = ml.zeros((sizes.r, 16)), ml.zeros((sizes.r, 16))
    return {
        **common(sizes), **tensors, **features, **optimizers, "ml": ml, "mlp": mlp, "step": step,
        "key": ml.random.key(0), **_long(ml.asarray), "state": state,
        "clip_gradients": lambda: ml.optim.clip_by_global_norm(gradients, 1.0),
    }  # fmt: skip


@cache
def _long(convert: Callable[[Any], Any]) -> Space:
    """Convert `long_array`, and some rows of it, once."""
    return {"x": convert(long_array()), "rows": [convert(row) for row in long_array()[:60]]}


@cache
def mlvm_layers(c: int) -> tuple[Any, Space]:
    """Return an MLP of width c, and layers, optimizers and gradients for it."""
    import mlvm.eager as ml

    def new_mlp() -> Any:
        return ml.nn.Sequential(ml.nn.Linear(c, c), ml.relu, ml.nn.Linear(c, c))

    def loss(mlp: Any, n: Any, y: Any) -> Any:
        return ml.softmax_cross_entropy(mlp(n), y, reduction="mean")

    mlp = new_mlp()
    with_gradient = ml.value_and_grad(loss)
    return mlp, {
        "linear": ml.nn.Linear(c, c), "layer_norm": ml.nn.LayerNorm(c),
        "rms_norm": ml.nn.RMSNorm(c), "group_norm": ml.nn.GroupNorm(4, c),
        "batch_norm": ml.nn.BatchNorm(c), "embedding": ml.nn.Embedding(64, c),
        "cell": ml.nn.LSTMCell(c, 16), "conv": ml.nn.Conv2d(3, 8, 3, padding="VALID"),
        "gradient": lambda n, y: with_gradient(mlp, n, y),
        "grad_of_sum": ml.grad(lambda x: ml.sum(x * x)),
        "slope": ml.grad(lambda x: x * x + ml.sin(x)),
        "mapped": ml.vmap(lambda row: ml.sum(row * row)),
        "plain": ml.optim.SGD(mlp, 1e-3), "adamw": ml.optim.AdamW(new_mlp(), 1e-3),
        "sgd": ml.optim.SGD(new_mlp(), 1e-3), "adam": ml.optim.Adam(new_mlp(), 1e-3),
        "momentum": ml.optim.SGD(new_mlp(), 1e-3, momentum=0.9),
    }  # fmt: skip


def torch_space(sizes: Sizes) -> Space:
    import torch

    operands = arrays(sizes)
    operands["img"] = np.ascontiguousarray(operands["img"].transpose(0, 3, 1, 2))
    operands["k"] = np.ascontiguousarray(operands["k"].transpose(3, 2, 0, 1))
    tensors = {name: torch.from_numpy(array) for name, array in operands.items()}
    mlp, features = torch_layers(sizes.c)

    def gradient(n: Any, y: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(mlp(n), y)
        loss.backward()
        return loss

    def step(n: Any, y: Any) -> Any:
        features["plain"].zero_grad()
        loss = gradient(n, y)
        features["plain"].step()
        return loss

    state = torch.zeros(sizes.r, 16), torch.zeros(sizes.r, 16)
    return {
        **common(sizes), **tensors, **features, "torch": torch, "F": torch.nn.functional,
        "mlp": mlp, "gradient": gradient, "step": step, "state": state,
        **_long(torch.from_numpy),
    }  # fmt: skip


@cache
def torch_layers(c: int) -> tuple[Any, Space]:
    """Return what `mlvm_layers` returns."""
    import torch

    nn, optim = torch.nn, torch.optim

    def new_mlp() -> Any:
        mlp = nn.Sequential(nn.Linear(c, c), nn.ReLU(), nn.Linear(c, c))
        for weight in mlp.parameters():
            weight.grad = torch.ones_like(weight)
        return mlp

    def grad_of(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def gradient(x: Any) -> Any:
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf)[0]

        return gradient

    def step_of(kind: Any, **options: Any) -> Any:
        return kind(new_mlp().parameters(), 1e-3, foreach=True, **options).step

    mlp, other = new_mlp(), new_mlp()
    return mlp, {
        "linear": nn.Linear(c, c), "layer_norm": nn.LayerNorm(c), "rms_norm": nn.RMSNorm(c),
        "group_norm": nn.GroupNorm(4, c), "batch_norm": nn.BatchNorm1d(c),
        "embedding": nn.Embedding(64, c), "cell": nn.LSTMCell(c, 16), "conv": nn.Conv2d(3, 8, 3),
        "grad_of_sum": grad_of(lambda x: (x * x).sum()),
        "slope": grad_of(lambda x: x * x + x.sin()),
        "mapped": torch.vmap(lambda row: (row * row).sum()),
        "plain": optim.SGD(mlp.parameters(), 1e-3),
        "adamw": step_of(optim.AdamW), "sgd": step_of(optim.SGD), "adam": step_of(optim.Adam),
        "momentum": step_of(optim.SGD, momentum=0.9),
        "clip_gradients": lambda: nn.utils.clip_grad_norm_(other.parameters(), 1.0),
    }  # fmt: skip


def jax_space(sizes: Sizes) -> Space:
    import jax
    import jax.numpy as jnp

    def mlp(params: Any, n: Any) -> Any:
        (w1, b1), (w2, b2) = params
        return jax.nn.relu(n @ w1 + b1) @ w2 + b2

    def cross_entropy(n: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(n), y[:, None], 1).mean()

    def layer_norm(n: Any) -> Any:
        centered = n - n.mean(-1, keepdims=True)
        return centered / jnp.sqrt(n.var(-1, keepdims=True) + 1e-5) * tensors["b"] + tensors["b"]

    def step(n: Any, y: Any) -> Any:
        loss, gradients = gradient(params, n, y)
        params[:] = jax.tree.map(lambda x, g: x - 1e-3 * g, params, gradients)
        return loss

    tensors = {name: jnp.asarray(array) for name, array in arrays(sizes).items()}
    tensors["qkv"] = jnp.swapaxes(tensors["qkv"], 1, 2)
    tensors["table"] = jnp.ones((64, sizes.c))
    w, b = tensors["w"], tensors["b"]
    params = [(w, b), (w, b)]
    gradient = jax.value_and_grad(lambda params, n, y: cross_entropy(mlp(params, n), y))
    return {
        **common(sizes), **tensors, "jax": jax, "jnp": jnp, "np": jnp, "jnn": jax.nn, "mlp": mlp,
        "params": params, "cross_entropy": cross_entropy, "layer_norm": layer_norm,
        "linear": lambda n: n @ w + b, "gradient": partial(gradient, params), "step": step,
        "grad_of_sum": jax.grad(lambda x: (x * x).sum()), "key": jax.random.key(0),
        "slope": jax.grad(lambda x: x * x + jnp.sin(x)),
        "mapped": jax.vmap(lambda row: (row * row).sum()),
        **_long(jnp.asarray),
    }  # fmt: skip


SPACES: Final = {
    "mlvm": mlvm_space,
    "torch": torch_space,
    "numpy": numpy_space,
    "jax": jax_space,
}


def functions(library: str, call: Call, spaces: Sequence[Space]) -> list[Callable[..., Any]]:
    """Return the call as a function in each of the spaces, of the new number if it takes one."""
    parameter = "v" if call.takes_number else ""
    code = compile(f"lambda {parameter}: {call.expressions[library]}", call.name, "eval")
    return [eval(code, space) for space in spaces]


def prepare(library: str, quick: bool) -> Mapping[str, Round]:
    """Return the rounds of a library, and set the others to one thread."""
    if library == "torch":
        import torch

        torch.set_num_threads(1)
    wait: Callable[[Any], object] = lambda result: None  # noqa: E731
    if library == "jax":
        import jax

        wait = jax.block_until_ready
    space_of = cache(SPACES[library])
    number_of_types = QUICK_TYPES if quick else TYPES

    @lru_cache(maxsize=1)
    def modes_of(name: str) -> dict[str, Callable[[], float]]:
        call = CALLS[name]
        usual = space_of(Sizes())
        [function] = functions(library, call, [usual])
        if call.takes_number:
            numbers = itertools.count(3 + NUMBERED.index(name), len(NUMBERED))
            return {"new_us": timer(lambda: function(next(numbers)), MOST_NUMBERS)}
        modes = {"repeated_us": timer(function, MOST_CALLS)}
        if library != "jax":
            others = [space_of(Sizes.numbered(each)) for each in range(number_of_types)]
            each_type = functions(library, call, others)
            in_turn = timer(lambda: [of_type() for of_type in each_type][-1], MOST_CALLS)
            modes["types_us"] = lambda: in_turn() / len(each_type)
        return modes

    def timer(function: Callable[[], Any], most: int) -> Callable[[], float]:
        """Return a function that times a call of the function, on average."""
        wait(function())
        about = min(microseconds(lambda: wait(function())) for _ in range(5))
        times = 2 if quick else min(max(int(ROUND_US / about), 2), most)

        def work() -> None:
            for _ in range(times - 1):
                function()
            wait(function())

        return lambda: microseconds(work) / times

    def round_of(name: str) -> dict[str, float]:
        return {metric: measure() for metric, measure in modes_of(name).items()}

    return {name: partial(round_of, name) for name in CALLS if library in CALLS[name].expressions}


COMMON: Final = [call.name for call in CALLS.values() if call.section == "common calls"]
NUMBERED: Final = [call.name for call in CALLS.values() if call.takes_number]

SUITE = Suite(
    module="bench.eager",
    contenders=tuple(Contender(name, name, partial(prepare, name)) for name in SPACES),
    units={"repeated_us": "us", "types_us": "us", "new_us": "us"},
    contests=(
        Contest("100 types", "types_us", ("mlvm",), ("torch",), mean=1.0),
        Contest(
            "repeated, other", "repeated_us", ("mlvm",), ("torch",), mean=1.0,
            cases=frozenset(CALLS) - {*COMMON},
        ),
        Contest(
            "repeated, common", "repeated_us", ("mlvm",), ("torch",), dict.fromkeys(COMMON, 1.0),
            mean=1.5, cases=frozenset(COMMON),
        ),
        Contest(
            "new numbers", "new_us", ("mlvm",), ("torch",), dict.fromkeys(NUMBERED, 1 / 3),
            mean=1 / 3,
        ),
    ),
    rounds=9,
    quick_rounds=1,
    statistic="min",
)  # fmt: skip
