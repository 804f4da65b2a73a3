"""Numerical programs of scientific computing, written for any array library.

They are written from their published definitions:

    jacobi_2d, heat_3d, fdtd_2d, seidel_2d, adi, atax   kernels of PolyBench (Pouchet, 2012)
    hdiff, vadv           horizontal diffusion with a limiter, and implicit vertical advection, of a
                          weather model (Gysi et al., MODESTO, 2015)
    equation of state     a rational function of three fields with 48 terms and its derivative: some
                          360 ops, like the density of seawater (McDougall et al., 2003)
    cavity_flow           a lid-driven cavity by projection (Barba and Forsyth, CFD Python, 2018)
    mandelbrot            iterations until a point escapes
    go_fast               the trace of tanh, added to a matrix
    cholesky              the factorization by columns, as loops over rows
    azimint_hist          azimuthal integration of an image: sums over bins of the radius, divided
                          by their counts (Kieffer and Ashiotis, PyFAI, 2013)
    softmax, mlp          a softmax of attention scores; a perceptron of three layers
    lorenz                the Lorenz system by the classical Runge-Kutta method, in scalars
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np


class Tools(NamedTuple):
    """What a program is written with.

    xp: the functions of arrays.
    loop: `loop(n, body, state)` runs `state = body(i, *state)` n times.
    put: `put(x, index, value)` is x with these elements replaced.
    until: `until(is_done, body, state)` runs `state = body(*state)` until `is_done(*state)`.
    value_and_grad: a scalar function's value and gradient, in reverse mode.
    jvp: `jvp(f, x, tangent)` is the value and the directional derivative, in forward mode.
    jacobian: the Jacobian of a function of one vector, in forward mode.
    """

    xp: Any
    loop: Callable[[int, Callable[..., Any], Any], Any]
    put: Callable[[Any, Any, Any], Any]
    until: Callable[[Callable[..., Any], Callable[..., Any], Any], Any]
    value_and_grad: Callable[[Callable[..., Any]], Callable[..., Any]]
    jvp: Callable[[Callable[..., Any], Any, Any], Any]
    jacobian: Callable[[Callable[..., Any]], Callable[..., Any]]


IN: Final = slice(1, -1)
LESS: Final = slice(None, -2)
MORE: Final = slice(2, None)


def largest(t: Tools, x: Any, axis: int) -> Any:
    """Return the maxima along an axis, which stays with the size 1."""
    return getattr(t.xp, "amax", t.xp.max)(x, axis=axis, keepdims=True)


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


def atax(t: Tools, turns: int, a: Any, x: Any) -> Any:
    return [(a @ x) @ a]


def softmax(t: Tools, turns: int, x: Any) -> Any:
    powers = t.xp.exp(x - largest(t, x, -1))
    return [powers / t.xp.sum(powers, axis=-1, keepdims=True)]


def mlp(t: Tools, turns: int, x: Any, first: Any, second: Any, third: Any) -> Any:
    for weights in (first, second):
        x = x @ (weights - 0.5)
        x = t.xp.where(x > 0.0, x, 0.0)
    return softmax(t, turns, x @ (third - 0.5))
