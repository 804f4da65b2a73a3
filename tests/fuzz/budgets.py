"""Random training steps under random memory budgets, beside the same steps op by op.

    python -m tests.fuzz budgets --programs 2000 --seed 0

Each step is captured with `memory=`, a random share of its plan without one. Either the budget is
refused before anything runs, or results and state have eager's bits after two calls, the plan has
no more bytes than allowed, and no byte outside of it is written: scratch memory lies between two
fields that are checked. A larger budget must never give a slower program by the estimate.

Some steps look rows up and write to elements of a log. A third call with an index that is out of
range must raise the same error as the captured step without a budget, and leave the same state.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import BudgetError, PositionError
from mlvm.core.types import u8
from mlvm.eager import Tensor
from mlvm.eager.capture import launch
from mlvm.eager.capture.launch import Launch, Scratch
from tests.fuzz.command import Outcomes, Wrong, outcomes_of

PROGRAMS: Final = 2000

FIELD: Final = 4096  # bytes before and behind scratch memory
_PATTERN: Final = 0xA5

ENTRIES: Final = 5  # rows of tables, and elements of the log

Layer = Callable[[list[Tensor], list[Tensor]], Tensor]


def layers(
    draw: random.Random, width: int, state: State
) -> tuple[list[Layer], list[np.ndarray[Any, Any]]]:
    """Return random layers, each a function of the activations so far and of all weights, and the
    weights' values."""
    values: list[np.ndarray[Any, Any]] = []
    rng = np.random.default_rng(draw.randrange(1 << 30))

    def weight(*shape: int) -> int:
        values.append((rng.normal(size=shape) / np.sqrt(width)).astype(np.float32))
        return len(values) - 1

    def linear() -> Layer:
        kernel, bias = weight(width, width), weight(width)
        return lambda xs, w: xs[-1] @ w[kernel] + w[bias]

    def wide() -> Layer:
        up, down = weight(width, 3 * width), weight(3 * width, width)
        return lambda xs, w: ml.gelu(xs[-1] @ w[up]) @ w[down]

    def norm() -> Layer:
        scale, bias = weight(width), weight(width)
        return lambda xs, w: ml.layer_norm(xs[-1], w[scale], w[bias], eps=1e-5)

    def join() -> Layer:
        back = draw.randint(1, 4)
        return lambda xs, w: xs[-1] + 0.5 * xs[max(-back, -len(xs))]

    def product() -> Layer:
        back = draw.randint(1, 3)
        return lambda xs, w: xs[-1] * ml.sigmoid(xs[max(-back, -len(xs))])

    def attention() -> Layer:
        return lambda xs, w: ml.softmax(xs[-1] @ xs[-1].T * 0.1, axis=-1) @ xs[-1]

    def branch() -> Layer:
        kernel = weight(width, width)
        return lambda xs, w: ml.cond(
            ml.sum(xs[-1]) > 0.0, lambda x: ml.tanh(x @ w[kernel]), lambda x: x * 2.0, xs[-1]
        )

    def loop() -> Layer:
        kernel = weight(width, width)
        return lambda xs, w: ml.scan(
            lambda carry, _: (ml.tanh(carry @ w[kernel]), None), xs[-1], None, length=3
        )[0]

    def noise() -> Layer:
        return lambda xs, w: xs[-1] * ml.random.uniform(xs[-1].shape, low=0.5, high=1.5)

    def unary() -> Layer:
        fn = draw.choice(functions)
        return lambda xs, w: fn(ml.tanh(xs[-1]))

    def lookup() -> Layer:
        table = weight(ENTRIES, width)
        state.is_read = True
        return lambda xs, w: xs[-1] + ml.take(w[table], state.rows, axis=0)

    def write() -> Layer:
        i = draw.randrange(ENTRIES)
        state.is_read = True

        def layer(xs: list[Tensor], w: list[Tensor]) -> Tensor:
            state.log[state.entries[i]] = ml.mean(ml.stop_gradient(xs[-1]))
            return xs[-1] + state.log[i]

        return layer

    def images() -> Layer:
        side, channels, pool = draw.choice([6, 20, 21]), draw.choice([3, 8]), draw.choice(pools)
        spread, down = weight(side, side, channels), weight(8, width)
        kernels = [(weight(3, 3, n, 8), weight(8)) for n in (channels, 8)]
        norms: list[Any] = [lambda x: x, lambda x: x]
        if draw.random() < 0.5:
            norms = [ml.nn.BatchNorm(8) for _ in kernels]
            state.norms += norms

        def layer(xs: list[Tensor], w: list[Tensor]) -> Tensor:
            y = xs[-1][:, None, None, :channels] * w[spread]
            for (kernel, bias), norm in zip(kernels, norms, strict=True):
                y = norm(ml.conv2d(y, w[kernel], padding="SAME") + w[bias])
                y = pool(ml.relu(y))
            return xs[-1] + ml.mean(y, axis=(1, 2)) @ w[down]

        return layer

    pools: list[Any] = [lambda x: ml.max_pool2d(x, 2), lambda x: ml.avg_pool2d(x, 2)]
    functions: list[Any] = [
        ml.tanh,
        ml.relu,
        ml.square,
        ml.exp,
        lambda x: ml.cumulative_sum(x, axis=0),
    ]
    kinds = [linear, linear, wide, norm, join, product, attention, branch, loop, noise, unary]
    if draw.random() < 0.5:
        kinds += [lookup, lookup, write]
    if draw.random() < 0.25:
        kinds += [images] * 4
    made = [draw.choice(kinds)() for _ in range(draw.randint(3, 20))]
    if not values:
        made.append(linear())
    return made, values


