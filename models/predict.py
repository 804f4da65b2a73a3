"""Classify images with published or trained weights.

See `python -m models.predict --help`.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.machines.files import require_suffix, require_writable, write_file
from mlvm.machines.terminal import CommandParser, OptionError, escaped, say
from mlvm.show.svg import document, fitted, text
from models import weights
from models.data.files import parsing
from models.data.folder import FORMATS, pillow_image, pixels
from models.weights import Pretrained

_GELUS: Final = {"tanh": True, "exact": False}
_COLUMNS: Final = 40  # columns of a picture on a terminal
_SIZE, _BOLD = 14, 16  # font size, and the font size that has the width of bold letters
_STYLE: Final = " text { fill: #222 } .right { text-anchor: end }"


class Guess(NamedTuple):
    """Class and probability, 0 to 1."""

    name: str
    probability: float


class Classifier:
    """Image classifier: a model with given weights that reads image files.

    `classes` are the names of the classes, by default the names in the weights, or numbers. An
    image is scaled and cropped to the model's size. The brightness x from 0 to 1 becomes (x - mean)
    / std, with a single number or a number for each channel.

    Raises `OptionError` for a wrong number of classes, means or deviations. Raises `WeightsError`
    as `weights.Pretrained.build` does, and if the weights compute NaN.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        classes: Sequence[str] | None = None,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
    ) -> None:
        channels = pretrained.image_shape[2]
        if channels not in (1, 3):
            raise OptionError(f"{pretrained.file} needs {channels} channels; expected 1 or 3")
        if len(mean) not in (1, channels) or len(std) not in (1, channels) or 0 in std:
            raise OptionError(f"expected 1 or {channels} numbers as mean and std, std not 0")
        if not np.isfinite([*mean, *std]).all():
            raise OptionError("mean and std must be finite numbers")
        count = pretrained.num_classes
        if classes is not None and len(classes) != count:
            raise OptionError(f"expected {count} names of classes, got {len(classes)}")
        self.classes = classes or pretrained.classes or [str(i) for i in range(count)]
        self.file, self.image_shape = pretrained.file, pretrained.image_shape
        self._mean, self._std = (np.array(x, np.float32) for x in (mean, std))
        self.vm = ml.VM("predict")
        self.weights, self.batch = ml.Arena(self.vm, "weights"), ml.Arena(self.vm, "batch")
        with self.weights.allocating():
            self.model = pretrained.build(key=ml.random.key(0)).eval()
        self.probabilities = ml.capture(self._probabilities)

    def _probabilities(self, images: Tensor) -> Tensor:
        return ml.softmax(self.model(images), axis=-1)

    def __call__(self, image: NDArray[np.uint8], top: int) -> list[Guess]:
        """Return at most `top` classes of u8[H,W,C], the most likely first.

        The image must have the model's size.
        """
        scaled = (image / np.float32(255) - self._mean) / self._std
        with self.batch:
            probabilities = self.probabilities(ml.asarray(scaled[None].astype(np.float32))).numpy()[
                0
            ]
        if not np.isfinite(probabilities).all():
            raise ml.errors.WeightsError(
                f"{self.file} computes NaN: it contains NaN or numbers that are too large"
            )
        best = np.argsort(-probabilities, kind="stable")[:top]
        return [Guess(self.classes[i], float(probabilities[i])) for i in best]


def read_classes(file: Path) -> list[str]:
    """Read the names of classes, one name per line, in UTF-8.

    Raises `DataError` for a file that cannot be read or is not text.
    """
    with parsing(file) as stream:
        lines = stream.read().decode("utf-8-sig").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


# --- pictures ------------------------------------------------------------------------


def on_terminal(image: NDArray[np.uint8]) -> str:
    """Draw u8[2 n, m, 3] as n lines of m half blocks, each with an upper and a lower pixel."""
    lines = []
    for upper, lower in zip(image[::2].tolist(), image[1::2].tolist(), strict=True):
        blocks = [
            f"\x1b[38;2;{r};{g};{b}m\x1b[48;2;{x};{y};{z}m▀"
            for (r, g, b), (x, y, z) in zip(upper, lower, strict=True)
        ]
        lines.append("".join(blocks) + "\x1b[0m")
    return "\n".join(lines)


