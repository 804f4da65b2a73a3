"""Saved steps as `mlvm build` takes them, those with lengths too.

In: a `SavedStep`. Out: a `Planned` of `mlvm.build`; with lengths, an `OpenSource`, which
makes the step at any lengths, and with formulas of lengths in the place of sizes and attributes.
Callers: `mlvm.__main__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlvm.build.lengths import Formulas, OpenPlanned, OpenSource, StepLength
from mlvm.build.planned import Planned, Stay, Tensor
from mlvm.build.targets import CannotBuild
from mlvm.core.errors import ShapeError
from mlvm.eager.tensor.number import Numbers, plain
from mlvm.step.open_step import FUNCTIONS, OpenStep
from mlvm.step.saved import SavedStep


def planned_of(step: SavedStep) -> Planned:
    """Return the step as a build takes it."""
    planned, plan = step.planned, step.planned.plan
    return Planned(
        planned.program,
        [Tensor(*each) for each in planned.arguments],
        [Tensor(*each) for each in step.results],
        step.inputs,
        step.outputs,
        step.states,
        plan.nbytes,
        planned.lines,
        [Stay(x.offset, x.nbytes, x.start, x.end) for x in planned.lifetimes],
        {pc: moment for moment, pc in enumerate(planned.moments)},
    )


def lengths_of(step: SavedStep) -> OpenSource | None:
    """Return the lengths of a step as a build takes them; None if it has none."""
    opened = step.open
    if opened is None:
        return None
    names = [each.name for each in opened.lengths]
    axes: dict[tuple[int, int], int] = {}
    for k, each in enumerate(opened.lengths):
        for place in each.axes:
            if axes.setdefault(place, k) != k:
                raise CannotBuild(
                    f"lengths: {names[axes[place]]!r} and {each.name!r} are of one axis of one "
                    f"tensor; give them one name"
                )

    def values_of(sizes: Sequence[int]) -> list[Any]:
        return opened.values_of(dict(zip(names, sizes, strict=True)))

    def is_valid(sizes: Sequence[int]) -> bool:
        try:
            values = values_of(sizes)
        except ShapeError:
            return False
        return opened.template.fits(values)

    return OpenSource(
        [StepLength(x.name, x.at_most, opened.values[x.place]) for x in opened.lengths],
        axes,
        opened.input_types(),
        is_valid,
        lambda sizes: planned_of(step.at_values(values_of(sizes))),
        lambda sizes, formulas: _recorded(step, opened, values_of(sizes), formulas),
    )


@contextmanager
def _recorded(
    step: SavedStep, opened: OpenStep, values: Sequence[Any], formulas: Formulas
) -> Iterator[OpenPlanned]:
    """Record the step at the lengths of these values as formulas, inside the block."""
    sizes = [values[each.place] for each in opened.lengths]
    numbers, _ = Numbers((), None, sizes).fork_for(formulas)
    with numbers.planning_kernels() as placeholders:
        symbols = [*values]
        for each, placeholder in zip(opened.lengths, placeholders, strict=True):
            symbols[each.place] = placeholder
        for place, name, operands in opened.steps:
            symbols[place] = FUNCTIONS[name](*[symbols[each] for each in operands])
        for place, _ in opened.guards:
            plain(symbols[place])  # a number that is seen is guarded
        now = step.at_values(symbols)
        code = now.planned.program.main.code

        def attributes(pc: int) -> Mapping[str, Any]:
            return next((x for x in code[pc].immediates[2:] if isinstance(x, Mapping)), {})

        yield OpenPlanned(
            [each.type for each in now.planned.arguments],
            now.inputs,
            now.outputs,
            [each.type for each in now.results],
            attributes,
            [each.nbytes for each in now.planned.lifetimes],
            [(number, symbols[place]) for number, place in opened.scalars],
            lambda: [(numbers.formula(n), numbers.values[n]) for n in numbers.guarded],
        )
