"""A Gaussian process learns a function from forty noisy points, and says how sure it is.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006: a kernel's length, height and
noise maximise the marginal likelihood (their equation 2.30), by L-BFGS and through a Cholesky
factor; mean and variance elsewhere are their algorithm 2.1. All of it is in f64.

    python examples/gaussian_process.py
"""

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


class GaussianProcess(nn.Module):
    """height² exp(-|a - b|² / (2 length²)), and noise² beside; the logarithms are parameters."""

    def __init__(self):
        self.log_length, self.log_height, self.log_noise = (
            ml.full((), start, dtype=ml.float64) for start in (0.0, 0.0, -1.0)
        )

    def kernel(self, a, b):
        """Return f64[n, m] of places f64[n] and f64[m]."""
        distance = (a[:, None] - b) / ml.exp(self.log_length)
        return ml.exp(2 * self.log_height - distance**2 / 2)

    def factor(self, x):
        """Return the lower Cholesky factor of what the values at x vary by, noise and all."""
        noise = ml.exp(2 * self.log_noise) * ml.eye(len(x), dtype=ml.float64)
        return ml.linalg.cholesky(self.kernel(x, x) + noise)

    def __call__(self, x, y, at):
        """Return mean and standard deviation of the function there, having seen y at x."""
        factor, across = self.factor(x), self.kernel(x, at)
        mean = across.T @ ml.linalg.cholesky_solve(factor, y)
        explained = ml.linalg.solve_triangular(factor, across, lower=True)
        variance = ml.exp(2 * self.log_height) - ml.sum(explained**2, axis=0)
        return mean, ml.sqrt(variance)


def loss_of(process, x, y):
    """Return -log p(y | x) for each point."""
    factor = process.factor(x)
    white = ml.linalg.solve_triangular(factor, y, lower=True)
    log_density = ml.sum(white**2) / 2 + ml.sum(ml.log(ml.diagonal(factor)))
    return log_density / len(x) + 0.5 * np.log(2 * np.pi)


def main(steps=60, points=40):
    rng = np.random.default_rng(0)
    x = ml.asarray(np.sort(rng.uniform(0, 10, points)))
    y = ml.sin(x) + ml.asarray(rng.normal(0, 0.1, points))
    process = GaussianProcess()
    optimizer = ml.optim.LBFGS(process, 0.5)

    @ml.capture
    def train_step(x, y):
        loss, gradients = ml.value_and_grad(loss_of)(process, x, y)
        optimizer.update(gradients)
        return loss

    losses = [float(train_step(x, y)) for _ in range(steps)]
    print(f"-log p(y) of a point: {losses[0]:.2f} -> {losses[-1]:.2f}")
    length, noise = float(ml.exp(process.log_length)), float(ml.exp(process.log_noise))
    print(f"length {length:.2f}, noise {noise:.3f}")
    at = ml.asarray(np.linspace(0, 12, 7))
    mean, deviation = process(x, y, at)
    for place, m, d in zip(at.numpy(), mean.numpy(), deviation.numpy(), strict=True):
        print(f"sin({place:4.1f}) = {np.sin(place):5.2f}, guessed {m:5.2f} ± {2 * d:.2f}")
    return process, losses, (x, y, at, mean, deviation)


if __name__ == "__main__":
    main()
