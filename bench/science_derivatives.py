"""Programs whose derivatives are the result, written for any array library.

gmm           the logarithm of the posterior of a Gaussian mixture with a Wishart prior, and its
              gradient (Srajer et al., ADBench, 2018)
hand          the Jacobian of a hand tracker: 26 angles move 22 bones, whose vertices are compared
              with measured points (Srajer et al., 2018)
lstm          the loss of a diagonal LSTM that predicts characters, and its gradient (Srajer et al.,
              2018)
kmeans        the Newton direction of a clustering's cost: the gradient divided by the diagonal of
              the Hessian
lse           the logarithm of a sum of exponentials, and its gradient
llsq          the loss of a least-squares fit of a polynomial, and its gradient
ode           the last component of a chain of differential equations by the classical Runge-Kutta
              method, and its gradient
saddle        a minimum over one point of a maximum over another one, by nested gradient descent
              (Siskind and Pearlmutter, 2008)
particle      the control of a charge in the field of two others that brings it to the origin: a
              gradient descent over Euler's method over the gradient of the potential (2008)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.science_programs import Tools, largest


def log_sum_exp(t: Tools, x: Any, axis: int) -> Any:
    top = largest(t, x, axis)
    return t.xp.squeeze(top, axis) + t.xp.log(t.xp.sum(t.xp.exp(x - top), axis=axis))


def gmm(t: Tools, turns: int, alphas: Any, means: Any, factors: Any, x: Any) -> Any:
    n, d = x.shape
    clusters, at = means.shape[0], np.zeros((d, d), np.int64)
    at[np.tril_indices(d, -1)] = 1 + np.arange(d * (d - 1) // 2)  # where the factor is not 0

    def posterior(parameters: Any) -> Any:
        alphas, means, factors = parameters
        diagonal, rest = factors[:, :d], factors[:, d:]
        lower = t.xp.concat([0.0 * rest[:, :1], rest], axis=1)[:, t.xp.asarray(at.reshape(-1))]
        centered = x[:, None, :] - means
        products = t.xp.einsum("kij,nkj->nki", lower.reshape((clusters, d, d)), centered)
        whitened = t.xp.exp(diagonal) * centered + products
        sums = t.xp.sum(diagonal, axis=1)
        terms = alphas + sums - 0.5 * t.xp.sum(whitened * whitened, axis=2)
        prior = t.xp.sum(t.xp.exp(2.0 * diagonal)) + t.xp.sum(rest * rest)
        total = t.xp.sum(log_sum_exp(t, terms, 1)) - n * log_sum_exp(t, alphas, 0)
        return total - n * d * 0.5 * math.log(2.0 * math.pi) + 0.5 * prior

    value, slopes = t.value_and_grad(posterior)((alphas, means, factors))
    return [value, *slopes]


def hand(t: Tools, turns: int, theta: Any, base: Any, weights: Any, points: Any, at: Any) -> Any:
    bones = base.shape[0]
    parents = [-1, *(0 if i % 4 == 0 else i for i in range(bones - 1))]

    def rotation(angles: list[Any]) -> Any:
        """Return the rotation by angles about the three axes, f64[3,3]."""
        (cx, cy, cz), (sx, sy, sz) = ([f(a) for a in angles] for f in (t.xp.cos, t.xp.sin))
        rows = [
            [cy * cz, sx * sy * cz - cx * sz, cx * sy * cz + sx * sz],
            [cy * sz, sx * sy * sz + cx * cz, cx * sy * sz - sx * cz],
            [-sy, sx * cy, cx * cy],
        ]
        return t.xp.stack([t.xp.stack(row) for row in rows])

    def error(theta: Any) -> Any:
        zero = 0.0 * theta[0]
        turned: list[Any] = []
        moved: list[Any] = []
        for i, parent in enumerate(parents):
            finger, joint = (i - 1) // 4, (i - 1) % 4
            if i == 0 or joint == 3:  # the wrist and the tips do not bend
                angles = [zero, zero, zero]
            else:
                first = 6 + 4 * finger + (joint + 1 if joint else 0)
                angles = [theta[first], zero if joint else theta[first + 1], zero]
            turn = base[i, :, :3] @ rotation(angles)
            if parent >= 0:
                moved.append(moved[parent] + turned[parent] @ base[i, :, 3])
                turn = turned[parent] @ turn
            else:
                moved.append(base[i, :, 3])
            turned.append(turn)
        turns, moves = t.xp.stack(turned), t.xp.stack(moved)
        vertices = t.xp.einsum("bij,nj->nbi", turns, at) + moves
        vertices = t.xp.einsum("nb,nbi->ni", weights, vertices)
        angle = t.xp.sqrt(t.xp.sum(theta[:3] * theta[:3]))
        axis, c, s = theta[:3] / angle, t.xp.cos(angle), t.xp.sin(angle)
        # Rodrigues' formula
        (x, y, z), (u, v, w) = (vertices[:, i] for i in range(3)), axis
        across = t.xp.stack([y * w - z * v, z * u - x * w, x * v - y * u], axis=1)
        along = (vertices @ axis)[:, None] * axis
        vertices = c * vertices - s * across + (1.0 - c) * along
        return (points - vertices - theta[3:6]).reshape((-1,))

    return [error(theta), t.jacobian(error)(theta)]


def lstm(t: Tools, turns: int, layers: Any, ends: Any, state: Any, sequence: Any) -> Any:
    """`layers`: f64[2 l, 4 b], weights and biases of l layers; `state`: f64[2 l, b]."""
    width = state.shape[1]

    def sigmoid(x: Any) -> Any:
        return 1.0 / (1.0 + t.xp.exp(-x))

    def loss(parameters: Any) -> Any:
        layers, ends = parameters

        def step(i: Any, state: Any, total: Any) -> Any:
            x, new = sequence[i] * ends[0], []
            for layer in range(0, state.shape[0], 2):
                hidden, cell = state[layer], state[layer + 1]
                gates = t.xp.concat([x, hidden, x, hidden]) * layers[layer] + layers[layer + 1]
                forget, keep, out, change = (gates[k * width : (k + 1) * width] for k in range(4))
                cell = cell * sigmoid(forget) + sigmoid(keep) * t.xp.tanh(change)
                x = sigmoid(out) * t.xp.tanh(cell)
                new += [x, cell]
            predicted = x * ends[1] + ends[2]
            normalized = predicted - t.xp.log(t.xp.sum(t.xp.exp(predicted)) + 2.0)
            return t.xp.stack(new), total + t.xp.sum(sequence[i + 1] * normalized)

        steps = sequence.shape[0] - 1
        _, total = t.loop(steps, step, (state, 0.0 * ends[0, 0]))
        return -total / (steps * width)

    value, slopes = t.value_and_grad(loss)((layers, ends))
    return [value, *slopes]


def kmeans(t: Tools, turns: int, points: Any, centers: Any) -> Any:
    def cost(centers: Any) -> Any:
        away = points[:, None, :] - centers
        return -t.xp.sum(largest(t, -t.xp.sum(away * away, axis=2), 1))

    def gradient(centers: Any) -> Any:
        return t.value_and_grad(cost)(centers)[1]

    slopes, curvatures = t.jvp(gradient, centers, 0.0 * centers + 1.0)
    return [slopes / curvatures]


def lse(t: Tools, turns: int, x: Any) -> Any:
    def value(x: Any) -> Any:
        return log_sum_exp(t, x, 0)

    return [*t.value_and_grad(value)(x)]


def llsq(t: Tools, turns: int, x: Any, points: Any, powers: Any) -> Any:
    points = 2.0 * points - 1.0

    def half_squares(x: Any) -> Any:
        difference = t.xp.sign(points) + (points[:, None] ** t.xp.floor(powers)) @ x
        return 0.5 * t.xp.sum(difference * difference)

    return [*t.value_and_grad(half_squares)(x)]


def ode(t: Tools, turns: int, x: Any) -> Any:
    def last(x: Any) -> Any:
        h = 2.0 / turns
        one = 0.0 * x[:1] + 1.0

        def slope(y: Any) -> Any:
            return x * t.xp.concat([one, y[:-1]])

        def step(i: Any, y: Any) -> Any:
            first = slope(y)
            second = slope(y + 0.5 * h * first)
            third = slope(y + 0.5 * h * second)
            return (y + h / 6.0 * (first + 2.0 * second + 2.0 * third + slope(y + h * third)),)

        (y,) = t.loop(turns, step, (0.0 * x,))
        return y[-1]

    return [*t.value_and_grad(last)(x)]


def minimum(t: Tools, value_and_slope: Callable[..., Any], x: Any, rate: float) -> Any:
    """Return where gradient descent from x ends.

    The rate doubles after ten steps that descended and halves after a step that did not. The end is
    a gradient or a step of at most 1e-5.
    """

    def length(x: Any) -> Any:
        return t.xp.sqrt(t.xp.sum(x * x))

    def body(x: Any, value: Any, slope: Any, rate: Any, count: Any, done: Any) -> Any:
        new = x - rate * slope
        new_value, new_slope = value_and_slope(new)
        flat, grow = length(slope) <= 1e-5, count >= 10.0
        near = length(new - x) <= 1e-5
        zero = 0.0 * value
        done = t.xp.where(flat | (near & ~grow), zero + 1.0, zero)
        moves, better = (done < 0.5) & ~grow, new_value < value
        accepts = moves & better
        rate = t.xp.where(moves & ~better, rate / 2.0, rate)
        rate = t.xp.where(grow, rate * 2.0, rate)
        count = t.xp.where(accepts, count + 1.0, 0.0)
        return (
            t.xp.where(accepts, new, x),
            t.xp.where(accepts, new_value, value),
            t.xp.where(accepts, new_slope, slope),
            rate,
            count,
            done,
        )

    value, slope = value_and_slope(x)
    zero = 0.0 * value
    state = (x, value, slope, zero + rate, zero, zero)
    return t.until(lambda *state: state[-1] > 0.5, body, state)[0]


def saddle(t: Tools, turns: int, start: Any) -> Any:
    rate = 10.0**-turns
    start = 0.0 * start + 1.0

    def inner(first: Any) -> Any:
        """Return the point with the largest value for the first one."""

        def loss(second: Any) -> Any:
            return t.xp.sum(second * second) - t.xp.sum(first * first)

        return minimum(t, t.value_and_grad(loss), start, rate)

    def outer(first: Any) -> Any:
        second = inner(first)
        return t.xp.sum(first * first) - t.xp.sum(second * second)

    def outer_and_slope(first: Any) -> Any:
        # forward mode, which JAX needs for loops of unknown length
        parts = [t.jvp(outer, first, t.xp.asarray(unit)) for unit in np.eye(2)]
        return parts[0][0], t.xp.stack([part[1] for part in parts])

    first = minimum(t, outer_and_slope, start, rate)
    return [first, inner(first)]


def particle(t: Tools, turns: int, start: Any) -> Any:
    step = 0.1

    def landing(control: Any) -> Any:
        """Return the square of the distance from the origin where the charge reaches height 0."""

        def potential(place: Any) -> Any:
            right, (up, height) = place[0] - 10.0, (place[1], 10.0 - control)
            distance = t.xp.sqrt(right * right + (up - height) * (up - height))
            return 1.0 / distance + 1.0 / t.xp.sqrt(right * right + up * up)

        def move(x: Any, y: Any, dx: Any, dy: Any) -> Any:
            _, (fx, fy) = t.value_and_grad(potential)((x, y))
            return x + step * dx, y + step * dy, dx - step * fx, dy - step * fy

        zero = 0.0 * control
        state = (zero, zero + 8.0, zero + 0.75, zero)
        x, y, dx, dy = t.until(lambda x, y, dx, dy: y + step * dy <= 0.0, move, state)
        end = x - y / dy * dx
        return end * end

    def landing_and_slope(control: Any) -> Any:
        return t.jvp(landing, control, 0.0 * control + 1.0)

    return [minimum(t, landing_and_slope, 0.0 * start, 10.0**-turns)]
