"""Lanes: code generation for many inputs of a recorded function (`mlvm.machines.lane_runs`).

Each value has a slot of a frame. The calls between two branches or function calls are a segment, a
function of the program, which is also compiled for certain numbers of rows. Copies, reshapes, saved
values and passed values are between segments: for lanes they move row numbers, not bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import CaptureError
from mlvm.core.machine.callee import OUT
from mlvm.core.memo import Memo, exact_repr
from mlvm.core.op import OPS, Attributes, Op
from mlvm.core.program.program import STAR, Function, Instruction, Program
from mlvm.core.types import TensorType, i64
from mlvm.machines import lane_link, residuals
from mlvm.machines.checks import CHECK
from mlvm.machines.lane_link import LaneProgram, Part, PartCode, RowSegment, host_call
from mlvm.step.batch_rules import BatchedOp, over_lanes
from mlvm.step.blocks import renewed, with_blocks, without_dead_calls, without_dead_calls_in
from mlvm.step.compile import compile_flow
from mlvm.step.flow import Call, Flow, Home, Procedure, Use, Value
from mlvm.step.fusion import FusionPolicy
from mlvm.step.lane_function import LaneFunction

COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
"""Numbers of rows for which a segment is compiled."""
SUM_COUNTS: Final = (1, 4, 16, 64, 256)

_LIGHT: Final = 64
"""Maximum bytes of values of control flow; a segment of such values does not wait for more rows."""

_Key: TypeAlias = Value | Home


def lanes_of(
    function: LaneFunction, family: object = None, *, is_read: bool = False
) -> LaneProgram:
    """Generate the program of a function, for `lanes.run`.

    `is_read`: whether it comes from a file, with code only for this family.

    Raises `CaptureError` for a host function that lanes cannot run, and for any other update of a
    value outside.
    """
    main, procedures, results, shared, sums, policy = function
    scope = policy, family if is_read else None

    def make() -> LaneProgram:
        everything = [*with_blocks([c for each in (main, *procedures) for c in each.block.calls])]
        nresults = {c.callee: _given_back(c) for c in everything if c.callee is not None}
        writer = _Writer(shared, sums, scope, len(main.params), nresults)
        writer.has_records = any(call.name == residuals.PUSH for call in everything)
        last = {u.value.home: u.value for call in main.block.calls for u in call.outs}
        outs = [*[use.value for use in results], *[last[home] for home in sums if home in last]]
        calls = without_dead_calls(Flow(main.block.calls, outs))
        writer.procedure(main, calls, results)
        for each in procedures:
            if each in nresults:
                writer.procedure(each, without_dead_calls_in(each.block).calls)
        return writer.program(family)

    def closed(part: Any) -> Any:
        return exact_repr(part) if isinstance(part, Mapping) else part

    homes, *parts = function.fields(closed)
    types = tuple([type for _, _, type in homes])  # the indices differ from trace to trace
    return _written.get((scope, types, *parts), make)


_written: Final = Memo[object, LaneProgram](256, "step.lanes programs")
_parts: Final = Memo[object, Part](4096, "step.lanes parts")


class _SegmentCall(NamedTuple):
    """Call of a segment: the op, and the operands and the result by number, with types."""

    op: Op
    attributes: Attributes
    ins: tuple[tuple[int, TensorType], ...]
    out: tuple[int, TensorType]
    line: str | None


class _SegmentCalls:
    """Calls of a segment, independent of the function.

    inputs: the numbers of operands from outside, followed by those of shared operands.
    outs: the numbers of results.
    key: equal for segments that have the same parts.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        key_of: Callable[[Use], _Key],
        ins: Iterable[_Key],
        shared: Iterable[_Key],
        outs: Iterable[_Key],
    ) -> None:
        numbers: dict[_Key, int] = {}

        def numbered(use: Use) -> tuple[int, TensorType]:
            return numbers.setdefault(key_of(use), len(numbers)), use.type

        self.calls = []
        for call in calls:
            assert call.op is not None
            operands = tuple(map(numbered, call.ins))
            result = numbered(call.outs[0])
            self.calls.append(_SegmentCall(call.op, call.attributes, operands, result, call.line))
        self.shared = {numbers[key] for key in shared}
        self.inputs = [*[numbers[key] for key in ins], *[numbers[key] for key in shared]]
        self.outs = [numbers[key] for key in outs]
        rows = [(x.op.name, exact_repr(x.attributes), x.ins, x.out) for x in self.calls]
        self.key = tuple(rows), tuple(self.inputs), len(self.shared), tuple(self.outs)

    def rows(self, count: int) -> list[Call]:
        """Return the calls, each batched over `count` rows.

        Raises `CaptureError` for a call that cannot be batched.
        """
        now: dict[int, Value] = {}
        last = {call.out[0]: i for i, call in enumerate(self.calls)}
        batched_calls: list[Call] = []
        for i, (op, attributes, ins, (number, out_type), line) in enumerate(self.calls):
            which = [each not in self.shared for each, _ in ins]
            batched = _batched(op, attributes, [type for _, type in ins], which, count)
            assert batched is not None
            name, attributes, types = batched
            operands = []
            for (each, _), type in zip(ins, types, strict=True):
                if each not in now:
                    home = Home("input", self.inputs.index(each), type)
                    now[each] = Value(type.nbytes, home)
                operands.append(Use(now[each], type))
            op = OPS[name]
            type_ = op.infer(types, attributes)
            if type_ is None or type_.nbytes != count * out_type.nbytes:
                raise CaptureError(f"{line or 'here'}: {name} does not support lanes; use ml.vmap")
            value = now[number] = Value(type_.nbytes)
            if number in self.outs and last[number] == i:
                value.home = Home("output", self.outs.index(number), type_)
            outs = [Use(value, type_)]
            batched_calls.append(Call(f"{name}{OUT}", op, attributes, outs, operands, line))
        return batched_calls


