"""Comparison of two recordings: the first step that differs, and by replaying it, the first op.

Two steps are equal if their results and the state after them are equal. Runs that differ only in
threads, members, workers or execution are therefore equal, although the inputs (parts of a batch)
and the programs (with collectives) may differ. If results differ, the cause is the first of: the
state before the step, an input, an op. The op is found by computing the step op by op in both runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import (
    ArgumentError,
    MachineError,
    MlvmError,
    UnknownFunctionError,
    counted,
    listed,
)
from mlvm.core.ops.half import shown
from mlvm.core.types import Array, TensorType
from mlvm.eager.files.safetensors import packed
from mlvm.eager.runs.execution import Executed, Execution, Ref
from mlvm.eager.runs.named_values import Values
from mlvm.eager.runs.replay import Replay, replay_of
from mlvm.eager.runs.run import RecordedStep, Run
from mlvm.eager.runs.source import SourceLine
from mlvm.eager.runs.steps import StepTable
from mlvm.machines.digest import digest
from mlvm.machines.versions import cause_of_other_bits


class Elements(NamedTuple):
    """Differing elements of two arrays of the same type.

    `differing`, `size`: the number of differing elements, and the number of elements.
    `first`: the index of the first differing element.
    `values`: that element in both arrays.
    `bits`: these values as hexadecimal digits.
    """

    differing: int
    size: int
    first: tuple[int, ...]
    values: tuple[Any, Any]
    bits: tuple[str, str]

    def __str__(self) -> str:
        (a, b), (bits_a, bits_b) = self.values, self.bits
        count = f"{self.differing:,} of {self.size:,} elements differ, first at {[*self.first]}"
        count = count if self.size > 1 else "the value differs"
        return f"{count}: {a} ({bits_a}), {b} ({bits_b})"


class OperandOrigin(NamedTuple):
    """Operand of an op, with the origin of the value.

    Attributes:
        origin, type: the origin and the type of the operand.
        is_equal: whether it is equal in both runs; None if the ops of the runs do not correspond.
        twin: the number of an equal operand of the other run's op, if it has a different position
            or the ops do not correspond; else None.
    """

    origin: str
    type: TensorType
    is_equal: bool | None
    twin: int | None = None


class OpReport(NamedTuple):
    """The first differing op in one run.

    Attributes:
        op: the op.
        call: the op as text, with the names of inputs.
        operands: the operands of the op.
        line: the line of Python that called the op.
        text: the text of this line as recorded.
    """

    op: Executed
    call: str
    operands: Sequence[OperandOrigin]
    line: SourceLine | None
    text: str


class Difference(NamedTuple):
    """First difference of two runs.

    Attributes:
        step: the number of the step; all earlier steps are equal.
        cause: `call` if the runs call different functions, `state`, `input`, `op`, `result` if a
            replay does not reproduce it, or `length`.
        text: a sentence that describes the difference.
        names: the names of differing state, inputs or results.
        ops: for an op, the first differing op of each run.
        elements: the differing elements of the result of corresponding ops, an input or a state.
        programs: the first op of each run in which the programs differ, if the lines are different:
            ops of the backward pass have the line of `value_and_grad`, and the cause is often a
            forward op.
        optimizers: a text for each optimizer that differs in the runs.
    """

    step: int
    cause: str
    text: str
    names: Sequence[str] = ()
    ops: tuple[OpReport | None, OpReport | None] = (None, None)
    elements: Elements | None = None
    programs: tuple[OpReport | None, OpReport | None] = (None, None)
    optimizers: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def diff(a: Run | Replay, b: Run | Replay) -> Difference | None:
    """Return the first difference of two recordings; None if they are equal.

    If this machine cannot compute the step, for example because its inputs were not stored, the
    difference has the number of the step and the reason.

    Raises `EncodingError` for a damaged recording, `ArgumentError` for a value that is not a run
    or has no steps, and the errors of a step.
    """
    left, right = replay_of(a, "diff"), replay_of(b, "diff")
    for x, y in zip(left.run.steps, right.run.steps, strict=False):
        if not _are_equal(left, right, x, y):
            return _difference(left, right, x, y)
    counts = len(left.run.steps), len(right.run.steps)
    shorter = left.run if counts[0] < counts[1] else right.run
    if counts[0] == counts[1] or (min(counts) and not shorter.is_closed):
        if not min(counts):
            raise ArgumentError(f"diff: expected recordings with steps, {shorter.folder} has none")
        return None
    equal = f"the first {min(counts)} steps are equal; " if min(counts) else ""
    text = f"{equal}A has {counted(counts[0], 'step')}, B has {counts[1]}"
    text += "" if shorter.is_closed else f"; {shorter.folder} was not closed"
    text += f"; {shorter.folder} ended with an error" if shorter.has_failed else ""
    return Difference(min(counts), "length", text)


def equality(a: Run, b: Run) -> str:
    """Return a sentence for two equal runs: the steps, a recording that was cut, and other state.

    A run that was not closed is equal to a longer run with the same first steps, if it has steps.
    State that the other run lacks, or has with a different type, is not compared, but named.
    """
    count = min(len(a.steps), len(b.steps))
    longer = [f"; {run.folder} has {len(run.steps)}" for run in (a, b) if len(run.steps) != count]
    cut = dict.fromkeys(run.folder for run in (a, b) if not run.is_closed)
    incomplete = [f"; {folder} was not closed" for folder in cut]
    mine, others = [_types(run, [step.table for step in run.steps[:count]]) for run in (a, b)]
    more: list[str] = []
    if sorted(mine.values()) != sorted(others.values()):  # not only the names differ
        for name, state, other in (("A", mine, others), ("B", others, mine)):
            only = [f"{path} ({kind})" for path, kind in state.items() if other.get(path) != kind]
            more += [f"; only {name} has the state {listed(only, 4)}"] if only else []
    return f"equal: {counted(count, 'step')}{''.join(longer + incomplete + more)}"


def _types(run: Run, tables: Iterable[StepTable]) -> dict[str, str]:
    """Return the types of the state that steps read or update, by name."""
    state = dict(each for table in {id(x): x for x in tables}.values() for each in table.state)
    return {name: str(run.cells[number].type) for name, number in sorted(state.items())}


def elements(x: Array, y: Array) -> Elements | None:
    """Return the differing elements of two arrays; None for equal bits or nans, or other types."""
    if digest(x) == digest(y) or TensorType.of(x) != TensorType.of(y):
        return None
    bits = [np.asarray(packed(each)).reshape(x.size, -1) for each in (x, y)]
    differs = (bits[0] != bits[1]).any(axis=-1).reshape(x.shape)
    if TensorType.of(x).dtype.is_inexact:
        differs &= ~(np.isnan(shown(x)) & np.isnan(shown(y)))
    where = np.unravel_index(int(np.argmax(differs)), x.shape)
    index = tuple(int(i) for i in where)
    texts = [each.reshape(*x.shape, -1)[index][::-1].tobytes().hex() for each in bits]
    values = [shown(each)[index].item() for each in (x, y)]
    return Elements(int(differs.sum()), x.size, index, (values[0], values[1]), (texts[0], texts[1]))


def _are_equal(a: Replay, b: Replay, x: RecordedStep, y: RecordedStep) -> bool:
    """Return whether the results, updated inputs and later states of two steps are equal.

    Updated inputs are compared only if they have the same types in both runs: a member of a group
    may update a part of a batch. If the states have different names or types, as for a member with
    sharded state, the contents are compared.
    """
    nresults = [len(step.results) - len(step.table.updated) for step in (x, y)]
    results = [step.results[:n] for step, n in zip((x, y), nresults, strict=True)]
    if results[0] != results[1] or len(x.table.updated) != len(y.table.updated):
        return False
    types = [[step.table.types[i] for i, _ in step.table.updated] for step in (x, y)]
    if types[0] == types[1] and x.results[nresults[0] :] != y.results[nresults[1] :]:
        return False
    states = [
        [(name, str(replay.run.cells[cell].type)) for name, cell in step.table.state]
        for replay, step in ((a, x), (b, y))
    ]
    if a.run.log_version != b.run.log_version or states[0] != states[1]:
        return _have_equal_state(a, b, x, y)
    return x.after == y.after


def _have_equal_state(a: Replay, b: Replay, x: RecordedStep, y: RecordedStep) -> bool:
    """Return whether state with the same name and type is equal after two steps.

    State with other names but the same types, which was renamed, needs the same contents. Both
    steps are computed again. If that is not possible, equal results are sufficient."""
    after: list[dict[tuple[str, str], bytes]] = []
    for replay, step in ((a, x), (b, y)):
        try:
            names, contents = replay.names(step), replay.cells_after(step.number)
        except (MlvmError, OSError):
            return len(x.results) > 0
        after.append(
            {
                (name, str(TensorType.of(contents[i]))): digest(contents[i])
                for name, i in names.items()
            }
        )
    mine, others = after
    common = mine.keys() & others.keys()
    renamed = [
        sorted((key[1], content) for key, content in state.items() if key not in common)
        for state in after
    ]
    types = [[type for type, _ in rows] for rows in renamed]
    is_equal = all(mine[key] == others[key] for key in common)
    return is_equal and (types[0] != types[1] or renamed[0] == renamed[1])


def _difference(left: Replay, right: Replay, x: RecordedStep, y: RecordedStep) -> Difference:
    """Return the cause of the difference of two steps, the first that differ.

    If this machine cannot compute them, the difference contains the reason."""
    mine, others = x.table.optimizers, y.table.optimizers
    differing = [
        f"  {run}: {name} is {optimizers.get(name, 'not used')}"
        for name in {**mine, **others}
        for run, optimizers in (("A", mine), ("B", others))
        if mine and others and mine.get(name) != others.get(name)
    ]
    try:
        difference = _cause(left, right, x, y)
        is_call = difference.cause == "call"
        return difference if is_call else difference._replace(optimizers=differing)
    except (ArgumentError, MachineError, UnknownFunctionError) as error:
        cause, what, names = "result", "the results differ", _results(x, y)
        if x.before != y.before:
            cause, what, names = "state", "the state before the step differs", []
        text = f"{_head(x, y)}: {what}, and this machine cannot compute the step: {error}"
        return Difference(x.number, cause, text, names, optimizers=differing)


def _cause(left: Replay, right: Replay, x: RecordedStep, y: RecordedStep) -> Difference:
    """Return the cause of the difference of two steps. Raises the errors of a replay."""
    head, mine, other = _head(x, y), x.table.function, y.table.function
    called = [{step.table.function for step in each.run.steps} for each in (left, right)]
    if mine != other and (mine in called[1] or other in called[0]):  # not only renamed
        text = f"step {x.number}: A calls {mine}, and B calls {other}"
        return Difference(x.number, "call", text)
    if x.before != y.before:
        names, differing = _differing_state(left, right, x, y)
        if names:
            previous = f"between step {x.number - 1} and step {x.number}"
            when = previous if x.number else "before the first step"
            a, b = _types(left.run, [x.table]), _types(right.run, [y.table])
            typed = [_with_types(name, a[name], b.get(name, "absent")) for name in names]
            text = f"{head}: the state differs, and was written {when}: {listed(typed, 4)}"
            return Difference(x.number, "state", text, names, elements=differing)
    if x.table.ntensors != y.table.ntensors:
        described = [listed(each.table.names, 4) or "none" for each in (x, y)]
        text = f"{head}: the inputs differ: A has {described[0]}; B has {described[1]}"
        return Difference(x.number, "input", text)
    is_constant = len(x.inputs) != len(y.inputs)  # a Python number is one in one of the programs
    inputs = [i for i, (p, q) in enumerate(zip(x.inputs, y.inputs, strict=False)) if p != q]
    inputs = [i for i in inputs if not is_constant or i < x.table.ntensors]
    if inputs:
        names = [x.table.names[i] for i in inputs]
        types = [(x.table.types[i], y.table.types[i]) for i in inputs]
        typed = [_with_types(name, *each) for name, each in zip(names, types, strict=True)]
        text = f"{head}: the inputs differ: {listed(typed, 4)}"
        differing = _differing_input(left, right, x.number, inputs)
        return Difference(x.number, "input", text, names, elements=differing)
    for step in (x, y):
        if not step.table.file:
            raise ArgumentError(f"{step.table.function} has no program: {step.table.reason}")
    return _differing_op(left, right, x, y)


def _head(x: RecordedStep, y: RecordedStep) -> str:
    """Return the number of a step, with the functions of both runs if these differ."""
    return _with_types(f"step {x.number}", x.table.function, y.table.function)


def _with_types(name: str, a: str, b: str) -> str:
    """Return a name, with the types or functions in both runs if these differ."""
    return name if a == b else f"{name} ({a} in A, {b} in B)"


def _results(x: RecordedStep, y: RecordedStep) -> list[str]:
    rows = zip(x.table.digested(len(x.results)), x.results, y.results, strict=False)
    return [name for name, p, q in rows if p != q] or ["the state after the step"]


def _checkpointed(run: Run, step: RecordedStep) -> dict[str, int]:
    """Return the digests of a step's state by name, if a checkpoint follows the step."""
    at_end = [each.cells for each in run.checkpoints if each.step == step.number + 1]
    cells = {*step.table.cells()}
    return {run.cells[i].name: x for each in at_end for i, x in each.items() if i in cells}