class State:
    """Memory that a step reads and writes besides its weights.

    rows: the rows of a table of `ENTRIES` that a step looks up.
    entries: the elements of `log` that it writes.
    is_read: whether the step reads any of these.
    norms: layers with running values, which the step updates.
    """

    def __init__(self, rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows = ml.asarray(rng.integers(ENTRIES, size=rows))
        self.entries = ml.asarray(rng.integers(ENTRIES, size=ENTRIES))
        self.log = ml.zeros(ENTRIES)
        self.is_read = False
        self.norms: list[Any] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the step updates."""
        return [self.log, *[x for norm in self.norms for x in (norm.mean, norm.var)]]

    def damage(self, draw: random.Random) -> None:
        """Set an index out of range."""
        indices = draw.choice([self.rows, self.entries])
        indices[draw.randrange(indices.shape[0])] = ENTRIES + 2


class Training:
    """A step of random layers, its weights and its optimizer."""

    value_and_grad: Any = staticmethod(ml.value_and_grad)

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        width, rows = draw.choice([8, 24, 40]), draw.choice([4, 13, 16, 30])
        self.state = State(rows, seed)
        self.layers, values = layers(draw, width, self.state)
        self.weights = [ml.asarray(value) for value in values]
        self.optimizer: Any = ml.optim.SGD(self.weights, 0.01, momentum=0.9)
        if draw.random() < 0.5:
            self.optimizer = ml.optim.AdamW(self.weights, 0.001)
        self.x = ml.asarray(np.random.default_rng(seed).normal(size=(rows, width)), dtype="f32")

    def step(self, x: Tensor) -> Tensor:
        def loss(weights: list[Tensor]) -> Tensor:
            xs = [x]
            for layer in self.layers:
                xs.append(layer(xs, weights))
            return ml.mean(ml.square(ml.tanh(xs[-1])))

        value, gradients = self.value_and_grad(loss)(self.weights)
        self.optimizer.update(gradients)
        return value


def bits(seed: int, run: Callable[[Training], list[Tensor]]) -> list[bytes]:
    """Return the bytes of results and weights of a step that `run` calls."""
    ml.random.seed(seed)
    training = Training(seed)
    results = run(training)
    return [x.numpy().tobytes() for x in (*results, *training.weights, *training.state.tensors)]


def bits_of_failure(seed: int, memory: int | None) -> list[bytes]:
    """Return the bytes of weights and log, and the error, after a call with a wrong index."""
    error = b"none"

    def run(training: Training) -> list[Tensor]:
        nonlocal error
        step = ml.capture(training.step, memory=memory)
        step(training.x)
        training.state.damage(random.Random(f"index of {seed}"))
        try:
            step(training.x)
        except PositionError as raised:
            error = str(raised).encode()
        return []

    found = bits(seed, run)
    return [*found, error]


@contextmanager
def guarded() -> Iterator[list[str]]:
    """Lay scratch memory between two fields in the block. The list gets what was written there."""
    written: list[str] = []
    checks: list[Callable[[], None]] = []
    reserve = Scratch.reserve

    def guarding(self: Scratch, vm: Any, launched: Launch) -> Any:
        owner = launched.owner or launched
        nbytes = owner.planned.plan.nbytes
        if self.storage is None or nbytes > self.nbytes:
            self.release(vm)
            self.storage, self.nbytes = vm.alloc_storage(nbytes + 2 * FIELD), nbytes
            type = ml.TensorType(u8, (FIELD,))
            fields = [vm.tensor_from_storage(self.storage, type, at) for at in (0, FIELD + nbytes)]
            for each in fields:
                vm.write(each, np.full(FIELD, _PATTERN, np.uint8))

            def check(storage: Any = self.storage) -> None:
                for name, each in zip(("before", "behind"), fields, strict=True):
                    if storage == self.storage and (vm.read(each) != _PATTERN).any():
                        written.append(f"bytes {name} the scratch memory were written")

            checks.append(check)
        if owner.storage != self.storage:
            owner.temporaries = tuple(
                vm.tensor_from_storage(self.storage, each.type, FIELD + each.place)
                for each in owner.planned.arguments
                if each.role == "scratch"
            )
            owner.storage = self.storage
        return owner.temporaries

    with patch.object(launch.Scratch, "reserve", guarding):
        yield written
        for check in checks:
            check()
    assert reserve is Scratch.reserve


def attempt(seed: int) -> str:
    """Try a program. Return its outcome; raise `Wrong` for what may not be."""
    draw = random.Random(f"budget of {seed}")
    expected = bits(seed, lambda t: [t.step(t.x), t.step(t.x)])
    training = Training(seed)
    measured = ml.measure(training.step, training.x)
    points = measured.curve()
    for before, after in itertools.pairwise(points):
        if not (before.nbytes or 0) > (after.nbytes or 0) or before.seconds > after.seconds:
            raise Wrong(f"the curve is not monotonic: {before}, {after}")
    whole = measured.plan.nbytes + measured.plan.hoisted_nbytes
    smallest = points[-1].nbytes or 0
    budget = int(draw.uniform(0.9 * smallest, whole)) + 1
    if draw.random() < 0.5:
        budget = draw.choice(points).nbytes or 1
    with guarded() as written:

        def run(training: Training) -> list[Tensor]:
            step = ml.capture(training.step, memory=budget)
            results = [step(training.x), step(training.x)]
            if step.plan.nbytes + step.plan.hoisted_nbytes > budget:
                raise Wrong(f"a plan of {step.plan} for a budget of {budget:,} bytes")
            return results

        try:
            got = bits(seed, run)
        except BudgetError as error:
            if smallest <= budget:
                raise Wrong(f"{points[-1]} fits, and it was refused: {error}") from None
            return "refused"
    if written:
        raise Wrong("; ".join(written))
    if got != expected:
        wrong = [i for i, (x, y) in enumerate(zip(got, expected, strict=True)) if x != y]
        raise Wrong(f"budget {budget:,} of {whole:,}: results {wrong} have other bits than eagerly")
    if not training.state.is_read:
        return "the same bits"
    expected, got = bits_of_failure(seed, None), bits_of_failure(seed, budget)
    if got != expected:
        raise Wrong(f"budget {budget:,} of {whole:,}: {got[-1]!r} instead of {expected[-1]!r}")
    return "the same bits" if got[-1] == b"none" else "the same bits, and the same error"


def fuzz(programs: int, seed: int, first: int = 0) -> tuple[Outcomes, str | None]:
    """Try programs from a number on: return their outcomes, and what was wrong, if anything."""
    return outcomes_of(range(first, first + programs), lambda i: attempt(1_000_003 * seed + i))
