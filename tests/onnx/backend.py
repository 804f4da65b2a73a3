"""ONNX's own backend suite: its cases as plain data, and how one is run and judged."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import pickle
import tempfile
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.ops.half import widened
from mlvm.core.types import DType
from mlvm.onnx import load

EXPECTED = Path(__file__).with_name("expected.toml")
FROZEN = Path(__file__).with_name("frozen.bin")
ROUNDED = "off by the last bit of halves, which the suite rounds at each step"
KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")


class Case(NamedTuple):
    """A model, and for each set of inputs the outputs that are expected."""

    name: str
    model: bytes
    sets: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


def cases() -> list[Case]:
    """The cases of the installed `onnx`, made once and pickled beside other temporary files."""
    import onnx

    folder = os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # of all runs
    file = Path(folder) / f"mlvm-onnx-{onnx.__version__}.pickle"
    if not file.exists():
        entries = list(_generate())
        draft = file.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(entries))
        draft.replace(file)
    return [Case(*each) for each in pickle.loads(file.read_bytes())]


def _generate() -> Iterator[tuple[Any, ...]]:
    import onnx
    from onnx import numpy_helper
    from onnx.backend.test.loader import load_model_tests

    def value(file: Path, type: Any) -> Any:
        kind = type.WhichOneof("value")
        data = file.read_bytes()
        if kind == "sequence_type":
            return _plain(numpy_helper.to_list(onnx.SequenceProto.FromString(data)))
        if kind == "optional_type":
            return _plain(numpy_helper.to_optional(onnx.OptionalProto.FromString(data)))
        return _plain(numpy_helper.to_array(onnx.TensorProto.FromString(data)))

    for kind in KINDS:
        for case in load_model_tests(kind=kind):
            if case.model is not None:
                model, sets = case.model, case.data_sets
                sets = [(_plain(list(a)), _plain(list(b))) for a, b in sets]
            else:
                folder = Path(case.model_dir)
                model = onnx.load(folder / "model.onnx")
                sets = []
                for each in sorted(folder.glob("test_data_set_*")):
                    sides = []
                    for side, declared in (
                        ("input", model.graph.input),
                        ("output", model.graph.output),
                    ):
                        count = len(list(each.glob(f"{side}_*.pb")))
                        sides.append(
                            [value(each / f"{side}_{i}.pb", declared[i].type) for i in range(count)]
                        )
                    sets.append(tuple(sides))
            yield case.name, model.SerializeToString(), sets, case.rtol, case.atol


def _plain(value: Any) -> Any:
    """A value in dtypes that numpy has by itself."""
    import onnx

    if value is None or isinstance(value, str):
        return value
    if isinstance(value, onnx.TensorProto):
        return _plain(onnx.numpy_helper.to_array(value))
    if isinstance(value, onnx.SequenceProto):
        return _plain(onnx.numpy_helper.to_list(value))
    if isinstance(value, onnx.OptionalProto):
        return _plain(onnx.numpy_helper.to_optional(value))
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16).view([("bf16", np.uint16)])
    if array.dtype.kind in "biufcOUS" and array.dtype.isbuiltin == 1:
        return array
    name = array.dtype.name
    wide = np.float32 if "float" in name else np.uint8 if name.startswith("u") else np.int8
    return array.astype(wide)


def run(case: Case, *, captured: bool) -> None:
    """Run the case and compare. Raises `AssertionError` for a wrong value, whatever the model
    raises otherwise."""
    model = load(case.model)
    for inputs, outputs in case.sets:
        arguments = dict(
            zip(
                model.inputs,
                (_input(model, n, x, captured) for n, x in zip(model.inputs, inputs, strict=False)),
                strict=False,
            )
        )
        function = ml.capture(model) if captured else model
        result = function(**arguments)
        judge(result if isinstance(result, tuple) else (result,), outputs, case)


def _input(model: Any, name: str, value: Any, captured: bool) -> Any:
    """Return the model's argument for a value: numbers where a captured function must know them."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_input(model, name, each, captured) for each in value]
    if captured and name in model.static_inputs and value.dtype.names is None:
        return value.tolist()
    return ml.asarray(value)