def _differing_state(
    left: Replay, right: Replay, x: RecordedStep, y: RecordedStep
) -> tuple[list[str], Elements | None]:
    """Return the names of state that differs before a step, and the first one's elements."""
    states: list[dict[str, Array]] = []
    for replay, step in ((left, x), (right, y)):
        contents, paths = replay.cells(step.number), replay.names(step)
        states.append({name: contents[each] for name, each in step.table.state if name in paths})
    mine, others = [{name: digest(x) for name, x in state.items()} for state in states]
    names = [name for name, each in mine.items() if others.get(name, each) != each]
    if not names:  # state that only one of the programs reads is equal unless it was renamed
        rest = {TensorType.of(states[1][name]) for name in others.keys() - mine.keys()}
        computed = {*others.values()}
        names = [
            name
            for name, each in mine.items()
            if name not in others
            and each not in computed
            and TensorType.of(states[0][name]) in rest
        ]
    first = next((name for name in names if name in others), None)
    names.sort(key=lambda name: name != first)  # the elements are of the first name
    return names, elements(states[0][first], states[1][first]) if first is not None else None


def _differing_input(
    left: Replay, right: Replay, number: int, inputs: Sequence[int]
) -> Elements | None:
    """Return the differing elements of the first differing input, if both recordings have it."""
    try:
        arrays = [[*replay.at(number).inputs.values()] for replay in (left, right)]
    except MlvmError:
        return None
    return elements(arrays[0][inputs[0]], arrays[1][inputs[0]])


