"""Collectives of a group, as functions in each VM's table.

The names and semantics follow MPI (MPI: A Message-Passing Interface Standard, version 4.1,
2023). Collectives are declared like ops. `all_reduce` and `broadcast` ( x1..xn -- ) update any
number of tensors in place, with one barrier. A collective with a result has the two forms of an op:
`all_gather` ( x -- y ) and `all_gather.out` ( y x -- ).

`all_reduce.start` ( x1..xn -- ) starts an asynchronous `all_reduce`, and `all_reduce.wait` of the
same tensors waits for it. `all_gather.start` and `all_gather.wait` ( y x -- ) do the same for
`all_gather.out`, and `reduce_scatter.start` and `.wait` for `reduce_scatter.out`. In between, a
thread of the member communicates; the program continues and must not use the tensors. Collectives
are matched in the order of the calls. A blocking call of a member matches a started call of
another member.

Each collective accepts `timeout`, the longest time in seconds without progress that a member waits
for another member. None means the timeout of the group.

The group's communicator sends host arrays (`mlvm.parallel.communicator`). Tensors of a device are
read before the communication, and written after it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from mlvm.core.errors import ArgumentError, DTypeError, GroupError, MachineError, ShapeError
from mlvm.core.machine.callee import OUT, Callee, OpFresh, OpInto, Value
from mlvm.core.memory import HOST, Memory, address
from mlvm.core.op import Attributes, Kernel, Op
from mlvm.core.ops.half import takes_halves
from mlvm.core.types import Array, DType, TensorType
from mlvm.parallel.communicator import Collective, Communicator, Reduction

_Key: TypeAlias = tuple[tuple[int, int], ...]


class Member:
    """VM as a member of a group, with the rank `rank` of `size`.

    The VM's tensors are stored in `memory`. `ops` are the member's collectives by name.
    `kept_functions` are the functions that the member keeps between runs (see `AnyGroup.keep`).
    """

    def __init__(
        self, name: str, rank: int, size: int, memory: Memory = HOST, timeout: float | None = None
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.kept_functions: dict[int, Any] = {}
        self._communicator: Communicator | None = None  # of the current run
        self._thread = 0  # thread of the program
        self._memory = memory
        self._timeout = timeout
        self._executor: ThreadPoolExecutor | None = None  # one thread, for asynchronous collectives
        self._started: list[tuple[str, _Key, Future[None]]] = []
        self.ops = {
            "all_reduce": Op(self.all_reduce, self._reduced),
            "all_reduce.start": Op(self.all_reduce_start, self._reduced),
            "all_reduce.wait": Op(self.all_reduce_wait, _anything),
            "all_gather": Op(self.all_gather, self._gathered),
            "all_gather.start": Op(self.all_gather_start, self._gathered_into),
            "all_gather.wait": Op(self.all_gather_wait, _anything),
            "reduce_scatter": Op(self.reduce_scatter, self._scattered),
            "reduce_scatter.start": Op(self.reduce_scatter_start, self._scattered_into),
            "reduce_scatter.wait": Op(self.reduce_scatter_wait, _anything),
            "broadcast": Op(self.broadcast, self._broadcast),
            "recv": Op(self.recv, self._received),
            "send": Op(self.send, self._sent),
            "barrier": Op(self.barrier, _require_time),
        }
        for op_name, op in self.ops.items():
            op.name = op_name

    # --- a run ---

    def begin(self, communicator: Communicator) -> None:
        """Begin a run on the calling thread."""
        self._communicator = communicator
        self._thread = threading.get_ident()

    def finish(self) -> None:
        """Wait for all asynchronous collectives; raise the first error."""
        started, self._started = self._started, []
        for *_, each in started:
            each.result()

    def leave(self) -> None:
        """Leave the run, after all asynchronous collectives have finished."""
        self._communicator = None
        started, self._started = self._started, []
        for *_, each in started:
            each.exception()

    def close(self) -> None:
        """Drop the kept functions, and stop the member's thread."""
        self.kept_functions.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def functions(self) -> dict[str, Callee]:
        """Return the functions to register in the VM.

        A collective with a result has two functions, and any other collective has one.
        """
        callees: dict[str, Callee] = {}
        for name, op in self.ops.items():
            if op.dynamic:
                callees[name] = Effect(op)
            else:
                callees[name] = InOrder(OpFresh(op))
                callees[name + OUT] = InOrder(OpInto(op))
        return callees

    # --- the collectives ---

    def all_reduce(self, *xs: Array, op: Reduction = "sum", timeout: float | None = None) -> None:
        """Reduce each x in place to the sum, mean, maximum or minimum of all members' x."""
        self._require_writable("all_reduce", *xs)

        self._meet(self._call("all_reduce", xs, xs, timeout, op=op))

    def all_reduce_start(
        self, *xs: Array, op: Reduction = "sum", timeout: float | None = None
    ) -> None:
        """Start an asynchronous `all_reduce`.

        `all_reduce.wait` of the same tensors waits for it.
        """
        self._require_writable("all_reduce.start", *xs)
        self._start(self._call("all_reduce", xs, xs, timeout, op=op))

    def all_reduce_wait(self, *xs: Array) -> None:
        """Wait for the `all_reduce` that `all_reduce.start` has started with these tensors."""
        self._wait("all_reduce", xs)

    @takes_halves
    def reduce_scatter(
        self, out: Array, x: Array, *, op: Reduction = "sum", timeout: float | None = None
    ) -> None:
        """Return this member's shard of the sum, mean, maximum or minimum of all members' x.

        The reduced tensor is split along axis 0 into equal shards, one per rank.
        """
        self._require_apart("reduce_scatter" + OUT, out, x)

        self._meet(self._call("reduce_scatter", [x], (out, x), timeout, op=op))

    @takes_halves
    def reduce_scatter_start(
        self, y: Array, x: Array, *, op: Reduction = "sum", timeout: float | None = None
    ) -> None:
        """Start an asynchronous `reduce_scatter` of x into y.

        `reduce_scatter.wait` of the same tensors waits for it.
        """
        self._require_apart("reduce_scatter.start", y, x)
        self._start(self._call("reduce_scatter", [x], (y, x), timeout, op=op))

    @takes_halves
    def reduce_scatter_wait(self, y: Array, x: Array) -> None:
        """Wait for the `reduce_scatter` that was started with these tensors."""
        self._wait("reduce_scatter", (y, x))

    @takes_halves
    def all_gather(self, out: Array, x: Array, *, timeout: float | None = None) -> None:
        """Concatenate all members' x along axis 0 in order of rank.

        A scalar is treated as a tensor of shape (1,).
        """
        self._require_apart("all_gather" + OUT, out, x)

        self._meet(self._call("all_gather", [x], (out, x), timeout))

    @takes_halves
    def all_gather_start(self, y: Array, x: Array, *, timeout: float | None = None) -> None:
        """Start an asynchronous `all_gather` of x into y.

        `all_gather.wait` of the same tensors waits for it.
        """
        self._require_apart("all_gather.start", y, x)
        self._start(self._call("all_gather", [x], (y, x), timeout))

    @takes_halves
    def all_gather_wait(self, y: Array, x: Array) -> None:
        """Wait for the `all_gather` that was started with these tensors."""
        self._wait("all_gather", (y, x))

    def broadcast(self, *xs: Array, root: int = 0, timeout: float | None = None) -> None:
        """Overwrite each x with the value of the member with rank `root`."""
        self._require_writable("broadcast", *xs)

        self._meet(self._call("broadcast", xs, xs, timeout, root=root))

    def send(self, x: Array, *, to: int, timeout: float | None = None) -> None:
        """Send x to the member with rank `to`, which must call `recv`."""
        self._meet(self._call("send", [x], (x,), timeout, ranks=(self.rank, to), to=to))

    @takes_halves
    def recv(
        self,
        out: Array,
        *,
        source: int,
        shape: tuple[int, ...],
        dtype: str,
        timeout: float | None = None,
    ) -> None:
        """Receive the tensor that the member with rank `source` sends to this member."""
        self._require_writable("recv.out", out)
        pair = (source, self.rank)
        self._meet(self._call("recv", [out], (out,), timeout, ranks=pair, source=source))

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until all members have called `barrier`."""
        self._meet(self._call("barrier", [], (), timeout))

    def _call(
        self,
        name: str,
        xs: Sequence[Array],
        arrays: tuple[Array, ...],
        timeout: float | None,
        *,
        ranks: tuple[int, ...] | None = None,
        **attributes: Any,
    ) -> Collective:
        """Build the call of `name` on `xs` for all members, or for the two members of `ranks`."""
        return Collective(
            name=name,
            attributes=attributes,
            key=(name, *attributes.values()) if ranks is None else (),
            types=[(x.dtype, x.shape) for x in xs],
            ranks=tuple(range(self.size)) if ranks is None else ranks,
            arrays=arrays,
            nbytes=sum([x.nbytes for x in xs]),
            timeout=self._timeout if timeout is None else timeout,
        )

    def _start(self, call: Collective) -> None:
        """Start the call on the member's second thread."""
        key, communicator = _key(call.arrays), self._here(call)
        started = [other for name, other, _ in self._started if name == call.name]
        if any(x.nbytes for x in call.arrays) and key in started:
            raise GroupError(f"{call} was started before; call its wait first")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                1, f"{self.name} beside", initializer=np.seterr, initargs=("ignore",)
            )
        future = self._executor.submit(self._on_host, communicator, call)
        self._started.append((call.name, key, future))

    def _wait(self, name: str, arrays: tuple[Array, ...]) -> None:
        """Wait for a call that was started with these arrays."""
        call, key = self._call(f"{name}.wait", arrays, arrays, None), _key(arrays)
        self._here(call)
        for i, (*started, future) in enumerate(self._started):
            if started == [name, key]:  # several empty tensors may have the same key
                del self._started[i]
                future.result()
                return
        raise GroupError(f"{call}: expected an earlier {name}.start of these tensors, got none")

    def _here(self, call: Collective) -> Communicator:
        """Return the communicator of the current run.

        Raises `GroupError` outside a run, and on any thread except the member's.
        """
        if self._communicator is None:
            raise GroupError(f"{call}: {self.name} is not in a run of its group; see Group.run")
        if self._thread != threading.get_ident():
            raise GroupError(
                f"{call} of {self.name} was called on the thread of a different member; "
                "use the VM that the task receives"
            )
        return self._communicator

    def _meet(self, call: Collective) -> None:
        """Take part in a collective, after the started collectives have finished."""
        communicator = self._here(call)
        for *_, each in self._started:
            each.exception()  # waits; the call of `.wait` raises its error
        self._on_host(communicator, call)

    def _on_host(self, communicator: Communicator, call: Collective) -> None:
        """Run the call on host arrays."""
        if self._memory is HOST:
            communicator.execute(self.rank, call)
            return
        arrays = tuple([self._memory.read(x) for x in call.arrays])
        communicator.execute(self.rank, replace(call, arrays=arrays))
        for x, array in zip(call.arrays, arrays, strict=True):
            self._memory.write(x, array)

    def _require_apart(self, name: str, out: Array, x: Array) -> None:
        """Raise `MachineError` if out overlaps x or is a constant."""
        self._require_writable(name, out)
        if np.may_share_memory(out, x):
            raise MachineError(
                f"{name} would overwrite an operand while reading it; pass a separate output"
            )

    def _require_writable(self, name: str, *xs: Array) -> None:
        if not all(map(self._memory.writable, xs)):
            raise MachineError(f"{name} would write to a constant; pass a copy")

    # --- type rules ---

    def _reduced(self, *xs: TensorType, op: Reduction, timeout: float | None = None) -> None:
        _require_time(timeout)
        for x in xs:
            if op == "mean" and not x.dtype.is_inexact:
                raise DTypeError(f"a mean requires floats, got {x.dtype.name}; convert with astype")
            if op in ("max", "min") and x.dtype.kind == "complex":
                raise DTypeError(
                    f"{op} requires real numbers, got {x.dtype.name}; use real, imag or abs"
                )
            if op == "sum" and x.dtype.kind == "bool":
                raise DTypeError("a sum requires numbers, got bool; convert with astype")

    def _scattered(self, x: TensorType, op: Reduction, timeout: float | None = None) -> TensorType:
        if not x.ndim or x.shape[0] % self.size:
            text = (
                f"expected the length of axis 0 as a multiple of {self.size}, the number of members"
            )
            raise ShapeError(f"{text}, got {x}")
        self._reduced(x, op=op, timeout=timeout)
        return x.with_shape((x.shape[0] // self.size, *x.shape[1:]))

    def _scattered_into(
        self, y: TensorType, x: TensorType, op: Reduction, timeout: float | None = None
    ) -> None:
        _require_type(y, self._scattered(x, op, timeout))

    def _gathered(self, x: TensorType, timeout: float | None = None) -> TensorType:
        _require_time(timeout)
        length, *rest = x.shape or (1,)
        return x.with_shape((self.size * length, *rest))

    def _gathered_into(self, y: TensorType, x: TensorType, timeout: float | None = None) -> None:
        _require_type(y, self._gathered(x, timeout))

    def _broadcast(self, *xs: TensorType, root: int, timeout: float | None = None) -> None:
        _require_time(timeout)
        if not 0 <= root < self.size:
            raise ArgumentError(f"root must be a rank, 0 .. {self.size - 1}, got {root}")

    def _received(
        self, source: int, shape: tuple[int, ...], dtype: str, timeout: float | None = None
    ) -> TensorType:
        _require_time(timeout)
        self._require_peer("source", source)
        return TensorType(DType.named(dtype), shape)

    def _sent(self, x: TensorType, to: int, timeout: float | None = None) -> None:
        _require_time(timeout)
        self._require_peer("to", to)

    def _require_peer(self, attribute: str, rank: int) -> None:
        if not 0 <= rank < self.size or rank == self.rank:
            raise ArgumentError(
                f"{attribute} must be the rank of a different member (of {self.size}), got {rank}; "
                f"this member has rank {self.rank}"
            )


class InOrder:
    """Form of an op that a VM never passes to its workers.

    Members must call collectives in program order.
    """

    def __init__(self, form: OpInto | OpFresh) -> None:
        self.nresults: int | None = form.nresults
        self.kernel: Kernel | None = form.kernel
        self.bind = form.bind
        self.infer = form.infer
        self.cost = form.cost
        self.call = form.call
        self._form = form

    @property
    def memory(self) -> Memory:
        return self._form.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._form.memory = memory


class Effect:
    """Collective without a result, as a function of the VM's table."""

    nresults: int | None = 0
    memory = HOST
    kernel: Kernel | None = None

    def __init__(self, op: Op) -> None:
        self.op = op
        self.bind = op.bind

    def infer(self, operands: Sequence[TensorType], attributes: Attributes) -> tuple[()]:
        self.op.infer(operands, attributes)
        return ()

    def cost(self, operands: Sequence[TensorType], attributes: Attributes) -> tuple[int, int]:
        return 0, 0

    def call(self, params: Sequence[Value], attributes: Attributes) -> tuple[()]:
        self.op.kernel(*params, **attributes)
        return ()


def _anything(*xs: TensorType) -> None:
    """Accept any number of operands of any type, without a result."""


def _require_time(timeout: float | None = None) -> None:
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout must be a number of seconds > 0, got {timeout}")


def _require_type(y: TensorType, result: TensorType) -> None:
    if y != result:
        raise ShapeError(f"expected {result} as the output, got {y}")


def _key(xs: Sequence[Array]) -> _Key:
    """Return a key of the tensors: addresses and sizes."""
    return tuple([(address(x), x.nbytes) for x in xs])
