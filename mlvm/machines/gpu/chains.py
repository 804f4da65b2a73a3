"""Lowering of chains of ops (`mlvm.core.machine.fused`) to kernel calls.

All elementwise links form one kernel. A matrix product at the start, a reduction and a copy of a
window are separate calls with results in scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from mlvm.core.machine.fused import READS_WINDOW, WRITES_WINDOW, Chain
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes, Op
from mlvm.core.types import TensorType
from mlvm.machines.gpu.elementwise import DeviceLink, chain_call
from mlvm.machines.gpu.kernels import KERNELS, REFUSED, Argument, Call, Facts, Scratch, Types


class OnHost(NamedTuple):
    """Call of the op's kernel on the host; the first argument is the result."""

    op: Op
    attributes: Attributes
    types: tuple[TensorType, ...]
    args: tuple[Argument, ...]


class Judged(NamedTuple):
    """Call that may reject values: the op, and the operand that is checked."""

    call: Call
    op: Op
    attributes: Attributes
    types: tuple[TensorType, ...]
    args: tuple[Argument, ...]
    judges: int


Step: TypeAlias = Call | OnHost | Judged
"""Step of an op; `args` are numbers of parameters, or scratch memory."""


def steps_of(
    facts: Facts, op: Op, types: Types, attributes: Attributes, args: Sequence[Argument]
) -> list[Step]:
    """Return the steps of an op on parameters, or scratch, of these types, the result's first."""
    if not types[0].size:
        return []
    row, dtypes = KERNELS.get(op.name), [type.dtype for type in types]
    if any(dtype.is_storage for dtype in dtypes):  # several elements per byte
        row = None
    lacks = row is not None and row.computes and not all(map(facts.has, dtypes))
    calls = None if row is None or lacks else row.make(facts, types, **attributes)
    if row is None or calls is None:
        return [OnHost(op, attributes, tuple(types), tuple(args))]
    steps: list[Step] = []
    for call in calls:
        placed_args = tuple(
            [args[x] if isinstance(x, int) else _named_scratch(x, op.name) for x in call.args]
        )
        placed = call._replace(args=placed_args)
        if REFUSED in call.args:
            steps.append(Judged(placed, op, attributes, tuple(types), tuple(args), row.judges))
        else:
            steps.append(placed)
    return steps


def _named_scratch(argument: Argument, name: str) -> Argument:
    if not isinstance(argument, Scratch):
        return argument
    return argument._replace(name=f"{name} {argument.name}")


def steps_of_chain(facts: Facts, chain: Chain, types: Types) -> list[Step]:
    """Return the steps of a chain on parameters of these types."""
    lowering = _Lowering(facts, chain, types)
    for op, target, sources, attributes in chain.links:
        if op.name == READS_WINDOW:
            lowering.read_window(op, target, sources[0], attributes)
        elif op.name == WRITES_WINDOW:
            lowering.write_window(op, target, sources, attributes)
        elif op.links:
            lowering.join(op, target, sources, attributes)
        else:
            lowering.call(op, target, sources, attributes)
    lowering.flush()
    return lowering.steps


