"""The function table: what `cfunc` finds by name.

Every op is there twice: `add` ( x y -- z ) makes its result, `add.out` ( z x y -- ) writes
into z. A linked program holds on to a name's `Slot`, so a call looks nothing up, and still
sees a later registration.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.errors import DTypeError, OpError, ShapeError, UnknownFunction
from mlvm.core.op import OPS, Attributes, Kernel, Op
from mlvm.core.types import Array, TensorType

Value = Array | int | str
OUT: Final = ".out"


class Slot:
    """A name's place in the table: its function now, and what the verifier may rely on.

    `call(params, attributes)` returns the results. `kernel` is set where calling the bare
    kernel on the parameters is all there is to do (the `.out` form of an op).
    """

    __slots__ = ("call", "kernel", "name", "nresults", "op")

    def __init__(self, name: str, op: Op) -> None:
        self.name = name
        self.op = op
        if name.endswith(OUT):
            self.nresults: int = 0
            self.kernel: Kernel | None = op.kernel
            self.call = self._into
        else:
            self.nresults = 1
            self.kernel = None
            self.call = self._dynamic if op.dynamic else self._fresh

    def bind(self, attributes: Attributes) -> Attributes:
        """The attributes as the function takes them. Raises `AttributeRefused`."""
        return self.op.bind(attributes)

    def infer(
        self, operands: Sequence[TensorType], attributes: Attributes
    ) -> tuple[TensorType | None, ...]:
        """The results' types, None for one that only running tells. Raises an `OpError`."""
        if self.nresults:
            return (self.op.infer(operands, attributes),)
        if not operands:
            raise ShapeError("takes the tensor to write to first").at(self.name, operands)
        out, inferred = operands[0], self.op.infer(operands[1:], attributes)
        if out is not inferred:
            refused = ShapeError if inferred is None or out.dtype is inferred.dtype else DTypeError
            raise refused(f"the result is {inferred} and does not fit into {out}").at(
                self.name, operands
            )
        return ()

    def _into(self, params: Sequence[Value], attributes: Attributes) -> tuple[Value, ...]:
        self.op.kernel(*params, **attributes)
        return ()

    def _fresh(self, params: Sequence[Any], attributes: Attributes) -> tuple[Value, ...]:
        type = self.op.infer([TensorType.of(x) for x in params], attributes)
        assert type is not None  # only dynamic ops leave the type open
        out = np.empty(type.shape, type.dtype.numpy)
        self.op.kernel(out, *params, **attributes)
        return (out,)

    def _dynamic(self, params: Sequence[Any], attributes: Attributes) -> tuple[Value, ...]:
        self.op.infer([TensorType.of(x) for x in params], attributes)
        result: Array = self.op.kernel(*params, **attributes)
        return (result,)

    def refused(self, error: OpError, params: Sequence[Value]) -> OpError:
        """The error a kernel raised, with this function's name and operand types."""
        operands = [TensorType.of(x) if isinstance(x, np.ndarray) else x for x in params]
        return error.at(self.name, operands)


class FunctionTable:
    """Functions by name; starts with all ops."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        for name, op in OPS.items():
            self._slots[name] = Slot(name, op)
            if not op.dynamic:
                self._slots[name + OUT] = Slot(name + OUT, op)

    def slot(self, name: str) -> Slot:
        """The slot of that name. Raises `UnknownFunction`, which offers names like it."""
        try:
            return self._slots[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._slots, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UnknownFunction(f"no function {name!r}{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)
