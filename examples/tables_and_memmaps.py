"""Data as it comes: a table of pandas, and an array on disk that may be larger than memory.

A Pipeline takes both as they are, and makes batches ahead. Their f64 becomes f32, as the weights
are. Without pandas a dict of columns does as well.

    python examples/tables_and_memmaps.py
"""

import tempfile
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn

NUMBERS = ["rooms", "area", "age"]


def houses(n):
    """Return a table of prices of houses in four quarters: a frame, or a dict of its columns."""
    rng = np.random.default_rng(0)
    columns = {
        "rooms": rng.integers(1, 8, n),
        "area": rng.uniform(30, 200, n),
        "age": rng.uniform(0, 100, n),
        "quarter": rng.integers(0, 4, n),
    }
    worth = np.array([1.0, 1.3, 0.8, 2.0])[columns["quarter"]]
    columns["price"] = worth * columns["area"] * 3 + 20 * columns["rooms"] - columns["age"]
    try:
        import pandas
    except ImportError:
        return columns
    return pandas.DataFrame(columns)


class Prices(nn.Module):
    """Numbers f[batch, 3] and quarters i64[batch] -> prices f[batch], in hundreds."""

    def __init__(self, mean, deviation):
        self.mean, self.deviation = nn.buffer(ml.asarray(mean)), nn.buffer(ml.asarray(deviation))
        self.quarters = nn.Embedding(4, 4)
        self.net = nn.Sequential(nn.Linear(7, 32), ml.gelu, nn.Linear(32, 1))

    def __call__(self, numbers, quarter):
        x = (numbers - self.mean) / self.deviation
        return self.net(ml.concat([x, self.quarters(quarter)], axis=1))[:, 0]


def train_on_table(steps):
    """Return losses of guessing prices."""
    table = houses(2000)
    numbers = np.stack([table[name] for name in NUMBERS], axis=1)
    mean, deviation = numbers.mean(axis=0), numbers.std(axis=0)
    model = Prices(mean.astype(np.float32), deviation.astype(np.float32))
    optimizer = ml.optim.AdamW(model, ml.optim.cosine(1e-2, total_steps=steps))

    def loss_of(model, batch):
        return ml.mean_squared_error(model(batch.numbers, batch.quarter), batch.price / 100)

    @ml.capture
    def train_step(batch):
        loss, gradients = ml.value_and_grad(loss_of)(model, batch)
        optimizer.update(gradients)
        return loss

    columns = {"numbers": numbers, "quarter": table["quarter"], "price": table["price"]}
    with ml.Pipeline(columns, 64, shuffle=True, drop_last=True) as batches:
        losses = [float(train_step(batches.get())) for _ in range(steps)]
    print(f"{type(table).__name__}: loss {losses[0]:.2f} -> {losses[-1]:.3f}")
    return losses


def mean_of_memmap(file, rows):
    """Return the mean of the columns of an array that is mapped, not read: a batch at a time."""
    written = np.lib.format.open_memmap(file, mode="w+", dtype=np.float64, shape=(rows, 16))
    written[:] = np.arange(16) + np.random.default_rng(0).normal(size=(rows, 16))
    written.flush()
    mapped = np.load(file, mmap_mode="r")
    total = ml.zeros(16)
    with ml.Pipeline(mapped, 256, workers=2) as batches:
        for (x,) in batches:  # one epoch
            total += ml.sum(x, axis=0)
    mean = total / len(mapped)
    print(f"{file.stat().st_size:,} bytes mapped, read by 2 threads; mean {mean.numpy().round(1)}")
    return mean.numpy(), np.mean(mapped, axis=0)


def main(steps=300, rows=20_000):
    ml.random.seed(0)
    losses = train_on_table(steps)
    with tempfile.TemporaryDirectory() as folder:
        means = mean_of_memmap(Path(folder) / "large.npy", rows)
    return losses, means


if __name__ == "__main__":
    main()
