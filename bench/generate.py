"""Time of a token of a Llama with 100 million weights of few bits, beside llama.cpp.

`token_ms` is the time of one token behind those before it, at temperature 0: the median of a round.
Both read one file. llama.cpp quantises activations to eight bits, by groups of 32; here they stay
f32. So the tokens differ after a while, but the work for each is the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from bench.gguf_file import LlamaSize, llama, write
from bench.harness import Contender, Prepare, Round, Suite

SIZE: Final = LlamaSize(768, 12, 12, 12, 2048, 10_000)
SMALL: Final = LlamaSize(64, 2, 4, 2, 128, 300)
PROMPT: Final = [1, 260, 270]
LENGTH: Final = 60
"""How many tokens are one round."""
FORMATS: Final = ("Q4_0", "Q8_0")

Tokens = Iterator[int]
Generate = Callable[[], Tokens]
"""Begins anew: the tokens that follow the prompt, of which each is the likeliest."""


def preparing(make: Callable[[Path], Generate]) -> Prepare:
    """Return a `prepare` of each format, with `quick` of a small model."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        folder = tempfile.TemporaryDirectory()

        @cache
        def generate_of(form: str) -> Generate:
            file = Path(folder.name) / f"{form}.gguf"
            write(file, *llama(SMALL if quick else SIZE, form))
            generate = make(file)
            [*generate()]  # what is prepared at first
            return generate

        def timed(form: str) -> Mapping[str, float]:
            times = [time.perf_counter() for _ in generate_of(form)()]
            return {"token_ms": float(median(np.diff(times))) * 1e3}

        return {form: partial(timed, form) for form in FORMATS[: 1 if quick else None]}

    return prepare


def mlvm_generate(file: Path, threads: int) -> Generate:
    from bench.mlvm_training import vm_of
    from models.llama_text import LlamaText

    text = LlamaText(file, vm_of(threads))
    return lambda: text.generate(PROMPT, length=LENGTH, until_end=False)


def llama_cpp_generate(file: Path, threads: int) -> Generate:
    import llama_cpp

    model = llama_cpp.Llama(
        str(file), n_ctx=256, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate() -> Tokens:
        model.reset()
        tokens = PROMPT
        for _ in range(LENGTH):
            model.eval(tokens)
            logits = llama_cpp.llama_get_logits(model._ctx.ctx)
            tokens = [int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())]
            yield tokens[0]

    return generate


SUITE = Suite(
    module="bench.generate",
    contenders=(
        Contender("mlvm-1t", "mlvm", preparing(partial(mlvm_generate, threads=1))),
        Contender("llama.cpp-1t", "llama_cpp", preparing(partial(llama_cpp_generate, threads=1))),
    ),
    units={"token_ms": "ms"},
    ours=("mlvm-1t",),
    targets={("Q4_0", "token_ms", "mlvm-1t", "llama.cpp-1t"): 0.8},
    rounds=15,
    timeout=300,
    quick_rounds=1,
)
