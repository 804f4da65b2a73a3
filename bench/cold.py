"""The time from a fresh process to the first loss, and to the first result of a second shape.

Each round starts new processes. `import_ms` is the processor time of one that only imports the
library. `first_ms` is the time to the first result: weights, trace, compilation and one run.
`second_ms` is the same for other sizes in that process: one more sample, or one word less.
`again_ms` is a call that repeats them, `whole_ms` the time of the process from start to end.

`mixer` and `gpt` are training steps, `bert` a forward pass, `loop` the gradient of a scan of 1,000
iterations, `onnx` a forward pass of a Mixer from an ONNX file.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench import dynamic, mixer
from bench.dynamic_sizes import CASES as FAMILIES
from bench.dynamic_sizes import BertSize, TransformerSize
from bench.dynamic_sizes import Size as Family
from bench.harness import ROOT, Contender, Contest, Prepare, Round, Suite, microseconds
from bench.sizes import MIXERS, MixerSize, batch_of


class Loop(NamedTuple):
    """A vector of `width` numbers that a scan of `iterations` changes; the result is a gradient."""

    width: int
    iterations: int


class OnnxFile(NamedTuple):
    """A Mixer's forward pass on `batch` images, from a file."""

    batch: int
    path: str


Size = MixerSize | Family | Loop | OnnxFile
Run = Callable[[], object]

BERT: Final = FAMILIES["bert"]
GPT: Final = FAMILIES["transformer training"]


def sizes(case: str) -> tuple[Size, Size]:
    """Return the sizes of the first result and of the second; those of `onnx` stand in its
    files."""
    assert isinstance(BERT, BertSize)
    assert isinstance(GPT, TransformerSize)
    pairs: dict[str, tuple[Size, Size]] = {
        "mixer": (MIXERS["cifar"], MIXERS["cifar"]._replace(batch=65)),
        "gpt": (GPT, GPT._replace(batch=17)),
        "bert": (BERT._replace(layers=4, lengths=(8,)), BERT._replace(layers=4, lengths=(7,))),
        "loop": (Loop(64, 1000), Loop(65, 1000)),
    }
    return pairs[case]


ONNX_BATCHES: Final = (8, 9)
CASES: Final = ("mixer", "gpt", "bert", "loop", "onnx")
QUICK: Final = ("loop",)


# --- what each library runs ------------------------------------------------------------


def mlvm(size: Size) -> Run:
    match size:
        case MixerSize():
            return mixer.mlvm_replay(size)
        case Loop():
            import mlvm.eager as ml

            def loss(x: Any) -> Any:
                state, _ = ml.scan(lambda s, _: (ml.sin(s) * 1.01, None), x, None, size.iterations)
                return ml.sum(state)

            step, x = ml.capture(ml.grad(loss)), ml.ones(size.width)
            return lambda: step(x).numpy()
        case OnnxFile():
            from bench.onnx import ours

            return ours(size.path, {"images": _images(size)}, 1)
        case _:
            return dynamic.mlvm(size, greedy=False, captured=True)


def torch(size: Size, *, compiled: bool = False) -> Run:
    match size:
        case MixerSize():
            from bench.torch_training import model_of, training

            return training(size, model_of(size), compiled=compiled)
        case Loop():
            import torch

            def gradient() -> object:
                x = torch.ones(size.width, requires_grad=True)
                state = x
                for _ in range(size.iterations):
                    state = torch.sin(state) * 1.01
                state.sum().backward()
                return x.grad

            return gradient
        case _:
            return dynamic.torch(size, greedy=False, compiled=compiled)  # type: ignore[arg-type]


def jax(size: Size) -> Run:
    match size:
        case MixerSize():
            return mixer.jax_jit(size)
        case Loop():
            import jax
            import jax.numpy as jnp

            def loss(x: Any) -> Any:
                body = lambda s, _: (jnp.sin(s) * 1.01, None)  # noqa: E731
                return jax.lax.scan(body, x, None, size.iterations)[0].sum()

            step, x = jax.jit(jax.grad(loss)), jnp.ones(size.width)
            return lambda: step(x).block_until_ready()
        case _:
            return dynamic.jax(size, greedy=False)  # type: ignore[arg-type]


def onnxruntime(size: Size) -> Run:
    from bench.onnx import onnxruntime

    assert isinstance(size, OnnxFile)
    return onnxruntime(size.path, {"images": _images(size)}, 1)


