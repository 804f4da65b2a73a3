"""A diffusion model that draws handwritten digits: a small UNet learns the noise in an image.

Ho et al., Denoising Diffusion Probabilistic Models, arXiv 2006.11239. Given noisy images and how
noisy they are, the net guesses the noise (their algorithm 1). Images are drawn by taking a little
of it away many times (algorithm 2), in a loop that is one program, with an average of the weights.

    python examples/diffusion.py
"""

from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn

T = 100  # steps from an image to noise
BETA = np.linspace(1e-3, 0.12, T, dtype=np.float32)  # variance of the noise added in each
ALPHA = np.cumprod(1 - BETA)  # the share of the image that is left


class Block(nn.Module):
    """Two convolutions with a way past them, told the time f[batch, time_dim]."""

    def __init__(self, inputs, outputs, time_dim):
        self.norm = [nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)]
        self.conv = [nn.Conv2d(inputs, outputs, 3), nn.Conv2d(outputs, outputs, 3)]
        self.time = nn.Linear(time_dim, outputs)
        self.past = nn.Linear(inputs, outputs)

    def __call__(self, x, time):
        h = self.conv[0](ml.silu(self.norm[0](x))) + self.time(time)[:, None, None]
        return self.past(x) + self.conv[1](ml.silu(self.norm[1](h)))


class UNet(nn.Module):
    """Images f[batch, 8, 8, 1] and times i64[batch] -> the noise in them, f[batch, 8, 8, 1]."""

    def __init__(self, width=16, time_dim=32):
        self.time_dim = time_dim
        self.time = nn.Sequential(nn.Linear(time_dim, time_dim), ml.silu)
        self.stem = nn.Conv2d(1, width, 3)
        self.down = Block(width, width, time_dim)
        self.middle = Block(width, 2 * width, time_dim)
        self.up = Block(3 * width, width, time_dim)
        self.head = nn.Conv2d(width, 1, 3, kernel_init=nn.init.zeros)

    def __call__(self, x, t):
        time = self.time(ml.sinusoidal_encoding(t, self.time_dim))
        wide = self.down(self.stem(x), time)
        deep = self.middle(ml.avg_pool2d(wide, 2), time)
        both = ml.concat([wide, ml.interpolate(deep, scale=2)], axis=-1)
        return self.head(ml.silu(self.up(both, time)))


def loss_of(model, x):
    """Return the mean squared error of the predicted noise, at random times."""
    t, noise = ml.random.randint(len(x), low=0, high=T), ml.random.normal(x.shape)
    signal = ml.asarray(ALPHA)[t][:, None, None, None]
    noisy = ml.sqrt(signal) * x + ml.sqrt(1 - signal) * noise
    return ml.mean_squared_error(model(noisy, t), noise)


@ml.capture
def draw(model, x):
    """Return images f[batch, 8, 8, 1], denoised step by step from x."""

    def denoise(i, x):
        t = T - 1 - i
        beta, signal = ml.asarray(BETA)[t], ml.asarray(ALPHA)[t]
        guess = model(x, ml.repeat(t[None], len(x)))
        mean = (x - beta / ml.sqrt(1 - signal) * guess) / ml.sqrt(1 - beta)
        return mean + ml.where(t > 0, ml.sqrt(beta), 0.0) * ml.random.normal(x.shape)

    return ml.fori_loop(0, T, denoise, x)


def main(steps=600, batch=64):
    ml.random.seed(0)
    with np.load(Path(__file__).parents[1] / "models" / "data" / "digits.npz") as file:
        images = file["images"][..., None] / 8 - 1  # from -1 to 1
    model = UNet()
    optimizer = ml.optim.Adam(model, ml.optim.warmup(ml.optim.constant(2e-3), steps // 20))
    average = ml.optim.EMA(model, 0.99)

    @ml.capture
    def train_step(x):
        loss, gradients = ml.value_and_grad(loss_of)(model, x)
        optimizer.update(gradients)
        average.update()
        return loss

    batches = ml.Pipeline(images, batch, shuffle=True, drop_last=True)
    losses = [float(train_step(*batches.get())) for _ in range(steps)]
    print(f"loss {losses[0]:.2f} -> {np.mean(losses[-50:]):.2f}; without a guess it is 1")
    with average.swapped():
        drawn = draw(model, ml.random.normal((8, 8, 8, 1))).numpy()[..., 0]
    for rows in np.digitize(drawn, [-0.6, 0.0, 0.6]).swapaxes(0, 1):
        print("  ".join("".join(" .+#"[level] * 2 for level in row) for row in rows))
    return losses, images[..., 0], drawn


if __name__ == "__main__":
    main()
