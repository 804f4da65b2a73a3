"""Pairs of recordings of 1,000 training steps with one difference, which `diff` must name.

    python -m tests.fuzz differences --programs 400 --seed 0

Each program changes one thing from a random step on: one bit of one operand of one random op, the
learning rate, the order of two batches, or an op, which is replaced by an algebraically equal one.
`diff` must name the first step that differs, and its op and source line, input or constant.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.eager.runs.diff import Difference, diff
from mlvm.eager.runs.execution import Executed, Execution, Ref
from mlvm.eager.runs.replay import Replay, open_run
from mlvm.eager.runs.run import Run
from mlvm.machines.digest import digest
from tests.fuzz.command import Outcomes, Wrong, outcomes_of

PROGRAMS: Final = 400

STEPS: Final = 1000
LIMIT: Final = 60.0  # seconds for one `diff`

Ops = dict[str, Callable[..., Tensor]]

OPS: Final[Ops] = {
    "square": lambda x: x * x,
    "mean": lambda x: ml.mean(x),
    "tanh": lambda x: ml.tanh(x),
    "scaled": lambda x: x / 8.0**0.5,
    "softmax": lambda x: ml.softmax(x, axis=-1),
}
EQUAL_OPS: Final[Ops] = {
    "square": lambda x: ml.exp(2.0 * ml.log(ml.abs(x))),
    "mean": lambda x: ml.sum(ml.sum(x, axis=0)) / x.size,
    "tanh": lambda x: 1.0 - 2.0 / (ml.exp(2.0 * x) + 1.0),
    "scaled": lambda x: x * 8.0**-0.5,
    "softmax": lambda x: ml.exp(x) / ml.sum(ml.exp(x), axis=-1, keepdims=True),
}


def train(
    folder: Path,
    *,
    steps: int = STEPS,
    changed: int = -1,
    rate: float = 0.01,
    swaps: bool = False,
    replaced: str = "",
) -> Run:
    """Record a training that is changed from one step on."""
    ml.random.seed(0)
    model = ml.nn.Linear(8, 8, key=ml.random.key(1))
    optimizer = ml.optim.AdamW(model, learning_rate=0.01)

    def step_with(ops: Ops) -> Any:
        @ml.capture
        def step(x: Tensor, y: Tensor) -> Tensor:
            def loss(model: Any) -> Tensor:
                h = model(x)
                scores = ops["scaled"](h @ x.mT)
                h = ops["softmax"](scores) @ ops["tanh"](h)
                d = h * ml.random.uniform(h.shape) - y
                return ops["mean"](ops["square"](d))

            value, grads = ml.value_and_grad(loss)(model)
            optimizer.update(grads)
            return value

        return step

    rng = np.random.default_rng(0)
    batches = rng.normal(size=(steps + 1, 2, 4, 8)).astype(np.float32)
    before, after = step_with(OPS), step_with(OPS | {replaced: EQUAL_OPS.get(replaced, abs)})
    order = [*range(steps + 1)]
    if swaps:
        order[changed : changed + 2] = order[changed : changed + 2][::-1]
    with ml.runs.record(folder):
        for n in range(steps):
            if n == changed:
                optimizer.learning_rate = rate
            x, y = batches[order[n]]
            step = after if replaced and n >= changed >= 0 else before
            step(ml.asarray(x), ml.asarray(y))
    return open_run(folder)


# --- a machine that flips a bit ----------------------------------------------------------------


class Flipped(Execution):
    """Execution on a machine that flips one bit of one operand while it executes one op."""

    flip = (-1, 0, 0)
    """The position of the op, the number of the operand, and the bit."""

    def step(self) -> Executed | None:
        position, operand, _ = self.flip
        op = self.next_op() if self.position == position else None
        if op is None:
            return super().step()
        content = self._find(op.operands[operand])
        assert content is not None  # it is an operand of the next op
        before = content.array.copy()
        np.copyto(content.array, self._flipped(before))
        try:
            return super().step()
        finally:
            np.copyto(content.array, before)

    def _flipped(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        data = bytearray(array.tobytes())
        data[self.flip[2] // 8] ^= 1 << self.flip[2] % 8
        return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


class FaultyReplay(Replay):
    """Replay on a machine that flips one bit in one step."""

    fault = (-1, (-1, 0, 0))
    """The step, and the flip."""

    def execution(self, number: int) -> Execution:
        step, flip = self.fault
        if number != step:
            return super().execution(number)
        execution = Flipped(self.run.program(self.run.steps[number].table), self.operands(number))
        execution.flip = flip
        return execution


def flipped(run: Run, rng: random.Random) -> tuple[FaultyReplay, Executed]:
    """Return the recording of a machine that flips a bit with an effect, and the op that reads it.

    It is the given recording, in which the digests of one step are different.
    """
    while True:
        number = rng.randrange(len(run.steps))
        clean = Replay(run).execution(number)
        clean.run()
        op = rng.choice([op for op in clean.executed if op.operands and op.results])
        chosen = rng.randrange(len(op.operands))
        if op.operands[chosen].kind == "scratch":
            continue
        bit = rng.randrange(8 * op.operand_types[chosen].nbytes)
        faulty = FaultyReplay(open_run(run.folder))
        faulty.fault = number, (op.position, chosen, bit)
        execution = faulty.execution(number)
        execution.run()
        has_effect = [*map(digest, execution.results())] != [*map(digest, clean.results())]
        if has_effect and _differs(clean, execution, op.results):
            step = faulty.run.steps[number]
            faulty.run.steps[number] = step._replace(results=[0] * len(step.results), after=0)
            return faulty, op


def _differs(a: Execution, b: Execution, refs: tuple[Ref, ...]) -> bool:
    return any(digest(a.value(ref)) != digest(b.value(ref)) for ref in refs)


# --- attempts ----------------------------------------------------------------------------------


def first_difference(a: Run | Replay, b: Run | Replay) -> tuple[Difference, str]:
    """Return what `diff` finds, and the outcome."""
    start = time.monotonic()
    difference = diff(a, b)
    seconds = time.monotonic() - start
    if difference is None:
        raise Wrong("the runs are equal")
    return difference, "named" if seconds < LIMIT else f"named after {LIMIT:g} s or more"


def attempt(folder: Path, clean: Run, seed: int, number: int) -> str:
    """Change one thing and compare; return the outcome. Raises `Wrong`."""
    rng = random.Random(f"{seed} {number}")
    kind = ("flip", "rate", "order", "op")[number % 4]
    if kind == "flip":
        faulty, op = flipped(clean, rng)
        found, outcome = first_difference(clean, faulty)
        places = [(each.op.position, each.line) for each in found.ops if each is not None]
        expected = (faulty.fault[0], "op", [(op.position, op.line)] * 2)
        if (found.step, found.cause, places) != expected:
            raise Wrong(f"{op} of step {faulty.fault[0]} read a flipped bit, not\n{found}")
        return f"a flipped bit: {outcome}"
    changed, steps = rng.randrange(len(clean.steps)), len(clean.steps)
    shutil.rmtree(folder / "changed", ignore_errors=True)
    training = partial(train, folder / "changed", steps=steps, changed=changed)
    if kind == "rate":
        rate = rng.choice([0.02, 0.011, 1e-3])
        found, outcome = first_difference(clean, training(rate=rate))
        numbers = re.findall(r"(?:constant|=) -?([\d.e-]+)$", str(found), re.MULTILINE)
        if found.step != changed or np.float32(rate) not in [*map(np.float32, numbers)]:
            raise Wrong(f"the rate became {rate} at step {changed}, not\n{found}")
        return f"a changed rate: {outcome}"
    if kind == "order":
        found, outcome = first_difference(clean, training(swaps=True))
        if (found.step, found.cause, [*found.names]) != (changed, "input", ["x", "y"]):
            raise Wrong(f"batches {changed} and {changed + 1} were exchanged, not\n{found}")
        return f"an exchanged batch: {outcome}"
    name = rng.choice([*EQUAL_OPS])
    other = training(replaced=name)
    pairs = zip(clean.steps, other.steps, strict=True)
    first = next((x.number for x, y in pairs if (x.after, x.results) != (y.after, y.results)), None)
    if first is None:
        return "an op replaced by an equal one: no bit differs"
    found, outcome = first_difference(clean, other)
    lines = EQUAL_OPS[name].__code__.co_firstlineno, OPS[name].__code__.co_firstlineno
    named = [each.line for each in (*found.ops, *found.programs) if each is not None]
    if found.step != first or not any(x is not None and x.number in lines for x in named):
        raise Wrong(f"{name} was replaced at step {changed}, {first} differs first, not\n{found}")
    return f"an op replaced by an equal one: {outcome}"


def fuzz(programs: int, seed: int, first: int, steps: int = STEPS) -> tuple[Outcomes, str | None]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clean = train(folder / "clean", steps=steps)
        numbers = range(first, first + programs)
        return outcomes_of(numbers, partial(attempt, folder, clean, seed))
