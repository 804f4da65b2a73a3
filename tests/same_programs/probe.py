"""`python probe.py FOLDER PART...`: write what a checkout of mlvm makes of each part to the folder.

The checkout is the one whose `mlvm` and `models` Python finds; nothing else of this one is used but
`world.py`, which lies beside the programs. A part is `models:NAME`, `example:FILE` or the file of a
fuzzed program. Files in the folder begin with the part's name:

    .eager      a line for each launch: the program by its digest, and which operands are one tensor
    .MODE.N     a captured step as `Captured.save` writes it, after the call that recorded it
    .MODE       the launches of captured calls, their plans, and what could not be saved
    .results    what each run returns and leaves, by digest
    .printed    what an example prints, and the files that it writes, by digest
    .STEP       a step that an example saves

Digests name files in `programs/`. Cycles of references are freed between parts only: they may keep
views of a tensor, and an update copies such a tensor, so its launch depends on the collector.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import io
import itertools
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final

import numpy as np
from world import World, walked  # type: ignore[import-not-found]

import mlvm
import mlvm.eager as ml

MODES: Final = {
    f"fuse={fuse},recompute={recompute}": {"fuse": fuse, "recompute": recompute}
    for fuse in (True, False)
    for recompute in (True, False)
}

OUT: Final = Path(sys.argv[1])


def lookup(name: str, home: str) -> Any:
    """The public function of that name: where it is at home, or wherever it has moved."""
    others = (each.name for each in pkgutil.walk_packages(mlvm.__path__, "mlvm."))
    for module in itertools.chain([home], others):
        try:
            value = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if getattr(value, "__module__", None) == module:
            return value
    sys.exit(f"mlvm has no {name}")


observed = lookup("observed", "mlvm.core.observe")


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def saved(program: Any) -> str:
    """The digest of a program, which is written down."""
    data = program.to_bytes()
    digest = digest_of(data)
    (OUT / "programs" / digest).write_bytes(data)
    return digest


class Probe:
    """Writes down what one part does."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.results: list[str] = []
        self.lines: list[str] = []

    def write(self, kind: str, data: str | bytes) -> None:
        data = data.encode() if isinstance(data, str) else data
        (OUT / f"{self.part}.{kind}").write_bytes(data)

    @contextmanager
    def launches(self, vm: ml.VM, kind: str) -> Iterator[None]:
        """Write down the launches of the VM."""
        self.lines = []

        def launch(
            proceed: Callable[..., Any], program: Any, args: Any = (), **options: Any
        ) -> Any:
            numbers: dict[int, int] = {}
            same = [numbers.setdefault(handle, len(numbers)) for handle in args]
            self.lines.append(f"{saved(program)} {' '.join(map(str, same))}")
            return proceed(program, args, **options)

        with observed(vm, launch=launch):
            yield
        self.write(kind, "".join(f"{line}\n" for line in self.lines))

    def see(self, when: str, trees: dict[str, Any]) -> None:
        """Write down all that is in the trees."""
        for name, tree in trees.items():
            for path, x in walked(name, tree):
                if isinstance(x, ml.Tensor):
                    try:
                        array = x.numpy()
                        x = f"{x.type} {digest_of(array.tobytes())}"
                    except ml.errors.StaleTensorError:
                        x = "stale"
                elif isinstance(x, np.ndarray):
                    x = f"array {x.dtype} {x.shape} {digest_of(x.tobytes())}"
                elif callable(x):
                    x = "a function"
                self.results.append(f"{when} {path}: {x if isinstance(x, str) else repr(x)}")

    def run(self, build: Callable[[], World]) -> None:
        """Run the steps of a program eagerly, and captured in every mode."""
        self._run(build, "eager", None)
        for name, options in MODES.items():
            self._run(build, name, options)
        self.write("results", "".join(f"{line}\n" for line in self.results))

    def _run(self, build: Callable[[], World], kind: str, options: dict[str, Any] | None) -> None:
        vm = ml.VM("same")
        for _ in range(int(os.environ["OTHER_HANDLES"])):
            vm.dealloc_tensor(vm.alloc_tensor(ml.TensorType("f32")))
        weights, results = ml.Arena(vm, "weights"), ml.Arena(vm, "results")
        with self.launches(vm, kind):
            with weights.allocating():
                ml.random.seed(0)
                world = build()
            step = world.step if options is None else ml.capture(world.step, **options)
            signatures = 0
            for i in range(world.steps):
                with results if world.resets else results.allocating():
                    args = world.arguments(i)
                    try:
                        returned = step(*args)
                    except ml.errors.MlvmError as error:
                        self.results.append(f"{kind} {i}: {type(error).__name__}")
                        break
                    if isinstance(step, ml.Captured):
                        self.lines.append(f"plan {step.plan}")
                        if step.signatures != signatures:
                            signatures = step.signatures
                            self._save(step, f"{kind}.{i}")
                    there = {"result": returned, "argument": args, "state": world.state()}
                    self.see(f"{kind} {i}", {**there, "random": ml.random.state()})

    def _save(self, step: Any, kind: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "step"
            try:
                step.save(file)
            except ml.errors.CaptureError as error:
                self.lines.append(f"not saved: {type(error).__name__}")
            else:
                self.write(kind, file.read_bytes())


# --- models ------------------------------------------------------------------------------


def trained(build: Callable[[Any], Any], inputs: Any, labels: Any, **options: Any) -> Any:
    """The world of a training."""
    dtype = options.get("dtype", "f32")

    def world() -> World:
        model = build(ml.random.key(0))
        optimizer = options.get("optimizer", adamw)(model)
        scale = ml.optim.LossScale() if dtype == "f16" else None

        def loss_of(model: Any, inputs: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
            if dtype != "f32":
                inputs = ml.astype(inputs, dtype)
                logits = ml.astype(model.astype(dtype)(inputs), ml.float32)
            else:
                logits = model(inputs)
            loss = ml.softmax_cross_entropy(logits, labels, ignore_index=-1, reduction="mean")
            return loss if scale is None else scale.scale(loss)

        def step(inputs: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
            loss, grads = ml.parallel.value_and_grad(loss_of)(model, inputs, labels)
            if scale is None:
                optimizer.update(grads)
            else:
                loss, grads = scale.unscale((loss, grads))
                scale.update(optimizer, grads)
            return loss

        def arguments(i: int) -> tuple[Any, ...]:
            return ml.asarray(np.roll(inputs, i, axis=0)), ml.asarray(np.roll(labels, i, axis=0))

        state = [model, optimizer, *([] if scale is None else [scale.state()])]
        return World(step, arguments, lambda: state, steps=2)

    return world


def adamw(model: Any) -> Any:
    return ml.optim.AdamW(model, ml.optim.cosine(1e-2, 400, warmup_steps=2), weight_decay=0.05)


def sgd(model: Any) -> Any:
    return ml.optim.SGD(model, 0.1, momentum=0.9)


def generated() -> World:
    from models.transformer import Transformer, generate

    model = Transformer(11, 8, 16, 2, 2, key=ml.random.key(0))

    def step(prompt: ml.Tensor, key: ml.Tensor, temperature: ml.Tensor) -> Any:
        length, end = ml.asarray(2), ml.asarray(-1)
        return generate(model, prompt, length, key, temperature=temperature, end=end, top_k=5)

    def arguments(i: int) -> tuple[Any, ...]:
        prompt = np.array([3, 4 + i % 7, 0, 0, 0, 0, 0, 0])
        return ml.asarray(prompt), ml.random.key(i), ml.asarray(np.float32(0.8))

    return World(step, arguments, lambda: [model], steps=2)


def guessed(build: Callable[[Any], Any], inputs: Any) -> Callable[[], World]:
    """The world of a model that guesses."""

    def world() -> World:
        model = build(ml.random.key(0)).eval()
        return World(
            lambda x: ml.softmax(model(x), axis=-1),
            lambda i: (ml.asarray(np.roll(inputs, i, axis=0)),),
            lambda: [model],
            steps=2,
        )

    return world


def worlds() -> dict[str, Callable[[], World]]:
    from models.bert import Bert
    from models.convnet import ConvNet
    from models.lstm import LstmClassifier
    from models.mlp import Mlp
    from models.mlp_mixer import MlpMixer
    from models.transformer import Transformer
    from models.tree_lstm import TreeClassifier
    from models.vit import VisionTransformer

    rng = np.random.default_rng(0)
    # The gradient of a kernel of these images is summed in three blocks.
    images, classes = rng.normal(size=(12, 8, 8, 1)).astype(np.float32), rng.integers(0, 10, 12)
    text, next_text = rng.integers(0, 11, (2, 3, 8))
    words = np.where(np.arange(9) < np.array([[9], [4], [6]]), rng.integers(1, 20, (3, 9)), 0)
    inner, leaf = [(0, 1, 2), (0, 3, 4)], [(4, -1, -1), (1, -1, -1), (7, -1, -1)]
    trees = np.array([[*inner, *leaf], [inner[0], leaf[0], leaf[1], leaf[2], leaf[2]]])

    def mixer(key: Any) -> Any:
        return MlpMixer((8, 8, 1), 10, 4, 16, 2, 8, 32, key=key)

    of_images = {
        "mlp": lambda key: Mlp((8, 8, 1), 10, (16, 8), key=key),
        "convnet": lambda key: ConvNet((8, 8, 1), 10, (4, 8), key=key),
        "mlp_mixer": mixer,
        "vit": lambda key: VisionTransformer((8, 8, 1), 10, 4, 16, 2, 32, 2, key=key),
    }
    of_text = {
        "transformer": lambda key: Transformer(11, 8, 16, 2, 2, key=key),
        "bert": lambda key: Bert(11, 11, 16, 2, 2, key=key),
    }

    def lstm(key: Any) -> Any:
        return LstmClassifier(20, 3, 4, 5, key=key)

    def tree_lstm(key: Any) -> Any:
        return TreeClassifier(15, 10, 6, 5, key=key)

    return {
        **{name: trained(build, images, classes) for name, build in of_images.items()},
        **{name: trained(build, text, next_text) for name, build in of_text.items()},
        "lstm": trained(lstm, words, classes[:3] % 3),
        "tree_lstm": trained(tree_lstm, trees, classes[:2]),
        **{
            f"{name} by SGD": trained(of_images[name], images, classes, optimizer=sgd)
            for name in of_images
        },
        "mlp_mixer in f16": trained(mixer, images, classes, dtype="f16"),
        "mlp_mixer in bf16": trained(mixer, images, classes, dtype="bf16"),
        **{f"{name} guesses": guessed(build, images) for name, build in of_images.items()},
        "bert guesses": guessed(of_text["bert"], text),
        "lstm guesses": guessed(lstm, words),
        "tree_lstm guesses": guessed(tree_lstm, trees),
        "generate": generated,
    }


# --- examples ----------------------------------------------------------------------------


def library_beside(path: Path, folder: str) -> str:
    """Build the C functions of an example; return the library's file."""
    library, source = f"{folder}/example.so", path.with_name("functions.c")
    command = f"gcc -std=c99 -O2 -fPIC -shared -I mlvm/machines -o {library} {source} -lm"
    subprocess.run(command.split(), check=True)
    return library


def example(probe: Probe, path: Path) -> None:
    """Write an example as a program, what it prints, and the steps and files that it writes."""
    if path.suffix == ".py":
        with tempfile.TemporaryDirectory() as folder:
            sys.argv[1:] = [folder]
            if path.with_name("functions.c").exists():
                sys.argv[1:] = [library_beside(path, folder)]
            printed = io.StringIO()
            with redirect_stdout(printed):
                runpy.run_path(str(path.resolve()), run_name="__main__")
            for file in sorted(Path(folder).iterdir()):
                if file.suffix == ".mlvm":
                    probe.write(file.stem, file.read_bytes())
                elif file.suffix != ".so":
                    printed.write(f"{file.name}: {digest_of(file.read_bytes())}\n")
            probe.write("printed", printed.getvalue())
        return
    text = path.read_text("utf-8")
    program = lookup("assemble", "mlvm.core.program.assembly")(text)
    probe.write("eager", f"{saved(program)}\n")
    head = "\n".join(line.removeprefix(";").strip() for line in text.split("\n\n")[0].splitlines())
    [command] = re.findall(r"^python -m mlvm (run (?:.*\\\n)*.*)$", head, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    done = subprocess.run(
        [sys.executable, "-m", "mlvm", *words], capture_output=True, text=True, check=True
    )
    probe.write("printed", done.stdout)


def program(path: Path) -> Callable[[], World]:
    """The `build` of a fuzzed program, whose lines are known by its name."""
    namespace: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text("utf-8"), path.stem, "exec"), namespace)
    return namespace["build"]


def main(parts: list[str]) -> None:
    (OUT / "programs").mkdir(parents=True, exist_ok=True)
    if parts == ["list"]:
        examples = [*Path("examples").glob("*.mlasm"), *Path("examples").glob("*/*.py")]
        if importlib.util.find_spec("ziglang") is None:  # the compiler for the page's step
            examples.remove(Path("examples/embedded/page.py"))
        names = [f"models:{name}" for name in worlds()] + [f"example:{each}" for each in examples]
        (OUT / "list").write_text("".join(f"{name}\n" for name in sorted(names)))
        return
    models: dict[str, Any] = worlds() if any(each.startswith("models:") for each in parts) else {}
    gc.disable()
    for part in parts:
        gc.collect()
        kind, _, name = part.rpartition(":")
        probe = Probe(part.replace("/", " ") if kind else Path(part).stem)
        try:
            if kind == "example":
                example(probe, Path(name))
            else:
                probe.run(models[name] if kind else program(Path(name)))
        except Exception:
            probe.write("failed", traceback.format_exc(limit=-2))


if __name__ == "__main__":
    main(sys.argv[2:])