def _batched(
    op: Op, attributes: Attributes, types: Sequence[TensorType], which: Sequence[bool], count: int
) -> BatchedOp:
    if count == 1 and over_lanes(op, attributes, types, which, 2) is None:
        return op.name, attributes, types
    return over_lanes(op, attributes, types, which, count)


class _Body:
    """Code of a function, and the slots of its frame.

    Slots are numbered from the first local; parameters have negative numbers.

    types: the types of the slots. owned: homes that the function updates in place.
    """

    def __init__(self, params: Mapping[_Key, TensorType]) -> None:
        self.code: list[Instruction] = []
        self.nparams = len(params)
        self.slots: dict[_Key, int] = {key: i - len(params) for i, key in enumerate(params)}
        self.types = [*params.values()]
        self.owned: set[Home] = set()

    def slot(self, key: _Key, type: TensorType) -> int:
        """Return the slot of a home or value; allocate one if it has none."""
        if key not in self.slots:
            self.add(key, type)
        return self.slots[key]

    def add(self, key: _Key, type: TensorType) -> None:
        """Allocate a new slot for a home or value."""
        self.slots[key] = len(self.types) - self.nparams
        self.types.append(type)

    def type_at(self, slot: int) -> TensorType:
        return self.types[slot + self.nparams]


