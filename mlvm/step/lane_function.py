"""Recorded functions for lanes, and their parts as numbers: for a file, and for a key.

In: the calls of `ml.auto_batch`. Out: the function as nested tuples, in which each home, value and
    block has a number in the order of first use, and a block lists the numbers of the inner blocks.
Callers: `lane_programs`, which generates equal functions once; `open_lanes`, for files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mlvm.step.flow import Block, Call, Home, Procedure, Use
from mlvm.step.fusion import NATIVE, REFERENCE, FusionPolicy
from mlvm.step.templates import Substitution

POLICIES: Final = [REFERENCE, NATIVE]
"""Policies by number."""


class LaneFunction(NamedTuple):
    """Recorded function for lanes.

    `main`: the function; the parameters are the program's arguments, and it returns `results`.
    `procedures`: the functions that it calls.
    `shared`: the values that it reads from outside, in order.
    `sums`: homes outside to which frames add.
    """

    main: Procedure
    procedures: Sequence[Procedure]
    results: Sequence[Use]
    shared: Sequence[Use]
    sums: Mapping[Home, int]
    policy: FusionPolicy

    def changed(self, by: Substitution) -> LaneFunction:
        """Return the copy of the function with the substitution applied."""
        return self._replace(
            main=by.procedure(self.main),
            procedures=list(map(by.procedure, self.procedures)),
            results=by.uses(self.results),
            shared=by.uses(self.shared),
            sums={by.home(home): i for home, i in self.sums.items()},
        )

    def fields(self, closed: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return the function as values; `closed` converts types, sizes and attributes."""
        return _Fields(self, closed).all()


class _Fields:
    """Numbers of the parts of a function, and the fields in order."""

    def __init__(self, function: LaneFunction, closed: Callable[[Any], Any]) -> None:
        self._function, self._closed = function, closed
        self._procedures = [function.main, *function.procedures]
        self._numbers: dict[int, int] = {}  # by id
        self._homes: list[Any] = []
        self._values: list[Any] = []
        self._blocks: list[Any] = []

    def all(self) -> tuple[Any, ...]:
        function = self._function
        procedures = [
            (each.name, tuple(map(self._home, each.params)), self._block(each.block))
            for each in self._procedures
        ]
        results, shared = self._uses(function.results), self._uses(function.shared)
        sums = tuple([(self._home(home), i) for home, i in function.sums.items()])
        policy = POLICIES.index(function.policy)
        rows = map(tuple, (self._homes, self._values, self._blocks))
        return (*rows, tuple(procedures), results, shared, sums, policy)

    def _number(self, part: object, rows: list[Any], fields: Callable[[], Any]) -> int:
        number = self._numbers.get(id(part))
        if number is None:
            number = self._numbers[id(part)] = len(rows)
            rows.append(None)
            rows[number] = fields()
        return number

    def _home(self, home: Home) -> int:
        fields = home.role, home.index, self._closed(home.type)
        return self._number(home, self._homes, lambda: fields)

    def _use(self, use: Use) -> tuple[int, Any]:
        value = use.value
        home = -1 if value.home is None else self._home(value.home)
        fields = self._closed(value.nbytes), home
        return self._number(value, self._values, lambda: fields), self._closed(use.type)

    def _uses(self, uses: Sequence[Use]) -> tuple[Any, ...]:
        return tuple(map(self._use, uses))

    def _block(self, block: Block) -> int:
        def fields() -> Any:
            calls = tuple(map(self._call, block.calls))  # first: homes are in a set
            homes = tuple(sorted(map(self._home, block.homes)))
            result = None if block.result is None else self._use(block.result)
            return homes, calls, result

        return self._number(block, self._blocks, fields)

    def _call(self, call: Call) -> Any:
        procedure = -1 if call.callee is None else self._procedures.index(call.callee)
        return (
            call.name,
            call.op is not None,
            self._closed(call.attributes),
            self._uses(call.outs),
            self._uses(call.ins),
            tuple(map(self._block, call.blocks)),
            procedure,
            self._uses(call.passed),
        )
