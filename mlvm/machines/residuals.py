"""Residuals: what the way back through control flow needs of the way there, on a stack.

How often a `while_loop` turns, or how deep a function calls itself, is known at run time only. So
such a program keeps the values of each turn, or call, as a record on a stack of the VM's own, and
knows it by its number there.

    residuals.begin  ( -- )               a program's own stack, above that of one around it
    residuals.push   ( p x1 .. xn -- )    a record of copies of the tensors; its number is in p
    residuals.read   ( o1 .. on p -- )    the first n tensors of that record are in o1 .. on
    residuals.add    ( r p q -- )         a record of the sums of those of two; its number is in r
    residuals.end    ( -- )               the program's records are given up
    residuals.held   ( -- n )             the bytes of the stack, which the VM keeps, as an i64[]

Numbers begin with 1, and 0 is a record of zeros. So records are as vectors: cotangents of records
are records, too. There each i64 is the number of another, of which `add` makes the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from mlvm.core.errors import MachineError, OperandValueError
from mlvm.core.machine.callee import is_tensor
from mlvm.core.machine.frame import Frame, PythonFunction
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import ALIGNMENT, Array, TensorType, i64, u8
from mlvm.core.vm import VM

BEGIN: Final = "residuals.begin"
PUSH: Final = "residuals.push"
READ: Final = "residuals.read"
ADD: Final = "residuals.add"
END: Final = "residuals.end"
HELD: Final = "residuals.held"

_CHUNK: Final = 1 << 16
_PER_RECORD: Final = 224  # bytes of Python's, and as many for each array
_HELD: Final = Program.of_op(HELD, 0, {}, 1)


class Residuals:
    """The stacks of one VM: a program's, and above it those of programs that it launches by host
    functions. Their memory is kept for the next launch; `held` is how many bytes it has."""

    def __init__(self, vm: VM) -> None:
        self.held = 0
        self._vm = weakref.ref(vm)  # whose function table has the methods
        self._chunks: list[Array] = []
        self._top = 0, 0  # the chunk, and how much of it is used
        self._records: list[list[Array]] = []
        self._programs: list[tuple[int, tuple[int, int], int]] = []  # depth, top, records before

    def begin(self, frame: Frame) -> None:
        """Begin the stack of the program that runs now. What is left of others at its depth of
        launches within launches, which have failed, is given up."""
        depth = self._machine().depth
        while self._programs and self._programs[-1][0] >= depth:
            self.end(frame)
        self._programs.append((depth, self._top, len(self._records)))

    def end(self, frame: Frame) -> None:
        """Give up the records of the program that began last."""
        if not self._programs:
            raise MachineError(f"{END} without {BEGIN}")
        _, self._top, count = self._programs.pop()
        self._machine().keep(-sum(map(_overhead, self._records[count:])))
        del self._records[count:]

    def push(self, frame: Frame) -> None:
        """Copy the tensors into a new record, and tell its number."""
        number, *arrays = _arrays(PUSH, frame)
        number[...] = self._push(arrays)

    def read(self, frame: Frame) -> None:
        """Copy a record, or as many of its arrays. Raises `OperandValueError` if there is none of
        that number and these types."""
        *outs, place = _arrays(READ, frame)
        if not (number := int(place)):
            for out in outs:
                out[...] = 0
            return
        record = self._record(number)
        if [x.shape for x in outs] != [x.shape for x in record[: len(outs)]] or any(
            out.dtype != x.dtype for out, x in zip(outs, record, strict=False)
        ):
            raise OperandValueError(f"no record {number} of {len(outs)} such tensors is there")
        for out, x in zip(outs, record, strict=False):
            np.copyto(out, x)

    def add(self, frame: Frame) -> None:
        """Add the records of two numbers, or of each two in two arrays, and what they name."""
        sums = [_arrays(ADD, frame)]
        while sums:
            total, *both = sums.pop()
            for i, (p, q) in enumerate(zip(*[x.ravel().tolist() for x in both], strict=True)):
                total.flat[i] = p or q
                if p and q:
                    pairs = [*zip(self._record(p), self._record(q), strict=True)]
                    total.flat[i] = self._push([x + y for x, y in pairs])
                    made = self._records[-1]
                    named = [each for each in zip(made, *zip(*pairs, strict=True), strict=True)]
                    sums += [[*each] for each in named if each[0].dtype == np.int64]

    def _push(self, arrays: Sequence[Array]) -> int:
        self._machine().keep(_overhead(arrays))
        record = [self._take(TensorType.of(array)) for array in arrays]
        for place, array in zip(record, arrays, strict=True):
            np.copyto(place, array)
        self._records.append(record)
        return len(self._records)

    def _record(self, number: int) -> list[Array]:
        first = self._programs[-1][2] if self._programs else 0
        return self._records[number - 1] if first < number <= len(self._records) else []

    def tell(self, frame: Frame) -> None:
        frame.push(np.asarray(self.held, np.int64))

    def _take(self, type: TensorType) -> Array:
        """Memory for a tensor, on top."""
        nbytes = -(-type.nbytes // ALIGNMENT) * ALIGNMENT
        chunk, used = self._top
        while chunk < len(self._chunks) and used + nbytes > self._chunks[chunk].size:
            chunk, used = chunk + 1, 0
        if chunk == len(self._chunks):
            self._chunks.append(self._more(max(nbytes, _CHUNK << min(chunk, 10))))
        self._top = chunk, used + nbytes
        memory = self._chunks[chunk][used : used + type.nbytes]
        return memory.view(type.dtype.numpy).reshape(type.shape)

    def _more(self, nbytes: int) -> Array:
        vm = self._machine()
        memory = vm.array_of(vm.alloc_tensor(TensorType(u8, (nbytes,))))
        self.held += nbytes
        return memory

    def _machine(self) -> VM:
        vm = self._vm()
        assert vm is not None  # it runs a program
        return vm


def _overhead(record: Sequence[Array]) -> int:
    """Bytes of a record beside the elements."""
    return _PER_RECORD * (1 + len(record))


def register(vm: VM) -> None:
    """Make the functions known to the VM's programs."""
    of = Residuals(vm)
    functions: list[tuple[str, Callable[[Frame], None], int | None]] = [
        (BEGIN, of.begin, 0),
        (PUSH, of.push, None),
        (READ, of.read, None),
        (ADD, of.add, 3),
        (END, of.end, 0),
    ]
    callees = {name: PythonFunction(name, does, nparams, 0) for name, does, nparams in functions}
    callees[PUSH].reads, callees[READ].reads = slice(1, None), slice(-1, None)
    vm.register_callees({**callees, HELD: PythonFunction(HELD, of.tell, 0, 1)})


def held(vm: VMProtocol) -> int:
    """The bytes of the VM's stack."""
    [nbytes] = vm.launch(_HELD)
    return int(nbytes)


def _arrays(name: str, frame: Frame) -> list[Array]:
    """The parameters, of which the one for the record's number is an i64[]."""
    params = [frame.param(i) for i in range(frame.nparams)]
    arrays = list(filter(is_tensor, params))
    if name == ADD:
        return arrays
    number = arrays[0 if name == PUSH else -1] if arrays else None
    if len(arrays) < len(params) or number is None or TensorType.of(number) != TensorType(i64):
        raise MachineError(f"{name} takes tensors, and an i64[] for the record's number")
    return arrays
