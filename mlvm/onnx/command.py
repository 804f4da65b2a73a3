"""`python -m mlvm onnx`: describe, run and time an ONNX file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError, OpError
from mlvm.core.tables import table
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.eager.tensor.operands import as_operand, widest_of
from mlvm.eager.tree import flatten, named_tensors
from mlvm.machines.files import write_array
from mlvm.onnx.model import Model, load
from mlvm.show.memory_report import show_plan
from mlvm.show.vm_trace import VMTrace

_SECONDS: Final = 1.0
_SHOWN: Final = 15  # ops


def run(
    file: Path,
    inputs: Sequence[Array],
    *,
    times: bool,
    plan: bool,
    save: Path | None,
    out: Path | None,
) -> None:
    """Print the inputs and outputs of a model, and run it captured if inputs are given.

    Print the types of the results, the ops with `times`, and the memory with `plan`, which is also
    drawn to `out` or next to the file. Save the step to `save`, and the results to `out`.

    Missing inputs are zeros if the file declares their shapes, otherwise `ModelError` is raised.
    Also raises the errors of `load` and the model, and `OSError`.
    """
    model = load(file)
    _describe(file, model)
    if not (inputs or times or plan or save or out):
        return
    widest = widest_of(model.weights.values())
    arrays: list[Any] = [as_operand(x, widest) if x.ndim else x for x in inputs]
    arrays += _zeros(model, len(inputs))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    captured = ml.capture(model)
    for number, (path, x) in enumerate(flatten(captured(*arrays))[0]):
        print(f"result {number}: {x.type}" if not path else f"result {path}: {x.type}")
        if out is not None:
            write_array(out / f"{number}.npy", np.asarray(x))
    if times:
        _print_times(captured, arrays)
    if plan:
        print()
        show_plan(captured.plan, captured.planned.recording(), file, out or file.parent)
    if save is not None:
        captured.save(save)
        print(
            f"\nsaved    {save}, {save.stat().st_size:,} bytes: python -m mlvm run {save} --arg ..."
        )


def _describe(file: Path, model: Model) -> None:
    weights = named_tensors(model, buffers=True).values()
    size = sum(x.type.nbytes for x in weights)
    print(f"{file}: {len(model.graph.nodes):,} nodes, {len(weights):,} weights, {size:,} bytes")
    for what, row in (("input", model.inputs), ("output", model.outputs)):
        for name, text in row.items():
            print(f"{what:<8} {name}: {text}")


def _zeros(model: Model, count: int) -> list[Array]:
    """Return zeros for the inputs after the first `count`."""
    zeros: list[Array] = []
    for name, text in [*model.inputs.items()][count:]:
        try:
            type = TensorType.parse(text)
        except OpError:
            raise ModelError(f"the input {name!r} is {text}: pass it with --input") from None
        zeros.append(np.zeros(type.shape, type.dtype.numpy))
    return zeros


def _print_times(captured: Any, arrays: Sequence[Array]) -> None:
    """Print the time of a call and each op, the longest first."""
    seconds: list[float] = []
    tensors = [ml.asarray(x) if x.ndim else x for x in arrays]
    while sum(seconds) < _SECONDS and len(seconds) < 1000:  # timed calls
        began = time.perf_counter()
        np.asarray(flatten(captured(*tensors))[0][0][1])
        seconds.append(time.perf_counter() - began)
    best, middle = min(seconds) * 1e3, sorted(seconds)[len(seconds) // 2] * 1e3
    print(f"\n{len(seconds)} calls: best {best:.3f} ms, median {middle:.3f} ms")
    vm = ml.default_vm()
    if not isinstance(vm, VM):
        return
    for _ in range(2):  # the first call prepares the program for the trace
        trace = VMTrace(vm.name)
        with vm.instrumented(trace):
            start = time.perf_counter_ns()
            captured(*tensors)
            total = time.perf_counter_ns() - start
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for span in trace.spans:
        chain = span.about.get("attributes", {}).get("chain")
        name = span.name.removesuffix(".out") if chain is None else f"fused: {chain}"
        name = name if len(name) <= 60 else f"{name[:57]}..."
        spent[name] += span.ended - span.began
        calls[name] += 1
    rows = spent.most_common(_SHOWN)
    if len(spent) > _SHOWN:
        rows.append(("other ops", sum(spent.values()) - sum(ns for _, ns in rows)))
    rows.append(("launch and copies", max(total - sum(spent.values()), 0)))
    cells = [("ms", "share", "calls", "op, one by one")]
    cells += [
        (f"{ns / 1e6:.3f}", f"{ns / total:.1%}", str(calls.get(name, "")), name)
        for name, ns in rows
    ]
    cells.append((f"{total / 1e6:.3f}", "100.0%", "", "total of this call, with measurement"))
    print(*table(cells, right=3), sep="\n")