def drawn(rows: Sequence[tuple[str, NDArray[np.uint8], Sequence[Guess]]]) -> str:
    """Return an SVG picture with a row for each image.

    A row contains the image, and a bar for each class.
    """
    side, bar, line = 160, 26, 32
    height = max(side + 40, 60 + line * max(len(guesses) for _, _, guesses in rows))
    parts = [f'<rect width="720" height="{height * len(rows)}" fill="white"/>']
    for i, (name, image, guesses) in enumerate(rows):
        top = i * height
        content = io.BytesIO()
        pillow_image().fromarray(image[..., 0] if image.shape[2] == 1 else image).save(
            content, "PNG"
        )
        png = base64.b64encode(content.getvalue()).decode()
        parts.append(
            f'<image x="20" y="{top + 20}" width="{side}" height="{side}" '
            f'href="data:image/png;base64,{png}"/>'
        )
        end = fitted(escaped(name)[::-1], 500, _BOLD)[
            ::-1
        ]  # the end of a path is more informative than the beginning
        parts.append(text(200, top + 36, end, attributes='font-weight="bold"'))
        for j, guess in enumerate(guesses):
            y = top + 52 + line * j
            parts.append(
                f'<rect x="200" y="{y}" width="{1 + 420 * guess.probability:.1f}" '
                f'height="{bar}" fill="#9dbfdc"/>'
            )
            parts.append(text(208, y + 18, fitted(escaped(guess.name), 410, _SIZE)))
            parts.append(text(700, y + 18, f"{100 * guess.probability:.2f} %", "right"))
    style = f"svg {{ font: {_SIZE}px sans-serif }}" + _STYLE
    return document(720, height * len(rows), style, *parts)


# --- the command ---------------------------------------------------------------------


def parser() -> CommandParser:
    """Return the parser of the command."""
    command = CommandParser(_run, prog="python -m models.predict")
    add = command.add_argument
    add(
        "weights",
        type=Path,
        metavar="WEIGHTS",
        help="google-research's .npz, timm's safetensors, or a file of models.train --save",
    )
    add("images", type=Path, metavar="IMAGE", nargs="+", help=", ".join(FORMATS))
    add("--classes", type=Path, metavar="FILE", help="class names, one per line (default: numbers)")
    add("--top", type=int, default=5, metavar="N", help="number of classes")
    add(
        "--picture",
        action=argparse.BooleanOptionalAction,
        default=sys.stdout is not None and sys.stdout.isatty(),
        help="draw each image in coloured blocks (default: if the output is a terminal)",
    )
    add("--plot", type=Path, metavar="FILE", help="draw images and classes to this SVG file")
    add("--gelu", choices=_GELUS, help="default: exact in timm's layout, otherwise tanh")
    add("--heads", type=int, metavar="N", help="of a ViT in timm's layout (default: by its width)")
    add(
        "--size",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="image size of the weights (default: from the file, or square)",
    )
    for name, what in (("mean", "subtracted from brightness 0 .. 1"), ("std", "divisor")):
        add(
            f"--{name}",
            type=float,
            nargs="+",
            default=[0.5],
            metavar="X",
            help=f"{what}, one number or one per channel (default: 0.5)",
        )
    return command


def _run(options: argparse.Namespace) -> None:
    """Classify images with the weights of an MLP-Mixer or a Vision Transformer.

    Example:
        python -m models.predict mixer.safetensors photo.png --top 3
    """
    if options.top < 1 or (options.heads is not None and options.heads < 1):
        raise OptionError("--top and --heads must be >= 1")
    approximate = None if options.gelu is None else _GELUS[options.gelu]
    if options.plot is not None:
        require_suffix(options.plot, ".svg", "--plot")
        require_writable(options.plot)
    pretrained = weights.read(
        options.weights,
        num_heads=options.heads,
        approximate=approximate,
        image_size=options.size,
    )
    say(f"{options.weights}: {pretrained}")
    classes = None if options.classes is None else read_classes(options.classes)
    classifier = Classifier(pretrained, classes=classes, mean=options.mean, std=options.std)
    rows: list[tuple[str, Any, list[Guess]]] = []
    for file in options.images:
        image = pixels(file, classifier.image_shape)
        guesses = classifier(image, options.top)
        print(escaped(str(file)))
        if options.picture:
            height, width, _ = classifier.image_shape
            lines = max(1, _COLUMNS * height // width // 2)
            print(on_terminal(pixels(file, (2 * lines, _COLUMNS, 3))))
        for guess in guesses:
            print(f"{100 * guess.probability:7.2f} %  {escaped(guess.name)}", flush=True)
        rows.append((str(file), image, guesses))
    if options.plot is not None:
        write_file(options.plot, drawn(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `CommandParser.run`."""
    return parser().run(arguments)


if __name__ == "__main__":
    sys.exit(main())
