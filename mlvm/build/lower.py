"""Lowering of ops that Python runs as several kernels to these kernels in sequence.

Operands and results are converted where no kernel supports their types
(`mlvm.machines.native.fallbacks`). A chain runs in parts where a link has no row function
(`mlvm.machines.native.kernels`). Converted operands are in temporaries outside of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from mlvm.arena.placement import rounded
from mlvm.core.machine.callee import Fused, OpInto, WritesInto
from mlvm.core.machine.fused import parse
from mlvm.core.op import Attributes
from mlvm.core.types import TensorType
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.fallbacks import fallback
from mlvm.machines.native.kernels import NativeFused, NativeKernel, Parts
from mlvm.machines.native.planner import PLANNERS, unwrapped


class Temporary(NamedTuple):
    """Temporary tensor of a step: `nbytes` bytes at an offset of the scratch memory."""

    type: TensorType
    at: int
    nbytes: int


Parameter: TypeAlias = int | Temporary
Bound: TypeAlias = Callable[[Any], int]
Calls: TypeAlias = list[tuple[KernelCall, tuple[Parameter, ...]]]


class Typed(NamedTuple):
    """Operand or result of an op, with the parameter."""

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
    """Lower an op to calls with parameters; return None if C has no kernel for it.

    With sizes, `bound` returns the largest value of a size, and attributes are as in the program.
    """
    lowering = _OpLowering(bound)
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


class _OpLowering:
    """Builder of the calls of an op."""

    def __init__(self, bound: Bound | None) -> None:
        self.calls: Calls = []
        self._end = 0
        self._bound = bound

    def _temporary(self, type: TensorType) -> Typed:
        nbytes = type.nbytes if self._bound is None else self._bound(type.nbytes)
        temporary = Temporary(type, self._end, nbytes)
        self._end += rounded(nbytes)
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

    def _convert(self, out: Typed, x: Typed) -> None:
        call = PLANNERS["astype"]([out.type, x.type], {"dtype": out.type.dtype.name})
        self._add(call, (out, x))

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
        """Lower an op that is not a single C call to the steps of the kernel."""
        if not isinstance(kernel, NativeKernel):
            raise _Impossible
        call = self._planned(kernel, operands, attributes)
        types = [each.type for each in operands]
        if call is not None:
            self._add(call, operands)
        elif kernel.op.name == "sum" and types[0].size and types[1].size == 0:
            self._add(PLANNERS["zeros"]([types[0]], {}), operands[:1])
        elif types[0].size or kernel.op.may_raise:
            wide = fallback(kernel.op, types, attributes)
            if wide is None:
                raise _Impossible
            converted = [*operands]
            for i in (*range(1, len(operands)), 0):  # the result comes last
                if wide.types[i] is not operands[i].type:
                    converted[i] = self._temporary(wide.types[i])
                    if i:
                        self._convert(converted[i], operands[i])
            self.op(kernel, converted, wide.attributes)
            if converted[0] is not operands[0]:
                self._convert(operands[0], converted[0])
