"""Weights that PyTorch has saved, in a model that is written here.

A safetensors file has tensors by name. The names differ, and so does the order of axes: PyTorch has
channels first, and a Linear's weight is [out, in] (docs/layers.md has the table). A name or a shape
that does not fit is an error before anything is written.

    python examples/foreign_weights.py [FILE, of `save_file(model.state_dict(), FILE)` in PyTorch]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


class Classifier(nn.Module):
    """Images f[batch, 8, 8, 1] -> logits f[batch, 10]. In PyTorch:

    Sequential(Conv2d(1, 4, 3, padding=1), BatchNorm2d(4), ReLU(), MaxPool2d(2), Flatten(),
               Linear(64, 10))
    """

    def __init__(self):
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm(4)
        self.head = nn.Linear(64, 10)

    def __call__(self, images):
        x = ml.max_pool2d(ml.relu(self.norm(self.conv(images))), 2)
        x = ml.moveaxis(x, -1, 1)  # what PyTorch flattens has channels first
        return self.head(ml.reshape(x, (len(x), -1)))


def from_pytorch(theirs):
    """Return the state for `load_state` from tensors by PyTorch's names."""
    return {
        "conv/kernel": ml.permute_dims(theirs["0.weight"], (2, 3, 1, 0)),
        "conv/bias": theirs["0.bias"],
        "norm/scale": theirs["1.weight"],
        "norm/bias": theirs["1.bias"],
        "norm/mean": theirs["1.running_mean"],
        "norm/var": theirs["1.running_var"],
        "head/kernel": theirs["5.weight"].T,
        "head/bias": theirs["5.bias"],
    }


def write_example(file):
    """Write a file as PyTorch would, with untrained weights of that model."""
    rng = np.random.default_rng(0)
    shapes = {
        "0.weight": (4, 1, 3, 3),
        "0.bias": (4,),
        "1.weight": (4,),
        "1.bias": (4,),
        "1.running_mean": (4,),
        "1.running_var": (4,),
        "5.weight": (10, 64),
        "5.bias": (10,),
    }
    theirs = {name: rng.uniform(0.1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    theirs["1.num_batches_tracked"] = np.array(0)
    ml.save(file, theirs)


def main(file=None, out=None):
    with tempfile.TemporaryDirectory() as folder:
        if file is None:
            file = Path(folder) / "pytorch.safetensors"
            write_example(file)
        theirs = ml.load(file)
        print(*(f"{name}: {x.type}" for name, x in theirs.items()), sep="\n")
        model = Classifier()
        model.load_state(from_pytorch(theirs))
        model.eval()  # the running mean and variance are used, and stay
        x = ml.random.normal((2, 8, 8, 1), key=ml.random.key(0))
        logits = model(x)
        print("logits", logits.numpy().round(2))
        out = out or Path(folder) / "mine.safetensors"
        ml.save(out, model)  # and PyTorch reads this: safetensors.torch.load_file
        again = Classifier()
        ml.load(out, into=again)
        again.eval()
        print("saved and loaded, the same logits:", bool(ml.all(again(x) == logits)))
    return theirs, x, logits


if __name__ == "__main__":
    main(*sys.argv[1:])