class Library(NamedTuple):
    """A contender: its package, the function that builds a call, the cases that it takes."""

    package: str
    make: Callable[[Any], Run]
    cases: tuple[str, ...] = CASES


LIBRARIES: Final = {
    "mlvm": Library("mlvm.eager", mlvm),
    "torch-eager": Library("torch", torch, CASES[:-1]),
    "torch-compiled": Library("torch", partial(torch, compiled=True), CASES[:-2]),
    "jax": Library("jax", jax, CASES[:-1]),
    "onnxruntime": Library("onnxruntime", onnxruntime, CASES[-1:]),
}


# --- a round ---------------------------------------------------------------------------


def preparing(library: str) -> Prepare:
    """Return a `prepare` whose rounds start processes of a library."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        cases = [c for c in LIBRARIES[library].cases if not quick or c in QUICK]
        return {case: partial(timed, case) for case in cases}

    def timed(case: str) -> Mapping[str, float]:
        command = [sys.executable, "-m", "bench.cold", library, case, *_files(case)]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, check=True)
        whole = (time.perf_counter() - start) * 1e3
        metrics: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return {"import_ms": import_ms(), **metrics, "whole_ms": whole}

    def import_ms() -> float:
        code = "import time, {0}; print(time.process_time() * 1e3)"
        command = [sys.executable, "-c", code.format(LIBRARIES[library].package)]
        done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, check=True)
        return float(done.stdout)

    return prepare


def main(library: str, case: str, *files: str) -> None:
    """Time the first results of one case in this process; print the metrics as JSON."""
    package, make, _ = LIBRARIES[library]
    importlib.import_module(package)
    metrics = {}
    runs: list[Run] = []
    pair = tuple(map(OnnxFile, ONNX_BATCHES, files)) if files else sizes(case)

    def build(size: Size) -> None:
        runs.append(make(size))
        runs[-1]()

    for name, size in zip(("first_ms", "second_ms"), pair, strict=True):
        metrics[name] = microseconds(lambda: build(size)) / 1e3  # noqa: B023
    metrics["again_ms"] = microseconds(runs[-1]) / 1e3
    print(json.dumps(metrics))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that lives as long as this process."""
    return tempfile.TemporaryDirectory()


@cache
def _files(case: str) -> list[str]:
    """Return the ONNX files of a case: written once, in a process that saves them."""
    if case != "onnx":
        return []
    files = [str(Path(_folder().name) / f"{batch}.onnx") for batch in ONNX_BATCHES]
    code = "import sys; from bench.cold import write_files; write_files(sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, *files], cwd=ROOT, env=os.environ, check=True)
    return files


def write_files(files: list[str]) -> None:
    """Save the Mixer of the case `onnx` for each of its batches."""
    import mlvm.eager as ml
    from bench.mlvm_training import model_of

    model = model_of(MIXERS["cifar"])
    model.eval()
    for size in map(OnnxFile, ONNX_BATCHES, files):
        ml.onnx.save(lambda images: model(images), (_images(size),), size.path)


def _images(size: OnnxFile) -> np.ndarray[Any, Any]:
    return batch_of(MIXERS["cifar"]._replace(batch=size.batch))[0]


PEERS: Final = ("torch-eager", "torch-compiled", "jax", "onnxruntime")
SUITE: Final = Suite(
    module="bench.cold",
    contenders=tuple(
        Contender(name, library.package.partition(".")[0], preparing(name))
        for name, library in LIBRARIES.items()
    ),
    units=dict.fromkeys(("import_ms", "first_ms", "second_ms", "again_ms", "whole_ms"), "ms"),
    targets={
        (case, metric, "mlvm", peer): target
        for peer, target, cases in (
            ("jax", 4.0, CASES[:-1]),
            ("torch-compiled", 20.0, CASES[:-2]),
            ("onnxruntime", 1 / 1.2, CASES[-1:]),
        )
        for case in cases
        for metric in ("first_ms", "second_ms")
    },
    limits={(case, "import_ms", "mlvm"): 250.0 for case in CASES},
    contests=(Contest("fresh process", "whole_ms", ("mlvm",), PEERS),),
    rounds=5,
    warm_up_rounds=1,
    quick_rounds=1,
    timeout=600,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
