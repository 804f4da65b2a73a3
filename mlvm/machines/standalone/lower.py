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
_TAKE_ANY_VALUE = frozenset(["sum", "mean", "max", "min", "sort", "argsort"])


class Temporary(NamedTuple):
    """Temporary tensor of a step: `nbytes` bytes at an offset of its scratch memory."""

    type: TensorType
    at: int
    nbytes: int


Parameter: TypeAlias = int | Temporary
Bound: TypeAlias = Callable[[Any], int]
Calls: TypeAlias = list[tuple[KernelCall, tuple[Parameter, ...]]]


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
    try:
        if isinstance(callee, OpInto):
            bound_attributes = callee.bind(attributes) if bound else attributes
            lowering.op(callee.kernel, types, [*numbers], bound_attributes)
        elif isinstance(callee, Fused) and isinstance(callee.kernel, NativeFused):
            lowering.chain(callee, types, numbers, attributes)
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

    def _temporary(self, type: TensorType) -> Temporary:
        nbytes = type.nbytes if self._bound is None else self._bound(type.nbytes)
        temporary = Temporary(type, self._end, nbytes)
        self._end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return temporary

    def _add(self, call: KernelCall | None, parameters: Sequence[Parameter]) -> None:
        if call is None:
            raise _Impossible
        self.calls.append((unwrapped(call), tuple(parameters)))

    def _call(
        self, kernel: NativeKernel, types: Sequence[TensorType], attributes: Attributes
    ) -> KernelCall | None:
        return (kernel.plan if self._bound else kernel.call)(types, attributes)

    def chain(
        self,
        callee: Fused,
        types: Sequence[TensorType],
        numbers: Sequence[int],
        attributes: Attributes,
    ) -> None:
        """Lower a chain."""
        kernel: Any = callee.kernel
        if self._bound is None:
            return self.parts(kernel.plan_for(attributes["chain"], types), types, numbers)
        chain = parse(attributes, callee.kernels)
        call = kernel.plan(types, {"chain": chain})
        if call is not None:
            return self._add(call, numbers)
        return self.parts(Parts(chain, types), types, numbers)

    def _convert(self, out: TensorType, into: Parameter, x: TensorType, source: Parameter) -> None:
        self._add(PLANNERS["astype"]([out, x], {"dtype": out.dtype.name}), (into, source))

    def parts(self, parts: Any, types: Sequence[TensorType], numbers: Sequence[int]) -> None:
        """Lower a chain, one part after the other."""
        if not isinstance(parts, Parts):
            raise _Impossible
        temporaries = [self._temporary(type) for type in parts.temporaries]
        all_types = [*types, *parts.temporaries]
        all_parameters: list[Parameter] = [*numbers, *temporaries]
        for work, places, attributes in parts.parts:
            parameters = [all_parameters[place] for place in places]
            if isinstance(work, KernelCall):
                self._add(work, parameters)
            else:
                self.op(work, [all_types[place] for place in places], parameters, attributes)

    def op(
        self,
        kernel: object,
        types: Sequence[TensorType],
        parameters: Sequence[Parameter],
        attributes: Attributes,
    ) -> None:
        """Lower an op by the steps that its kernel takes where it has no call."""
        if not isinstance(kernel, NativeKernel):
            raise _Impossible
        call = self._call(kernel, types, attributes)
        out, op = types[0], kernel.op
        if call is not None:
            self._add(call, parameters)
        elif out.size == 0 and op.name in _TAKE_ANY_VALUE:
            return
        elif op.name == "sum" and types[1].size == 0:
            self._add(PLANNERS["zeros"]([out], {}), parameters[:1])
        elif op.name == "sum" and out.dtype.is_integer:  # modulo 2^64, and then less
            wide = out.with_dtype(i64)
            temporary, attributes = self._temporary(wide), {**attributes, "dtype": i64.name}
            self._add(
                self._call(kernel, [wide, *types[1:]], attributes), (temporary, *parameters[1:])
            )
            self._convert(out, parameters[0], wide, temporary)
        elif op.name == "matmul" and out.dtype.is_integer and out.dtype.itemsize < i64.itemsize:
            temporary = self._temporary(out.with_dtype(i64))  # modulo 2^64, and then less
            alike, sources = self._operands_as(i64, types, parameters)
            alike[0], sources[0] = temporary.type, temporary
            self._add(self._call(kernel, alike, attributes), sources)
            self._convert(out, parameters[0], temporary.type, temporary)
        elif (op.name == "concat" or (op.name == "matmul" and out.dtype in (f32, f64))) and any(
            x.dtype is not out.dtype for x in types[1:]
        ):
            alike, sources = self._operands_as(out.dtype, types, parameters)
            self._add(self._call(kernel, alike, attributes), sources)
        elif any(map(half.is_half, types)):
            self._halves(kernel, types, parameters, attributes)
        elif any(type.dtype is f64 for type in types[1:]):
            alike, sources = self._operands_as(f64, types, parameters, only=f32)
            self._add(self._call(kernel, alike, attributes), sources)
        else:
            raise _Impossible

    def _operands_as(
        self,
        dtype: DType,
        types: Sequence[TensorType],
        parameters: Sequence[Parameter],
        only: DType | None = None,
    ) -> tuple[list[TensorType], list[Parameter]]:
        """Convert all operands, or those of the dtype `only`; return types and parameters, which
        begin with the result's."""
        alike, sources = [*types], [*parameters]
        for i, type in enumerate(types[1:], 1):
            if type.dtype is not dtype and only in (None, type.dtype):
                alike[i] = type.with_dtype(dtype)
                sources[i] = self._temporary(alike[i])
                self._convert(alike[i], sources[i], type, parameters[i])
        return alike, sources

    def _halves(
        self,
        kernel: NativeKernel,
        types: Sequence[TensorType],
        parameters: Sequence[Parameter],
        attributes: Attributes,
    ) -> None:
        """Lower an op on halves as `half.run` runs it, but for rare cases."""
        op, out = kernel.op, types[0]
        rounds = any(
            counts and x.dtype.is_integer and x.dtype.itemsize > 1
            for x, counts in zip(types[1:], half.promotes(op, types[1:]), strict=True)
        )
        if rounds or op.dynamic or op.name in ("nextafter", "uniform", "astype"):
            raise _Impossible
        wide, sources = [*types], [*parameters]
        for dtype in {type.dtype for type in types[1:] if half.is_half(type)}:
            wide, sources = self._operands_as(f32, wide, sources, only=dtype)
        if half.is_half(out):
            named = attributes.get("dtype") == out.dtype.name
            in_f64 = (named and any(x.dtype is f64 for x in types[1:])) or not op.inputs
            wide[0] = out.with_dtype(f64 if in_f64 else f32)
            sources[0] = self._temporary(wide[0])
            attributes = dict(attributes)
            if named:
                attributes["dtype"] = wide[0].dtype.name
            for name in half.FILLS & attributes.keys():
                value = np.array(attributes[name])
                attributes[name] = float(half.shown(half.cast(value, out.dtype)))
        self.op(kernel, wide, sources, attributes)
        if half.is_half(out):
            self._convert(out, parameters[0], wide[0], sources[0])