class _Writer:
    """Code generator of a program, function by function."""

    def __init__(
        self,
        shared: Sequence[Use],
        sums: Mapping[Home, int],
        scope: tuple[FusionPolicy, object],
        nargs: int,
        nresults: Mapping[Procedure, int],
    ) -> None:
        self.scope = scope
        self.nargs, self.nresults = nargs, nresults
        self.has_records = False
        self.shared_types = [use.type for use in shared]
        self.shared: dict[_Key, int] = {}
        self.nshared = len(shared)
        for i, use in enumerate(shared):
            self.shared.setdefault(use.value, i)
        self.sums = sums
        self.functions: list[Function] = []
        self.segments: dict[str, RowSegment] = {}
        self.nsegments = self.nsites = 0
        self.hoisted: list[Use] = []
        self.first_calls: list[Call] = []
        self.names: dict[Procedure, str] = {}
        # State of the current function:
        self.body = _Body({})
        self.readers: dict[Value, set[int]] = {}
        self.pending: list[Call] = []
        self.products: dict[Value, Call] = {}  # see `_products`

    # --- functions --------------------------------------------------------------------------

    def name_of(self, procedure: Procedure) -> str:
        return self.names.setdefault(procedure, f"f{len(self.names)}")

    def procedure(
        self, procedure: Procedure, calls: Sequence[Call], results: Sequence[Use] | None = None
    ) -> None:
        """Generate a function: `main`, which returns `results`, or any other function.

        The results of any other function are the first parameters of that function.
        """
        everything = list(with_blocks(calls))
        params = procedure.params
        outs = [] if results is not None else params[: self.nresults[procedure]]
        self.pending = []
        body = self.body = _Body({home: home.type for home in params[len(outs) :]})
        body.types.append(TensorType(i64))  # number of the call
        self.readers = {}
        reads = [(use, id(call)) for call in everything for use in call.ins]
        blocks = [block for call in everything for block in call.blocks]
        reads += [(block.result, id(block)) for block in blocks if block.result is not None]
        for use, reader in (*reads, *[(use, 0) for use in results or ()]):
            self.readers.setdefault(use.value, set()).add(reader)
        body.owned = {
            call.outs[0].value.home
            for call in everything
            if _is_update(call) and call.outs[0].value.home is not None
        }
        self.products = self._products(everything)
        for i, home in enumerate(params[len(outs) :], -body.nparams):
            if home in body.owned:
                self.emit("get", i)
                self.op("copy", 1, 1)
                self.emit("set", i)
        self.calls(calls)
        for use in results or ():
            self.read(use)
        for home in outs:
            at = body.slot(home, home.type)
            self.emit("get", at)
            self.as_type(body.type_at(at), home.type)
        count = len(outs) if results is None else len(results)
        self.emit("return", count)
        facts = {
            "params": [str(type) for type in body.types[: body.nparams]],
            "locals": [str(type) for type in body.types[body.nparams :]],
        }
        head = host_call(lane_link.FRAME, 0, len(body.types) - body.nparams, facts)
        code = [each.jumping(lambda pc: pc + len(head)) for each in body.code]
        name = self.name_of(procedure) if results is None else lane_link.ROW
        self.functions.append(Function(name, body.nparams, count, (*head, *code)))

    def _products(self, calls: Sequence[Call]) -> dict[Value, Call]:
        """Find the matrix products x^T y that are only added to a sum.

        Rows of x and y are then saved instead, and multiplied once at the end.
        """
        makers = {use.value: call for call in calls for use in call.outs}
        products: dict[Value, Call] = {}
        for call in calls:
            if not (self._is_sum(call) and call.op is not None and call.op.name == "add"):
                continue
            part = call.ins[1].value
            maker = makers.get(part)
            if (
                maker is not None
                and maker.op is not None
                and maker.op.name == "matmul"
                and maker.attributes["transpose_x"]
                and not maker.attributes["transpose_y"]
                and all(use.type.ndim == 2 and use.value.home is None for use in maker.ins)
                and not any(self.is_shared(use) for use in maker.ins)
                and part.home is None
                and self.readers[part] == {id(call)}
            ):
                products[part] = maker
        return products

    def emit(self, opcode: str, *immediates: Any) -> int:
        self.body.code.append(Instruction.of(opcode, *immediates))
        return len(self.body.code) - 1

    def op(self, name: str, nparams: int, nresults: int, **attributes: Any) -> None:
        self.body.code += host_call(name, nparams, nresults, attributes)

    def key(self, use: Use) -> _Key:
        """Return the key of a use's slot: the home, or the value if it has no home."""
        if use.value in self.shared:
            return use.value
        return use.value.home or use.value

    def is_shared(self, use: Use) -> bool:
        return use.value in self.shared

    def _is_sum(self, call: Call) -> bool:
        return bool(call.outs) and call.outs[0].value.home in self.sums

    def read(self, use: Use, *, alias: bool = False) -> None:
        """Push the value: a copy if the slot is updated in place, unless `alias`."""
        key = self.key(use)
        if key in self.shared:
            number = self.shared[key]
            self.emit("load_arg", self.nargs + number)
            self.as_type(self.shared_types[number], use.type)
            return
        if key not in self.body.slots:
            raise CaptureError("a row reads a value that was never written; write it first")
        at = self.body.slots[key]
        self.emit("get", at)
        if key in self.body.owned and not alias:
            self.op("copy", 1, 1)
        self.as_type(self.body.type_at(at), use.type)

    def as_type(self, type: TensorType, target: TensorType) -> None:
        """Reshape the topmost value to a different type of the same dtype."""
        if type is not target:
            if type.dtype is not target.dtype:
                raise CaptureError(f"a row of the batch needs a value of {target}, got {type}")
            self.op("reshape", 1, 1, shape=target.shape)

    def write(self, use: Use) -> None:
        """Pop the topmost value into the slot of a use."""
        at = self.body.slot(self.key(use), use.type)
        self.as_type(use.type, self.body.type_at(at))
        self.emit("set", at)

    def slot_of(self, out: Use, x: Use) -> int:
        """Return the slot of a result that is written in place, if it has the type of `x`."""
        at = self.body.slot(self.key(out), out.type)
        type = self.body.type_at(at)
        if type is not out.type or type is not x.type:
            raise CaptureError(f"a row of the batch needs a slot of {out.type}, got {type}")
        return at

    def fresh(self, use: Use) -> None:
        """Push memory for a value that no other slot refers to."""
        at = self.slot_of(use, use)
        self.emit("get", at)
        self.op("copy", 1, 1)
        self.emit("set", at)
        self.emit("get", at)

    # --- calls ------------------------------------------------------------------------------

    def calls(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if call.blocks:
                self.flush()
                self.control(call)
            elif call.op is None:
                self.flush()
                self.host(call)
            elif call.outs[0].value in self.products:
                continue
            elif self._is_sum(call):
                self.flush()
                self.add(call)
            elif not self.moves(call):
                self.pending.append(call)
        self.flush()

    def moves(self, call: Call) -> bool:
        """Generate a call that only reads, writes or moves rows; return False for other calls."""
        assert call.op is not None
        [out] = call.outs
        name = call.op.name
        may_raise = call.op.may_raise and not (call.op.elementwise and out.type.dtype.is_inexact)
        is_same = all(map(self.is_shared, call.ins)) and not may_raise
        if is_same and out.value.home is None:
            self.hoist(call, out)
        elif is_same and name != "copy":
            self.flush()
            other = Use(Value(out.type.nbytes), out.type)
            self.hoist(call, other)
            self.to(out, other)
        elif name in ("copy", "reshape"):
            self.flush()
            self.to(out, call.ins[0])
        elif name == "take" and _is_row(call, 1) and not self.is_shared(call.ins[0]):
            self.flush()
            x, index = call.ins
            self.read(x, alias=True)
            self.read(index)
            self.op("take", 2, 1, axis=0)
            self.write(out)
        elif _is_update(call):
            self.flush()
            x, value, index = call.ins
            at = self.slot_of(out, x)
            self.emit("get", at)
            self.emit("get", at)
            self.read(value)
            self.read(index)
            self.op(f"dynamic_update{OUT}", 4, 0, axis=0)
        else:
            return False
        return True

    def hoist(self, call: Call, out: Use) -> None:
        """Hoist a call out of all lanes, which have the same operands."""
        self.shared[out.value] = self.nshared + len(self.hoisted)
        self.hoisted.append(out)
        self.shared_types.append(out.type)
        self.first_calls.append(
            Call(call.name, call.op, call.attributes, [out], call.ins, call.line)
        )

    def to(self, out: Use, source: Use) -> None:
        """Move a value to the slot of a different value."""
        self.read(source, alias=True)
        if not self.body.owned.isdisjoint([self.key(out), self.key(source)]):
            self.op("copy", 1, 1)
        self.as_type(source.type, out.type)
        self.write(out)

    def host(self, call: Call) -> None:
        if call.callee is not None:
            self.call(call)
        elif call.name == residuals.PUSH:
            self.fresh(call.outs[0])
            for use in call.ins:
                self.read(use)
            self.op(residuals.PUSH, 1 + len(call.ins), 0)
        elif call.name == residuals.READ:
            for use in call.outs:
                self.fresh(use)
            self.read(call.ins[0])
            self.op(residuals.READ, 1 + len(call.outs), 0)
        elif call.name == CHECK:
            self.read(call.ins[0])
            self.op(CHECK, 1, 0, message=call.attributes["message"])
        else:
            raise CaptureError(
                f"{call.line or 'here'}: {call.name} is not supported in a function for "
                f"ml.auto_batch, which runs ops, control flow and ml.subroutine"
            )

    def call(self, call: Call) -> None:
        """Generate the call of a function."""
        assert call.callee is not None
        nresults = self.nresults[call.callee]
        for use, home in zip(call.passed[nresults:], call.callee.params[nresults:], strict=True):
            self.read(use)
            self.as_type(use.type, home.type)
        self.emit("call", self.name_of(call.callee))
        pairs = zip(call.passed[:nresults], call.callee.params, strict=False)
        for use, home in reversed([*pairs]):
            self.as_type(home.type, use.type)
            self.write(use)
            if self.key(use) in self.body.owned:
                self.read(use)
                self.write(use)

    def control(self, call: Call) -> None:
        if call.callee is not None:
            raise CaptureError(
                f"{call.line or 'here'}: a function is called from outside of lanes; "
                "call it inside of the function"
            )
        first, second = call.blocks
        again = len(self.body.code)
        if call.name == "cond":
            self.read(call.ins[0])
        else:
            self.calls(first.calls)
            assert first.result is not None
            self.read(first.result)
        leave = self.emit("jump_if_false", -1)
        if call.name == "cond":
            self.calls(first.calls)
            end = self.emit("jump", -1)
            self.land(leave)
            self.calls(second.calls)
            self.land(end)
        else:
            self.calls(second.calls)
            self.emit("jump", again)
            self.land(leave)

    def land(self, jump: int) -> None:
        """Set the target of a jump to the next instruction."""
        code = self.body.code
        code[jump] = code[jump]._replace(immediates=(len(code),))

    # --- sums -------------------------------------------------------------------------------

    def add(self, call: Call) -> None:
        """Generate an update of a value outside: each frame adds to a sum."""
        assert call.op is not None
        place = self.sums[call.outs[0].value.home]  # type: ignore[index]
        name, total = call.op.name, call.outs[0]
        operands = list(call.ins[1:])
        product = self.products.get(operands[0].value)
        if (
            name not in ("add", "index_add", "slice_add")
            or call.ins[0].value.home is not total.value.home
        ):
            raise CaptureError(
                f"{call.line or 'here'}: a lane must not update a tensor from outside of it; "
                "return the new value"
            )
        if product is not None:
            operands = list(product.ins)
        whole = name == "add" or (
            name == "index_add" and call.attributes["axis"] == 0 and not operands[1].type.shape
        )
        site = f"a{self.nsites}"
        self.emit("get", 0)
        for use in operands:
            self.read(use)
        self.op(lane_link.ADD, 1 + len(operands), 0, site=self.nsites)
        self.nsites += 1
        ins, outs = [use.type.nbytes for use in operands], [total.type.nbytes]
        self.segments[site] = RowSegment({}, ins, outs, [], heavy=False, sum=place)
        shapes = call.ins[0].type, *[use.type for use in operands]
        of = None if product is None else (product.outs[0].type, exact_repr(product.attributes))
        key = name, exact_repr(call.attributes), of, shapes
        for count in SUM_COUNTS if whole else (1,):
            make = partial(_summed, call, product, operands, count)
            self.part(site, count, key, make)

    # --- segments ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Generate segments for the pending calls.

        A call without a batching rule is a separate segment.
        """
        calls, self.pending = self.pending, []
        run: list[Call] = []
        for call in calls:
            if not self.is_batched(call):
                self.segment(run)
                self.segment([call], counts=(1,))
                run = []
            else:
                run.append(call)
        self.segment(run)

    def is_batched(self, call: Call) -> bool:
        """Return whether a call has a batching rule."""
        assert call.op is not None
        types = [use.type for use in call.ins]
        which = [not self.is_shared(use) for use in call.ins]
        return over_lanes(call.op, call.attributes, types, which, 2) is not None

    def segment(self, calls: list[Call], counts: Sequence[int] = COUNTS) -> None:
        """Generate calls that run for many rows simultaneously."""
        if not calls:
            return
        mine = {id(call) for call in calls}
        out_types: dict[_Key, TensorType] = {}
        ins: dict[_Key, TensorType] = {}
        shared: dict[_Key, int] = {}
        for call in calls:
            for use in call.ins:
                key = self.key(use)
                if key in self.shared:
                    shared[key] = self.shared[key]
                elif key not in out_types:
                    ins.setdefault(key, use.type)
            [out] = call.outs
            out_types[self.key(out)] = out.type
        values = {self.key(call.outs[0]): call.outs[0].value for call in calls}
        outs = [
            key
            for key, value in values.items()
            if isinstance(key, Home) or self.readers.get(value, set()) - mine
        ]
        light = all(use.type.nbytes <= _LIGHT for call in calls for use in (*call.outs, *call.ins))
        name = f"s{self.nsegments}"
        self.nsegments += 1
        self.alone(name, calls, ins, outs)
        for key in ins:
            self.emit("get", self.body.slots[key])
        self.emit("call", name)
        last = {self.key(call.outs[0]): call.outs[0] for call in calls}
        for key in reversed(outs):
            self.write(last[key])
        batched = _SegmentCalls(calls, self.key, ins, shared, outs)
        if (self.scope, counts[-1], batched.key) not in _parts.entries:
            batched.rows(min(counts[-1], 2))  # raises errors early
        in_bytes = [type.nbytes for type in ins.values()]
        out_bytes = [out_types[key].nbytes for key in outs]
        places = [self.nargs + i for i in shared.values()]
        self.segments[name] = RowSegment({}, in_bytes, out_bytes, places, heavy=not light, sum=-1)
        for count in counts:
            self.part(name, count, batched.key, partial(batched.rows, count))

    def alone(
        self, name: str, calls: Sequence[Call], ins: Mapping[_Key, TensorType], outs: list[_Key]
    ) -> None:
        """Generate the function of a segment for one row."""
        outer = self.body
        types = {key: outer.type_at(outer.slots[key]) for key in ins}
        body = self.body = _Body(types)
        for call in calls:
            assert call.op is not None
            for use in call.ins:
                self.read(use)
            self.op(call.op.name, len(call.ins), 1, **call.attributes)
            [out] = call.outs
            body.add(self.key(out), out.type)
        for key in outs:
            self.emit("get", body.slots[key])
        self.emit("return", len(outs))
        self.functions.append(Function(name, body.nparams, len(outs), tuple(body.code)))
        self.body = outer

    def part(self, name: str, count: int, key: Any, make_calls: Callable[[], list[Call]]) -> None:
        """Generate the part of a segment for `count` rows.

        `key` is equal for segments that have the same parts.
        """
        part = partial(Part, partial(_compiled, make_calls, self.scope[0]))
        self.segments[name].parts[count] = _parts.get((self.scope, count, key), part)

    def program(self, family: object) -> LaneProgram:
        """Return the program of all functions."""
        if self.first_calls:
            self.hoist_first()
        [row] = [each for each in self.functions if each.name == lane_link.ROW]
        facts = row.code[1].immediates[2]
        facts |= {"shared": [str(type) for type in self.shared_types], "sums": len(self.sums)}
        code = [Instruction.of("load_arg", i) for i in range(self.nargs)]
        code.append(Instruction.of("call", lane_link.ROW))
        if self.has_records:
            begin, end = (host_call(name, 0, 0, {}) for name in (residuals.BEGIN, residuals.END))
            code = [*begin, *code, *end]
        main = Function("main", 0, STAR, (*code, Instruction.of("halt")))
        return LaneProgram(Program([main, *self.functions]), self.segments, family)

    def hoist_first(self) -> None:
        """Generate the function of the values that all rows share."""
        names = {
            use.value: Value(use.type.nbytes, Home("output", i, use.type))
            for i, use in enumerate(self.hoisted)
        }
        inputs: list[int] = []
        for use in (use for call in self.first_calls for use in call.ins):
            if use.value not in names:
                names[use.value] = Value(use.type.nbytes, Home("input", len(inputs), use.type))
                inputs.append(self.nargs + self.shared[use.value])
        calls = renewed(self.first_calls, names)
        sizes = [use.type.nbytes for use in self.hoisted]
        self.segments[lane_link.FIRST] = RowSegment({}, [], sizes, inputs, heavy=False, sum=-1)
        key = _SegmentCalls(calls, lambda use: use.value, [], [], []).key
        self.part(lane_link.FIRST, 1, key, lambda: calls)


def _compiled(make_calls: Callable[[], list[Call]], policy: FusionPolicy) -> PartCode:
    planned = compile_flow(Flow(make_calls(), []), policy=policy)
    arguments = [(each.role, each.place, each.type) for each in planned.arguments]
    return PartCode(planned.program, arguments, planned.plan.nbytes)


def _given_back(call: Call) -> int:
    """Return the number of operands of a call that are results."""
    outs = {use.value.home or use.value for use in call.outs}
    return sum(1 for use in call.passed if (use.value.home or use.value) in outs)


def _summed(call: Call, product: Call | None, operands: Sequence[Use], count: int) -> list[Call]:
    """Return the calls that add `count` rows of the operands to a sum.

    product: the matmul of the operands, if they are not the call's operands
    """
    assert call.op is not None
    type, name = call.outs[0].type, call.op.name
    before = Use(Value(type.nbytes, Home("input", 0, type)), type)
    after = Use(Value(type.nbytes, Home("output", 0, type)), type)
    types = [use.type.with_shape((count, *use.type.shape)) for use in operands]
    rows = [Use(Value(t.nbytes, Home("input", i, t)), t) for i, t in enumerate(types, 1)]
    if name != "add":
        if count == 1:
            rows = [Use(row.value, use.type) for row, use in zip(rows, operands, strict=True)]
        return [_op(name, call.attributes, after, [before, *rows])]
    if product is not None:
        of = product.outs[0].type
        merged = [Use(x, t.with_shape((t.shape[0] * t.shape[1], t.shape[2]))) for x, t in rows]
        first = _op("matmul", product.attributes, Use(Value(of.nbytes), of), merged)
    else:
        attributes = OPS["sum"].bind({"axis": (0,)})
        first = _op("sum", attributes, Use(Value(type.nbytes), type), rows)
    return [first, _op("add", {}, after, [before, Use(first.outs[0].value, type)])]


def _op(name: str, attributes: Attributes, out: Use, ins: Sequence[Use]) -> Call:
    return Call(f"{name}{OUT}", OPS[name], attributes, [out], list(ins))


def _is_row(call: Call, operand: int) -> bool:
    """Return True if the call reads or replaces rows, and that operand is the row's number."""
    return call.attributes["axis"] == 0 and call.ins[operand].type.shape == ()


def _is_update(call: Call) -> bool:
    """Return True if the call replaces rows of a value in place."""
    return (
        call.op is not None
        and call.op.name == "dynamic_update"
        and _is_row(call, 2)
        and call.outs[0].value.home is not None
        and call.ins[0].value.home is call.outs[0].value.home
    )