# --- ops ----------------------------------------------------------------------------------


_Pair: TypeAlias = tuple[Executed | None, Executed | None]
"""An op of each run, or None."""


class _Trace:
    """Execution of a step op by op, with the digest of each result."""

    def __init__(self, replay: Replay, step: RecordedStep) -> None:
        self.replay, self.step = replay, step
        self.execution: Execution = replay.execution(step.number)
        self.ops = self.execution.executed
        self.digests: dict[Ref, bytes] = {}

    def advance(self) -> Executed | None:
        """Execute the next op; return None at the end."""
        op = self.execution.step()
        if op is not None:
            for ref in op.results:
                self.digests[ref] = digest(self.execution.value(ref))
        return op

    def digest(self, ref: Ref) -> bytes:
        """Return the digest of an operand."""
        if ref.kind == "scratch":
            return b""
        if ref not in self.digests:
            self.digests[ref] = digest(self.execution.value(ref))
        return self.digests[ref]

    def report(self, op: Executed, twins: Sequence[bytes], *, correspond: bool) -> OpReport:
        """Return the report of an op. `twins` are the digests of the other run's operands."""
        operands = []
        for i, (ref, type) in enumerate(zip(op.operands, op.operand_types, strict=True)):
            mine = self.digest(ref)
            is_known = mine in twins and not correspond and ref.kind != "scratch"
            equal = (
                mine == twins[i] if correspond else None,
                twins.index(mine) if is_known else None,
            )
            origin = self.replay.origin(self.step, self.execution, ref)
            operands.append(OperandOrigin(origin, type, *equal))
        text = "" if op.line is None else self.replay.run.text_at(op.line)
        return OpReport(op, Values(self.execution).text(op), operands, op.line, text)