def judge(results: Sequence[Any], expected: Sequence[Any], case: Case) -> None:
    """Raise `AssertionError` unless all are alike."""
    assert len(results) >= len(expected), f"{len(results)} results, not {len(expected)}"
    for y, reference in zip(results, expected, strict=False):
        if isinstance(reference, list):
            assert isinstance(y, list), "no list"
            assert len(y) == len(reference), "another length of a list"
            judge(y, reference, case)
        elif reference is None or y is None:
            assert y is reference, f"{y} is not {reference}"
        else:
            array = np.asarray(y)
            if reference.dtype.names:
                reference = widened(reference)
            assert array.dtype == reference.dtype, f"{array.dtype} is not {reference.dtype}"
            assert array.shape == reference.shape, f"{array.shape} is not {reference.shape}"
            np.testing.assert_allclose(array, reference, rtol=case.rtol, atol=case.atol)


def expected(name: str, *, captured: bool) -> str | None:
    """Why a case is expected to fail; None for one that is to pass."""
    parts = tomllib.loads(EXPECTED.read_text())
    reasons = {
        pattern: reason
        for part, own in parts.items()
        if captured or part != "captured"
        for pattern, reason in own.items()
    }
    fitting = [pattern for pattern in reasons if fnmatch.fnmatchcase(name, pattern)]
    return reasons[max(fitting, key=len)] if fitting else None


def is_near(case: Case, *, captured: bool) -> bool:
    """Return whether results in halves are off by no more than two units in the last place."""
    try:
        run(case._replace(rtol=2.0**-6 if "bf16" in case.name else 2.0**-9), captured=captured)
    except AssertionError:
        return False
    return True


def freeze(cases: Sequence[Case]) -> None:
    """Write the smallest case of each op to `frozen.bin`."""
    chosen: dict[str, Case] = {}
    for case in cases:
        size = len(case.model) + sum(_nbytes(side) for each in case.sets for side in each)
        arrays = all(isinstance(x, np.ndarray) for each in case.sets for side in each for x in side)
        if size > 6_000 or not arrays or "_expanded" in case.name:
            continue
        if expected(case.name, captured=True):
            continue
        model = load(case.model)
        for kind in {node.type for graph in model.graph.all() for node in graph.nodes}:
            before = chosen.get(kind)
            if before is None or size < len(before.model) + 1:
                chosen[kind] = case
    index, parts = [], []
    for case in {case.name: case for case in chosen.values()}.values():
        parts.append(case.model)
        sets = []
        for each in case.sets:
            sets.append([[(DType.of(x.dtype).name, x.shape) for x in side] for side in each])
            parts += [np.ascontiguousarray(x).tobytes() for side in each for x in side]
        index.append((case.name, len(case.model), case.rtol, case.atol, sets))
    head = json.dumps(index).encode()
    FROZEN.write_bytes(zlib.compress(len(head).to_bytes(8, "little") + head + b"".join(parts), 9))


def frozen() -> dict[str, Case]:
    """The cases of `frozen.bin` by name."""
    data = zlib.decompress(FROZEN.read_bytes())
    place = 8 + int.from_bytes(data[:8], "little")

    def take(size: int) -> bytes:
        nonlocal place
        place += size
        return data[place - size : place]

    def array(name: str, shape: list[int]) -> Any:
        dtype = DType.named(name)
        return np.frombuffer(take(math.prod(shape) * dtype.itemsize), dtype.numpy).reshape(shape)

    by_name: dict[str, Case] = {}
    for name, size, rtol, atol, sets in json.loads(data[8:place]):
        model = take(size)
        own = [([array(*x) for x in a], [array(*x) for x in b]) for a, b in sets]
        by_name[name] = Case(name, model, own, rtol, atol)
    return by_name


def _nbytes(values: Any) -> int:
    return sum(x.nbytes for x in values if isinstance(x, np.ndarray))
