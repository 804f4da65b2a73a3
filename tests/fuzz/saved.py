"""Programs of the eager language as ONNX files: what `save` writes, `onnx.checker` takes, ONNX
Runtime runs, and `load` reads."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.eager.tree import flatten
from mlvm.onnx import load, save
from tests.fuzz.graphs import session
from tests.fuzz.language.making import make
from tests.fuzz.language.source import built_by


class Saved:
    """What came of the programs so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def report(self) -> str:
        """A line for each outcome."""
        return "\n".join(f"{n:7}  {outcome}" for outcome, n in self.outcomes.most_common())


def _tensors(tree: Any) -> list[Any]:
    ends = {True: None, False: True}
    parts = flatten(tree, ends=lambda x: ends[isinstance(x, (list, tuple, dict))])[0]
    return [x for _, x in parts if isinstance(x, (ml.Tensor, np.ndarray, np.generic))]


def difference(seed: int, number: int) -> str | None:
    """How the file of a program differs from it; None where it does not. Raises what `save` does,
    and what the other readers say of its file."""
    ml.random.seed(0)
    world = built_by(make(seed, number).text())()
    args = list(world.arguments(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "it.onnx"
        save(world.step, args, path)
        importlib.import_module("onnx").checker.check_model(str(path), full_check=True)
        data = path.read_bytes()
    runtime, operands = session(data), _tensors(args)
    names = [each.name for each in runtime.get_inputs()]
    theirs = runtime.run(None, dict(zip(names, map(np.asarray, operands), strict=True)))
    own = _tensors([load(data)(*operands)])
    wanted = _tensors([world.step(*args)])
    for x, y, z in zip(wanted, own, theirs, strict=True):
        a, b = np.asarray(x), np.asarray(y)
        if a.tobytes() != b.tobytes():
            return f"read back: {b.ravel()[:4]}, not {a.ravel()[:4]}"
        most = max(1.0, float(np.abs(a[np.isfinite(a)]).max(initial=0)))
        is_same = (a.dtype, a.shape) == (z.dtype, z.shape)
        if not is_same or not np.allclose(a, z, rtol=1e-3, atol=1e-3 * most, equal_nan=True):
            return f"by ONNX Runtime: {z.dtype}{z.ravel()[:4]}, not {a.dtype}{a.ravel()[:4]}"
    return None


def fuzz(programs: int, seed: int, first: int = 0) -> tuple[Saved, str | None]:
    """Try so many programs; what came out, and the first that differs."""
    runs = Saved()
    for number in range(first, first + programs):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                told = difference(seed, number)
        except MlvmError as error:
            runs.outcomes[f"refused: {type(error).__name__}"] += 1
            continue
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        if told is not None:
            return runs, f"--saved --seed {seed} --first {number}: {told}"
        runs.outcomes["the same"] += 1
    return runs, None
