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
    wanted: list[int] = []
    kept: list[tuple[Slots[int], list[int]]] = []
    for change, n in changes:
        if change == "e":
            stack.extend(range(n))
            wanted.extend(range(n))
        elif change == "p":
            n = min(n, len(wanted))
            at = len(wanted) - n
            assert stack.pop(n) == wanted[at:]
            del wanted[at:]
        elif change == "k":
            kept.append((stack.shared(), wanted.copy()))
        elif wanted:
            stack.put(n % len(wanted), -n)
            wanted[n % len(wanted)] = -n
            assert stack.at(n // 2 % len(wanted)) == wanted[n // 2 % len(wanted)]
        assert len(stack) == len(wanted)
    found: Finder[int] = Finder(lambda x: x < 0)
    for slots, values in [*kept, (stack.shared(), wanted)]:
        assert [*slots.above(0)] == values
        assert slots == Slots[int]().with_more(values)  # one form
        for start in (0, len(values) // 2):
            assert found.any_above(slots, start) == any(x < 0 for x in values[start:])
            assert [*slots.lowest(start).above(0)] == values[:start]
        other = Slots[int]().with_more([x + (x % 50 == 7) for x in values])
        both = merged(slots, other, lambda i, x, y: min(x, y))
        assert both.root is slots.root
        most = merged(slots, other, lambda i, x, y: max(x, y))
        assert most == other
