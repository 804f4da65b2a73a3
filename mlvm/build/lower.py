"""Lowering of ops that Python runs as several kernels to these kernels in sequence.

Floats of 16 bits are widened before an op and narrowed after it (`mlvm.core.ops.half`). An f32
beside an f64 is converted first. A chain runs in parts where a link has no row function
(`mlvm.machines.native.kernels`). Converted operands are in temporaries outside of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.machine.callee import Fused, OpInto, WritesInto
from mlvm.core.machine.fused import parse
from mlvm.core.op import Attributes
from mlvm.core.ops import half
from mlvm.core.types import DType, TensorType, f32, f64, i64
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.kernels import NativeFused, NativeKernel, Parts
from mlvm.machines.native.planner import PLANNERS, unwrapped

_ALIGNMENT = 64


class Temporary(NamedTuple):
    """Temporary tensor of a step: `nbytes` bytes at an offset of its scratch memory."""

    type: TensorType
    at: int
    nbytes: int


Parameter: TypeAlias = int | Temporary
Bound: TypeAlias = Callable[[Any], int]
Calls: TypeAlias = list[tuple[KernelCall, tuple[Parameter, ...]]]


class Typed(NamedTuple):
    """Operand or result of an op, with its parameter."""

    type: TensorType
    parameter: Parameter


Operands: TypeAlias = Sequence[Typed]


class _Impossible(Exception):
    """Error of an op without kernels in C."""


def lowered(
    callee: WritesInto,
    types: Sequence[TensorType],
    numbers: Sequence[int],
    attributes: Attributes,
    bound: Bound | None = None,
) -> Calls | None:
    """Lower an op to calls with their parameters; None if there is no kernel in C. With lengths,
    `bound` returns the largest value of a size, and attributes are as in the program."""
    lowering = _Lowering(bound)
    operands = list(map(Typed, types, numbers))
    try:
        if isinstance(callee, OpInto):
            bound_attributes = callee.bind(attributes) if bound else attributes
            lowering.op(callee.kernel, operands, bound_attributes)
        elif isinstance(callee, Fused) and isinstance(callee.kernel, NativeFused):
            lowering.chain(callee, operands, attributes)
        else:
            return None
    except _Impossible:
        return None
    return lowering.calls


class _Lowering:
    """Builder of the calls of an op."""

    def __init__(self, bound: Bound | None) -> None:
        self.calls: Calls = []
        self._end = 0
        self._bound = bound

    def _temporary(self, type: TensorType) -> Typed:
        nbytes = type.nbytes if self._bound is None else self._bound(type.nbytes)
        temporary = Temporary(type, self._end, nbytes)
        self._end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return Typed(type, temporary)

    def _add(self, call: KernelCall | None, operands: Operands) -> None:
        if call is None:
            raise _Impossible
        self.calls.append((unwrapped(call), tuple([each.parameter for each in operands])))

    def _planned(
        self, kernel: NativeKernel, operands: Operands, attributes: Attributes
    ) -> KernelCall | None:
        plan = kernel.plan if self._bound else kernel.call
        return plan([each.type for each in operands], attributes)

    def _call(self, kernel: NativeKernel, operands: Operands, attributes: Attributes) -> None:
        self._add(self._planned(kernel, operands, attributes), operands)

    def _convert(self, out: Typed, x: Typed) -> None:
        call = PLANNERS["astype"]([out.type, x.type], {"dtype": out.type.dtype.name})
        self._add(call, (out, x))

    def _converted(
        self, dtype: DType, operands: Operands, only: DType | None = None
    ) -> list[Typed]:
        """Convert operands, or those of the dtype `only`."""
        converted = [*operands]
        for i, x in enumerate(operands):
            if x.type.dtype is not dtype and only in (None, x.type.dtype):
                converted[i] = self._temporary(x.type.with_dtype(dtype))
                self._convert(converted[i], x)
        return converted

    def chain(self, callee: Fused, operands: Operands, attributes: Attributes) -> None:
        """Lower a chain."""
        kernel: Any = callee.kernel
        types = [each.type for each in operands]
        if self._bound is None:
            return self.parts(kernel.plan_for(attributes["chain"], types), operands)
        chain = parse(attributes, callee.kernels)
        call = kernel.plan(types, {"chain": chain})
        if call is not None:
            return self._add(call, operands)
        return self.parts(Parts(chain, types), operands)

    def parts(self, parts: Any, operands: Operands) -> None:
        """Lower a chain, one part after the other."""
        if not isinstance(parts, Parts):
            raise _Impossible
        values = [*operands, *map(self._temporary, parts.temporaries)]
        for work, places, attributes in parts.parts:
            row = [values[place] for place in places]
            if isinstance(work, KernelCall):
                self._add(work, row)
            else:
                self.op(work, row, attributes)

    def op(self, kernel: object, operands: Operands, attributes: Attributes) -> None:
        """Lower an op by the steps that its kernel takes where it has no call."""
        if not isinstance(kernel, NativeKernel):
            raise _Impossible
        call = self._planned(kernel, operands, attributes)
        out, *xs = operands
        name, dtype = kernel.op.name, out.type.dtype
        if call is not None:
            self._add(call, operands)
        elif out.type.size == 0 and not kernel.op.may_raise:
            return
        elif name == "sum" and xs[0].type.size == 0:
            self._add(PLANNERS["zeros"]([out.type], {}), [out])
        elif name == "sum" and dtype.is_integer:  # modulo 2^64, and then less
            wide = self._temporary(out.type.with_dtype(i64))
            self._call(kernel, [wide, *xs], {**attributes, "dtype": i64.name})
            self._convert(out, wide)
        elif name == "matmul" and dtype.is_integer and dtype.itemsize < i64.itemsize:
            wide = self._temporary(out.type.with_dtype(i64))  # modulo 2^64, and then less
            self._call(kernel, [wide, *self._converted(i64, xs)], attributes)
            self._convert(out, wide)
        elif (name == "concat" or (name == "matmul" and dtype in (f32, f64))) and any(
            x.type.dtype is not dtype for x in xs
        ):
            self._call(kernel, [out, *self._converted(dtype, xs)], attributes)
        elif any(half.is_half(x.type) for x in operands):
            self._halves(kernel, operands, attributes)
        elif any(x.type.dtype is f64 for x in xs):
            self._call(kernel, [out, *self._converted(f64, xs, only=f32)], attributes)
        else:
            raise _Impossible

    def _halves(self, kernel: NativeKernel, operands: Operands, attributes: Attributes) -> None:
        """Lower an op on halves as `half.run` runs it, but for rare cases."""
        op, (out, *xs) = kernel.op, operands
        types = [x.type for x in xs]
        rounds = any(
            counts and x.dtype.is_integer and x.dtype.itemsize > 1
            for x, counts in zip(types, half.promotes(op, types), strict=True)
        )
        if rounds or op.dynamic or op.name in ("nextafter", "uniform", "astype"):
            raise _Impossible
        for dtype in {type.dtype for type in types if half.is_half(type)}:
            xs = self._converted(f32, xs, only=dtype)
        if not half.is_half(out.type):
            return self.op(kernel, [out, *xs], attributes)
        named = attributes.get("dtype") == out.type.dtype.name
        in_f64 = (named and f64 in [type.dtype for type in types]) or not op.inputs
        wide = self._temporary(out.type.with_dtype(f64 if in_f64 else f32))
        attributes = dict(attributes)
        if named:
            attributes["dtype"] = wide.type.dtype.name
        for name in half.FILLS & attributes.keys():
            value = np.array(attributes[name])
            attributes[name] = float(half.shown(half.cast(value, out.type.dtype)))
        self.op(kernel, [wide, *xs], attributes)
        return self._convert(out, wide)
