"""Recurrences: `kernels/recurrent_of.h`."""

from __future__ import annotations

from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.ops.recurrent import CELLS
from mlvm.core.types import bf16, f16, f32, f64, u64
from mlvm.machines.native._native import RECURRENT_CELLS, KernelCall
from mlvm.machines.native.elements import integer_kind
from mlvm.machines.native.planner import Types, kernel_call, planner
from mlvm.machines.native.planners.linalg import Matrix, Product, tiles, vector

_UNIT: Final = 32  # elements of a state, as wide as a tile
_WORTH_A_BARRIER: Final = 6000  # minimum nanoseconds per step to synchronize threads


@planner("recurrence", halves="own")
def recurrence(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, projected, _, kernel, *_ = types
    _, rows, width = projected.shape
    # rows up to which a bf16 kernel is read without conversion
    if f16 in (out.dtype, kernel.dtype) or (kernel.dtype is bf16 and rows > 4):
        return None
    dtype, size = ("f64", 8) if kernel.dtype is f64 else ("f32", 4)
    hidden = kernel.shape[0]
    product = Product(dtype, Matrix(rows, hidden, hidden, 1), Matrix(hidden, width, width, 1))
    cell = CELLS[attributes["cell"]]
    scratch = (cell.parts * rows * hidden + (rows + 2) * width) * size
    saved = cell.saved_sums if attributes["keep"] else 0
    kept_states = 4 * (cell.parts + 1) * rows * hidden if out.dtype is bf16 else 0
    halves = [out.dtype is bf16, kernel.dtype is bf16]
    return _call(op, types, product, attributes, hidden, [saved, *halves], scratch, kept_states)


@planner("recurrence_vjp")
def recurrence_vjp(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    _, g, last, _, states, turned, _ = types
    if states.dtype is not turned.dtype or states.dtype not in (f32, f64):
        return None
    _, rows, hidden = g.shape
    width, nparts = turned.shape[0], CELLS[attributes["cell"]].cotangents
    x = Matrix(rows, width, nparts * hidden, 1)
    product = Product(states.dtype.name, x, Matrix(width, hidden, hidden, 1))
    scratch = g.dtype.itemsize * rows * hidden
    return _call(op, types, product, attributes, hidden, [nparts], scratch, last.nbytes)


def _call(op: str, types: Types, product: Product, attributes: Attributes, hidden: int,
          more: list[int], scratch: int, states: int) -> KernelCall | None:  # fmt: skip
    rows, time, lengths = product.x.rows, types[1].shape[0], types[-1]
    if not rows * hidden or lengths.dtype is u64:
        return None
    child = vector(product, by_columns=True) if rows == 1 else tiles(product)
    if child is None:
        return None
    cell, size = attributes["cell"], product.x.columns * product.y.columns
    step = 100 + size * max(1.0 / 16, rows / 40) + 2.0 * rows * CELLS[cell].gates * hidden
    alone = hidden % _UNIT or step < _WORTH_A_BARRIER
    unit = hidden if alone else _UNIT
    units = hidden // unit
    rest = [time, integer_kind(lengths.dtype), attributes["reverse"]]
    rest += [CELLS[cell].parts, more[0], RECURRENT_CELLS.index(cell.upper()), *more[1:]]
    kernel, n = f"{op}_{product.dtype}", product.y.columns
    integers = {"m": rows, "k": product.x.columns, "n": n, "unit": unit}
    scratch += 64 + max(child.scratch, 4 * n)
    shared = 64 + -(-units // 8) * 64 + states
    head = kernel, len(types), units, time * step, integers
    return kernel_call(*head, scratch=scratch, shared=shared, children=[child], rest=rest)
