"""The collectives: what the members of a group do together, as functions in each VM's table.

Names and meanings are MPI's (MPI: A Message-Passing Interface Standard, version 4.1, 2023).
Collectives are declared as ops are. `all_reduce` and `broadcast` ( x1..xn -- ) change any number
of tensors in place, in one meeting. A collective with a result has the two forms of an op:
`all_gather` ( x -- y ) and `all_gather.out` ( y x -- ).

Members share their memory, so no data is sent. Large work is divided: each member computes a part
and writes it to all members, in blocks that stay in its cache. Elements are combined in the order
of ranks, whichever member does it, so results have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from mlvm.core.errors import AttributeRefused, DTypeError, GroupError, MachineError, ShapeError
from mlvm.core.machine.callee import OUT, Callee, OpFresh, OpInto, Value
from mlvm.core.op import Attributes, Kernel, Op
from mlvm.core.types import Array, DType, TensorType
from mlvm.parallel.rendezvous import Arrays, Collective, Rendezvous, Work

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]

BLOCK_NBYTES: Final = 1 << 18
"""Bytes that are combined at once: so many that threads seldom wait for Python's lock, and so few
that they fit a second-level cache."""

_UFUNCS: Final = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


class Member:
    """A VM's place in its group: `rank` of `size`. `ops` are the collectives of that place by
    name.

    `rendezvous` is where the members of the current run meet, None between runs.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.rendezvous: Rendezvous | None = None
        self.ops: dict[str, Op] = {
            op.name: op
            for op in (
                Op(self.all_reduce, self._reduced),
                Op(self.all_gather, self._gathered),
                Op(self.reduce_scatter, self._scattered),
                Op(self.broadcast, self._broadcast),
                Op(self.recv, self._received),
                Op(self.send, self._sent),
                Op(self.barrier, _nothing),
            )
        }

    def functions(self) -> dict[str, Callee]:
        """The functions to register: two forms of a collective with a result, one of any other."""
        callees: dict[str, Callee] = {}
        for name, op in self.ops.items():
            if op.dynamic:
                callees[name] = Effect(op)
            else:
                callees[name] = InOrder(OpFresh(op))
                callees[name + OUT] = InOrder(OpInto(op))
        return callees

    # --- the collectives ---

    def all_reduce(self, *xs: Array, op: Reduction = "sum") -> None:
        """Each x becomes the sum, mean, maximum or minimum of all members' x."""
        for x in xs:
            _require_writable("all_reduce", x)

        def work(arrays: Arrays, part: int, parts: int) -> None:
            members = [_flat(each) for each in arrays]
            scratch = np.empty(BLOCK_NBYTES, np.uint8)
            for i, block in _blocks(members[0], part, parts):
                each = [member[i][block] for member in members]
                total = scratch.view(each[0].dtype)[: each[0].size]
                _combine(op, each, total)
                for x in each:
                    np.copyto(x, total)

        self._meet("all_reduce", xs, xs, work, op=op)

    def reduce_scatter(self, out: Array, x: Array, *, op: Reduction = "sum") -> None:
        """A piece of the sum, mean, maximum or minimum of all members' x. That is cut along axis 0
        into as many pieces as there are members, and each member gets the piece of its rank."""
        _require_apart("reduce_scatter", out, x)

        def work(arrays: Arrays, part: int, parts: int) -> None:
            outs, xs = (_flat(each) for each in zip(*arrays, strict=True))
            for rank, block in _blocks(outs, part, parts):
                out = outs[rank]
                pieces = [x[rank * out.size : (rank + 1) * out.size] for x in xs]
                _combine(op, [piece[block] for piece in pieces], out[block])

        self._meet("reduce_scatter", [x], (out, x), work, op=op)

    def all_gather(self, out: Array, x: Array) -> None:
        """All members' x, one after the other along axis 0 in order of rank; a scalar counts as
        a tensor of one element."""
        _require_apart("all_gather", out, x)

        def work(arrays: Arrays, part: int, parts: int) -> None:
            outs, xs = (_flat(each) for each in zip(*arrays, strict=True))
            for rank, block in _blocks(xs, part, parts):
                x = xs[rank]
                for out in outs:
                    np.copyto(out[rank * x.size : (rank + 1) * x.size][block], x[block])

        self._meet("all_gather", [x], (out, x), work)

    def broadcast(self, *xs: Array, root: int = 0) -> None:
        """Each x becomes the x of the member with rank `root`."""
        for x in xs:
            _require_writable("broadcast", x)

        def work(arrays: Arrays, part: int, parts: int) -> None:
            sources = _flat(arrays[root])
            others = [_flat(each) for rank, each in enumerate(arrays) if rank != root]
            for i, block in _blocks(sources, part, parts):
                for other in others:
                    np.copyto(other[i][block], sources[i][block])

        self._meet("broadcast", xs, xs, work, root=root)

    def send(self, x: Array, *, to: int) -> None:
        """Give x to the member with rank `to`, when it calls `recv`."""
        self._meet("send", [x], (x,), _transfer, ranks=(self.rank, to), to=to)

    def recv(self, out: Array, *, source: int, shape: tuple[int, ...], dtype: str) -> None:
        """The tensor that the member with rank `source` gives to this one with `send`."""
        _require_writable("recv.out", out)
        self._meet("recv", [out], (out,), _transfer, ranks=(source, self.rank), source=source)

    def barrier(self) -> None:
        """Wait until all members have called this."""
        self._meet("barrier", [], (), _no_work)

    def _meet(
        self,
        name: str,
        xs: Sequence[Array],
        arrays: tuple[Array, ...],
        work: Work,
        *,
        ranks: tuple[int, ...] | None = None,
        **attributes: Any,
    ) -> None:
        """Call `name` on `xs` together with all members, or with the two members of `ranks`."""
        call = Collective(
            name=name,
            attributes=attributes,
            key=(name, *attributes.values()) if ranks is None else (),
            types=[(x.dtype, x.shape) for x in xs],
            ranks=tuple(range(self.size)) if ranks is None else ranks,
            arrays=arrays,
            nbytes=sum([x.nbytes for x in xs]),
            work=work,
        )
        if self.rendezvous is None:
            raise GroupError(f"{call}: {self.name} is in no run of its group; see Group.run")
        self.rendezvous.meet(self.rank, call)

    # --- type rules ---

    def _reduced(self, *xs: TensorType, op: Reduction) -> None:
        for x in xs:
            if op == "mean" and not x.dtype.is_float:
                raise DTypeError("a mean is of floats")
            if op == "sum" and x.dtype.kind == "bool":
                raise DTypeError("a sum is of numbers")

    def _scattered(self, x: TensorType, op: Reduction) -> TensorType:
        if not x.ndim or x.shape[0] % self.size:
            raise ShapeError(f"axis 0 must be a multiple of the group's {self.size} members")
        self._reduced(x, op=op)
        return x.with_shape((x.shape[0] // self.size, *x.shape[1:]))

    def _gathered(self, x: TensorType) -> TensorType:
        length, *rest = x.shape or (1,)
        return x.with_shape((self.size * length, *rest))

    def _broadcast(self, *xs: TensorType, root: int) -> None:
        if not 0 <= root < self.size:
            raise AttributeRefused(f"root must be a rank, 0 .. {self.size - 1}, not {root}")

    def _received(self, source: int, shape: tuple[int, ...], dtype: str) -> TensorType:
        self._require_peer("source", source)
        return TensorType(DType.named(dtype), shape)

    def _sent(self, x: TensorType, to: int) -> None:
        self._require_peer("to", to)

    def _require_peer(self, attribute: str, rank: int) -> None:
        if not 0 <= rank < self.size or rank == self.rank:
            raise AttributeRefused(
                f"{attribute} must be the rank of another of {self.size} members, not {rank}; "
                f"this one has rank {self.rank}"
            )


class InOrder:
    """A form of an op that a VM never leaves to its workers: members must call collectives in the
    order of their programs."""

    def __init__(self, form: OpInto | OpFresh) -> None:
        self.nresults: int | None = form.nresults
        self.kernel: Kernel | None = form.kernel
        self.bind = form.bind
        self.infer = form.infer
        self.cost = form.cost
        self.call = form.call


class Effect:
    """A collective without a result, as a function of the table."""

    nresults: int | None = 0
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


def _nothing() -> None:
    """The type rule of `barrier`, which has neither operands nor a result."""


# --- the work ------------------------------------------------------------------------


def _no_work(arrays: Arrays, part: int, parts: int) -> None:
    pass


def _transfer(arrays: Arrays, part: int, parts: int) -> None:
    """Copy the sender's array, which is the first, into the receiver's."""
    [source], [out] = map(_flat, arrays)
    for _, block in _blocks([source], part, parts):
        np.copyto(out[block], source[block])


def _combine(op: Reduction, xs: list[Array], total: Array) -> None:
    """total = x0 + x1 + ... from the left, or another reduction. `total` overlaps no x."""
    ufunc = _UFUNCS[op]
    if len(xs) == 1:
        np.copyto(total, xs[0])
    else:
        ufunc(xs[0], xs[1], out=total)
    for x in xs[2:]:
        ufunc(total, x, out=total)
    if op == "mean":
        np.divide(total, len(xs), out=total)


def _flat(arrays: Sequence[Array]) -> list[Array]:
    """The arrays in one dimension. A VM's tensors are contiguous, so none is copied."""
    return [x.reshape(-1) for x in arrays]


def _blocks(xs: Sequence[Array], part: int, parts: int) -> Iterator[tuple[int, slice]]:
    """The blocks of one of `parts` equal parts of the flat arrays, which count as one long array.
    A block is the number of an array and a slice of it."""
    total = sum([x.size for x in xs])
    begin, end = total * part // parts, total * (part + 1) // parts
    for i, x in enumerate(xs):
        first, last = max(begin, 0), min(end, x.size)
        step = BLOCK_NBYTES // x.itemsize
        for start in range(first, last, step):
            yield i, slice(start, min(start + step, last))
        begin -= x.size
        end -= x.size


def _require_apart(name: str, out: Array, x: Array) -> None:
    """Raise `MachineError` if out overlaps x, or is a constant."""
    _require_writable(name + OUT, out)
    if np.may_share_memory(out, x):
        raise MachineError(f"{name}{OUT} would write over an operand while it reads it")


def _require_writable(name: str, x: Array) -> None:
    if not x.flags.writeable:
        raise MachineError(f"{name} would write to a constant")
