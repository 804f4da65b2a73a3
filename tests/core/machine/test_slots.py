"""Stacks that share what they have in common, beside tuples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.machine.slots import Finder, Slots, Stack, merged

CHANGES = st.lists(st.tuples(st.sampled_from("epsk"), st.integers(0, 1100)), max_size=30)


@given(CHANGES)
def test_a_stack_is_a_list(changes: list[tuple[str, int]]) -> None:
    """Extended, popped, written to, and kept."""
    stack: Stack[int] = Stack(Slots())
    model: list[int] = []
    snapshots: list[tuple[Slots[int], list[int]]] = []
    for change, n in changes:
        if change == "e":
            stack.extend(range(n))
            model.extend(range(n))
        elif change == "p":
            n = min(n, len(model))
            at = len(model) - n
            assert stack.pop(n) == model[at:]
            del model[at:]
        elif change == "k":
            snapshots.append((stack.shared(), model.copy()))
        elif model:
            stack.put(n % len(model), -n)
            model[n % len(model)] = -n
            assert stack.at(n // 2 % len(model)) == model[n // 2 % len(model)]
        assert len(stack) == len(model)
    finder: Finder[int] = Finder(lambda x: x < 0)
    for slots, values in [*snapshots, (stack.shared(), model)]:
        assert [*slots.above(0)] == values
        assert slots == Slots[int]().with_more(values)  # one form
        for start in (0, len(values) // 2):
            assert finder.any_above(slots, start) == any(x < 0 for x in values[start:])
            assert [*slots.lowest(start).above(0)] == values[:start]
        other = Slots[int]().with_more([x + (x % 50 == 7) for x in values])
        both = merged(slots, other, lambda i, x, y: min(x, y))
        assert both.root is slots.root
        most = merged(slots, other, lambda i, x, y: max(x, y))
        assert most == other