class _Lowering:
    """Lowering of a chain to calls.

    The parameters have the same numbers as in the chain; the numbers of other values follow.
    """

    def __init__(self, facts: Facts, chain: Chain, types: Types) -> None:
        self.steps: list[Step] = []
        self._facts = facts
        self._outputs = chain.outputs
        self._inferred = chain.infer(types)
        self._types = dict(enumerate(types))
        self._value = {
            i: i for i in range(chain.outputs, len(types))
        }  # keys are the value numbers that links use
        self._next = len(types)
        self._at: dict[int, Argument] = {i: i for i in range(chain.outputs, len(types))}
        self._links: list[DeviceLink] = []
        self._stored: dict[int, Argument] = {}
        self._waiting: list[tuple[Op, TensorType, int, Argument, Attributes]] = []

    def _new(self, target: int) -> int:
        number, self._next = self._next, self._next + 1
        self._value[target] = number
        self._types[number] = self._inferred[target]
        return number

    def join(self, op: Op, target: int, sources: Sequence[int], attributes: Attributes) -> None:
        """Add the op to the current kernel."""
        numbers = [self._value[source] for source in sources]
        if any(n not in self._at and not self._is_computed(n) for n in numbers):
            self.flush()
        number = self._new(target)
        self._links.append(DeviceLink(op.name, number, tuple(numbers), attributes))
        if target >= 0:
            self._stored[number] = target

    def _is_computed(self, number: int) -> bool:
        return any(link.target == number for link in self._links)

    def call(self, op: Op, target: int, sources: Sequence[int], attributes: Attributes) -> None:
        """Add a matrix product, which comes first, or a reduction, which follows the kernel."""
        numbers = [self._value[source] for source in sources]
        if not self._links and not self._waiting:
            number = self._new(target)
            where = target if target >= 0 else self._scratch(number)
            args = [where, *[self._at[n] for n in numbers]]
            types = [self._types[n] for n in (number, *numbers)]
            self.steps += steps_of(self._facts, op, types, attributes, args)
            self._at[number] = where
            return
        [source] = numbers
        if source not in self._stored and (source in self._at or self._is_computed(source)):
            # also for an operand, because it may be overwritten
            self._stored[source] = self._scratch(source)
        number = self._new(target)
        self._waiting.append((op, self._types[number], source, target, attributes))

    def read_window(self, op: Op, target: int, source: int, attributes: Attributes) -> None:
        """Copy a window of a parameter."""
        number, types = self._new(target), [self._inferred[target], self._types[source]]
        self._at[number] = self._scratch(number)
        self.steps += steps_of(
            self._facts, op, types, attributes, [self._at[number], self._at[source]]
        )

    def write_window(
        self, op: Op, target: int, sources: Sequence[int], attributes: Attributes
    ) -> None:
        """Write a value into a window of a parameter, after the kernel has computed it."""
        x, source = [self._value[number] for number in sources]
        if self._is_computed(source):
            self._stored.setdefault(source, self._scratch(source))
            self.flush()
        types = [self._inferred[target], self._types[x], self._types[source]]
        args = [target, self._at[x], self._at[source]]
        self.steps += steps_of(self._facts, op, types, attributes, args)

    def _scratch(self, number: int) -> Scratch:
        return Scratch(f"value {number}", self._types[number].nbytes)

    def flush(self) -> None:
        """Create the kernel, and the calls that follow it."""
        if self._links or self._stored:
            self._make_kernel()
        for op, type, source, target, attributes in self._waiting:
            types = [type, self._types[source]]
            self.steps += steps_of(
                self._facts, op, types, attributes, [target, self._stored[source]]
            )
        self._at.update(self._stored)
        for _, _, _, target, _ in self._waiting:
            assert isinstance(target, int)
            self._at[self._value[target]] = target
        self._links, self._stored, self._waiting = [], {}, []

    def _make_kernel(self) -> None:
        computed = {link.target for link in self._links}
        inputs = {
            n: self._at[n]
            for n in [*[n for link in self._links for n in link.sources], *self._stored]
            if n not in computed
        }
        shape = self._types[next(iter(self._stored))].shape
        if not all(self._types[n].size for n in self._stored):
            return
        call = None
        if all(self._facts.has(self._types[n].dtype) for n in {*computed, *inputs}):
            outputs = list(self._stored.items())
            call = chain_call(self._facts, self._links, self._types, inputs, outputs, shape)
        if call is not None:
            self.steps.append(call)
            return
        at = {n: self._stored.get(n, self._scratch(n)) for n in computed}
        for n in inputs:
            at[n] = self._at[n]
            if n in self._stored:  # before it is overwritten
                types = [self._types[n]] * 2
                args = [self._stored[n], at[n]]
                self.steps += steps_of(self._facts, OPS["copy"], types, NO_ATTRIBUTES, args)
        for name, target, sources, attributes in self._links:  # in order
            types = [self._types[n] for n in (target, *sources)]
            args = [at[n] for n in (target, *sources)]
            self.steps += steps_of(self._facts, OPS[name], types, attributes, args)
