"""Recorded steps of calls that differ only in numbers: lengths of operands, and arguments.

In: a call whose steps were just recorded, and which of its numbers differ from an earlier call.
Out: an open template, with which C runs such calls for other numbers (`language/families.c`): the
types of results and the integers of kernels are formulas of the numbers. The call is traced with
placeholders for the numbers; each value that the trace or a planner needs becomes a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mlvm.core.lengths import Length
from mlvm.core.machine.callee import OpInto
from mlvm.core.types import TensorType
from mlvm.eager.recording.recorder import recording_of
from mlvm.eager.tensor.apply import OneOp, apply
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.number import Numbers
from mlvm.eager.tensor.tensor import Tensor
from mlvm.machines.native.extension import EXTENSION
from mlvm.step.templates import at, frozen


def open_template_of(
    function: Callable[..., Any] | OneOp,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any] | None,
    inputs: Sequence[int],
) -> Any:
    """Return the open template of a call, or None if it has none.

    inputs: for each number of the call's key, in order, the index of its input, or -1 if it is
    constant.
    """
    assert EXTENSION is not None
    if isinstance(function, OneOp):
        function = partial(apply, function)
    vm = current_arena().vm
    values: dict[int, float] = {}
    for number, value in zip(inputs, _numbers((args, keywords), []), strict=True):
        if number >= 0:
            values[number] = value
    floats: list[int] = [i for i in sorted(values) if type(values[i]) is float]
    lengths: list[Any] = [i for i in sorted(values) if i not in floats]
    numbers = Numbers([values[i] for i in floats], vm, [int(values[i]) for i in lengths])
    with numbers.recording() as recorded:
        placeholders = dict(zip((*floats, *lengths), recorded, strict=True))
        del recorded
        tensors: list[Tensor] = []
        order = iter(inputs)
        types: dict[int, TensorType] = {}
        opened = _replaced((args, keywords), tensors, types, order, placeholders)
        del placeholders
        with recording_of(vm, tensors, types) as record:
            stand_ins = {id(x): record.placeholder(x) for x in tensors}
            own, named = _with_tensors(opened, stand_ins)
            operands = tuple([stand_ins[id(x)] for x in tensors])
            traced = EXTENSION.traced_steps(function, own, named, operands)
            if traced is None:
                return None
            steps, constants = traced
            places = {id(x): place for (place, _), x in numbers.tensors.items()}
            scalars = [places.get(id(x), -1) for x in constants]
            if not places.keys() <= {id(x) for x in constants}:
                return None
            rows = [
                (
                    frozen(out.type),
                    None if out.base is not None else call.op.name,
                    frozen(call.attributes),
                    [frozen(x.type) for x in xs],
                )
                for call, xs, out in steps
            ]
            del steps, own, named, opened
    if not numbers.guarded.keys().isdisjoint(range(numbers.inputs)):
        return None  # the function needs the value itself
    return _planned(numbers, vm, rows, scalars, [*floats, *lengths])


def _planned(
    numbers: Numbers,
    vm: Any,
    rows: Sequence[tuple[Any, ...]],
    scalars: Sequence[int],
    order: Sequence[int],
) -> Any:
    """Plan the kernels of steps with integers as formulas; None if a step has no kernel."""
    assert EXTENSION is not None
    formulas = EXTENSION.Formulas()
    fork = numbers.fork_with_steps(formulas, order)
    guards = {place: numbers.values[place] for place in numbers.guarded}
    steps = []
    with fork.planning_kernels() as placeholders:
        for open_type, name, attributes, operands in rows:
            type = at(open_type, placeholders)
            call = None
            if name is not None:
                callee = vm.functions.binding(f"{name}.out").callee
                plan = getattr(getattr(callee, "kernel", None), "plan", None)
                if plan is None or not isinstance(callee, OpInto):
                    return None
                types = [type, *[at(x, placeholders) for x in operands]]
                call = plan(types, callee.bind(at(attributes, placeholders)))
                if call is None:
                    return None
                call = getattr(call, "call", call)
            lengths = [
                n.formula() if isinstance(n, Length) else formulas.constant(n) for n in type.shape
            ]
            steps.append((call, type.dtype, tuple(lengths)))
        held = [(fork.formula(place), value) for place, value in guards.items()]
        held += fork.guards()
        values = [place if place < 0 else fork.formula(place) for place in scalars]
    flat = tuple([x for pair in held for x in pair])
    return EXTENSION.open_template(formulas, flat, steps, values)


def _numbers(part: Any, seen: list[Tensor]) -> Iterator[float]:
    """Yield the numbers of a call's key, in the order of `numbers_of` in families.c."""
    kind = type(part)
    if kind is Tensor:
        if not any(x is part for x in seen):
            seen.append(part)
            yield from part.type.shape
    elif kind is int or kind is float:
        yield part
    elif kind is tuple or kind is list:
        for each in part:
            yield from _numbers(each, seen)
    elif kind is slice:
        yield from _numbers((part.start, part.stop, part.step), seen)
    elif isinstance(part, Mapping):
        yield from _numbers(tuple(part.values()), seen)


def _replaced(
    part: Any,
    tensors: list[Tensor],
    types: dict[int, TensorType],
    order: Iterator[int],
    placeholders: Mapping[int, Any],
) -> Any:
    """Return a part of the arguments with placeholders for its open numbers.

    Append its tensors to `tensors`, and the types of tensors with open lengths to `types`."""
    kind = type(part)

    def opened(n: float) -> Any:
        number = next(order)
        return n if number < 0 else placeholders[number]

    if kind is Tensor:
        if not any(x is part for x in tensors):
            tensors.append(part)
            shape = [opened(n) for n in part.type.shape]
            if any(isinstance(n, Length) for n in shape):
                types[id(part)] = TensorType(part.type.dtype, shape)
        return part
    if kind is int or kind is float:
        return opened(part)
    if kind is tuple or kind is list:
        return kind([_replaced(x, tensors, types, order, placeholders) for x in part])
    if kind is slice:
        bounds = (part.start, part.stop, part.step)
        return slice(*[_replaced(x, tensors, types, order, placeholders) for x in bounds])
    if isinstance(part, Mapping):
        items = part.items()
        return {k: _replaced(x, tensors, types, order, placeholders) for k, x in items}
    return part


def _with_tensors(part: Any, stand_ins: Mapping[int, Tensor]) -> Any:
    kind = type(part)
    if kind is Tensor:
        return stand_ins[id(part)]
    if kind is tuple or kind is list:
        return kind([_with_tensors(x, stand_ins) for x in part])
    if isinstance(part, Mapping):
        return {k: _with_tensors(x, stand_ins) for k, x in part.items()}
    return part
