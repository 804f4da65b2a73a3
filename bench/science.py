"""Numerical programs that scientists write, beside numpy, JAX and PyTorch.

The programs are written from their published definitions, in f64 and on one thread:

    jacobi_2d, heat_3d, fdtd_2d, seidel_2d   stencils of PolyBench (Pouchet, 2012)
    hdiff                 horizontal diffusion of a weather model, with a limiter (Gysi et al.,
                          MODESTO, 2015)
    equation of state     a rational function of three fields with 48 terms and its derivative: some
                          360 ops, like the density of seawater (McDougall et al., 2003)
    cavity_flow           a lid-driven cavity by projection (Barba and Forsyth, CFD Python, 2018)
    mandelbrot            iterations until a point escapes
    go_fast               the trace of tanh, added to a matrix
    cholesky              the factorization by columns, as loops over rows
    vadv                  vertical advection in a weather model, implicit in time: tridiagonal
                          systems along the last axis (Gysi et al., MODESTO, 2015)
    adi                   diffusion by alternating directions, of PolyBench
    azimint_hist          azimuthal integration of an image: sums over bins of the radius, divided
                          by their counts (Kieffer and Ashiotis, PyFAI, 2013)
    particle              a charge in the field of two others by Euler's method, all of it scalars
                          (Siskind and Pearlmutter, 2008)
    lorenz                the Lorenz system by the classical Runge-Kutta method, in scalars

numpy and mlvm run one text: writes such as `A[1:-1] = ...` are updates in place. JAX has no such
writes, so its text differs there. No contender is timed before its results agree with numpy's.
`us` is the time of one call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.harness import Contender, Prepare, Round, Suite, rounds_of

Array = NDArray[Any]
Loop = Callable[[int, Callable[..., Any], Any], Any]
"""`loop(n, body, state)` runs `state = body(i, *state)` n times."""


class Tools(NamedTuple):
    """What a program is written with.

    xp: the functions of arrays.
    loop: see `Loop`.
    put: `put(x, index, value)` is x with these elements replaced.
    """

    xp: Any
    loop: Loop
    put: Callable[[Any, Any, Any], Any]


def _assign(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


IN: Final = slice(1, -1)
LESS: Final = slice(None, -2)
MORE: Final = slice(2, None)


# --- the programs ------------------------------------------------------------------------


def jacobi_2d(t: Tools, turns: int, a: Any, b: Any) -> Any:
    def mean(x: Any) -> Any:
        return 0.2 * (x[IN, IN] + x[IN, LESS] + x[IN, MORE] + x[MORE, IN] + x[LESS, IN])

    def turn(i: Any, a: Any, b: Any) -> Any:
        b = t.put(b, (IN, IN), mean(a))
        return t.put(a, (IN, IN), mean(b)), b

    return t.loop(turns, turn, (a, b))


def heat_3d(t: Tools, turns: int, a: Any, b: Any) -> Any:
    def flow(x: Any) -> Any:
        middle = x[IN, IN, IN]
        return (
            0.125 * (x[MORE, IN, IN] - 2.0 * middle + x[LESS, IN, IN])
            + 0.125 * (x[IN, MORE, IN] - 2.0 * middle + x[IN, LESS, IN])
            + 0.125 * (x[IN, IN, MORE] - 2.0 * middle + x[IN, IN, LESS])
            + middle
        )

    def turn(i: Any, a: Any, b: Any) -> Any:
        b = t.put(b, (IN, IN, IN), flow(a))
        return t.put(a, (IN, IN, IN), flow(b)), b

    return t.loop(turns, turn, (a, b))


def fdtd_2d(t: Tools, turns: int, ex: Any, ey: Any, hz: Any) -> Any:
    rest, but_last = np.s_[1:], np.s_[:-1]

    def turn(i: Any, ex: Any, ey: Any, hz: Any) -> Any:
        ey = t.put(ey, 0, i * 1.0)
        ey = t.put(ey, rest, ey[rest] - 0.5 * (hz[rest] - hz[but_last]))
        ex = t.put(ex, (slice(None), rest), ex[:, rest] - 0.5 * (hz[:, rest] - hz[:, but_last]))
        change = ex[but_last, rest] - ex[but_last, but_last]
        change = change + ey[rest, but_last] - ey[but_last, but_last]
        hz = t.put(hz, (but_last, but_last), hz[but_last, but_last] - 0.7 * change)
        return ex, ey, hz

    return t.loop(turns, turn, (ex, ey, hz))


def hdiff(t: Tools, turns: int, x: Any, coefficient: Any) -> Any:
    laplacian = 4.0 * x[IN, IN] - (x[MORE, IN] + x[LESS, IN] + x[IN, MORE] + x[IN, LESS])
    inner = x[2:-2, 2:-2]

    def limited(flux: Any, slope: Any) -> Any:
        return t.xp.where(flux * slope > 0, 0.0, flux)

    down = limited(laplacian[1:, IN] - laplacian[:-1, IN], x[2:-1, 2:-2] - x[1:-2, 2:-2])
    across = limited(laplacian[IN, 1:] - laplacian[IN, :-1], x[2:-2, 2:-1] - x[2:-2, 1:-2])
    change = down[1:] - down[:-1] + across[:, 1:] - across[:, :-1]
    return [inner - coefficient * change]


_random: Final = random.Random(0)
_TERMS: Final = [[_random.uniform(-1e-2, 1e-2) for _ in range(6)] for _ in range(16)]


def equation_of_state(t: Tools, turns: int, salt: Any, heat: Any, pressure: Any) -> Any:
    root = t.xp.sqrt(salt)

    def polynomial(numbers: list[float], x: Any) -> Any:
        total = numbers[0] * x + numbers[1]
        for number in numbers[2:]:
            total = total * x + number
        return total

    def surface(rows: list[list[float]]) -> Any:
        by_heat = [polynomial(row, heat) for row in rows]
        total = by_heat[0]
        for each in by_heat[1:4]:
            total = total * root + each
        for each in by_heat[4:]:
            total = total + pressure * each
        return total

    above, below = surface(_TERMS[:8]), 1.0 + surface(_TERMS[8:])
    slope = surface([row[1:] for row in _TERMS[:8]]) * below
    slope = slope - above * surface([row[1:] for row in _TERMS[8:]])
    return [above / below, slope / (below * below), t.xp.log(1.0 + below * below)]


def cavity_flow(t: Tools, turns: int, u: Any, v: Any, p: Any) -> Any:
    h, dt, density, viscosity = 2.0 / (u.shape[0] - 1), 0.001, 1.0, 0.1

    def middle(x: Any) -> Any:
        return x[IN, IN], x[IN, LESS], x[IN, MORE], x[LESS, IN], x[MORE, IN]

    def turn(i: Any, u: Any, v: Any, p: Any) -> Any:
        (u0, ul, ur, ud, uu), (v0, vl, vr, vd, vu) = middle(u), middle(v)
        ux, vy = (ur - ul) / (2 * h), (vu - vd) / (2 * h)
        uy, vx = (uu - ud) / (2 * h), (vr - vl) / (2 * h)
        source = density * ((ux + vy) / dt - ux * ux - 2 * uy * vx - vy * vy)

        def relax(i: Any, p: Any) -> Any:
            _, left, right, down, up = middle(p)
            p = t.put(p, (IN, IN), (left + right + down + up) * 0.25 - 0.25 * h * h * source)
            p = t.put(p, (slice(None), -1), p[:, -2])
            p = t.put(p, 0, p[1])
            p = t.put(p, (slice(None), 0), p[:, 1])
            return (t.put(p, -1, 0.0),)

        (p,) = t.loop(10, relax, (p,))
        _, pl, pr, pd, pu = middle(p)
        across = u0 * dt / h * (u0 - ul) + v0 * dt / h * (u0 - ud)
        spread = viscosity * dt / (h * h) * (ur + ul + uu + ud - 4 * u0)
        new_u = u0 - across - dt / (2 * density * h) * (pr - pl) + spread
        across = u0 * dt / h * (v0 - vl) + v0 * dt / h * (v0 - vd)
        spread = viscosity * dt / (h * h) * (vr + vl + vu + vd - 4 * v0)
        v = t.put(v, (IN, IN), v0 - across - dt / (2 * density * h) * (pu - pd) + spread)
        return t.put(u, (IN, IN), new_u), v, p

    return t.loop(turns, turn, (u, v, p))


def mandelbrot(t: Tools, turns: int, cx: Any, cy: Any) -> Any:
    def turn(i: Any, x: Any, y: Any, count: Any) -> Any:
        inside = x * x + y * y < 4.0
        count = t.xp.where(inside, count + 1.0, count)
        new_x = t.xp.where(inside, x * x - y * y + cx, x)
        return new_x, t.xp.where(inside, 2.0 * x * y + cy, y), count

    return t.loop(turns, turn, (0.0 * cx, 0.0 * cx, 0.0 * cx))[2:]


def go_fast(t: Tools, turns: int, a: Any) -> Any:
    return [a + t.xp.sum(t.xp.tanh(t.xp.diagonal(a)))]


def seidel_2d(t: Tools, turns: int, a: Any) -> Any:
    n = a.shape[0]

    def element(k: Any, a: Any) -> Any:
        i, j = 1 + k // (n - 2), 1 + k % (n - 2)
        total = a[i - 1, j - 1] + a[i - 1, j] + a[i - 1, j + 1] + a[i, j - 1] + a[i, j]
        total = total + a[i, j + 1] + a[i + 1, j - 1] + a[i + 1, j] + a[i + 1, j + 1]
        return (t.put(a, (i, j), total / 9.0),)

    return t.loop(turns * (n - 2) * (n - 2), lambda k, a: element(k % (n - 2) ** 2, a), (a,))


def cholesky(t: Tools, turns: int, a: Any) -> Any:
    n = a.shape[0]
    below = np.tri(n, dtype=np.float64)

    def column(j: Any, a: Any) -> Any:
        pivot = a[:, j] / t.xp.sqrt(a[j, j])
        return (t.put(a - pivot[:, None] * pivot[None, :], (slice(None), j), pivot),)

    (a,) = t.loop(n, column, (a,))
    return [a * t.xp.asarray(below)]


def vadv(t: Tools, turns: int, u: Any, w: Any, force: Any) -> Any:
    levels, per_step = u.shape[2], 1.0 / 0.15

    def speed(k: Any) -> Any:
        return 0.125 * (w[1:, :, k] + w[:-1, :, k])

    def right_side(k: Any) -> Any:
        return per_step * u[:, :, k] + force[:, :, k]

    def eliminate(k: Any, upper: Any, right: Any) -> Any:
        below, above = -speed(k), speed(k + 1)
        slopes = below * (u[:, :, k - 1] - u[:, :, k]) + above * (u[:, :, k + 1] - u[:, :, k])
        scale = 1.0 / (per_step - below - above - upper[:, :, k - 1] * below)
        value = (right_side(k) - slopes - right[:, :, k - 1] * below) * scale
        upper = t.put(upper, (slice(None), slice(None), k), above * scale)
        return upper, t.put(right, (slice(None), slice(None), k), value)

    def substitute(j: Any, upper: Any, right: Any) -> Any:
        k = levels - 2 - j
        value = right[:, :, k] - upper[:, :, k] * right[:, :, k + 1]
        return upper, t.put(right, (slice(None), slice(None), k), value)

    above = speed(1)
    scale = 1.0 / (per_step - above)
    value = (right_side(0) - above * (u[:, :, 1] - u[:, :, 0])) * scale
    upper, right = 0.0 * u, 0.0 * u
    upper = t.put(upper, np.s_[:, :, 0], above * scale)
    right = t.put(right, np.s_[:, :, 0], value)
    upper, right = t.loop(levels - 2, lambda k, *s: eliminate(k + 1, *s), (upper, right))
    k = levels - 1
    below = -speed(k)
    value = right_side(k) - below * (u[:, :, k - 1] - u[:, :, k]) - right[:, :, k - 1] * below
    value = value / (per_step - below - upper[:, :, k - 1] * below)
    right = t.put(right, np.s_[:, :, k], value)
    _, right = t.loop(levels - 1, substitute, (upper, right))
    return [per_step * (right - u)]


def adi(t: Tools, turns: int, u: Any, v: Any, p: Any, q: Any) -> Any:
    n = u.shape[0]
    across, along = 2.0 * n * n / turns, 1.0 * n * n / turns

    def sweep(x: Any, y: Any, p: Any, q: Any, axis: int, numbers: tuple[float, ...]) -> Any:
        """Solve along an axis of y; the other direction of x is explicit."""
        side, middle, explicit = numbers

        def at(line: Any, rest: slice) -> tuple[Any, Any]:
            return (rest, line) if axis else (line, rest)

        def eliminate(j: Any, p: Any, q: Any) -> Any:
            j = j + 1
            pivot = side * p[IN, j - 1] + middle
            right = explicit * (x[at(j, LESS)] + x[at(j, MORE)])
            right = right + (1.0 - 2.0 * explicit) * x[at(j, IN)] - side * q[IN, j - 1]
            return t.put(p, (IN, j), -side / pivot), t.put(q, (IN, j), right / pivot)

        def substitute(j: Any, y: Any) -> Any:
            k = n - 2 - j
            return (t.put(y, at(k, IN), p[IN, k] * y[at(k + 1, IN)] + q[IN, k]),)

        y = t.put(t.put(y, at(0, IN), 1.0), at(-1, IN), 1.0)
        p, q = t.put(p, (IN, 0), 0.0), t.put(q, (IN, 0), 1.0)
        p, q = t.loop(n - 2, eliminate, (p, q))
        (y,) = t.loop(n - 2, substitute, (y,))
        return y, p, q

    def turn(i: Any, u: Any, v: Any, p: Any, q: Any) -> Any:
        v, p, q = sweep(u, v, p, q, 0, (-across / 2, 1.0 + across, along / 2))
        u, p, q = sweep(v, u, p, q, 1, (-along / 2, 1.0 + along, across / 2))
        return u, v, p, q

    return t.loop(turns, turn, (u, v, p, q))[:2]


def azimint_hist(t: Tools, turns: int, radius: Any, image: Any) -> Any:
    name = "weight" if t.xp.__name__ == "torch" else "weights"
    counts, _ = t.xp.histogram(radius, turns)
    sums, _ = t.xp.histogram(radius, turns, **{name: image})
    return [sums / counts]


def particle(t: Tools, turns: int, x: Any, y: Any) -> Any:
    def pull(x: Any, y: Any, height: float) -> tuple[Any, Any]:
        right, up = x - 10.0, y - height
        square = right * right + up * up
        cube = square * t.xp.sqrt(square)
        return right / cube, up / cube

    def turn(i: Any, x: Any, y: Any, dx: Any, dy: Any) -> Any:
        (ax, ay), (bx, by) = pull(x, y, 10.0), pull(x, y, 0.0)
        new_x, new_y = x + 0.1 * dx, y + 0.1 * dy
        return new_x, new_y, dx + 0.1 * (ax + bx), dy + 0.1 * (ay + by)

    return t.loop(turns, turn, (x, y + 8.0, 0.0 * x + 0.75, 0.0 * y))


def lorenz(t: Tools, turns: int, x: Any, y: Any, z: Any) -> Any:
    def slope(x: Any, y: Any, z: Any) -> tuple[Any, Any, Any]:
        return 10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z

    def turn(i: Any, *state: Any) -> Any:
        first = slope(*state)
        second = slope(*[a + 0.005 * b for a, b in zip(state, first, strict=True)])
        third = slope(*[a + 0.005 * b for a, b in zip(state, second, strict=True)])
        last = slope(*[a + 0.01 * b for a, b in zip(state, third, strict=True)])
        parts = zip(state, first, second, third, last, strict=True)
        return tuple(a + 0.01 / 6.0 * (b + 2.0 * c + 2.0 * d + e) for a, b, c, d, e in parts)

    return t.loop(turns, turn, (x, y, z))


# --- their sizes and operands ----------------------------------------------------------


class Program(NamedTuple):
    """Program with its sizes: shapes of random operands, turns of the loop, and calls a round."""

    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    turns: int
    calls: int
    quick: tuple[tuple[int, ...], ...]


def _alike(run: Callable[..., Any], count: int, ndim: int, n: int, turns: int) -> Program:
    return Program(run, ((n,) * ndim,) * count, turns, 3, ((9,) * ndim,) * count)


PROGRAMS: Final = {
    "jacobi_2d 150": _alike(jacobi_2d, 2, 2, 150, 50),
    "jacobi_2d 350": _alike(jacobi_2d, 2, 2, 350, 80),
    "heat_3d 25": _alike(heat_3d, 2, 3, 25, 25),
    "heat_3d 40": _alike(heat_3d, 2, 3, 40, 50),
    "fdtd_2d 200": _alike(fdtd_2d, 3, 2, 200, 20),
    "fdtd_2d 400": _alike(fdtd_2d, 3, 2, 400, 60),
    "hdiff 64": Program(hdiff, ((68, 68), (64, 64)), 1, 20, ((12, 13), (8, 9))),
    "hdiff 256": Program(hdiff, ((260, 260), (256, 256)), 1, 5, ((12, 13), (8, 9))),
    "state 4k": Program(equation_of_state, ((4096,),) * 3, 1, 20, ((70,),) * 3),
    "state 64k": Program(equation_of_state, ((65536,),) * 3, 1, 3, ((70,),) * 3),
    "state 1M": Program(equation_of_state, ((1 << 20,),) * 3, 1, 1, ((70,),) * 3),
    "cavity_flow 61": _alike(cavity_flow, 3, 2, 61, 25),
    "mandelbrot 250": _alike(mandelbrot, 2, 2, 250, 40),
    "go_fast 1000": _alike(go_fast, 1, 2, 1000, 1),
    "seidel_2d 40": _alike(seidel_2d, 1, 2, 40, 2),
    "cholesky 100": Program(cholesky, ((100, 100),), 1, 3, ((9, 9),)),
    "vadv 60": Program(
        vadv, ((60, 60, 40), (61, 60, 40), (60, 60, 40)), 1, 3, ((5, 4, 6), (6, 4, 6), (5, 4, 6))
    ),
    "adi 100": _alike(adi, 4, 2, 100, 10),
    "azimint_hist 400k": Program(azimint_hist, ((400_000,), (400_000,)), 1000, 3, ((90,), (90,))),
    "particle": Program(particle, ((), ()), 1000, 10, ((), ())),
    "lorenz": Program(lorenz, ((), (), ()), 1000, 10, ((), (), ())),
}


def operands(name: str, quick: bool) -> list[Array]:
    program = PROGRAMS[name]
    rng = np.random.default_rng(0)
    shapes = program.quick if quick else program.shapes
    arrays: list[Array] = [rng.random(shape) for shape in shapes]
    if program.run is cholesky:
        return [arrays[0] @ arrays[0].T + len(arrays[0]) * np.eye(len(arrays[0]))]
    if program.run is mandelbrot:
        return [2.5 * arrays[0] - 2.0, 2.5 * arrays[1] - 1.25]
    return arrays


def turns_of(name: str, quick: bool) -> int:
    return min(2, PROGRAMS[name].turns) if quick else PROGRAMS[name].turns


# --- contenders ------------------------------------------------------------------------


def _python_loop(n: int, body: Callable[..., Any], state: Any) -> Any:
    for i in range(n):
        state = body(i, *state)
    return state


def by_numpy(name: str, quick: bool) -> Callable[[], Any]:
    program, tools = PROGRAMS[name], Tools(np, _python_loop, _assign)
    arrays, turns = operands(name, quick), turns_of(name, quick)
    return lambda: program.run(tools, turns, *[x.copy() for x in arrays])


@cache
def reference(name: str, quick: bool) -> list[Array]:
    return [np.asarray(x) for x in by_numpy(name, quick)()]


def by_mlvm(name: str, quick: bool) -> Callable[[], Any]:
    import mlvm.eager as ml

    def loop(n: int, body: Callable[..., Any], state: Any) -> Any:
        return ml.fori_loop(0, n, lambda i, s: body(i, *s), tuple(state))

    program, tools = PROGRAMS[name], Tools(ml, loop, _assign)
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

    program, tools = PROGRAMS[name], Tools(jnp, loop, lambda x, i, v: x.at[i].set(v))
    turns = turns_of(name, quick)
    jitted = jax.jit(lambda *arrays: program.run(tools, turns, *arrays))
    arrays = [jnp.asarray(x) for x in operands(name, quick)]
    return lambda: jax.block_until_ready(jitted(*arrays))


def by_torch(name: str, quick: bool) -> Callable[[], Any]:
    import torch

    program, tools = PROGRAMS[name], Tools(torch, _python_loop, _assign)
    tensors, turns = [torch.tensor(x) for x in operands(name, quick)], turns_of(name, quick)

    def run() -> Any:
        with torch.inference_mode():
            return program.run(tools, turns, *[x.clone() for x in tensors])

    return run


def check(name: str, results: list[Array], expected: list[Array]) -> None:
    """Raise `ValueError` unless the results are the expected ones, but for rounding."""
    for i, (got, value) in enumerate(zip(results, expected, strict=True)):
        if got.shape != value.shape or not np.allclose(got, value, 1e-9, 1e-9, equal_nan=True):
            raise ValueError(f"{name}: result {i} differs from numpy's")


def preparing(make: Callable[[str, bool], Callable[[], Any]]) -> Prepare:
    def prepare(quick: bool) -> Mapping[str, Round]:
        def run_of(name: str) -> Callable[[], Any]:
            run = make(name, quick)
            check(name, [np.asarray(x) for x in run()], reference(name, quick))
            return run

        runs = {name: 1 if quick else each.calls for name, each in PROGRAMS.items()}
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
        for case in PROGRAMS
    },
    rounds=7,
)
