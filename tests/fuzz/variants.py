"""ONNX's own tests of ops, and calls of com.microsoft's ops, in other sizes and dtypes, beside
onnxruntime.

    python -m tests.fuzz variants
    python -m tests.fuzz variants --only Resize com.microsoft.QMoE --cases 9

Each test of a node, and each call of `contrib.txt`, is changed: one length in all shapes becomes 0,
1 or 2; all floats, or all integers, become another dtype; optional operands are left out, in all
combinations. What onnxruntime runs must have the same dtypes, shapes and values here, called and
folded when the file is loaded; a result of com.microsoft's ops that is rounded to 8 bits may be off
by one. `KNOWN` lists the differences that stay, and why.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.onnx.table import TABLE
from tests.fuzz.command import Wrong, outcomes_of, parser_of, require_known, told
from tests.fuzz.graphs import session
from tests.onnx.backend import Case, cases

FLOATS: Final = ("f2", "f4", "f8")
INTEGERS: Final = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
RANDOM: Final = ("Random", "Bernoulli", "Multinomial", "Dropout", "training_dropout")

_UNWRITTEN: Final = """MatMulInteger QLinearMatMul com.microsoft.QAttention com.microsoft.QGemm
    com.microsoft.DynamicQuantizeMatMul com.microsoft.DynamicQuantizeLSTM
    com.microsoft.MatMulIntegerToFloat"""

KNOWN: Final[dict[str, str]] = {
    **{f"{op}, 0 for": "onnxruntime leaves memory unwritten" for op in _UNWRITTEN.split()},
    "Pow, floats as i": "powers beyond the dtype wrap here, and are undefined in C",
    "MeanVarianceNormalization": "ONNX adds 1e-9 to the deviation, onnxruntime nothing",
    **dict.fromkeys(("ReduceMean, 0 for", "NegativeLogLikelihoodLoss, 0 for"), "the mean is nan"),
    "CenterCropPad, 1 for 3: called: ModelError: expected a length": "the lengths are cut, too",
    "ReduceProd, floats as i": "an overflow wraps here, and is undefined in C",
    **{f"ai.onnx.ml.Imputer, {n} for 4": "features without a value: refused" for n in range(3)},
    **{f"ai.onnx.ml.LinearRegressor, {n} for 3": "too few features: refused" for n in range(3)},
    "com.microsoft.QGemm, without": "a zero point without its scale is refused",
    "com.microsoft.GatherBlockQuantized, 0 for 7: called: PositionError": "no rows: refused",
    "Attention, without attn_mask": "scores of what is hidden are -inf, and the least float there",
    "DynamicQuantizeLinear, 0 for": "nothing has no range: it is refused",
}
"""Beginnings of differences that are intended, "Op, variant: difference", and why."""


class Variant(NamedTuple):
    """A model, its inputs by name, and what was changed."""

    model: Any
    inputs: dict[str, Any]
    text: str


def bases(count: int) -> Iterator[tuple[str, Case]]:
    """Yield a few tests of each op that are one node of plain tensors."""
    import onnx

    seen: Counter[str] = Counter()
    for case in sorted(cases(), key=lambda case: len(case.model)):
        model = onnx.load_from_string(case.model)
        [*nodes] = model.graph.node
        op = nodes[0].op_type if len(nodes) == 1 else ""
        given = case.sets[0][0] if case.sets else []
        plain = given and all(isinstance(x, np.ndarray) and x.dtype.kind in "fiub" for x in given)
        if op in TABLE and plain and seen[op] < count and not op.startswith(RANDOM):
            seen[op] += 1
            yield op, case


def contrib_cases() -> Iterator[tuple[str, Case]]:
    """Yield the calls of `contrib.txt`, each as a model with random operands."""
    for number, line in enumerate(Path(__file__).with_name("contrib.txt").read_text().splitlines()):
        if line[0] != "#":
            op, _, rest = line.partition("(")
            operands, attributes = eval(f"call({rest}", _names(np.random.default_rng(number)))
            op = op if "." in op else f"com.microsoft.{op}"
            yield op, _case(line, op, operands, attributes)


def _names(rng: Any) -> dict[str, Any]:
    """Return the functions that make the operands of calls."""
    import ml_dtypes
    from ml_dtypes import int4, uint4

    def drawn(dtype: Any) -> Any:
        limits: Any = ml_dtypes.iinfo(dtype)
        return lambda *shape: rng.integers(limits.min, limits.max + 1, shape).astype(dtype)

    drawn_dtypes: Any = {"u": "u1", "s": "i1", "q4": int4, "n4": uint4}
    return {
        **{dtype: partial(np.array, dtype=dtype) for dtype in ("f4", "u1", "i1", "i4", "i8")},
        "call": lambda *operands, **attributes: (operands, attributes),
        "f": lambda *shape: rng.standard_normal(shape).astype("f4"),
        "i": lambda high, *shape: rng.integers(0, high, shape).astype("i4"),
        **{name: drawn(dtype) for name, dtype in drawn_dtypes.items()},
    }


def _case(text: str, op: str, operands: Any, attributes: dict[str, Any]) -> Case:
    """Return a call as a case; operands in a list are constants of the model."""
    from onnx import helper, numpy_helper

    pairs = [("" if x is None else f"x{i}", x) for i, x in enumerate(operands)]
    given = {name: x for name, x in pairs if isinstance(x, np.ndarray)}
    outputs = [f"y{i}" for i in range(attributes.pop("outputs", 1))]
    names = [name for name, _ in pairs]
    domain, _, name = op.rpartition(".")
    node = helper.make_node(name, names, outputs, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "it",
        [helper.make_tensor_value_info(x, 1, None) for x in given],
        [helper.make_empty_tensor_value_info(x) for x in outputs],
        [numpy_helper.from_array(x[0], name) for name, x in pairs if isinstance(x, list)],
    )
    opsets = [
        helper.make_opsetid(*each) for each in (("", 21), (domain, 4 if "ml" in domain else 1))
    ]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Case(text, model.SerializeToString(), [([*given.values()], [])], 0.0, 0.0)


def variants(case: Case) -> Iterator[Variant]:
    """Yield the case as it is, with other lengths, and with other dtypes."""
    import onnx

    model = onnx.load_from_string(case.model)
    names = [x.name for x in model.graph.input]
    arrays = dict(zip(names, case.sets[0][0], strict=False))
    yield _variant(model, arrays, "as it is")
    for length in sorted({n for x in arrays.values() for n in x.shape if n > 2})[:6]:
        for other in (0, 1, 2):
            changed = {name: _resized(x, length, other) for name, x in arrays.items()}
            yield _variant(model, changed, f"{other} for {length}")
    for kinds, dtypes in (("f", FLOATS), ("iu", INTEGERS)):
        for dtype in dtypes:
            changed = {
                name: _converted(x, dtype) if x.dtype.kind in kinds else x
                for name, x in arrays.items()
            }
            if any(changed[name].dtype != x.dtype for name, x in arrays.items()):
                yield _variant(model, changed, dtype)
    for dtype in INTEGERS:
        if all(x.dtype.kind == "f" for x in arrays.values()):
            changed = {name: _converted(x * 3, dtype) for name, x in arrays.items()}
            yield _variant(model, changed, f"floats as {dtype}")
    [node] = model.graph.node
    operands = zip(node.input, _schema(model).inputs, strict=False)
    present = [i for i, (x, kind) in enumerate(operands) if x in arrays and _is_optional(kind)]
    for count in range(1, len(present) + 1):
        for gone in combinations(present, count):
            yield _without(model, arrays, gone)


def _is_optional(operand: Any) -> bool:
    return str(operand.option).endswith("Optional")


def _schema(model: Any) -> Any:
    from onnx import defs

    [node] = model.graph.node
    if node.domain == "com.microsoft":
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        return next(
            x for x in state.get_all_operator_schema() if x.name == node.op_type and x.domain
        )
    versions = {x.domain: x.version for x in model.opset_import}
    return defs.get_schema(node.op_type, versions[node.domain], node.domain)


def _without(model: Any, arrays: dict[str, Any], gone: tuple[int, ...]) -> Variant:
    """Leave out operands of the node, by their positions."""
    import onnx

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    node = changed.graph.node[0]
    for i in gone:
        node.input[i] = ""
    kept = {name: x for name, x in arrays.items() if name in node.input}
    inputs = [x for x in model.graph.input if x.name in kept]
    del changed.graph.input[:]
    changed.graph.input.extend(inputs)
    absent = ", ".join(_schema(model).inputs[i].name for i in gone)
    return _variant(changed, kept, f"without {absent}")


def _resized(x: Any, length: int, other: int) -> Any:
    for axis, n in enumerate(x.shape):
        if n == length:
            x = np.take(x, range(other), axis=axis)
    return x


def _converted(x: Any, dtype: str) -> Any:
    with np.errstate(all="ignore"):
        return (np.abs(x) if dtype[0] == "u" and x.dtype.kind != "u" else x).astype(dtype)


def _variant(model: Any, arrays: dict[str, Any], text: str) -> Variant:
    import onnx
    from onnx import helper

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    for value in graph.input:
        if value.name in arrays:
            x = arrays[value.name]
            number = helper.np_dtype_to_tensor_dtype(x.dtype)
            value.CopyFrom(helper.make_tensor_value_info(value.name, number, x.shape))
    outputs = [x.name for x in graph.output]
    del graph.output[:], graph.value_info[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return Variant(changed, arrays, text)


def _in_onnxruntime(variant: Variant) -> list[Any] | None:
    """Return the results of onnxruntime, or None if it does not run the model."""
    try:
        runtime = session(variant.model.SerializeToString())
        results: list[Any] = runtime.run(None, variant.inputs)
    except Exception:
        return None
    return results if all(isinstance(x, np.ndarray) for x in results) else None


def _here(variant: Variant, folded: bool) -> Any:
    """Return the results of mlvm, or an error."""
    import onnx
    from onnx import numpy_helper

    model, inputs = variant.model, variant.inputs
    if folded:
        model = onnx.ModelProto()
        model.CopyFrom(variant.model)
        del model.graph.input[:]
        made = [numpy_helper.from_array(x, name) for name, x in inputs.items()]
        model.graph.initializer.extend(made)
        inputs = {}
    try:
        with warnings.catch_warnings(action="ignore"):
            loaded = ml.onnx.load(model.SerializeToString())
            results = loaded(**inputs)
    except MlvmError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return [np.asarray(x) for x in (results if isinstance(results, tuple) else (results,))]


def difference(variant: Variant) -> str | None:
    """Return how the results differ from those of onnxruntime, None if they do not."""
    expected = _in_onnxruntime(variant)
    if expected is None:
        results = _here(variant, False)
        return results if isinstance(results, str) and results.startswith("raw ") else None
    for folded in (False, True):
        results = _here(variant, folded)
        how = "folded" if folded else "called"
        if isinstance(results, str):
            return f"{how}: {results}"
        for i, (x, y) in enumerate(zip(results, expected, strict=False)):
            where = f"{how}, output {i}"
            if x.dtype != y.dtype or x.shape != y.shape:
                return f"{where}: {x.dtype}{x.shape}, not {y.dtype}{y.shape}"
            tol = 2e-2 if y.dtype == np.float16 else 1e-3
            is_rounded = y.dtype in ("i1", "u1") and variant.model.graph.node[0].domain
            how_close = {"rtol": tol, "atol": 1.0 if is_rounded else tol}
            with np.errstate(all="ignore"):
                wide = x.astype("f8"), y.astype("f8")
                if not np.allclose(*wide, **how_close, equal_nan=True):
                    return f"{where}: {x.ravel()[:4].tolist()}, not {y.ravel()[:4].tolist()}"
    return None


def differences(op: str, case: Case) -> list[str]:
    """Return how the variants of a test differ from onnxruntime's results."""
    found = []
    for variant in variants(case):
        text = difference(variant)
        if text is not None and not any(
            f"{op}, {variant.text}: {text}".startswith(x) for x in KNOWN
        ):
            found.append(f"{op}, {variant.text}: {text}  [{case.name}]")
    return found


def attempt(op: str, case: Case) -> str:
    """Compare the variants of a test in another process: onnxruntime may end its own."""
    with ProcessPoolExecutor(1, get_context("fork"), signal.alarm, (120,)) as pool:
        try:
            found = pool.submit(differences, op, case).result()
        except BrokenProcessPool:
            return "the process ended, in onnxruntime or here"
    if found:
        print(*found, sep="\n", file=sys.stderr, flush=True)  # also of a run that is stopped
        raise Wrong("\n    ".join(found))
    return "equal"


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--only", nargs="*", help="ops")
    parser.add_argument("--cases", type=int, default=2, help="tests of each op")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--verbose", action="store_true", help="name each test before it runs")
    options = parser.parse_args(argv)
    every = [*bases(options.cases), *contrib_cases()]
    ops = {op for op, _ in every}
    require_known(parser, [x for x in options.only or () if x not in ops], lambda: ops)
    chosen = [x for x in every if not options.only or x[0] in options.only]

    def run(i: int) -> str:
        if options.verbose:
            print(i, chosen[i][1].name, file=sys.stderr, flush=True)
        return attempt(*chosen[i])

    return told(*outcomes_of(range(options.first, len(chosen)), run))
