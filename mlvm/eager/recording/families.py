"""Recorded steps of calls that differ only in numbers: lengths of operands, and arguments.

In: a call with steps that were just recorded, and the numbers that differ from an earlier call.
Out: an open template, with which C runs such calls for other numbers (`language/families.c`): the
types of results and the integers of kernels are formulas of the numbers. The call is traced with
placeholders for the numbers; each value that the trace or a planner needs becomes a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from mlvm.arena.context import context, current
from mlvm.core.dynamic_sizes import Length
from mlvm.core.machine.callee import Fused, OpInto
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.fused import parse
from mlvm.core.op import Op
from mlvm.core.types import TensorType
from mlvm.eager.recording.recorder import recording_of
from mlvm.eager.tensor.apply import OneOp, apply, one_op
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.number import Numbers
from mlvm.eager.tensor.tensor import Tensor
from mlvm.machines.native.extension import EXTENSION
from mlvm.step.templates import OpenType, Place, at, frozen, mapped, places


def open_template_of(
    function: Callable[..., Any] | Op,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any] | None,
    inputs: Sequence[int],
) -> Any:
    """Return the open template of a call, or None if it has none.

    inputs: for each number of the call's key, in order, the index of the input, or -1 for a
    constant.
    """
    assert EXTENSION is not None
    if isinstance(function, Op):
        function = partial(_applied, function.name)
    vm, tape = current_arena().vm, current().tape
    tensors: dict[int, Tensor] = {}
    key: list[float] = []  # the numbers of the key, in the order of `numbers_of` in families.c

    def note(x: Any) -> Any:
        if type(x) is not Tensor:
            key.append(x)
        elif id(x) not in tensors:
            tensors[id(x)] = x
            key.extend(x.type.shape)
        return x

    call = _changed(note, (args, keywords or {}))
    values = {number: x for number, x in zip(inputs, key, strict=True) if number >= 0}
    floats: list[int] = [i for i in sorted(values) if type(values[i]) is float]
    lengths: list[Any] = [i for i in sorted(values) if i not in floats]
    numbers = Numbers([values[i] for i in floats], vm, [int(values[i]) for i in lengths])
    with numbers.recording() as recorded:
        placeholders = dict(zip((*floats, *lengths), recorded, strict=True))
        del recorded
        order, unvisited = iter(inputs), {*tensors}
        types: dict[int, TensorType] = {}
        shared: dict[Any, TensorType] = {}  # operands of the same type also share an open type

        def opened(x: Any) -> Any:
            if type(x) is not Tensor:
                return placeholders.get(next(order), x)
            if id(x) in unvisited:
                unvisited.remove(id(x))
                shape: list[Any] = [placeholders.get(next(order), n) for n in x.type.shape]
                if any(isinstance(n, Length) for n in shape):
                    meaning = (x.type, *map(id, shape))
                    types[id(x)] = shared.setdefault(meaning, TensorType(x.type.dtype, shape))
            return x

        call = _changed(opened, call)
        placeholders.clear()
        with context(tape=None), recording_of(vm, [*tensors.values()], types) as record:
            stand_ins = {key: record.placeholder(x) for key, x in tensors.items()}
            own, named = _changed(lambda x: stand_ins.get(id(x), x), call)
            traced = EXTENSION.traced_steps(function, own, named, tuple(stand_ins.values()))
            if traced is None:
                return None
            steps, constants = traced
            places = {id(x): place for (place, _), x in numbers.tensors.items()}
            scalars = [places.get(id(x), -1) for x in constants]
            if not places.keys() <= {id(x) for x in constants}:
                return None
            tracked = {
                id(stand_ins[key])
                for key, x in tensors.items()
                if tape is not None and x.tape is tape
            }
            rows = [
                (
                    frozen(out.type),
                    None if out.base is not None else f"{call.op.name}.out",
                    frozen(call.attributes),
                    [frozen(x.type) for x in xs],
                    _node_of(tape, tracked, call, xs, out),
                )
                for call, xs, out in steps
            ]
            del steps, own, named
    if not numbers.guarded.keys().isdisjoint(range(numbers.inputs)):
        return None  # the function needs the value itself
    return _planned(numbers, vm, rows, scalars, [*floats, *lengths])


def _applied(name: str, *operands: Tensor, **attributes: Any) -> Tensor:
    return apply(one_op(name, **attributes), *operands)


def _node_of(tape: Any, tracked: set[int], call: OneOp, xs: Sequence[Tensor], out: Tensor) -> Any:
    """Return the frozen node template of a step; None without an operand among the tracked ones.

    A result with a node is added to the ids of tracked tensors."""
    mask = tuple([id(x) in tracked for x in xs])
    if True not in mask:
        return None
    template = tape.template(call, tuple([x.type for x in xs]), out.type, mask)
    if template.tracked:
        tracked.add(id(out))
    vjps = tuple([(*vjp[:3], False) for vjp in template.vjps])  # calls get rules of their own
    return template.tracked, frozen(vjps), template.saves


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
        for open_type, name, attributes, operands, node in rows:
            type = at(open_type, placeholders)
            call = None
            if name is not None:
                call = open_call(
                    vm.functions, name, [open_type, *operands], attributes, placeholders
                )
                if call is None:
                    return None
            lengths = [
                n.formula() if isinstance(n, Length) else formulas.constant(n) for n in type.shape
            ]
            numbers_at = None
            if places(node):
                parts: list[Any] = [*operands]
                node = _maker(node, parts)
                numbers_at = tuple([fork.formula(each.number) for each in parts[len(operands) :]])
            steps.append((call, type.dtype, tuple(lengths), node, numbers_at))
        conditions = [(fork.formula(place), value) for place, value in guards.items()]
        conditions += fork.guards()
        values = [place if place < 0 else fork.formula(place) for place in scalars]
    flat = tuple([x for pair in conditions for x in pair])
    return EXTENSION.open_template(formulas, flat, steps, values)


def _maker(part: Any, order: list[Any]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that returns a frozen part for the values of the types and places in order.

    Places that are not in the order are added to it."""
    kind = type(part)
    if kind is Place and part not in order:
        order.append(part)
    if (kind is Place or kind is OpenType) and part in order:
        return itemgetter(order.index(part))
    if not places(part):
        return lambda _: part
    if kind is OpenType:
        shape = _maker(part.shape, order)
        return lambda values: TensorType(part.dtype, shape(values))
    if kind is partial:
        args, named = _maker(part.args, order), _maker(part.keywords, order)
        return lambda values: partial(part.func, *args(values), **named(values))
    if isinstance(part, Mapping):
        entries = {name: _maker(each, order) for name, each in part.items()}
        return lambda values: {name: entry(values) for name, entry in entries.items()}
    items = [_maker(each, order) for each in part]
    return lambda values: tuple([item(values) for item in items])


def open_call(
    functions: FunctionTable,
    name: str,
    types: Sequence[Any],
    attributes: Any,
    placeholders: Sequence[Any],
) -> Any:
    """Plan the native kernel of a function for frozen types and attributes.

    The integers of the kernel are formulas of the placeholders. Return None if the function has no
    such kernel.
    """
    callee = functions.binding(name).callee
    plan = getattr(getattr(callee, "kernel", None), "plan", None)
    if plan is None or not isinstance(callee, (Fused, OpInto)):
        return None
    bound = at(attributes, placeholders)
    if isinstance(callee, Fused):
        bound = {"chain": parse(bound, callee.kernels)}
    else:
        bound = callee.bind(bound)
    call = plan([at(type, placeholders) for type in types], bound)
    return getattr(call, "call", call)


def _changed(change: Callable[[Any], Any], part: Any) -> Any:
    """Return a part of the arguments with changed tensors and numbers, in order."""
    kind = type(part)
    if kind is Tensor or kind is int or kind is float:
        return change(part)
    each = partial(_changed, change)
    if kind is slice:
        return slice(*map(each, (part.start, part.stop, part.step)))
    return mapped(each, part)
