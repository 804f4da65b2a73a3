"""A neural ordinary differential equation learns the law by which a spiral winds inwards.

Chen et al., Neural Ordinary Differential Equations, arXiv 1806.07366. The net is the speed at a
place; the path is integrated by the classical method of Runge and Kutta, in a `scan`. Gradients go
through each step; `ml.checkpoint` recomputes the values of a step in the backward pass.

    python examples/neural_ode.py
"""

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn

STEP = 0.05


def integrate(speed, start, steps):
    """Return the places f[steps, ..., 2] that follow the start f[..., 2], one after each STEP of
    time."""

    @ml.checkpoint
    def turn(x):
        k1 = speed(x)
        k2 = speed(x + STEP / 2 * k1)
        k3 = speed(x + STEP / 2 * k2)
        k4 = speed(x + STEP * k3)
        return x + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def both(x, _):
        x = turn(x)
        return x, x

    return ml.scan(both, start, None, length=steps)[1]


def spiral(x):
    """Return the law that is to be found, dx/dt of f[..., 2] (section 5.1 of the authors' code)."""
    return x**3 @ ml.asarray([[-0.1, 2.0], [-2.0, -0.1]])


class Speed(nn.Module):
    """A guess at the law: the speed f[..., 2] at a place f[..., 2]."""

    def __init__(self, width=64):
        self.hidden, self.out = nn.Linear(2, width), nn.Linear(width, 2)

    def __call__(self, x):
        return self.out(ml.tanh(self.hidden(x**3)))


def loss_of(speed, places):
    """Return the mean squared error of integrated paths f[steps + 1, batch, 2]."""
    return ml.mean_squared_error(integrate(speed, places[0], len(places) - 1), places[1:])


def main(steps=1000, piece=10):
    ml.random.seed(0)
    rng = np.random.default_rng(0)
    start = ml.asarray([2.0, 0.0])
    path = ml.concat([start[None], integrate(spiral, start, 200)]).numpy()
    model = Speed()
    optimizer = ml.optim.Adam(model, ml.optim.exponential(3e-2, 0.1, transition_steps=steps))

    @ml.capture
    def train_step(places):
        loss, gradients = ml.value_and_grad(loss_of)(model, places)
        optimizer.update(gradients)
        return loss

    losses = []
    for _ in range(steps):
        starts = rng.integers(0, len(path) - piece, 32)
        losses.append(float(train_step(path[np.arange(piece + 1)[:, None] + starts])))
    print(f"loss {losses[0]:.4f} -> {np.mean(losses[-20:]):.6f}")
    guess = integrate(model, start, 200).numpy()
    for i in (49, 99, 199):
        time, place, true = (i + 1) * STEP, guess[i].round(2), path[i + 1].round(2)
        print(f"t = {time:4.1f}: at {place}, the spiral is at {true}")
    return losses, guess, path[1:]


if __name__ == "__main__":
    main()
