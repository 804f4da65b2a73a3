"""Numerical programs that scientists write, beside numpy, JAX and PyTorch.

The programs are in `bench.science_programs`, `bench.science_ocean` and `bench.science_derivatives`.
They run in f64 and on one thread. numpy and mlvm run one text: writes such as `A[1:-1] = ...` are
updates in place. JAX has no such writes, so its text differs there. No contender is timed before
its results agree with numpy's; numpy's derivatives are central differences, at small sizes. `us` is
the time of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench import science_derivatives as derivatives
from bench import science_ocean as ocean
from bench import science_programs as programs
from bench.harness import Contender, Prepare, Round, Suite, rounds_of
from bench.science_programs import Tools

Array = NDArray[Any]
Shapes = tuple[tuple[int, ...], ...]


class Program(NamedTuple):
    """Program with its sizes: shapes of random operands, turns of the loop, and calls a round.

    `quick`: the shapes of tests. `is_derivative`: numpy cannot compute it, except by differences.
    """

    run: Callable[..., Any]
    shapes: Shapes
    turns: int
    calls: int
    quick: Shapes
    is_derivative: bool = False


def _alike(run: Callable[..., Any], count: int, ndim: int, n: int, turns: int) -> Program:
    return Program(run, ((n,) * ndim,) * count, turns, 3, ((9,) * ndim,) * count)


def _derivative(
    run: Callable[..., Any], shapes: Shapes, quick: Shapes, turns: int = 1, calls: int = 3
) -> Program:
    return Program(run, shapes, turns, calls, quick, True)


def _grid(run: Callable[..., Any], fields: int, *sizes: int) -> Program:
    """Return a program of an ocean model, with `fields` fields and the heights of the levels."""
    small = (7, 8, 6)
    return Program(run, (sizes,) * fields + (sizes[2:],), 1, 3, (small,) * fields + (small[2:],))


def _mixture(n: int, d: int, clusters: int) -> Shapes:
    return (clusters,), (clusters, d), (clusters, d * (d + 1) // 2), (n, d)


def _hand(vertices: int) -> Shapes:
    return (26,), (21, 3, 4), (vertices, 21), (vertices, 3), (vertices, 3)


def _sequence(length: int, layers: int, width: int) -> Shapes:
    return (2 * layers, 4 * width), (3, width), (2 * layers, width), (length, width)


PROGRAMS: Final = {
    "jacobi_2d 150": _alike(programs.jacobi_2d, 2, 2, 150, 50),
    "jacobi_2d 350": _alike(programs.jacobi_2d, 2, 2, 350, 80),
    "heat_3d 25": _alike(programs.heat_3d, 2, 3, 25, 25),
    "heat_3d 40": _alike(programs.heat_3d, 2, 3, 40, 50),
    "fdtd_2d 200": _alike(programs.fdtd_2d, 3, 2, 200, 20),
    "fdtd_2d 400": _alike(programs.fdtd_2d, 3, 2, 400, 60),
    "hdiff 64": Program(programs.hdiff, ((68, 68), (64, 64)), 1, 20, ((12, 13), (8, 9))),
    "hdiff 256": Program(programs.hdiff, ((260, 260), (256, 256)), 1, 5, ((12, 13), (8, 9))),
    "state 4k": Program(programs.equation_of_state, ((4096,),) * 3, 1, 20, ((70,),) * 3),
    "state 64k": Program(programs.equation_of_state, ((65536,),) * 3, 1, 3, ((70,),) * 3),
    "state 1M": Program(programs.equation_of_state, ((1 << 20,),) * 3, 1, 1, ((70,),) * 3),
    "isoneutral mixing 4k": _grid(ocean.isoneutral_mixing, 4, 16, 16, 16),
    "isoneutral mixing 64k": _grid(ocean.isoneutral_mixing, 4, 64, 64, 16),
    "turbulent energy 4k": _grid(ocean.turbulent_kinetic_energy, 9, 16, 16, 16),
    "turbulent energy 64k": _grid(ocean.turbulent_kinetic_energy, 9, 64, 64, 16),
    "cavity_flow 61": _alike(programs.cavity_flow, 3, 2, 61, 25),
    "mandelbrot 250": _alike(programs.mandelbrot, 2, 2, 250, 40),
    "go_fast 200": _alike(programs.go_fast, 1, 2, 200, 1),
    "go_fast 1000": _alike(programs.go_fast, 1, 2, 1000, 1),
    "seidel_2d 40": _alike(programs.seidel_2d, 1, 2, 40, 2),
    "cholesky 100": Program(programs.cholesky, ((100, 100),), 1, 3, ((9, 9),)),
    "vadv 60": Program(
        programs.vadv,
        ((60, 60, 40), (61, 60, 40), (60, 60, 40)),
        1,
        3,
        ((5, 4, 6), (6, 4, 6), (5, 4, 6)),
    ),
    "adi 100": _alike(programs.adi, 4, 2, 100, 10),
    "azimint_hist 400k": Program(
        programs.azimint_hist, ((400_000,), (400_000,)), 1000, 3, ((90,), (90,))
    ),
    "atax 1000": Program(programs.atax, ((1000, 1200), (1200,)), 1, 3, ((9, 8), (8,))),
    "softmax 128": Program(programs.softmax, ((16, 16, 128, 128),), 1, 1, ((2, 3, 9, 8),)),
    "mlp 1000": Program(
        programs.mlp,
        ((8, 3000), (3000, 1000), (1000, 1000), (1000, 200)),
        1,
        3,
        ((3, 9), (9, 8), (8, 8), (8, 5)),
    ),
    "lorenz": Program(programs.lorenz, ((), (), ()), 1000, 10, ((), (), ())),
    "gmm 1000": _derivative(derivatives.gmm, _mixture(1000, 10, 25), _mixture(7, 3, 4)),
    "hand 500": _derivative(derivatives.hand, _hand(500), _hand(9)),
    "lstm 256": _derivative(derivatives.lstm, _sequence(256, 2, 14), _sequence(6, 2, 5)),
    "kmeans 10k": _derivative(derivatives.kmeans, ((10_000, 8), (16, 8)), ((20, 3), (4, 3))),
    "lse 1M": _derivative(derivatives.lse, ((1 << 20,),), ((30,),)),
    "llsq 4k": _derivative(derivatives.llsq, ((32,), (4096,), (32,)), ((5,), (20,), (5,))),
    "ode 500": _derivative(derivatives.ode, ((500,),), ((3,),), turns=200),
    "saddle": _derivative(derivatives.saddle, ((2,),), ((2,),), turns=5),
    "particle": _derivative(derivatives.particle, ((),), ((),), turns=5),
}


def operands(name: str, quick: bool) -> list[Array]:
    program = PROGRAMS[name]
    rng = np.random.default_rng(0)
    shapes = program.quick if quick else program.shapes
    arrays: list[Array] = [rng.random(shape) for shape in shapes]
    if program.run is programs.cholesky:
        return [arrays[0] @ arrays[0].T + len(arrays[0]) * np.eye(len(arrays[0]))]
    if program.run is programs.mandelbrot:
        return [2.5 * arrays[0] - 2.0, 2.5 * arrays[1] - 1.25]
    if program.run is derivatives.llsq:
        return [arrays[0], arrays[1], np.arange(1.0 * len(arrays[0]))]
    return arrays


def turns_of(name: str, quick: bool) -> int:
    return min(2, PROGRAMS[name].turns) if quick else PROGRAMS[name].turns


TOO_SLOW: Final = (derivatives.saddle, derivatives.particle)
"""Programs that PyTorch needs minutes for: nested transforms in loops of Python."""

# --- contenders ------------------------------------------------------------------------


def _assign(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


def _python_loop(n: int, body: Callable[..., Any], state: Any) -> Any:
    for i in range(n):
        state = body(i, *state)
    return state


def _python_until(is_done: Callable[..., Any], body: Callable[..., Any], state: Any) -> Any:
    while not is_done(*state):
        state = body(*state)
    return state


_STEP: Final = 1e-5
"""Half the distance of a central difference."""


def _jvp(f: Callable[..., Any], x: Any, tangent: Any) -> Any:
    return f(x), (f(x + _STEP * tangent) - f(x - _STEP * tangent)) / (2 * _STEP)


def _columns(f: Callable[..., Any]) -> Callable[[Array], Array]:
    def jacobian(x: Array) -> Array:
        units = np.eye(x.size).reshape(x.size, *x.shape)
        return np.stack([_jvp(f, x, unit)[1] for unit in units], axis=-1)

    return jacobian


def _value_and_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(x: Any) -> Any:
        if not isinstance(x, tuple):
            return f(x), _columns(f)(x).reshape(x.shape)
        parts = []
        for i, each in enumerate(x):
            part = _value_and_grad(lambda new, i=i: f((*x[:i], new, *x[i + 1 :])))
            parts.append(part(each)[1])
        return f(x), tuple(parts)

    return gradient


def by_numpy(name: str, quick: bool) -> Callable[[], Any]:
    program = PROGRAMS[name]
    tools = Tools(np, _python_loop, _assign, _python_until, _value_and_grad, _jvp, _columns)
    arrays, turns = operands(name, quick), turns_of(name, quick)
    return lambda: program.run(tools, turns, *[x.copy() for x in arrays])


@cache
def reference(name: str, quick: bool) -> list[Array]:
    return [np.asarray(x) for x in by_numpy(name, quick)()]


def by_mlvm(name: str, quick: bool) -> Callable[[], Any]:
    import mlvm.eager as ml

    def loop(n: int, body: Callable[..., Any], state: Any) -> Any:
        return ml.fori_loop(0, n, lambda i, s: body(i, *s), tuple(state))

    def until(is_done: Callable[..., Any], body: Callable[..., Any], state: Any) -> Any:
        return ml.while_loop(lambda s: ~is_done(*s), lambda s: body(*s), tuple(state))

    def jvp(f: Callable[..., Any], x: Any, tangent: Any) -> Any:
        return ml.jvp(f, (x,), (tangent,))

    program = PROGRAMS[name]
    tools = Tools(ml, loop, _assign, until, ml.value_and_grad, jvp, ml.jacfwd)
    turns = turns_of(name, quick)

    def run(*arrays: Any) -> Any:
        return program.run(tools, turns, *[ml.copy(x) for x in arrays])

    captured = ml.capture(run)
    tensors = [ml.asarray(x) for x in operands(name, quick)]
    return lambda: captured(*tensors)


def by_jax(name: str, quick: bool) -> Callable[[], Any]:
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp

    def loop(n: int, body: Callable[..., Any], state: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda i, s: tuple(body(i, *s)), tuple(state))

    def until(is_done: Callable[..., Any], body: Callable[..., Any], state: Any) -> Any:
        return jax.lax.while_loop(lambda s: ~is_done(*s), lambda s: tuple(body(*s)), tuple(state))

    def jvp(f: Callable[..., Any], x: Any, tangent: Any) -> Any:
        return jax.jvp(f, (x,), (tangent,))

    def put(x: Any, index: Any, value: Any) -> Any:
        return x.at[index].set(value)

    program = PROGRAMS[name]
    tools = Tools(jnp, loop, put, until, jax.value_and_grad, jvp, jax.jacfwd)
    turns = turns_of(name, quick)
    jitted = jax.jit(lambda *arrays: program.run(tools, turns, *arrays))
    arrays = [jnp.asarray(x) for x in operands(name, quick)]
    return lambda: jax.block_until_ready(jitted(*arrays))


def by_torch(name: str, quick: bool) -> Callable[[], Any]:
    import torch
    from torch import func

    def jvp(f: Callable[..., Any], x: Any, tangent: Any) -> Any:
        return func.jvp(f, (x,), (tangent,))

    def value_and_grad(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: func.grad_and_value(f)(x)[::-1]

    program = PROGRAMS[name]
    tools = Tools(torch, _python_loop, _assign, _python_until, value_and_grad, jvp, func.jacfwd)
    tensors, turns = [torch.tensor(x) for x in operands(name, quick)], turns_of(name, quick)

    def run() -> Any:
        with torch.no_grad():
            return program.run(tools, turns, *[x.clone() for x in tensors])

    return run


def check(name: str, results: list[Array], expected: list[Array]) -> None:
    """Raise `ValueError` unless the results are the expected ones, but for rounding.

    A derivative by differences is less precise.
    """
    tolerance = 1e-4 if PROGRAMS[name].is_derivative else 1e-9
    for i, (got, value) in enumerate(zip(results, expected, strict=True)):
        close = got.shape == value.shape and np.allclose(
            got, value, tolerance, tolerance, equal_nan=True
        )
        if not close:
            raise ValueError(f"{name}: result {i} differs from numpy's")


def preparing(make: Callable[[str, bool], Callable[[], Any]]) -> Prepare:
    def prepare(quick: bool) -> Mapping[str, Round]:
        def run_of(name: str) -> Callable[[], Any]:
            small = quick or PROGRAMS[name].is_derivative
            check(name, [np.asarray(x) for x in make(name, small)()], reference(name, small))
            return make(name, quick)

        runs = {
            name: 1 if quick else each.calls
            for name, each in PROGRAMS.items()
            if not (make is by_numpy and each.is_derivative)
            and not (make is by_torch and each.run in TOO_SLOW)
        }
        return rounds_of(run_of, runs, "us")

    return prepare


SUITE = Suite(
    module="bench.science",
    contenders=(
        Contender("mlvm-captured", "mlvm", preparing(by_mlvm)),
        Contender("numpy", "numpy", preparing(by_numpy)),
        Contender("jax-jit", "jax", preparing(by_jax)),
        Contender("torch", "torch", preparing(by_torch)),
    ),
    units={"us": "us"},
    ours=("mlvm-captured",),
    targets={
        (case, "us", "mlvm-captured", theirs): least
        for theirs, least in (("numpy", 1.0), ("jax-jit", 0.5))
        for case, program in PROGRAMS.items()
        if not (theirs == "numpy" and program.is_derivative)
    },
    rounds=7,
)
