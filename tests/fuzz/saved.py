"""Programs of the eager language as ONNX files: what `save` writes, `onnx.checker` takes, ONNX
Runtime runs, and `load` reads."""

from __future__ import annotations

import importlib
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.eager.tree import flatten
from mlvm.onnx import load, save
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.fuzz.graphs import session
from tests.fuzz.language import world
from tests.fuzz.language.making import make
from tests.fuzz.language.source import built_by

_REFUSED: Final = re.compile(
    r"random\.(?!key)|ropout|BatchNorm|key=|out=|\.update\(|\] = |[-+*/|&^]= |ml\.function|again"
)
"""Statements that an ONNX file cannot have: draws, updates and recursion."""


def _tensors(tree: Any) -> list[Any]:
    ends = {True: None, False: True}
    parts = flatten(tree, ends=lambda x: ends[isinstance(x, (list, tuple, dict))])[0]
    return [x for _, x in parts if isinstance(x, (ml.Tensor, np.ndarray, np.generic))]


def _program(seed: int, number: int) -> tuple[Any, list[Any]]:
    ml.random.seed(0)
    built = built_by(make(seed, number, _REFUSED).text())()
    return built.step, list(built.arguments(0))


def _is_sensitive(seed: int, number: int, expected: list[Any]) -> bool:
    """Return whether the results differ by much where the operands do by little."""
    world.factor = 1 + 1e-5
    try:
        step, args = _program(seed, number)
        moved = _tensors([step(*args)])
    finally:
        world.factor = 1.0
    return not all(
        np.allclose(x, y, rtol=1e-3, atol=1e-3) for x, y in zip(expected, moved, strict=True)
    )


def difference(seed: int, number: int) -> str | None:
    """Return how the file of a program differs from it; None where it does not. Raises what `save`
    does, and what the other readers say of its file."""
    step, args = _program(seed, number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "it.onnx"
        save(step, args, path)
        importlib.import_module("onnx").checker.check_model(str(path), full_check=True)
        data = path.read_bytes()
    runtime, operands = session(data), _tensors(args)
    if len({*map(id, operands)}) < len(operands) and "grad" in make(seed, number, _REFUSED).text():
        return (
            None  # a gradient for a tensor that is given twice counts both; a file has two inputs
        )
    names = [each.name for each in runtime.get_inputs()]
    theirs = runtime.run(None, dict(zip(names, map(np.asarray, operands), strict=True)))
    own = _tensors([load(data)(*operands)])
    expected = _tensors([step(*args)])
    for x, y, z in zip(expected, own, theirs, strict=True):
        a, b = np.asarray(x), np.asarray(y)
        if a.tobytes() != b.tobytes():
            return f"read back: {b.ravel()[:4]}, not {a.ravel()[:4]}"
        most = max(1.0, float(np.abs(a[np.isfinite(a)]).max(initial=0)))
        is_same = (a.dtype, a.shape) == (z.dtype, z.shape)
        if not is_same or not np.allclose(a, z, rtol=1e-3, atol=1e-3 * most, equal_nan=True):
            if is_same and _is_sensitive(seed, number, expected):
                return None
            return f"by ONNX Runtime: {z.dtype}{z.ravel()[:4]}, not {a.dtype}{a.ravel()[:4]}"
    return None


def fuzz(programs: int, seed: int, first: int = 0) -> tuple[Outcomes, str | None]:
    """Try a number of programs; what came out, and those that differ."""

    def attempt(number: int) -> str:
        try:
            with warnings.catch_warnings(action="ignore"):
                message = difference(seed, number)
        except MlvmError as error:
            return f"refused: {type(error).__name__}"
        if message is not None:
            raise Wrong(message)
        return "the same"

    return outcomes_of(range(first, first + programs), attempt)
