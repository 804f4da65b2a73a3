"""`ml.measure`: the memory that a function needs, computed without running it.

In: a function, and types instead of tensors. Out: the bytes of an eager call, the plan of the
captured function, and the bytes of alternative programs. No memory is allocated on the VM.

Callers: users, and `python -m mlvm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mlvm.arena.arena import Arena
from mlvm.arena.planner import Plan
from mlvm.core.errors import (
    ArenaError,
    ArgumentError,
    BudgetError,
    MlvmError,
    OutOfMemoryError,
    brief,
)
from mlvm.core.sizes import parse_size
from mlvm.core.types import NamedType, TensorType
from mlvm.eager.capture.call import as_tensors
from mlvm.eager.capture.capture import Captured, require_bools
from mlvm.eager.capture.dynamic_axes import MAX_LENGTH
from mlvm.eager.capture.guards.signature import Signatures
from mlvm.eager.capture.opened import OpenTrace
from mlvm.eager.capture.trace import Output, always, trace, trace_once
from mlvm.eager.recording import recorder
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.refusing import named
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import replace
from mlvm.machines.files import require_suffix, write_file
from mlvm.machines.old_keywords import old_keywords
from mlvm.show.picture import front
from mlvm.show.report import plan_table
from mlvm.step.compile import Planned, curve_of
from mlvm.step.flow import Flow
from mlvm.step.fusion import policy_of


class CurvePoint(NamedTuple):
    """Memory and estimated time of a program of a captured function.

    `nbytes` is the size of the plan with hoisted values in bytes, and `seconds` the estimated time.
    If no program fits a requested budget, `nbytes` is None and the time is infinite.

        >>> ml.measure(ml.tanh, ml.TensorType("f32", [1000])).curve()[0].nbytes
        0
    """

    nbytes: int | None
    seconds: float


class Measured:
    """Memory requirement of a function call.

    `arena` is the high-water mark of an arena in which the function runs eagerly: the largest total
    size of tensors that are alive simultaneously. It is exact except in `cond`, `scan` and other
    control flow, where one iteration and all branches are counted. `capacity` is sufficient for an
    arena with a fixed capacity; it includes the gaps between tensors. `plan` is the plan of the
    captured function. `curve` returns the memory and time of alternative programs.

        >>> measured = ml.measure(lambda x: ml.sum(ml.sort(x)), ml.TensorType("f32", [1000]))
        >>> measured
        eagerly, in an arena: 4,096 bytes
        captured: 4,032 bytes, lower bound 4,032 (1.00), unfused 4,032, by size
        >>> measured.arena, measured.plan.nbytes
        (4096, 4032)

    If types contain names of sizes, as in `TensorType("f32", ("batch", 784))`, `at` measures at
    given sizes, and `largest` finds the largest size. The other methods then need sizes, and raise
    `ArgumentError` without them.

        >>> def loss(x): return ml.grad(lambda x: ml.sum(ml.tanh(ml.tanh(x))))(x)
        >>> sizes = ml.measure(loss, memory="64 KiB", x=ml.TensorType("f32", ("batch", 100)))
        >>> n = sizes.largest("batch")
        >>> sizes.at(batch=n).plan.nbytes <= 64 << 10
        True

    Invalid calls:
        ml.measure(ml.tanh, ml.TensorType("f32", ("n",))).plan  # ArgumentError
    """

    def __init__(
        self,
        measured: Callable[[Mapping[str, int]], _Facts],
        names: set[str],
        budget: int | None = None,
        budgets: Sequence[int] = (),
    ) -> None:
        self._measured = measured
        self._names = sorted(names)
        self._budget, self._budgets = budget, budgets
        self._cached_facts = None if names else measured({})

    @property
    def _facts(self) -> _Facts:
        if self._cached_facts is None:
            sizes = ", ".join(f"{name}=32" for name in self._names)
            raise ArgumentError(
                f"measure: expected sizes for {', '.join(self._names)}; write .at({sizes})"
            )
        return self._cached_facts

    @property
    def arena(self) -> int:
        """The high-water mark in bytes of an arena in which the call runs eagerly."""
        return self._facts.arena

    @property
    def capacity(self) -> int:
        """The capacity in bytes that an arena needs to run the call eagerly."""
        return self._facts.capacity

    @property
    def plan(self) -> Plan:
        """The plan of the captured function."""
        return self._facts.plan

    def curve(self) -> list[CurvePoint]:
        """Return bytes against estimated time for alternative programs of the captured function.

        Each program needs less memory and more time than the previous one. With the `budgets` of
        `measure`, return the fastest program for each budget, in the given order. With
        `dynamic_axes` the bytes are those at the bounds; the times are those at the sizes of the
        arguments.

            >>> def step(x): return ml.grad(lambda x: ml.sum(ml.tanh(ml.tanh(ml.tanh(x)))))(x)
            >>> points = ml.measure(step, ml.TensorType("f32", [1000])).curve()
            >>> points == sorted(points, reverse=True)
            True
        """
        points = [CurvePoint(*each) for each in self._facts.curve()]
        none = CurvePoint(None, float("inf"))

        def fastest(budget: int) -> CurvePoint:  # the points are sorted by time
            return next((x for x in points if x.nbytes is not None and x.nbytes <= budget), none)

        return [fastest(budget) for budget in self._budgets] or points

    def plot(self, path: str | Path) -> None:
        """Draw the curve as an SVG picture, with the plan marked.

        Raises `ArgumentError` for a file name that does not end in .svg, and `OSError`.

        Invalid calls:
            ml.measure(ml.tanh, v).plot("curve.png")  # ArgumentError
        """
        require_suffix(path, ".svg", "plot")
        write_file(path, front(self._facts.curve(), self.plan.nbytes + self.plan.hoisted_nbytes))

    def at(self, /, **sizes: int) -> Measured:
        """Measure at these sizes, given by name.

        Raises the errors of `measure`, and `ArgumentError` for unknown names and invalid sizes.

        Invalid calls:
            ml.measure(ml.tanh, ml.TensorType("f32", ("n",))).at()  # ArgumentError
            ml.measure(ml.tanh, ml.TensorType("f32", ("n",))).at(n="many")  # ArgumentError
        """
        names = ", ".join(self._names) or "none"
        for name in self._names:
            if name not in sizes:
                raise ArgumentError(f"at: expected a size for {name!r}, got {sizes}")
        for name, n in sizes.items():
            if name not in self._names or type(n) is not int or n < 0:
                raise ArgumentError(
                    f"at: expected sizes of {names} as ints of 0 or more, got {name}={n!r}"
                )
        try:
            return Measured(lambda _: self._measured(sizes), set(), self._budget, self._budgets)
        except MlvmError as error:
            named("measure", error)
            raise

    def largest(self, name: str, /, **others: int) -> int:
        """Return the largest size of that name at which a captured function fits `memory=`.

        `others` are the other sizes. The search plans the function at each candidate size, without
        running it. It doubles and then halves the size. For some functions, a plan is a few percent
        smaller than the plan for a smaller size. Therefore the search then tries up to 16 sizes
        that are up to an eighth larger. It stops at 2**40 if the plan does not grow with the size.

        Raises `BudgetError` if size 1 does not fit, and `ArgumentError` without `memory=` and for a
        name that no type contains.

        Invalid calls:
            ml.measure(ml.tanh, ml.TensorType("f32", ("n",))).largest("m")  # ArgumentError
            ml.measure(ml.tanh, ml.TensorType("f32", ("n",))).largest("n")  # ArgumentError
            ml.measure(ml.cov, ml.TensorType("f32", ("n",)), memory=1).largest("n")  # BudgetError
        """
        if name not in self._names:
            names = ", ".join(self._names)
            expected = f"one of the names {names}" if names else "a type with names of sizes"
            raise ArgumentError(
                f"largest: expected {expected}, got {name!r}; a type has names as in "
                f'ml.TensorType("f32", ("batch", 784))'
            )
        if self._budget is None:
            raise ArgumentError("largest: expected a budget, got none; write measure(memory=)")
        self.at(**{**others, name: 1})
        fits, fails = 1, 2
        while fails <= MAX_LENGTH and self._fits({**others, name: fails}):
            fits, fails = fails, 2 * fails
        if fails > MAX_LENGTH:
            return fits
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._fits({**others, name: middle}):
                fits = middle
            else:
                fails = middle
        larger = range(fails + 1, fails + 2 + fits // 8, max(1, fits // 128))
        return next((n for n in reversed(larger) if self._fits({**others, name: n})), fits)

    def _fits(self, sizes: Mapping[str, int]) -> bool:
        try:
            self._measured(sizes)
        except (BudgetError, OutOfMemoryError, ArenaError):  # ArenaError: more than 2**62 bytes
            return False
        return True

    def __repr__(self) -> str:
        if self._cached_facts is None:
            return f"<measure at sizes of {', '.join(self._names)}>"
        return f"eagerly, in an arena: {self.arena:,} bytes\ncaptured: {self.plan}"

    def _repr_html_(self) -> str:
        return plan_table(self.plan, (f"{self.arena:,}", "eagerly, in an arena"))


class _Facts(NamedTuple):
    """Measurements of a call at given sizes."""

    arena: int
    capacity: int
    plan: Plan
    curve: Callable[[], list[tuple[int, float]]]


@hinted
@old_keywords("measure")
def measure(
    fn: Callable[..., Any],
    *args: Any,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    dynamic_axes: Mapping[str, Any] | None = None,
    max_sizes: Mapping[str, int] | None = None,
    memory: int | str | None = None,
    budgets: Sequence[int | str] = (),
    **kwargs: Any,
) -> Measured:
    """Measure the memory that a call needs, without running it or allocating anything.

    The result does not include the memory of the arguments and the state that the function reads.

    Pass the arguments of the function. Each tensor may be replaced by a `TensorType`. A type may
    contain names of sizes: `TensorType("f32", ("batch", 784))`. Then `.at(batch=32)` of the result
    measures at a size, and `.largest("batch")` returns the largest size for which the plan fits
    `memory`.

    Arguments:

    - `dynamic_axes`, `max_sizes`: dynamic axes as in `capture`. The plan is then computed for the
      bounds, and `plan.used` is the number of bytes in use at the sizes of the arguments.

    - `memory`: a budget for the plan, as in `capture(memory=)`.

    - `budgets`: sizes such as `"64 MiB"`. `curve()` of the result then contains the fastest program
      for each.

    - `fuse`, `recompute`, `hoist`: as in `capture`. For a captured function, the options of
      `capture` apply.

    Raises the errors of `capture`, `ArgumentError` for an option that is not a bool and an invalid
    size, and `CaptureError` for a type given as text.

        >>> ml.measure(lambda x: ml.sum(ml.sort(x)), ml.zeros(1000)).plan.nbytes
        4032
        >>> axes = {"x": ("n",)}
        >>> ml.measure(ml.tanh, ml.zeros(10), dynamic_axes=axes, max_sizes={"n": 1000}).arena
        64
        >>> ml.measure(ml.tanh, ml.TensorType("f32", ("n", 4))).at(n=8).arena
        128

    Invalid calls:
        ml.measure(ml.sum, v, fuse="no")  # ArgumentError
        ml.measure(ml.sum, v, budgets=["much"])  # ArgumentError
        ml.measure(ml.sum, v, budgets=b"64 MiB")  # ArgumentError
        ml.measure(lambda x: float(x), ml.TensorType("f32"))  # CaptureError
    """
    require_bools("measure", fuse=fuse, recompute=recompute, hoist=hoist)
    budget = None if memory is None else parse_size(memory, "measure(memory=)")
    if isinstance(budgets, (str, bytes)) or not isinstance(budgets, Sequence):
        raise ArgumentError(f"measure: expected budgets as a list of sizes, got {brief(budgets)}")
    limits = tuple([parse_size(each, "measure(budgets=)") for each in budgets])
    if isinstance(fn, Captured):
        fuse, recompute, hoist = fuse and fn.fuse, recompute and fn.recompute, hoist and fn.hoist
        budget = fn.budget if budget is None else budget
    recorder.refuse_captured("measure a function")
    captured = Captured(
        fn,
        fuse=fuse,
        recompute=recompute,
        hoist=hoist,
        dynamic_axes=dynamic_axes,
        max_sizes=max_sizes,
        memory=budget,
    )
    names: set[str] = set()
    replace(lambda type: names.update(type.names), (args, kwargs), NamedType)

    def at(sizes: Mapping[str, int]) -> _Facts:
        own = replace(lambda type: type.at(sizes), (args, kwargs), NamedType)
        return _facts(captured, *own)

    return Measured(at, names, budget, limits)


def _facts(
    captured: Captured[..., Any],
    args: Any,
    kwargs: Any,
    points: list[tuple[int, float]] | None = None,
) -> _Facts:
    """Measure a call.

    If `points` is given and the call has `dynamic_axes`, add the call's curve to `points`."""
    original, fn, spec, arena = (args, kwargs), captured.fn, captured.spec, current_arena()
    with closing(Arena(arena.vm, "measured")) as own:
        if spec.names:  # axes of tensors become dynamic
            args, kwargs = replace(
                lambda type: Output(type, None).alloc(own), (args, kwargs), TensorType
            )
        with own.allocating():
            args, kwargs = as_tensors(Signatures(fn), arena.vm, args, kwargs)
        call, signature = trace_once(fn, args, kwargs)
        compiler, hoist = captured.compiler(call)
        compiler = partial(compiler, hoist=hoist)
        eager = call.record.high_water, sum(call.record.storages.used.values())
        curve = partial(curve_of, policy=policy_of(arena.vm), hoist=hoist)
        lengths = spec.axes(signature, args, kwargs)
        if not lengths:
            return _Facts(*eager, compiler(call.flow).plan, partial(curve, call.flow))
        call = trace(fn, args, kwargs, arena, signature, (), lengths, always)

        def compiled(flow: Flow) -> Planned:
            # the sizes of the flow have values only during this call
            if points is not None:
                points[:] = curve(flow)
            return compiler(flow)

        plan = OpenTrace(call, lengths, signature).measured(signature, compiled)
        if plan is None:
            return _Facts(*eager, compiler(call.flow).plan, partial(curve, call.flow))
        return _Facts(*eager, plan, lambda: _points(captured, *original))


def _points(captured: Captured[..., Any], args: Any, kwargs: Any) -> list[tuple[int, float]]:
    """Return the curve of a function at the bounds of the sizes."""
    points: list[tuple[int, float]] = []
    _facts(captured, args, kwargs, points)
    return points
