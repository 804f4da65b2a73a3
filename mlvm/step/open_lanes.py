"""Functions of lanes with types that depend on dynamic sizes, and the encoding in files.

In: a function as for `lanes_of`, recorded with placeholders of sizes. Out: `OpenLanes`, an
    attribute of `lanes.run`, from which a launch's sizes make a program for rows. In a file each
    home, value and block has a number, and a block lists the numbers of the inner blocks.
Callers: `ml.auto_batch` in a trace with dynamic sizes; `OpenStep`, which reads untrusted files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from mlvm.core.dynamic_sizes import Length
from mlvm.core.errors import MlvmError
from mlvm.core.machine.callee import OUT
from mlvm.core.op import OPS
from mlvm.core.program.encoding import damaged
from mlvm.core.types import TensorType
from mlvm.step.flow import Block, Call, Home, Procedure, Use, Value
from mlvm.step.lane_function import POLICIES, LaneFunction
from mlvm.step.lane_programs import lanes_of
from mlvm.step.templates import AtValues, Freeze, OpenPart, OpenType, Substitution, places

T = TypeVar("T")


class OpenLanes(OpenPart):
    """Program of a function with types or attributes that depend on dynamic sizes.

    function: the function with places
    """

    NFIELDS: Final = 8

    def __init__(self, function: LaneFunction, places: set[int], *, is_read: bool = False) -> None:
        self.function, self.places, self._is_read = function, places, is_read

    @staticmethod
    def of(function: LaneFunction) -> OpenLanes | None:
        """Return the function with places; None if it does not depend on a size."""
        freeze = Freeze()
        frozen = function.changed(freeze)
        return OpenLanes(frozen, freeze.places) if freeze.places else None

    def at(self, values: Sequence[Any]) -> Any:
        if any(isinstance(values[place], Length) for place in self.places):
            return self
        try:
            function = self.function.changed(AtValues(values))
            return lanes_of(function, family=self, is_read=self._is_read)
        except MlvmError:
            raise
        except Exception as error:
            if not self._is_read:
                raise
            raise damaged(f"invalid function of lanes in the file: {error!r}") from None

    def fields(self, closed: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return the function as values for a file; `read` is the inverse.

        `closed` converts types and attributes.
        """
        return self.function.fields(closed)

    @staticmethod
    def read(fields: Any, opened: Callable[[Any], Any]) -> OpenLanes:
        """Return the function from the values of `fields`. Raises `ValueError` for other values."""
        numbers: set[int] = set()

        def noted(part: Any) -> Any:
            numbers.update(places(part))
            return part

        try:
            function = _function_of(fields, opened).changed(Substitution(noted))
            return OpenLanes(function, numbers, is_read=True)
        except (AttributeError, LookupError, MlvmError, RecursionError, TypeError) as error:
            raise ValueError(f"expected a function of lanes: {error!r}") from None


def _function_of(fields: Any, opened: Callable[[Any], Any]) -> LaneFunction:
    """Build the function from the values of `_Fields`."""
    homes, values, blocks, procedures, results, shared, sums, policy = fields
    all_homes = [Home(role, index, _type(opened(type))) for role, index, type in homes]
    all_values = [
        Value(_size(opened(nbytes)), None if home == -1 else _at(all_homes, home))
        for nbytes, home in values
    ]
    all_blocks = [Block() for _ in blocks]
    all_procedures = [Procedure(str(name), Block()) for name, _, _ in procedures]
    # blocks without a parent: no block contains itself, or is in two blocks
    free = {*range(len(blocks))}

    def use_of(use: Any) -> Use:
        value, type = use
        return Use(_at(all_values, value), _type(opened(type)))

    def block_of(number: Any, after: int) -> Block:
        if number <= after:
            raise ValueError(f"block {number} contains itself; remove the cycle")
        free.remove(number)
        return _at(all_blocks, number)

    def call_of(call: Any, number: int) -> Call:
        name, has_op, attributes, outs, ins, inside, callee, passed = call
        return Call(
            str(name),
            OPS[name.removesuffix(OUT)] if has_op else None,
            opened(attributes),
            [use_of(each) for each in outs],
            [use_of(each) for each in ins],
            blocks=tuple([block_of(each, number) for each in inside]),
            orderly=True,
            callee=None if callee == -1 else _at(all_procedures, callee),
            passed=[use_of(each) for each in passed],
        )

    for procedure, (_, params, block) in zip(all_procedures, procedures, strict=True):
        procedure.params = [_at(all_homes, each) for each in params]
        procedure.block = block_of(block, -1)
    for number, (block, (block_homes, calls, result)) in enumerate(
        zip(all_blocks, blocks, strict=True)
    ):
        block.homes = {_at(all_homes, each) for each in block_homes}
        block.calls = [call_of(each, number) for each in calls]
        block.result = None if result is None else use_of(result)
    return LaneFunction(
        all_procedures[0],
        all_procedures[1:],
        [use_of(each) for each in results],
        [use_of(each) for each in shared],
        {_at(all_homes, home): int(i) for home, i in sums},
        _at(POLICIES, policy),
    )


def _at(rows: Sequence[T], number: Any) -> T:
    if type(number) is not int or not 0 <= number < len(rows):
        raise ValueError(f"expected an index below {len(rows)}, got {number}")
    return rows[number]


def _type(type_: Any) -> Any:
    if type(type_) not in (TensorType, OpenType):
        raise TypeError(f"expected a type, got {type_!r}")
    return type_


def _size(nbytes: Any) -> Any:
    return nbytes if type(nbytes) is int else _type(nbytes)
