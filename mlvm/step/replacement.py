"""Replacement of subgraphs that match a pattern by calls of a host function.

A pattern is a small flow of ops on parameters. It matches calls of a block of the step with the
same ops, attributes, types and flow. The inner values have no other use. One call, at the position
of the last, replaces the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from mlvm.core.errors import CaptureError
from mlvm.core.locks import cached_property
from mlvm.core.memo import exact_repr
from mlvm.core.op import NO_ATTRIBUTES
from mlvm.core.types import TensorType
from mlvm.step.blocks import with_blocks, without_dead_calls
from mlvm.step.flow import Block, Call, Flow, Home, Use, Value

Types: TypeAlias = tuple[TensorType, ...]


class Match(NamedTuple):
    """Calls that match a pattern: uses by the pattern's values, and positions of the calls."""

    uses: dict[Value, Use]
    positions: list[int]


@dataclass
class Pattern:
    """Recorded pattern.

    `params`: the operand types, which are the types of the inputs of the flow, in order.
    `calls`: the calls; the last computes a result.
    `results`: the results, in order.
    `constants`: tensors from outside of the flow, by value.
    """

    params: Types
    calls: list[Call]
    results: list[Use]
    constants: dict[Value, object]

    @classmethod
    def of(
        cls, flow: Flow, results: Sequence[Use], params: Types, states: Sequence[object]
    ) -> Pattern:
        """Return the pattern of a recorded flow, which reads `states`.

        Raises `CaptureError` for a flow with calls other than ops, or with updates, and for an
        operand that is unused or returned.
        """
        calls = without_dead_calls(flow)
        for call in calls:
            if call.op is None or call.again:
                raise CaptureError(f"expected a pattern of ops, got a call of {call.name}")
        outputs = {use.value for call in calls for use in call.outs}
        if any(value.home and value.home.role in ("input", "state") for value in outputs):
            raise CaptureError("a pattern must not update a tensor in place; return a new tensor")
        values = [use.value for use in results]
        if not values or not outputs.issuperset(values) or len({*values}) < len(values):
            raise CaptureError(
                "expected a pattern that returns distinct computed tensors, "
                "got an operand or a result twice"
            )
        read = {use.value for call in calls for use in call.ins} - outputs
        numbers = {value.home.index for value in read if value.home and value.home.role == "input"}
        unused = [number for number in range(len(params)) if number not in numbers]
        if unused:
            raise CaptureError(
                f"expected a pattern that uses all operands; operand {unused[0]} is unused"
            )
        constants = {
            value: states[value.home.index]
            for value in read
            if value.home is not None and value.home.role == "state"
        }
        return cls(params, calls, list(results), constants)

    @cached_property
    def makers(self) -> dict[Value, Call]:
        """Return the call that computes each value."""
        return {use.value: call for call in self.calls for use in call.outs}

    def operands(self, match: Match) -> list[Use]:
        """Return the operands of a match, in the order of the parameters."""
        inputs = {
            value.home.index: use
            for value, use in match.uses.items()
            if value.home is not None and value.home.role == "input"
        }
        return [inputs[number] for number in range(len(self.params))]


class Matcher:
    """Matcher for one block of a step; `states` are the tensors that the step reads."""

    def __init__(self, calls: list[Call], flow: Flow, states: Sequence[object]) -> None:
        self.calls = calls
        self._uses = _uses(flow)
        self._written = {use.value for call in with_blocks(flow.calls) for use in call.outs}
        self._states = states
        self._makers = {
            use.value: i for i, call in enumerate(calls) if call.op is not None for use in call.outs
        }

    def matches(self, pattern: Pattern, *, exact: bool) -> Iterator[Match]:
        """Yield the matches, by last call.

        Unless `exact`, attributes and types may differ: such a match proposes types of operands.
        """
        last = pattern.calls[-1]
        for i, call in enumerate(self.calls):
            if call.op is last.op and call.name == last.name:
                match = self._match(pattern, i, exact=exact)
                if match is not None and (not exact or self._may_replace(pattern, match)):
                    yield match

    def _match(self, pattern: Pattern, last: int, *, exact: bool) -> Match | None:
        """Return the match that ends with the call at that position."""
        match = self._unify(pattern, Match({}, []), pattern.calls[-1], last, exact=exact)
        for result in pattern.results:  # results that the last call does not depend on
            if match is not None and result.value not in match.uses:
                maker = pattern.makers[result.value]
                tries = (
                    self._unify(pattern, match, maker, i, exact=exact)
                    for i in range(len(self.calls))
                    if i not in match.positions
                )
                match = next((each for each in tries if each is not None), None)
        return match

    def _unify(
        self, pattern: Pattern, match: Match, target: Call, position: int, *, exact: bool
    ) -> Match | None:
        """Return the match extended by the target call and the calls that it depends on."""
        match = Match(dict(match.uses), list(match.positions))
        pending = [(target, position)]
        while pending:
            target, position = pending.pop()
            call = self.calls[position]
            if call.op is not target.op or call.name != target.name or call.again:
                return None
            if exact and exact_repr(_plain(call.attributes)) != exact_repr(
                _plain(target.attributes)
            ):
                return None
            if position in match.positions or len(call.ins) != len(target.ins):
                return None
            match.positions.append(position)
            pairs = [*zip(target.outs, call.outs, strict=True)]
            pairs += zip(target.ins, call.ins, strict=True)
            for i, (ours, theirs) in enumerate(pairs):
                if exact and ours.type != theirs.type:
                    return None
                bound = match.uses.get(ours.value)
                if bound is not None:
                    if bound.value is not theirs.value:
                        return None
                    continue
                if ours.value in pattern.makers and i >= len(target.outs):
                    maker = self._makers.get(theirs.value)
                    if maker is None:
                        return None
                    pending.append((pattern.makers[ours.value], maker))
                constant = pattern.constants.get(ours.value)
                if exact and constant is not None and self._state(theirs.value) is not constant:
                    return None
                match.uses[ours.value] = self._operand(pattern, ours, theirs)
        return match

    def _operand(self, pattern: Pattern, ours: Use, theirs: Use) -> Use:
        """Return the use in the step.

        If the pattern only views an operand with a different type, the use has the type of the
        write.
        """
        home, value = ours.value.home, theirs.value
        if home is None or home.role != "input" or ours.type == pattern.params[home.index]:
            return theirs
        maker = self._makers.get(value)
        if maker is not None:
            return self.calls[maker].outs[0]
        return Use(value, value.home.type) if value.home is not None else theirs

    def _state(self, value: Value) -> object:
        """Return the tensor that initially has this value, if any."""
        home = value.home
        if home is None or home.role != "state" or value in self._written:
            return None
        return self._states[home.index]

    def _may_replace(self, pattern: Pattern, match: Match) -> bool:
        """Return whether the calls can be replaced by one call at the position of the last.

        Inner values must have no other use, and no call between them may touch results or overwrite
        operands.
        """
        inside = [self.calls[i] for i in match.positions]
        results = {match.uses[use.value].value for use in pattern.results}
        outputs = {use.value for call in inside for use in call.outs}
        operands = {use.value for call in inside for use in call.ins} - outputs
        for value in outputs - results:
            own = sum(use.value is value for call in inside for use in call.ins)
            if value.home is not None or self._uses[value] != own:
                return False
        result_homes, read = _homes(results), _homes(operands)
        first, last = min(match.positions), max(match.positions)
        for i in range(first, last):
            if i not in match.positions:
                call = self.calls[i]
                ins = {use.value for use in call.ins}
                written = _homes(use.value for use in call.outs)
                if ins & results or written & (result_homes | read) or _homes(ins) & result_homes:
                    return False
        return True


