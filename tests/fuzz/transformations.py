"""Random functions under mixed transformations, beside JAX, or lane by lane and beside differences.

    python -m tests.fuzz transformations --programs 1000 --seed 0

A program is one of `functions`. Over it goes a stack of `grad`, `vjp`, `jvp`, `linearize`,
`jacfwd`, `jacrev`, products with Hessians, functions with rules of their own, `vmap` along any axes
and `capture` (`jit`). A program with a `while_loop` has those that go forward. What it makes is the
same to the bit where it is captured; with `--autocast` only that is looked at, in bf16. Where JAX
is installed, what it makes of the program is expected. Without it, or with `--slopes`, lanes are
computed one by one and put together, and one derivative more is compared with finite differences. A
program that differs is printed with the number that makes it again, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.types import Array
from tests.brief import Fn
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.fuzz.functions import HERE, Library, Program, arguments, jax_library, leaves

FORWARD = ("jvp", "linearize", "jacfwd", "custom_jvp", "vmap", "vmap", "jit")
BACK = ("grad", "vjp", "jacrev", "hvp", "custom_vjp")
LARGE = ("jacfwd", "jacrev")


def stack_of(program: Program) -> list[str]:
    """Transformations from the inside out. One at most makes results much larger."""
    rng = np.random.default_rng(program.number + 3 * 10**6)
    kinds = FORWARD + BACK if program.differentiable else FORWARD
    levels: list[str] = []
    while len(levels) < int(rng.integers(1, 5)):
        kind = kinds[int(rng.integers(len(kinds)))]
        if kind == "custom_vjp" or "custom_vjp" not in levels or kind in ("grad", "vmap", "jit"):
            is_large = kind in LARGE and any(each in LARGE for each in levels)
            if not is_large and not ("custom_vjp" in levels and kind == "custom_vjp"):
                levels.append(kind)
    if program.differentiable and not {*LARGE, "custom_vjp"} & {*levels}:
        levels += [["grad", "jacrev", "vmap"], []][int(rng.integers(8) > 0)]
    stack: list[str] = []
    for kind in levels:
        if kind in (*BACK, "custom_jvp") and stack[-1:] == ["jit"]:
            stack.pop()  # a captured function has no gradient: what takes it is captured
        if kind != "jit" or stack[-1:] != ["jit"]:
            stack.append(kind)
    return stack


def transformed(lib: Library, module: Any, program: Program, levels: list[str]) -> Fn:
    """The program under its transformations, written with a library and its module."""

    def fn(*args: Any) -> Any:
        return program.run(lib, args)

    for number, kind in enumerate(levels):
        rng = np.random.default_rng((program.number, number))
        fn = _vmap(lib, module, fn, rng) if kind == "vmap" else _LEVELS[kind](lib, module, fn)
    return fn


def _total(lib: Library, fn: Fn) -> Fn:
    """A scalar of all results."""

    def total(*args: Any) -> Any:
        result = fn(*args)
        parts = result if isinstance(result, (tuple, list)) else [result]
        return sum([lib.sum(lib.sin(y)) for y in parts[1:]], lib.sum(lib.sin(parts[0])))

    return total


def _tangents(lib: Library, args: Any) -> tuple[Any, ...]:
    return tuple([lib.tanh(x) + 0.3 for x in args])


def _numbers(args: Any) -> tuple[int, ...]:
    return tuple(range(len(args)))


def _jvp(lib: Library, module: Any, fn: Fn) -> Fn:
    def moved(*args: Any) -> Any:
        value, tangent = module.jvp(fn, args, _tangents(lib, args))
        return value, tangent

    return lambda *args: _flat(moved(*args))


def _linearize(lib: Library, module: Any, fn: Fn) -> Fn:
    def moved(*args: Any) -> Any:
        value, forward = module.linearize(fn, *args)
        return value, forward(*_tangents(lib, args)), forward(*args)

    return lambda *args: _flat(moved(*args))


def _vjp(lib: Library, module: Any, fn: Fn) -> Fn:
    def pulled(*args: Any) -> Any:
        value, pull = module.vjp(fn, *args)
        single = not isinstance(value, (tuple, list))
        gs = [lib.sin(y) + 0.5 for y in ([value] if single else value)]
        return pull(gs[0] if single else tuple(gs))

    return lambda *args: _flat(pulled(*args))


def _grad(lib: Library, module: Any, fn: Fn) -> Fn:
    return lambda *args: _flat(module.grad(_total(lib, fn), _numbers(args))(*args))


def _hvp(lib: Library, module: Any, fn: Fn) -> Fn:
    def product(*args: Any) -> Any:
        gradient = module.grad(_total(lib, fn), _numbers(args))
        return module.jvp(gradient, args, _tangents(lib, args))[1]

    return lambda *args: _flat(product(*args))


def _jacobian(name: str) -> Callable[[Library, Any, Fn], Fn]:
    def level(lib: Library, module: Any, fn: Fn) -> Fn:
        return lambda *args: _flat(getattr(module, name)(fn, _numbers(args))(*args))

    return level


def _custom_jvp(lib: Library, module: Any, fn: Fn) -> Fn:
    custom = module.custom_jvp(fn)

    def rule(primals: Any, tangents: Any) -> Any:
        value, (_, tangent) = custom(*primals), module.jvp(fn, primals, tangents)
        single = not isinstance(value, (tuple, list))
        return value, tangent * 2.0 if single else tuple([t * 2.0 for t in tangent])

    custom.defjvp(rule)
    return custom


def _custom_vjp(lib: Library, module: Any, fn: Fn) -> Fn:
    custom = module.custom_vjp(fn)

    def back(args: Any, g: Any) -> Any:
        return tuple([x * 3.0 for x in module.vjp(fn, *args)[1](g)])

    custom.defvjp(lambda *args: (custom(*args), args), back)
    return custom


def _flat(results: Any) -> tuple[Any, ...]:
    if not isinstance(results, (tuple, list)):
        return (results,)
    return tuple([each for part in results for each in _flat(part)])


def _vmap(lib: Library, module: Any, fn: Fn, rng: np.random.Generator) -> Fn:
    """One lane or two, along an axis of some of the arguments: the first, and half the last one."""
    batched, places = rng.random(9) < 0.7, rng.integers(9, size=9).tolist()
    lanes, out, first = int(rng.integers(1, 3)), int(rng.integers(2)) * -1, int(rng.integers(9))

    def stacked(x: Any, axis: int) -> Any:
        row = x[(slice(None),) * axis + (None,)]
        return lib.concat([row, row * 0.5][:lanes], axis)

    def combined(*args: Any) -> Any:
        axes: list[int | None] = [None] * len(args)
        operands = [*args]
        for i, x in enumerate(args):
            if batched[i] or i == first % len(args):
                axis = places[i] % (x.ndim + 1)
                operands[i], axes[i] = stacked(x, axis), axis - places[i] % 2 * (x.ndim + 1)
        results = _flat(module.vmap(fn, in_axes=tuple(axes), out_axes=out)(*operands))
        ends = [(0, -1), ((..., 0), (..., -1))][-out]
        return tuple([y[ends[0]] + y[ends[1]] * 0.5 for y in results])

    return combined


def lane_by_lane(fn: Fn, in_axes: Any, out_axes: Any) -> Fn:
    """Return the reference of `vmap`: the function called lane by lane."""

    def batched(*args: Any) -> Any:
        pairs = list(zip(args, in_axes, strict=True))
        n = next(x.shape[axis] for x, axis in pairs if axis is not None)
        rows = [
            _flat(fn(*[x if axis is None else ml.moveaxis(x, axis, 0)[i] for x, axis in pairs]))
            for i in range(n)
        ]
        return tuple([ml.stack(column, axis=out_axes) for column in zip(*rows, strict=True)])

    return batched


ONE_BY_ONE = SimpleNamespace(
    **{name: getattr(ml, name) for name in dir(ml)} | {"vmap": lane_by_lane}
)
EAGER = SimpleNamespace(**vars(HERE) | {"jit": lambda fn: fn})


_LEVELS: dict[str, Callable[[Library, Any, Fn], Fn]] = {
    "jvp": _jvp, "linearize": _linearize, "vjp": _vjp, "grad": _grad, "hvp": _hvp,
    "jacfwd": _jacobian("jacfwd"), "jacrev": _jacobian("jacrev"), "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp, "jit": lambda lib, module, fn: lib.jit(fn),
}  # fmt: skip


def with_specials(program: Program, args: list[Array]) -> list[Array]:
    """The arguments, with nan, infinities and zeros of both signs among them."""
    rng = np.random.default_rng(program.number + 2 * 10**6)
    values = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    return [np.where(rng.random(x.shape) < 0.3, rng.choice(values, x.shape), x) for x in args]


IN_F32 = SimpleNamespace(**vars(HERE))
IN_F32.asarray = lambda x: ml.asarray(x, dtype=ml.float32)
IN_F32.matmul = lambda x, y: ml.astype(ml.matmul(x, y), ml.float32)
IN_F32.computed = lambda fn, args: leaves(fn(*map(IN_F32.asarray, args)))


def differs(
    program: Program,
    other: Library | None,
    module: Any,
    *,
    specials: bool = False,
    autocast: bool = False,
) -> str | None:
    """Return a difference between the results of two libraries, or of captured and eager code, in
    words."""
    args, levels = arguments(program), stack_of(program)
    here = IN_F32 if autocast else HERE
    fn = transformed(here, ml, program, levels)
    fn = ml.autocast("bfloat16")(fn) if autocast else fn
    step = ml.capture(fn)
    for values in ([with_specials(program, args)] if specials else []) + [args]:
        results = here.computed(fn, values)
        captured = here.computed(step, values)
        for ours, theirs in zip(results, captured, strict=True):
            if not _is_same(ours, theirs, levels):
                operands = [x.tolist() for x in values]
                return f"captured: {theirs.tolist()}\nnot {ours.tolist()}\nof {operands}"
    if autocast:
        return None
    if other is not None:
        return _differs_from(other, module, program, fn, results)
    lanes = _differs_from(EAGER, ONE_BY_ONE, program, fn, results) if "vmap" in levels else None
    return lanes if lanes or any("custom" in kind for kind in levels) else _slope_differs(fn, args)


def _differs_from(
    other: Library, module: Any, program: Program, fn: Fn, results: list[Array]
) -> str | None:
    """Return how the results differ from those of another library and its module."""
    args = arguments(program)
    expected = other.computed(transformed(other, module, program, stack_of(program)), args)
    for i, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        if ours.shape != theirs.shape:
            return f"shape {ours.shape}, not {theirs.shape}"
        scale = max(1.0, float(np.max(np.abs(theirs), initial=0.0)))
        if np.allclose(ours, theirs, rtol=1e-7, atol=1e-9 * scale, equal_nan=True):
            continue
        near = [HERE.computed(fn, [x * (1 + by) for x in args])[i] for by in (-1e-15, 1e-15)]
        most = 10 * np.ptp([*near, ours], axis=0)  # last bits of the arguments decide so much
        if not np.all(np.abs(ours - theirs) <= most):
            return f"{ours.tolist()}\nnot {theirs.tolist()}"
    return None


def _is_same(x: Array, y: Array, levels: list[str]) -> bool:
    """Return whether eager and captured results have the same bits. Second derivatives of loops may
    differ in the last one (docs/determinism.md)."""
    if np.array_equal(x, y, equal_nan=True):
        return True
    is_second = sum(kind not in ("vmap", "jit") for kind in levels) > 1
    scale = max(1.0, float(np.max(np.abs(x), initial=0.0)))
    return is_second and np.allclose(x, y, rtol=1e-14, atol=1e-14 * scale, equal_nan=True)


def _slope_differs(fn: Fn, args: list[Array]) -> str | None:
    """Compare the function's derivative along a direction with its differences over a long and a
    short step; return how they disagree. A function has kinks, and may bend."""
    v = [np.cos(x) for x in args]
    _, jvps = ml.jvp(lambda *xs: _flat(fn(*xs)), [*map(ml.asarray, args)], [*map(ml.asarray, v)])
    wrong = None
    for step in (1e-4, 1e-6):
        after = HERE.computed(fn, [x + step * t for x, t in zip(args, v, strict=True)])
        behind = HERE.computed(fn, [x - step * t for x, t in zip(args, v, strict=True)])
        slopes = [(y - x) / (2 * step) for x, y in zip(behind, after, strict=True)]
        pairs = [*zip(map(np.asarray, jvps), slopes, strict=True)]
        scale = max([1.0, *[float(np.max(np.abs(y), initial=0.0)) for y in (*slopes, *after)]])
        if all(np.allclose(x, y, rtol=1e-3, atol=1e-4 * scale, equal_nan=True) for x, y in pairs):
            return None
        wrong = wrong or f"{[x.tolist() for x, _ in pairs]}\nnot {[y.tolist() for _, y in pairs]}"
    return wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(memory=0)
    parser.add_argument("--special", action="store_true", help="nan, infinities, zeros, captured")
    parser.add_argument(
        "--slopes", action="store_true", help="lanes and differences, also where JAX is"
    )
    parser.add_argument("--autocast", action="store_true", help="in bf16, captured and eagerly")


def fuzz(
    programs: int,
    seed: int,
    first: int = 0,
    *,
    special: bool = False,
    slopes: bool = False,
    autocast: bool = False,
) -> tuple[Outcomes, str | None]:
    """Try the given number of programs; return how many were right, and those that differ."""
    jax = None if slopes or autocast else jax_library()
    module = None if jax is None else importlib.import_module("jax")
    there = "JAX" if jax else "nothing else" if autocast else "lanes and differences"

    def attempt(number: int) -> str:
        program = Program(seed + number)
        difference = differs(program, jax, module, specials=special, autocast=autocast)
        if difference is not None:
            levels = ", ".join(stack_of(program))
            raise Wrong(f"{' '.join(program.text)}; {levels}\n{difference}")
        return f"captured, and beside {there}"

    return outcomes_of(range(first, first + programs), attempt)