def _differing_op(left: Replay, right: Replay, x: RecordedStep, y: RecordedStep) -> Difference:
    """Compute a step op by op in both runs, and return the first op with a differing result."""
    traces = _Trace(left, x), _Trace(right, y)
    same = x.table.content == y.table.content
    pair, is_first = (_lockstep(*traces), True) if same else _sources(*traces)
    if pair == (None, None):
        names, states = _results(x, y), [_checkpointed(t.replay.run, t.step) for t in traces]
        if len(names) == 1 and x.results == y.results:
            names = [n for n, key in states[0].items() if states[1].get(n, key) != key] or names
        text = f"{_head(x, y)}: the recordings differ ({listed(names, 4)}), and replays are equal"
        text += _culprit(left, right, x.number)
        return Difference(x.number, "result", text, names)
    a, b = pair
    operands = _operands(traces, pair)
    correspond = a is not None and b is not None and _correspond(a, b, *operands)
    reports = _reports(traces, pair, operands[::-1], correspond=correspond)
    differing = None
    if correspond and a is not None and b is not None:
        values = [map(t.execution.value, op.results) for t, op in zip(traces, (a, b), strict=True)]
        differing = next(filter(None, map(elements, *values)), None)
    where = "the programs differ; " if not same else ""
    kinds = dict.fromkeys(op.name for op in pair if op is not None)
    which = "whose result differs" if is_first else "that differs and reaches the results"
    text = f"{_head(x, y)}: {where}the first op {which} is {' in A, '.join(kinds)}"
    text += " in B" if len(kinds) > 1 else ""
    text += "" if b else " in A, which B lacks"
    text += "" if a else " in B, which A lacks"
    first = (None, None) if same else _first_in_programs(*traces)
    if [op and op.line for op in first] == [op and op.line for op in pair]:
        first = None, None
    operands = _operands(traces, first)
    is_alike = all(first) and len(operands[0]) == len(operands[1])
    programs = _reports(traces, first, operands[::-1], correspond=is_alike)
    return Difference(x.number, "op", text, (), reports, differing, programs)