class Replaced(NamedTuple):
    """Replacement: the name of the host function, and the line of the last call."""

    name: str
    line: str | None


def replaced(
    flow: Flow, patterns: Sequence[tuple[Any, str]], instances: Any, states: Sequence[object]
) -> tuple[Flow, list[list[Replaced]]]:
    """Return the flow with calls of host functions instead of the matches of `patterns`.

    Also return the replacements for each pattern. Earlier patterns have priority.
    `instances(pattern, types)` returns the `Pattern` for operands of these types, or None; for
    `types` of None it returns a list of patterns that propose types.
    """
    flow = Flow(without_dead_calls(flow), flow.results)
    places: list[list[Replaced]] = [[] for _ in patterns]
    for each, (pattern, name) in zip(places, patterns, strict=True):
        for calls in _blocks(flow):
            each += _replace_in(Matcher(calls, flow, states), pattern, name, instances)
    return flow, places


def _replace_in(matcher: Matcher, pattern: Any, name: str, instances: Any) -> Iterator[Replaced]:
    """Replace the pattern in one block, and yield the replacements."""
    calls = matcher.calls
    proposals: dict[Types, None] = {}
    for probe in instances(pattern, None):
        for match in matcher.matches(probe, exact=False):
            proposals[tuple([use.type for use in probe.operands(match)])] = None
    positions: set[int] = set()
    calls_at: dict[int, Call] = {}
    for types in proposals:
        instance = instances(pattern, types)
        for match in () if instance is None else matcher.matches(instance, exact=True):
            operands = instance.operands(match)
            if positions.isdisjoint(match.positions):
                positions.update(match.positions)
                last = max(match.positions)
                outs = [match.uses[use.value] for use in instance.results]
                ins = [
                    Use(use.value, type)
                    for use, type in zip(operands, instance.params, strict=True)
                ]
                calls_at[last] = Call(
                    name,
                    None,
                    NO_ATTRIBUTES,
                    outs,
                    ins,
                    calls[last].line,
                    orderly=True,
                    may_raise=True,
                    pushes=True,
                )
    for i in sorted(calls_at):
        yield Replaced(name, calls_at[i].line)
    calls[:] = [
        calls_at.get(i, call) for i, call in enumerate(calls) if i in calls_at or i not in positions
    ]


def _blocks(flow: Flow) -> Iterator[list[Call]]:
    """Yield the calls of the step and of each block inside."""
    visited: set[int] = set()

    def inside(calls: list[Call]) -> Iterator[list[Call]]:
        yield calls
        for call in calls:
            for block in call.blocks:
                if id(block) not in visited:
                    visited.add(id(block))
                    yield from inside(block.calls)

    yield from inside(flow.calls)


def _uses(flow: Flow) -> Counter[Value]:
    """Return the number of reads of each value, in all blocks, including returns."""
    blocks: list[Block] = [block for call in with_blocks(flow.calls) for block in call.blocks]
    read = [use.value for call in with_blocks(flow.calls) for use in call.ins]
    read += [block.result.value for block in blocks if block.result is not None]
    return Counter([*read, *flow.results])


def _homes(values: Iterable[Value]) -> set[Home]:
    return {value.home for value in values if value.home is not None}


def _plain(attributes: Any) -> list[tuple[str, Any]]:
    return sorted(attributes.items())
