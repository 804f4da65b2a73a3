"""Lanes: a recorded function as code that runs for many inputs at once (see `mlvm.machines.lanes`).

Each value is a register of a frame, which has the number of a row. The calls between two places
where frames may part are a segment, which is compiled for some numbers of rows. What copies,
reshapes, keeps and passes values on moves numbers of rows, and no bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from mlvm.core.errors import CaptureError
from mlvm.core.machine.callee import OUT
from mlvm.core.op import OPS, Attributes
from mlvm.core.program.assembly import disassemble
from mlvm.core.types import TensorType
from mlvm.machines import residuals
from mlvm.machines.checks import CHECK
from mlvm.step.blocks import with_blocks, without_dead_calls, without_dead_calls_in
from mlvm.step.compile import compile_flow
from mlvm.step.flow import Call, Flow, Home, Procedure, Use, Value
from mlvm.step.fusion import FusionPolicy
from mlvm.step.rows import Made, over_lanes

COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
"""Numbers of rows that a segment is compiled for."""
SUM_COUNTS: Final = (1, 4, 16, 64, 256)

_LIGHT: Final = 64
"""Bytes of a value that control flow is made of; a segment of these does not wait for others."""

_HARMLESS: Final = frozenset(
    [
        *("full", "zeros", "arange", "linspace", "eye", "matmul", "sum", "mean", "max"),
        *("reshape", "broadcast_to", "permute_dims", "concat", "slice"),
    ]
)
"""Ops beside elementwise ones that refuse no values: they may run where no lane would."""

_Key: TypeAlias = Value | Home
_Step: TypeAlias = list[Any]


def lanes_of(
    main: Procedure,
    procedures: Sequence[Procedure],
    results: Sequence[Use],
    shared: Sequence[Use],
    sums: Mapping[Home, int],
    policy: FusionPolicy,
) -> str:
    """The code of a function. `main` has only arguments as parameters, and leaves `results`. Of
    what it reads from outside, `shared` has the uses in their order. What is added to the homes
    `sums` is summed up over all frames.

    Raises `CaptureError` for a host function in it that lanes cannot run, and for an update of
    what lies outside.
    """
    key = policy, _spelled([main, *procedures], results, shared, sums)
    text = _written.pop(key, None)
    if text is None:
        if len(_written) >= _MOST_WRITTEN:
            del _written[next(iter(_written))]
        writer = _Writer(shared, sums, policy)
        last = {u.value.home: u.value for call in main.block.calls for u in call.outs}
        wanted = [*[use.value for use in results], *[last[home] for home in sums if home in last]]
        calls = without_dead_calls(Flow(main.block.calls, wanted))
        returned = writer.procedure(main, calls, results)
        for each in procedures:
            writer.procedure(each, without_dead_calls_in(each.block).calls)
        text = writer.text(main, returned)
    _written[key] = text  # the last one used is the last
    return text


_MOST_WRITTEN: Final = 256
_written: Final[dict[Any, str]] = {}  # by how the functions are spelled


def _spelled(
    procedures: Sequence[Procedure],
    results: Sequence[Use],
    shared: Sequence[Use],
    sums: Mapping[Home, int],
) -> Any:
    """Equal for functions that do the same, whatever the values in them are called."""
    numbers: dict[Any, int] = {}

    def number(each: object) -> int:
        return numbers.setdefault(each, len(numbers))

    def use_of(use: Use | None) -> Any:
        if use is None:
            return None
        home = use.value.home
        return number(use.value), -1 if home is None else number(home), use.type

    def uses_of(uses: Sequence[Use]) -> Any:
        return tuple([use_of(use) for use in uses])

    def calls_of(calls: Sequence[Call]) -> Any:
        return tuple(
            [
                (
                    call.name,
                    repr(call.attributes) if call.attributes else "",
                    uses_of(call.outs),
                    uses_of(call.ins),
                    tuple([(calls_of(b.calls), use_of(b.result)) for b in call.blocks]),
                    None if call.callee is None else procedures.index(call.callee),
                    uses_of(call.passed),
                )
                for call in calls
            ]
        )

    homes = tuple([number(home) for home in sums])
    params = [tuple([(number(home), home.type) for home in each.params]) for each in procedures]
    bodies = tuple([calls_of(each.block.calls) for each in procedures])
    return homes, tuple(params), uses_of(shared), bodies, uses_of(results)


class _Writer:
    """Code as it is written, function by function."""

    def __init__(
        self, shared: Sequence[Use], sums: Mapping[Home, int], policy: FusionPolicy
    ) -> None:
        self.policy = policy
        self.shared: dict[_Key, int] = {}
        self.given = len(shared)
        for i, use in enumerate(shared):
            self.shared.setdefault(use.value, i)
        self.sums = sums
        self.steps: list[_Step] = []
        self.heavy: list[int] = []
        self.segments: list[Any] = []
        self.sites: list[Any] = []
        self.hoisted: list[Use] = []
        self.first_calls: list[Call] = []
        self.entries: dict[Procedure, int] = {}
        self.registers: dict[Procedure, dict[_Key, int]] = {}
        self.width = 0
        # Of the function that is being written:
        self.regs: dict[_Key, int] = {}
        self.readers: dict[Value, set[int]] = {}
        self.owned: set[Home] = set()
        self.pending: list[Call] = []
        self.awaited: set[_Key] = set()
        self.products: dict[Value, Call] = {}  # see `_products`

    # --- functions --------------------------------------------------------------------------

    def procedure(
        self, procedure: Procedure, calls: Sequence[Call], results: Sequence[Use] = ()
    ) -> list[tuple[int, int]]:
        """Write a function. Returns the registers that have its results, and their sizes."""
        self.entries[procedure] = len(self.steps)
        self.regs = self.registers[procedure] = {}
        self.awaited, self.pending = set(), []
        for home in procedure.params:
            self.register(home)
        everything = list(with_blocks(calls))
        self.readers = {}
        for call in everything:
            for use in call.ins:
                self.readers.setdefault(use.value, set()).add(id(call))
        for call in everything:
            for block in call.blocks:
                if block.result is not None:
                    self.readers.setdefault(block.result.value, set()).add(id(block))
        for use in results:
            self.readers.setdefault(use.value, set()).add(0)
        self.owned = {
            call.outs[0].value.home
            for call in everything
            if _is_update(call) and call.outs[0].value.home is not None
        }
        self.products = self._products(everything)
        self.calls(calls)
        self.flush()
        self.join()
        returned = [(self.read(use), use.type.nbytes) for use in results]
        self.emit("return")
        self.width = max(self.width, len(self.regs))
        return returned

    def _products(self, calls: Sequence[Call]) -> dict[Value, Call]:
        """The products x^T y that are only added to a sum: rows of x and y are kept for it instead,
        and make one product in the end."""
        makers = {use.value: call for call in calls for use in call.outs}
        found: dict[Value, Call] = {}
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
                found[part] = maker
        return found

    def register(self, key: _Key) -> int:
        return self.regs.setdefault(key, len(self.regs))

    def emit(self, *step: Any) -> int:
        self.steps.append(list(step))
        return len(self.steps) - 1

    def key(self, use: Use) -> _Key:
        """What has a register of its own: a home, or a value that has none."""
        if use.value in self.shared:
            return use.value
        return use.value.home or use.value

    def is_shared(self, use: Use) -> bool:
        return use.value in self.shared

    def _is_sum(self, call: Call) -> bool:
        return bool(call.outs) and call.outs[0].value.home in self.sums

    def read(self, use: Use) -> int:
        """The register that has the value, in which its row is nobody else's to change."""
        key = self.key(use)
        self.settle([key])
        if key in self.shared:
            at = self.register(key)
            self.emit("const", at, self.shared[key], use.type.nbytes)
            return at
        if key not in self.regs:
            raise CaptureError("a lane reads what it has not written")
        if key in self.owned:
            at = self.register(Value(use.type.nbytes))
            self.emit("dup", at, self.regs[key], use.type.nbytes)
            return at
        return self.regs[key]

    def settle(self, keys: Iterable[_Key]) -> None:
        """Wait for calls that make one of these."""
        if not self.awaited.isdisjoint(keys):
            self.join()

    def join(self) -> None:
        if self.awaited:
            self.emit("join")
            self.awaited.clear()

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
                pass
            elif self._is_sum(call):
                self.flush()
                self.add(call)
            elif self.moves(call):
                pass
            else:
                self.pending.append(call)

    def moves(self, call: Call) -> bool:
        """Write a call that only takes, puts or moves rows."""
        assert call.op is not None
        [out] = call.outs
        name = call.op.name
        is_same = all(map(self.is_shared, call.ins)) and (call.op.elementwise or name in _HARMLESS)
        if is_same and out.value.home is None:
            self.hoist(call, out)
            return True
        if is_same and name != "copy":
            self.flush()
            other = Use(Value(out.type.nbytes), out.type)
            self.hoist(call, other)
            self.to(out, other)
            return True
        if name in ("copy", "reshape"):
            self.flush()
            self.to(out, call.ins[0])
            return True
        if name == "take" and _is_row(call, 1) and not self.is_shared(call.ins[0]):
            self.flush()
            x, index = call.ins
            self.settle([self.key(x), self.key(index)])
            length = x.type.shape[0]
            at = self.read(index)
            of = self.regs[self.key(x)]
            to = self.register(self.key(out))
            self.emit("take", to, of, at, length, out.type.nbytes, index.type.dtype.numpy.str)
            return True
        if _is_update(call):
            self.flush()
            x, value, index = call.ins
            length, rows = x.type.shape[0], value.type.shape[0]
            given, at = self.read(value), self.read(index)
            to = self.register(self.key(out))
            nbytes = out.type.nbytes // length if length else 0
            self.emit("put", to, given, at, length, rows, nbytes, index.type.dtype.numpy.str)
            return True
        return False

    def hoist(self, call: Call, out: Use) -> None:
        """Make a call once, before all lanes: it has the same operands in each."""
        self.shared[out.value] = self.given + len(self.hoisted)
        self.hoisted.append(out)
        self.first_calls.append(
            Call(call.name, call.op, call.attributes, [out], call.ins, call.line)
        )

    def to(self, out: Use, source: Use) -> None:
        """Let a register have a value."""
        of = self.read(source)
        key = self.key(out)
        self.settle([key])
        at = self.register(key)
        if key in self.owned and self.key(source) not in self.owned:
            self.emit("dup", at, of, out.type.nbytes)
        else:
            self.emit("move", at, of)

    def host(self, call: Call) -> None:
        if call.callee is not None:
            self.call(call)
        elif call.name == residuals.PUSH:
            kept = [self.read(use) for use in call.ins]
            self.emit("push", self.register(self.key(call.outs[0])), kept)
        elif call.name == residuals.READ:
            number = self.read(call.ins[0])
            outs = [self.register(self.key(use)) for use in call.outs]
            self.emit("read", outs, number)
        elif call.name == CHECK:
            [use] = call.ins
            self.emit("check", self.read(use), use.type.nbytes, call.attributes["message"])
        else:
            raise CaptureError(
                f"{call.line or 'here'}: {call.name} is no part of a function for ml.batch, which "
                f"runs ops, control flow and ml.functions"
            )

    def call(self, call: Call) -> None:
        """Call a function: a step that is completed when the function has been written."""
        outs = {self.key(use) for use in call.outs}
        self.settle([self.key(use) for use in call.passed if self.key(use) not in outs])
        nresults = len(call.passed) - sum(1 for use in call.passed if self.key(use) not in outs)
        args = [self.read(use) for use in call.passed[nresults:]]
        results = [self.register(self.key(use)) for use in call.passed[:nresults]]
        self.emit("call", call.callee, args, results)
        self.awaited |= outs

    def control(self, call: Call) -> None:
        if call.callee is not None:
            raise CaptureError(f"{call.line or 'here'}: a function is called from outside of lanes")
        self.join()
        first, second = call.blocks
        if call.name == "cond":
            leave = self.split(call.ins[0])
            self.calls(first.calls)
            self.flush()
            self.join()
            end = self.emit("jump", -1)
            self.steps[leave][-1] = len(self.steps)
            self.calls(second.calls)
            self.flush()
            self.join()
            self.steps[end][-1] = len(self.steps)
            return
        again = len(self.steps)
        self.calls(first.calls)
        self.flush()
        assert first.result is not None
        leave = self.split(first.result)
        self.calls(second.calls)
        self.flush()
        self.join()
        self.emit("jump", again)
        self.steps[leave][-1] = len(self.steps)

    def split(self, condition: Use) -> int:
        at = self.read(condition)
        type = condition.type
        return self.emit("split", at, type.nbytes, type.dtype.name, -1)

    # --- sums -------------------------------------------------------------------------------

    def add(self, call: Call) -> None:
        """An update of what lies outside: of this each frame says its part."""
        assert call.op is not None
        place = self.sums[call.outs[0].value.home]  # type: ignore[index]
        name, total = call.op.name, call.outs[0]
        operands = list(call.ins[1:])
        product = self.products.get(operands[0].value)
        if (
            name not in ("add", "index_add", "slice_add")
            or call.ins[0].value.home is not total.value.home
        ):
            raise CaptureError(f"{call.line or 'here'}: a lane updates what lies outside of it")
        if product is not None:
            operands = list(product.ins)
        registers = [self.read(use) for use in operands]
        whole = name == "add" or (
            name == "index_add" and call.attributes["axis"] == 0 and not operands[1].type.shape
        )
        parts = {
            str(count): self.compiled(_summed(call, product, operands, count))
            for count in (SUM_COUNTS if whole else (1,))
        }
        sizes = [use.type.nbytes for use in operands]
        self.emit("add", len(self.sites), registers)
        self.sites.append({"sum": place, "sizes": sizes, "shared": [], "parts": parts})

    # --- segments ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the calls so far as segments: those without a rule stand alone."""
        calls, self.pending = self.pending, []
        run: list[Call] = []
        for call in calls:
            if self.batched(call, 2) is None:
                self.segment(run)
                self.segment([call], counts=(1,))
                run = []
            else:
                run.append(call)
        self.segment(run)

    def batched(self, call: Call, count: int) -> Made:
        assert call.op is not None
        types = [use.type for use in call.ins]
        which = [not self.is_shared(use) for use in call.ins]
        if count == 1 and over_lanes(call.op, call.attributes, types, which, 2) is None:
            return call.op.name, call.attributes, types
        return over_lanes(call.op, call.attributes, types, which, count)

    def segment(self, calls: list[Call], counts: Sequence[int] = COUNTS) -> None:
        """Write calls that run for many rows in one go."""
        if not calls:
            return
        mine = {id(call) for call in calls}
        made: dict[_Key, TensorType] = {}
        ins: dict[_Key, TensorType] = {}
        shared: dict[_Key, int] = {}
        for call in calls:
            for use in call.ins:
                key = self.key(use)
                if key in self.shared:
                    shared[key] = self.shared[key]
                elif key not in made:
                    ins.setdefault(key, use.type)
            [out] = call.outs
            made[self.key(out)] = out.type
        values = {self.key(call.outs[0]): call.outs[0].value for call in calls}
        outs = [
            key
            for key, value in values.items()
            if isinstance(key, Home) or self.readers.get(value, set()) - mine
        ]
        self.settle([*ins, *outs])
        light = all(use.type.nbytes <= _LIGHT for call in calls for use in (*call.outs, *call.ins))
        parts = {
            str(count): self.compiled(self.rows_of(calls, count, list(ins), list(shared), outs))
            for count in counts
        }
        number = len(self.segments)
        self.segments.append({"shared": list(shared.values()), "parts": parts})
        given = [(self.regs[key], type.nbytes) for key, type in ins.items()]
        left = [(self.register(key), made[key].nbytes) for key in outs]
        at = self.emit("run", number, given, left)
        if not light:
            self.heavy.append(at)

    def rows_of(
        self,
        calls: Sequence[Call],
        count: int,
        ins: list[_Key],
        shared: list[_Key],
        outs: list[_Key],
    ) -> list[Call]:
        """The calls, each for so many rows."""
        now: dict[_Key, Value] = {}
        last = {self.key(call.outs[0]): i for i, call in enumerate(calls)}
        made: list[Call] = []
        for i, call in enumerate(calls):
            found = self.batched(call, count)
            assert found is not None
            name, attributes, types = found
            operands = []
            for use, type in zip(call.ins, types, strict=True):
                key = self.key(use)
                if key not in now:
                    place = ins.index(key) if key in ins else len(ins) + shared.index(key)
                    now[key] = Value(type.nbytes, Home("input", place, type))
                operands.append(Use(now[key], type))
            op = OPS[name]
            out_type = op.infer(types, attributes)
            [out] = call.outs
            if out_type is None or out_type.nbytes != count * out.type.nbytes:
                raise CaptureError(f"{call.line or 'here'}: {name} has no rows in lanes")
            key = self.key(out)
            value = Value(out_type.nbytes)
            if key in outs and last[key] == i:
                value.home = Home("output", outs.index(key), out_type)
            now[key] = value
            made.append(
                Call(f"{name}{OUT}", op, attributes, [Use(value, out_type)], operands, call.line)
            )
        return made

    def compiled(self, calls: list[Call]) -> dict[str, Any]:
        """A program of these calls, and what to run it on."""
        planned = compile_flow(Flow(calls, []), policy=self.policy)
        arguments = [
            (each.role, each.place, each.type.dtype.name, each.type.shape)
            for each in planned.arguments
        ]
        text = disassemble(planned.program)
        return {"text": text, "arguments": arguments, "nbytes": planned.plan.nbytes}

    def text(self, main: Procedure, returned: list[tuple[int, int]]) -> str:
        steps: list[_Step] = []
        for step in self.steps:
            if step[0] == "call":
                _, callee, args, made = step
                nresults = len(made)
                params = [self.registers[callee][home] for home in callee.params]
                passed = list(zip(params[nresults:], args, strict=True))
                left = list(zip(made, params[:nresults], strict=True))
                step = ["call", self.entries[callee], passed, left]
            steps.append(step)
        registers = self.registers[main]
        first = None
        if self.first_calls:
            made = []
            now: dict[_Key, Value] = {}
            inputs: list[int] = []
            places = {use.value: i for i, use in enumerate(self.hoisted)}
            for call in self.first_calls:
                operands = []
                for use in call.ins:
                    if use.value not in now:
                        inputs.append(self.shared[use.value])
                        now[use.value] = Value(
                            use.type.nbytes, Home("input", len(inputs) - 1, use.type)
                        )
                    operands.append(Use(now[use.value], use.type))
                [out] = call.outs
                now[out.value] = Value(out.type.nbytes, Home("output", places[out.value], out.type))
                made.append(
                    Call(
                        call.name,
                        call.op,
                        call.attributes,
                        [Use(now[out.value], out.type)],
                        operands,
                        call.line,
                    )
                )
            first = {"shared": inputs, "parts": {"1": self.compiled(made)}}
        code = {
            "results": len(returned),
            "args": len(main.params),
            "shared": self.given,
            "sums": len(self.sums),
            "width": self.width,
            "steps": steps,
            "heavy": self.heavy,
            "params": [(registers[home], home.type.nbytes) for home in main.params],
            "returned": returned,
            "segments": self.segments,
            "sites": self.sites,
            "first": first,
            "hoisted": [max(use.type.nbytes, 1) for use in self.hoisted],
        }
        return json.dumps(code, separators=(",", ":"))


def _summed(call: Call, product: Call | None, operands: Sequence[Use], count: int) -> list[Call]:
    """The calls that add what so many rows of the operands say to a sum; `product` is what they
    are the operands of, if not of the call itself."""
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
    """Whether the call is about rows along the first axis, of which that operand is the number."""
    return call.attributes["axis"] == 0 and call.ins[operand].type.shape == ()


def _is_update(call: Call) -> bool:
    """Whether the call replaces rows of what lies in a home."""
    return (
        call.op is not None
        and call.op.name == "dynamic_update"
        and _is_row(call, 2)
        and call.outs[0].value.home is not None
        and call.ins[0].value.home is call.outs[0].value.home
    )