def _operands(traces: tuple[_Trace, _Trace], ops: _Pair) -> list[list[bytes]]:
    """Return the digests of the operands of each run's op."""
    pairs = zip(traces, ops, strict=True)
    return [[] if op is None else [*map(trace.digest, op.operands)] for trace, op in pairs]


def _reports(
    traces: tuple[_Trace, _Trace], ops: _Pair, twins: Sequence[Sequence[bytes]], *, correspond: bool
) -> tuple[OpReport | None, OpReport | None]:
    """Return the report of each run's op. `twins` are the digests of the other op's operands."""
    a, b = [
        None if op is None else trace.report(op, others, correspond=correspond)
        for trace, op, others in zip(traces, ops, twins, strict=True)
    ]
    return a, b


def _correspond(a: Executed, b: Executed, p: Sequence[bytes], q: Sequence[bytes]) -> bool:
    """Return whether two ops with these operands are the same op of two programs.

    They have the same kind and type. The positions and operands are equal, or at most one operand
    differs."""
    if a.name != b.name or a.types != b.types or a.operand_types != b.operand_types:
        return False
    if (a.position, a.operands) == (b.position, b.operands):
        return True
    return sum(x == y for x, y in zip(p, q, strict=True)) >= max(1, len(p) - 1)


def _first_in_programs(a: _Trace, b: _Trace) -> _Pair:
    """Return the first op of each execution that differs in the other execution."""
    for p, q in zip(a.ops, b.ops, strict=False):
        alike = (p.name, p.attributes, p.types) == (q.name, q.attributes, q.types)
        refs = [[x.kind if x.kind == "scratch" else x for x in op.operands] for op in (p, q)]
        if not alike or refs[0] != refs[1]:
            return p, q
        if any(a.digest(ref) != b.digest(ref) for ref in p.operands if ref.is_outside):
            return p, q
    n = min(len(a.ops), len(b.ops))
    return next(iter(a.ops[n:]), None), next(iter(b.ops[n:]), None)


def _culprit(left: Replay, right: Replay, number: int) -> str:
    """Return a text that names the recordings that replays do not reproduce."""
    wrong = {name: each for name, each in (("A", left), ("B", right)) if each.replay(number)}
    if not wrong:
        return ""
    causes = {cause_of_other_bits(each.run.versions) for each in wrong.values()}
    return f"; this machine does not reproduce the bits of {' and '.join(wrong)}{''.join(causes)}"


def _lockstep(a: _Trace, b: _Trace) -> _Pair:
    """Execute one program on the operands of both runs; return the first op that differs."""
    while True:
        p, q = a.advance(), b.advance()
        if p is None or q is None or p.place != q.place:  # a branch took a different path
            return p, q
        if [a.digests[ref] for ref in p.results] != [b.digests[ref] for ref in q.results]:
            return p, q


