"""Results that a process computes with its instruction set: op by op, and step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, product
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.core.op import OPS
from mlvm.core.ops import half
from mlvm.core.types import Array, DType, TensorType
from mlvm.machines.digest import digest
from mlvm.machines.native import extension
from tests.cases import CASES
from tests.fuzz.language import world
from tests.invariance.machines import Native
from tests.invariance.samples import samples
from tests.invariance.walk import DTYPES, Sample

ELEMENTS: Final = 20_011
"""Values of an elementwise op beyond its cases."""
_FLOATS: Final = ("f32", "f64", "f16", "bf16")


class Value(NamedTuple):
    """A result: the case or step it belongs to, what computed it, and its digest."""

    of: str
    by: str
    digest: str


# --- ops ---


def calls(only: str = "", every: int = 1) -> Iterator[Sample]:
    """Yield calls of ops that have native kernels, with the floats of each in every dtype.

    only: the ops whose names contain this text.
    every: keep one of so many.
    """
    from mlvm.machines.native import kernels as _fill_the_table  # noqa: F401
    from mlvm.machines.native.planner import PLANNERS

    assert PLANNERS
    for number, sample in enumerate(chain(_samples(), _wide())):
        if number % every == 0 and only in sample.op and sample.op in PLANNERS:
            yield sample


def _samples() -> Iterator[Sample]:
    for sample in samples():
        yield sample
        yield from filter(None, map(sample.in_dtype, DTYPES))
    for op, cases in CASES.items():
        if OPS[op].dynamic:
            yield from [Sample(op, case.inputs, case.attributes) for case in cases]


def _wide() -> Iterator[Sample]:
    """Yield elementwise ops of values from the whole range of a dtype, and of ordinary values."""
    from mlvm.machines.native import _native

    for name, op in OPS.items():
        if f"{name}_f32" not in _native.rows():
            continue
        for dtype, scale in product(_FLOATS, (0, 1, 6)):
            rng = np.random.default_rng([len(name), scale])
            inputs = [_values(rng, dtype, scale) for _ in op.inputs]
            sample = Sample(name, tuple(inputs), {})
            try:
                sample.type and OPS[name].bind({})
            except MlvmError:
                break
            if sample.type is not None:
                yield sample
    for source, target in product(DType.all, DType.all):
        x = _values(np.random.default_rng(len(source)), source, 0)
        yield Sample("astype", (x,), {"dtype": target})


def _values(rng: np.random.Generator, dtype: str, scale: int) -> Array:
    """Draw values: of any bits for a scale of 0, else from a normal distribution."""
    type = TensorType(dtype, (ELEMENTS,))
    if dtype == "bool":
        return rng.random(ELEMENTS) < 0.5
    if not scale:
        return np.frombuffer(rng.bytes(type.nbytes), type.dtype.numpy)
    return half.cast(rng.standard_normal(ELEMENTS) * scale, DType.named(dtype))


def of_ops(only: str = "", every: int = 1) -> Iterator[Value]:
    """Yield the result of each call by the native kernels, or the class of its error.

    The digest of the operands is a part of the call's name: numpy may have computed them.
    """
    assert extension.EXTENSION is not None
    machine = Native(extension.EXTENSION.simd(), 1)
    for number, sample in enumerate(calls(only, every)):
        try:
            result = digest(machine.run(sample) if sample.type else _dynamic(sample)).hex()
        except MlvmError as error:
            result = type(error).__name__
        operands = b"".join([digest(np.asarray(x)) for x in sample.inputs])
        drawn = digest(np.frombuffer(operands, np.uint8)).hex()
        yield Value(f"call {number}", f"{sample} of {drawn}", result)


def _dynamic(sample: Sample) -> Array:
    """Compute an op whose result's length depends on values."""
    from tests.machines.native.planners import native

    return native(sample.op, *sample.inputs, **sample.attributes)


# --- steps ---


@cache
def _probe() -> ModuleType:
    """Import the models' steps, which `tests.same_programs` runs in other checkouts, too."""
    sys.modules["world"] = world
    argv, sys.argv = sys.argv, ["", "."]
    try:
        from tests.same_programs import probe
    finally:
        sys.argv = argv
    return probe


def worlds() -> dict[str, Callable[[], world.World]]:
    """Return steps by name: those of models, in several dtypes."""
    return _probe().worlds()


class _Trace:
    """Instrument that lists the ops of launches with the digests of what they wrote."""

    def __init__(self, step: str) -> None:
        self.step, self.values = step, list[Value]()

    def before(self, name: str, params: Sequence[Any], attributes: Any) -> None:
        """Nothing to do."""

    def after(self, name: str, params: Sequence[Any], attributes: Any, results: Any) -> None:
        arrays = [x for x in (*results, *params) if isinstance(x, np.ndarray)]
        types = ", ".join([str(TensorType.of(x)) for x in arrays])
        digests = " ".join([digest(x).hex() for x in arrays])
        self.values.append(Value(self.step, f"{name}({types})", digests))


def of_steps(only: str = "", turns: int | None = None) -> Iterator[Value]:
    """Yield what each step computes, eagerly op by op, then captured; in `turns` only captured."""
    for name, build in worlds().items():
        if only in name:
            if turns is None:
                yield from _run(name, build, None)
            yield from _run(f"{name}, captured", build, {}, turns)
            yield from _run(f"{name}, captured without fusion", build, {"fuse": False}, turns)


def _run(
    name: str,
    build: Callable[[], world.World],
    options: dict[str, Any] | None,
    turns: int | None = None,
) -> Iterator[Value]:
    """Run a step eagerly, or captured with these options."""
    vm = ml.VM("bits")
    weights, results = ml.Arena(vm, "weights"), ml.Arena(vm, "results")
    with weights.allocating():
        ml.random.seed(0)
        built = build()
    step = built.step if options is None else ml.capture(built.step, **options)
    trace = _Trace(name)
    for turn in range(turns or built.steps):
        with results.allocating():
            args = built.arguments(turn)
            if options is not None:
                returned = step(*args)
            else:
                with vm.instrumented(trace):
                    returned = step(*args)
                yield from trace.values
                trace.values.clear()
            yield from _tensors(name, turn, {"result": returned, "state": built.state()})


def _tensors(name: str, turn: int, trees: dict[str, Any]) -> Iterator[Value]:
    for path, x in world.walked("", trees):
        if isinstance(x, ml.Tensor):
            yield Value(name, f"step {turn}, {path}: {x.type}", digest(x.numpy()).hex())


def write(file: Path, values: Iterator[Value]) -> None:
    """Write values, a line each."""
    file.write_text("".join("\t".join(value) + "\n" for value in values), "utf-8")


def read(file: Path) -> list[Value]:
    """Read what `write` has written."""
    return [Value(*line.split("\t")) for line in file.read_text("utf-8").splitlines()]
