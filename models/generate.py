"""Continue a text with a trained transformer: `python -m models.generate --help`.

For a transformer of `models.train`, one launch of a program with a loop generates all bytes. A
Llama from a GGUF file (`--weights`) generates one token per launch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.machines.terminal import CommandParser, OptionError, escaped, say
from models.data.text import LENGTH, NUM_BYTES
from models.llama_text import LlamaText
from models.training import checkpoint
from models.training.checkpoint import CheckpointError
from models.transformer import Transformer, generate

NO_END: Final = -1  # not a byte


class Generator:
    """A transformer of bytes, with weights from a checkpoint of `python -m models.train`.

    Raises `CheckpointError` for a file of a different model, `OSError` for a file that cannot be
    read.
    """

    def __init__(self, file: Path) -> None:
        tensors, metadata = checkpoint.load(file)
        try:
            model = json.loads(metadata[checkpoint.TRAINING])["model"]
        except (KeyError, ValueError, TypeError, RecursionError):
            raise CheckpointError(f"{file} was not written by models.train") from None
        if model != "transformer":
            raise CheckpointError(f"{file} contains a {model}; expected a transformer")
        self.vm = ml.VM("generate")
        self.weights, self.batch = ml.Arena(self.vm, "weights"), ml.Arena(self.vm, "batch")
        with self.weights.allocating():
            self.model = Transformer(NUM_BYTES, LENGTH, key=ml.random.key(0))
        own = {
            name.removeprefix("model/"): array
            for name, array in tensors.items()
            if name.startswith("model/")
        }
        try:
            self.model.load_state(own)
        except ml.errors.MlvmError as error:
            raise CheckpointError(f"{file} contains a different transformer: {error}") from None
        self.generate = ml.capture(self._generate)

    def _generate(
        self,
        prompt: Tensor,
        prompt_length: Tensor,
        key: Tensor,
        temperature: Tensor,
        end: Tensor,
        top_k: int | None,
    ) -> tuple[Tensor, Tensor]:
        return generate(
            self.model, prompt, prompt_length, key, temperature=temperature, end=end, top_k=top_k
        )

    def __call__(
        self,
        prompt: bytes,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        end: bytes | None = None,
    ) -> bytes:
        """Continue a prompt up to and including the byte `end`, or to the model's length.

        Return the prompt and the continuation. The same arguments generate the same bytes.

        Raises `OptionError` for an empty prompt, for a prompt that fills the model's length, and
        for other options that are out of range.
        """
        if not 0 < len(prompt) < self.model.length:
            raise OptionError(f"a prompt has 1 to {self.model.length - 1} bytes, got {len(prompt)}")
        if not 0 < temperature < math.inf:
            raise OptionError(f"temperature must be positive, got {temperature}")
        if top_k is not None and not 1 <= top_k <= NUM_BYTES:
            raise OptionError(f"top_k must be 1 .. {NUM_BYTES}, got {top_k}")
        if end is not None and len(end) != 1:
            raise OptionError(f"end must be a single byte, got {end!r}")
        if not 0 <= seed < 2**64:
            raise OptionError(f"seed must be in 0 .. 2**64 - 1, got {seed}")
        padded = np.zeros(self.model.length, np.int64)
        padded[: len(prompt)] = list(prompt)
        with self.batch:
            tokens, count = self.generate(
                ml.asarray(padded),
                ml.asarray(len(prompt)),
                ml.random.key(seed),
                ml.asarray(np.float32(temperature)),
                ml.asarray(NO_END if end is None else end[0]),
                top_k,
            )
            return bytes(tokens.numpy()[: int(count)].astype(np.uint8))


def parser() -> CommandParser:
    """Return the parser of the command."""
    prog = "python -m models.generate"
    command = CommandParser(_run, prog=prog, argument_default=argparse.SUPPRESS)
    add = command.add_argument
    add(
        "file",
        type=Path,
        nargs="?",
        default=None,
        metavar="FILE",
        help="file written by models.train --save",
    )
    add("--weights", type=Path, metavar="FILE.gguf", help="use a Llama from a GGUF file instead")
    add("--length", type=int, metavar="N", help="maximum number of tokens from a Llama")
    add("--prompt", default="def ", metavar="TEXT", help="text to continue")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="values below 1 favour likely tokens; 0 (Llama): always the most likely token",
    )
    add("--top-k", type=int, metavar="N", help="draw only from the N most likely tokens")
    add("--end", metavar="C", help="stop after this character")
    add("--seed", type=int, default=0, metavar="N", help="seed of the random draws")
    return command


def _run_llama(file: Path, prompt: str, *, seed: int, temperature: float, **options: int) -> None:
    text = LlamaText(file)
    times: list[float] = []
    for piece in text.text(prompt, seed=seed, temperature=temperature, **options):
        times.append(time.perf_counter())
        print(escaped_but_lines(piece), end="", flush=True)
    print()
    rest = len(times) - 2  # exclude the first token, which includes the trace, and the end token
    rate = f"; {rest / (times[-2] - times[0]):.1f} a second" if rest > 0 else ""
    say(f"{len(times) - 1} tokens{rate}")


def escaped_but_lines(text: str) -> str:
    """Escape control characters for a terminal, except newlines and tabs."""
    return "\n".join("\t".join(map(escaped, line.split("\t"))) for line in text.split("\n"))


def _run(arguments: argparse.Namespace) -> None:
    """Continue a text with a trained transformer.

    Example:
        python -m models.generate gpt.safetensors --prompt "def main("
    """
    options = vars(arguments)
    file = options.pop("file")
    if (file is None) == ("weights" not in options):
        raise OptionError("expected a FILE written by models.train, or --weights FILE.gguf")
    if "weights" in options:
        if "end" in options:
            raise OptionError("--end requires a FILE; a Llama stops at its end token")
        _run_llama(options.pop("weights"), options.pop("prompt"), **options)
        return
    if "length" in options:
        raise OptionError("--length is only for --weights")
    prompt = options.pop("prompt").encode()
    if "end" in options:
        options["end"] = options["end"].encode()
    generator = Generator(file)
    text = generator(prompt, **options)
    began = time.perf_counter()
    text = generator(prompt, **options)  # exclude the time of the trace
    seconds = time.perf_counter() - began
    print(text.decode(errors="replace"))
    count = len(text) - len(prompt)
    say(f"{count} bytes; {count / seconds:.0f} a second")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `CommandParser.run`."""
    return parser().run(arguments)


if __name__ == "__main__":
    sys.exit(main())
