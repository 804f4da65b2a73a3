"""A page that classifies a digit that is drawn on it, and learns from it: a training step in wasm.

    pip install ziglang
    python examples/embedded/page.py DIR            # writes DIR/page.html, a single file

The step is a Mixer's, trained here first: from an image, a label and a rate it returns what the
image is taken for, and changes the weights by gradient descent at that rate, which may be 0. It is
built as C for wasm32, with its weights, and lies in the page. The page asks no server for anything.
"""

from __future__ import annotations

import argparse
import base64
import subprocess
import sys
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from models.data import digits
from models.mlp_mixer import MlpMixer

HERE = Path(__file__).parent
BATCH = 32
STEPS = 600


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))

    data = digits.load()
    model = MlpMixer((8, 8, 1), 10, patch_size=2, hidden_dim=32, num_blocks=2, tokens_mlp_dim=16,
                     channels_mlp_dim=64, key=ml.random.key(0))  # fmt: skip
    optimizer = ml.optim.AdamW(model, 3e-3)
    by_gradient = ml.optim.SGD(model, 1.0)

    def loss_of(model: MlpMixer, images: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        return ml.softmax_cross_entropy(model(images), labels, reduction="mean")

    @ml.capture
    def train(images: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        loss, gradients = ml.value_and_grad(loss_of)(model, images, labels)
        optimizer.update(gradients)
        return loss

    @ml.capture
    def see(image: ml.Tensor, label: ml.Tensor, rate: ml.Tensor) -> ml.Tensor:
        def loss_and_logits(model: MlpMixer) -> tuple[ml.Tensor, ml.Tensor]:
            logits = model(image)
            return rate * ml.softmax_cross_entropy(logits, label, reduction="mean"), logits

        (_, logits), gradients = ml.value_and_grad(loss_and_logits, has_aux=True)(model)
        by_gradient.update(gradients)
        return ml.softmax(logits[0])

    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        images, labels = data.train[rng.integers(0, len(data.train), BATCH)]
        train(ml.asarray(images.astype(np.float32)), ml.asarray(labels.astype(np.int64)))
    images, labels = data.test[np.arange(len(data.test))]
    right = model(ml.asarray(images.astype(np.float32))).numpy().argmax(1) == labels
    print(f"right before it learns from you: {100 * right.mean():.1f} %")

    see(ml.zeros((1, 8, 8, 1)), ml.zeros((1,), dtype=ml.int64), ml.asarray(np.float32(0)))
    see.save(folder / "page.mlvm")
    built = folder / "page"
    build = ["build", str(folder / "page.mlvm"), "-o", str(built), "--target", "wasm32"]
    subprocess.run([sys.executable, "-m", "mlvm", *build, "--weights", "embed"], check=True)
    zig = [sys.executable, "-m", "ziglang"]
    subprocess.run(["make", "-C", built, f"ZIG={' '.join(zig)}", "libstep.a"], check=True)
    linked: list[str | Path] = ["-O2", "-mexec-model=reactor", "-s", "-I", built, HERE / "page.c"]
    linked += [built / "libstep.a", "-o", folder / "page.wasm"]
    subprocess.run([*zig, "cc", "-target", "wasm32-wasi", *linked], check=True)
    code = base64.b64encode((folder / "page.wasm").read_bytes()).decode()
    text = (HERE / "page.html").read_text().replace("@WASM@", code)
    (folder / "page.html").write_text(text)
    print(f"{folder / 'page.html'}: {len(text)} bytes")


main()
