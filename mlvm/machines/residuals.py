"""Residuals: values that control flow saves for the backward pass, on a stack per VM.

The trip count of a `while_loop` and the depth of a recursion are known only at run time. Therefore
a program saves the values of each iteration or call as a record on a stack of the VM, and refers to
records by number.

    residuals.begin  ( -- )               start the stack of a program, above outer programs
    residuals.push   ( p x1 .. xn -- )    copy the tensors to a new record; write its number to p
    residuals.read   ( o1 .. on p -- )    copy the first n tensors of record p to o1 .. on
    residuals.read_rows ( o1 .. on p -- ) copy row i from record p[i], for each i
    residuals.add    ( r p q -- )         add records p and q to a new record; write its number to r
    residuals.end    ( -- )               drop the records of the program
    residuals.held   ( -- n )             return the bytes of the stack, also unused, as an i64[]

Numbers start with 1, and 0 is a record of zeros. Therefore records are vectors, and the cotangent
of a record is a record. In a record of a cotangent, each i64 is the number of a nested record, and
`add` also adds the nested records.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mlvm.core.errors import HostFunctionError, MachineError
from mlvm.core.machine.callee import UserFunction, describe, is_tensor
from mlvm.core.machine.frame import Frame, PythonFunction
from mlvm.core.ops.elementwise import add as add_op
from mlvm.core.ops.half import suited
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import ALIGNMENT, Array, TensorType, i64, u8
from mlvm.core.vm import VM

if TYPE_CHECKING:
    from mlvm.machines.native._native import Records

BEGIN: Final = "residuals.begin"
PUSH: Final = "residuals.push"
READ: Final = "residuals.read"
READ_ROWS: Final = "residuals.read_rows"
ADD: Final = "residuals.add"
END: Final = "residuals.end"
HELD: Final = "residuals.held"

_ON_RECORDS: Final = (
    (PUSH, None, slice(1, None)),
    (READ, None, slice(-1, None)),
    (READ_ROWS, None, slice(-1, None)),
    (ADD, 3, slice(1, None)),
)
"""Function names, numbers of parameters, and the parameters that each function reads."""

_CHUNK: Final = 1 << 16
_PER_RECORD: Final = 224  # bytes of Python objects, plus the same number per array
_HELD: Final = Program.of_op(HELD, 0, {}, 1)


class Stack:
    """Stack of records of arrays.

    `more(nbytes)` allocates memory; `keep(nbytes)` reports the additional overhead in bytes.
    """

    def __init__(self, more: Callable[[int], Array], keep: Callable[[int], None]) -> None:
        self.nbytes = 0
        self._more, self._keep = more, keep
        self._chunks: list[Array] = []
        self._top = 0, 0  # index of the chunk, and used bytes in it
        self._records: list[list[Array]] = []
        self._first = 0  # number of records of enclosing programs

    def begin(self) -> Any:
        """Start the records of a program; return a mark for `end`."""
        mark = self._top, len(self._records), self._first
        self._first = len(self._records)
        return mark

    def end(self, mark: Any) -> None:
        """Drop the records since the mark."""
        self._top, count, self._first = mark
        self._keep(-sum(map(_overhead, self._records[count:])))
        del self._records[count:]

    def push(self, arrays: Sequence[Array]) -> int:
        """Copy arrays into a new record; return the number of the record."""
        self._keep(_overhead(arrays))
        record = [self._take(TensorType.of(array)) for array in arrays]
        for place, array in zip(record, arrays, strict=True):
            np.copyto(place, array)
        self._records.append(record)
        return len(self._records)

    def record(self, number: int) -> list[Array] | None:
        """Return the arrays of a record of the program, or None for an unknown number."""
        return self._records[number - 1] if self._first < number <= len(self._records) else None

    def _take(self, type: TensorType) -> Array:
        """Allocate memory for a tensor on top of the stack."""
        nbytes = -(-type.nbytes // ALIGNMENT) * ALIGNMENT
        chunk, used = self._top
        while chunk < len(self._chunks) and used + nbytes > self._chunks[chunk].size:
            chunk, used = chunk + 1, 0
        if chunk == len(self._chunks):
            size = max(nbytes, _CHUNK << min(chunk, 10))
            self._chunks.append(self._more(size))
            self.nbytes += size
        self._top = chunk, used + nbytes
        return type.over(self._chunks[chunk][used:])


class Residuals:
    """Stacks of residuals of a VM: one per program of a launch, nested like the programs.

    The next launch reuses the memory. `vm` is a weak proxy, because the VM's function table
    contains the methods.
    """

    def __init__(self, vm: VM, stack: Stack | Records) -> None:
        self._vm = vm
        self._stack: Any = stack
        self._programs: list[tuple[int, Any]] = []  # depth, and start of the records

    def begin(self, frame: Frame) -> None:
        """Start the stack of the current program.

        Drop the stacks of failed programs at the same depth of nested launches.
        """
        while self._programs and self._programs[-1][0] >= self._vm.depth:
            self.end(frame)
        self._programs.append((self._vm.depth, self._stack.begin()))

    def end(self, frame: Frame) -> None:
        """Drop the records of the most recently started program."""
        if not self._programs:
            raise MachineError(f"{END} without {BEGIN}; call {BEGIN} first")
        self._stack.end(self._programs.pop()[1])

    def push(self, frame: Frame) -> None:
        """Copy the tensors into a new record; write its number into the first parameter."""
        number, *arrays = _arrays(PUSH, frame)
        number[...] = self._stack.push(arrays)

    def read(self, frame: Frame) -> None:
        """Copy the first arrays of a record into the parameters.

        Raises `HostFunctionError` for an unknown record, or for a record with other types.
        """
        *outs, place = _arrays(READ, frame)
        for out, x in zip(outs, self._record_like(READ, int(place), outs), strict=False):
            np.copyto(out, x)

    def read_rows(self, frame: Frame) -> None:
        """Copy row i of the arrays from the record with number i. Raises what `read` raises."""
        *outs, places = _arrays(READ_ROWS, frame)
        numbers = places.copy()
        if any(out.shape[: places.ndim] != places.shape for out in outs):
            message = "expected a row of each tensor for each number of a record"
            raise HostFunctionError(f"{READ_ROWS}: {message}")
        for number in np.unique(numbers).tolist():
            rows = numbers == number
            for out, x in zip(outs, self._record_like(READ_ROWS, number, outs), strict=False):
                out[rows] = x[rows]

    def _record_like(self, name: str, number: int, outs: Sequence[Array]) -> list[Array]:
        """Return the arrays of a record.

        Raises `HostFunctionError` unless the first arrays have the types of `outs`.
        """
        record = (self._stack.record(number) if number else list(map(np.zeros_like, outs))) or []
        if [x.shape for x in outs] != [x.shape for x in record[: len(outs)]] or any(
            out.dtype != x.dtype for out, x in zip(outs, record, strict=False)
        ):
            message = f"unknown record {number} of {len(outs)} tensors with these types"
            raise HostFunctionError(f"{name}: {message}")
        return record

    def add(self, frame: Frame) -> None:
        """Add pairs of records, and recursively the records that they refer to.

        The numbers of the sums are written into the first parameter.
        """
        total, p, q = filter(is_tensor, map(frame.param, range(3)))
        pairs = [*zip(p.ravel().tolist(), q.ravel().tolist(), strict=True)]
        npairs = len(pairs)
        # by pair: start and count of the pairs that it refers to
        named: list[list[tuple[int, int]]] = []
        for pair in pairs:  # the list grows in the loop
            named.append([])
            if all(pair):
                for x, y in zip(*map(self._record, pair), strict=True):
                    if x.dtype == np.int64:
                        if (x >= pair[0]).any() or (y >= pair[1]).any():
                            raise HostFunctionError(
                                f"{ADD}: a record refers to a later record; add that record first"
                            )
                        named[-1].append((len(pairs), x.size))
                        pairs += zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)
        sums = [p or q for p, q in pairs]
        for i in reversed(range(len(pairs))):
            if all(pairs[i]):
                inner = iter(named[i])
                both = [*zip(*map(self._record, pairs[i]), strict=True)]
                arrays = [np.empty_like(x) for x, _ in both]
                for out, operands in zip(arrays, both, strict=True):
                    suited(add_op, add_op.kernel, operands)(out, *operands)
                for x in arrays:
                    if x.dtype == np.int64:
                        at, size = next(inner)
                        x[...] = np.asarray(sums[at : at + size], np.int64).reshape(x.shape)
                sums[i] = self._stack.push(arrays)
        total[...] = np.asarray(sums[:npairs], np.int64).reshape(total.shape)

    def tell(self, frame: Frame) -> None:
        frame.push(np.asarray(self._stack.nbytes, np.int64))

    def _record(self, number: int) -> list[Array]:
        record: list[Array] | None = self._stack.record(number)
        if record is None:
            raise HostFunctionError(f"{ADD}: record {number} does not exist")
        return record


def _overhead(record: Sequence[Array]) -> int:
    """Return the bytes of a record in addition to its elements."""
    return _PER_RECORD * (1 + len(record))


def register(vm: VM, *, native: bool = False) -> None:
    """Register the host functions of residuals on the VM."""
    machine: VM = weakref.proxy(vm)

    def more(nbytes: int) -> Array:
        return machine.array_of(machine.alloc_tensor(TensorType(u8, (nbytes,))))

    callees: list[UserFunction] = []
    if native:
        from mlvm.machines.native import _native as c
        from mlvm.machines.native.host import CFunction

        records = c.Records(more)
        of = Residuals(machine, records)
        addresses = c.PUSH_RECORD, c.READ_RECORD, c.READ_RECORD_ROWS, c.ADD_RECORDS
        for (name, nparams, reads), address in zip(_ON_RECORDS, addresses, strict=True):
            callees.append(CFunction(name, address, nparams, 0, None, records, reads))
    else:
        of = Residuals(machine, Stack(more, lambda nbytes: machine.keep(nbytes)))
        methods = of.push, of.read, of.read_rows, of.add
        for (name, nparams, reads), method in zip(_ON_RECORDS, methods, strict=True):
            callees.append(PythonFunction(name, method, nparams, 0, reads))
    callees.append(PythonFunction(BEGIN, of.begin, 0, 0))
    callees.append(PythonFunction(END, of.end, 0, 0))
    callees.append(PythonFunction(HELD, of.tell, 0, 1))
    vm.register_callees({each.name: each for each in callees})


def stack_bytes(vm: VMProtocol) -> int:
    """Return the bytes of the VM's stacks of residuals."""
    [nbytes] = vm.launch(_HELD)
    return int(nbytes)


def _arrays(name: str, frame: Frame) -> list[Array]:
    """Return the parameters.

    Raises `HostFunctionError` unless all are tensors, and the record number is an i64[].
    """
    params = [frame.param(i) for i in range(frame.nparams)]
    arrays = list(filter(is_tensor, params))
    number = arrays[0 if name == PUSH else -1] if arrays else None
    if (
        len(arrays) < len(params)
        or number is None
        or TensorType.of(number).dtype is not i64
        or (number.ndim > 0) != (name == READ_ROWS)
    ):
        raise HostFunctionError(
            f"{name}: expected tensors, and an i64[] as the record's number, got {describe(params)}"
        )
    return arrays