def _sources(a: _Trace, b: _Trace) -> tuple[_Pair, bool]:
    """Return the ops that cause the difference of two programs, and whether no earlier op differs.

    The other run also computes the operands of such an op, but not the result, and a differing
    result depends on it.
    """
    for trace in (a, b):
        while trace.advance() is not None:
            pass
    alike = [[(op.name, _from_ops(op), op.types) for op in trace.ops] for trace in (a, b)]
    if alike[0] == alike[1]:  # differences only in constants, inputs, states or attributes
        computed = {*a.digests.values()}, {*b.digests.values()}
        for p, q in zip(a.ops, b.ops, strict=True):
            mine, theirs = [{t.digests[ref] for ref in op.results} for t, op in ((a, p), (b, q))]
            is_exchanged = mine <= computed[1] and theirs <= computed[0]  # with another op
            if mine != theirs and not is_exchanged:
                return (p, q), True
    (first, is_first), (other, is_other_first) = _source(a, b), _source(b, a)
    twin, other_twin = _twin(other, b, a), _twin(first, a, b)
    if twin is not None and (first is None or twin.position < first.position):
        first = twin  # a different op of the other run computes its value by coincidence
    elif other_twin is not None and (other is None or other_twin.position < other.position):
        other = other_twin
    return (first, other), is_first and is_other_first


def _twin(op: Executed | None, trace: _Trace, other: _Trace) -> Executed | None:
    """Return the other run's op of the same kind, line and iteration, if its result differs."""

    def key(x: Executed) -> object:
        return x.name, x.types, x.line and x.line.text, [level.turn for level in x.path]

    if op is None:
        return None
    mine, theirs = [[x for x in t.ops if key(x) == key(op)] for t in (trace, other)]
    twin = next((y for x, y in zip(mine, theirs, strict=False) if x is op), None)
    expected = [trace.digests[ref] for ref in op.results]
    is_equal = twin is None or [other.digests[ref] for ref in twin.results] == expected
    return None if is_equal else twin


def _from_ops(op: Executed) -> list[Ref | None]:
    """Return the operands that are results; None for each other operand."""
    return [ref if ref.kind == "result" else None for ref in op.operands]


def _source(trace: _Trace, other: _Trace) -> tuple[Executed | None, bool]:
    outside = {ref for op in other.ops for ref in op.operands if ref.is_outside}
    computed = {*other.digests.values(), *map(other.digest, outside)}
    expected = {digest(array) for array in other.execution.results()}
    results = [trace.execution.at(each) for each in trace.execution.program.step.results]
    pending = [ref for ref, array in results if digest(array) not in expected]
    earliest: Executed | None = None
    visited: set[Ref] = set()
    while pending:
        ref = pending.pop()
        if ref in visited or ref.kind != "result" or trace.digest(ref) in computed:
            continue
        visited.add(ref)
        op = trace.ops[ref.number]
        unknown = [
            each
            for each in op.operands
            if each.kind == "result" and trace.digest(each) not in computed
        ]
        pending += unknown
        if not unknown and (earliest is None or op.position < earliest.position):
            earliest = op
    before = [] if earliest is None else trace.ops[: earliest.position]
    is_first = all(trace.digest(ref) in computed for op in before for ref in op.results)
    return earliest, is_first


# --- text ---------------------------------------------------------------------------------


def _lines(difference: Difference) -> Iterator[str]:
    yield difference.text
    yield from difference.optimizers
    yield from _ops(difference.ops, is_brief=False)
    if difference.elements is not None:
        of = f"{difference.names[0]}: " if len(difference.names) > 1 else ""
        yield f"  {of}{difference.elements}"
    if difference.programs != (None, None):
        yield "  the first op in which the programs differ:"
    yield from _ops(difference.programs, is_brief=True)


def _ops(reports: tuple[OpReport | None, OpReport | None], *, is_brief: bool) -> Iterator[str]:
    """Yield the op of each run with its operands; only the differing ones if `is_brief`."""
    for name, other, report in zip("AB", "BA", reports, strict=True):
        if report is None:
            continue
        yield f"  {name}: {report.call}{_attributes(report.op.attributes)}"
        for i, operand in enumerate(report.operands):
            equal = {True: ", equal in both", False: ", differs", None: ""}[operand.is_equal]
            if operand.twin is not None:
                equal = f", equal to operand {operand.twin} of {other}"
            if not is_brief or operand.is_equal is False:
                yield f"       operand {i}: {operand.type}, {operand.origin}{equal}"
        if report.line is not None:
            yield f"       {report.line}: {report.text}"
        if turns := report.op.turns:
            yield f"       in {turns}"


def _attributes(attributes: Mapping[str, Any]) -> str:
    texts = ", ".join(f"{name}={value}" for name, value in attributes.items())
    return f" {{{texts}}}" if texts else ""
