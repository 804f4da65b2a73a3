"""Arenas against a plain model: what is alive, what it holds, what is counted."""

from __future__ import annotations

import itertools
import random
import re
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlvm.arena.arena import STALE, Allocation, Arena, Mark, scope
from mlvm.core.errors import ArenaError, ArenaOverflowError, HandleError, StaleTensorError
from mlvm.core.memory import address as first_byte
from mlvm.core.types import ALIGNMENT, TensorType
from mlvm.core.vm import VM
from tests.arena.test_arena import consumed, types
from tests.brief import refuses
from tests.wired import machine

CAPACITY = 1024


def rounded(type: TensorType) -> int:
    return -(-type.nbytes // ALIGNMENT) * ALIGNMENT


def address(tensor: Allocation) -> tuple[int, int]:
    region = tensor.root.region
    assert region is not None
    return region.storage, region.offset


class Group:
    """In the model: a tensor and its views, in use until all of them are dropped."""

    def __init__(self, base: Allocation, content: bytes) -> None:
        self.base: Allocation | None = base
        self.views: list[Allocation] = []
        self.type = base.type
        self.content = content

    @property
    def tensors(self) -> list[Allocation]:
        return [*([self.base] if self.base is not None else []), *self.views]


class ArenaAgainstModel(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["fixed", "growing", "trimming"]))
    def make(self, kind: str) -> None:
        self.vm = VM()
        self.arena = Arena(
            self.vm,
            "batch",
            capacity=CAPACITY if kind == "fixed" else None,
            trims=kind == "trimming",
        )
        self.other = Arena(self.vm, "other", capacity=CAPACITY)
        self.fixed = kind == "fixed"
        self.marks: list[tuple[Mark, list[Group]]] = []
        self.passed: list[Mark] = []
        self.allocs = 0
        self.outside = scope()
        self.groups: list[Group] = []
        self.stale: list[tuple[Allocation, str]] = []
        self.high_water = 0
        self.entered: list[ExitStack] = []

    @property
    def used(self) -> int:
        return sum(self.size_of(group) for group in self.groups)

    def size_of(self, group: Group) -> int:
        """Return the bytes of a group's region, which size classes share in an arena that trims."""
        nbytes, region = rounded(group.type), group.tensors[0].root.region
        if not self.arena.trims:
            return nbytes
        assert region is not None
        assert nbytes <= region.nbytes <= 2 * nbytes + 8 * ALIGNMENT
        return region.nbytes

    def group(self, data: st.DataObject) -> Group:
        index = data.draw(st.integers(0, len(self.groups) - 1), label="group")
        return self.groups[index]

    def end(self, group: Group, why: str) -> None:
        self.groups.remove(group)
        self.stale += [(tensor, why) for tensor in group.tensors]

    def gaps(self) -> list[int]:
        """Return the free bytes of a fixed arena before, between and after its live tensors."""
        spans = ((address(tensor)[1], rounded(tensor.type)) for tensor in self.arena.live())
        occupied = sorted(span for span in spans if span[1])  # one of no bytes may lie in another
        edges = [(0, 0), *occupied, (CAPACITY, 0)]
        return [start - (at + n) for (at, n), (start, _) in itertools.pairwise(edges)]

    def end_all(self, why: str) -> None:
        for group in [*self.groups]:
            self.end(group, why)
        self.passed += [mark for mark, _ in self.marks]
        self.marks.clear()

    def add(self, tensor: Allocation, content: bytes) -> None:
        self.groups.append(Group(tensor, content))
        self.high_water = max(self.high_water, self.used)

    @rule(several=st.lists(types, min_size=1, max_size=4))
    def alloc(self, several: list[TensorType]) -> None:
        for type in several:
            nbytes = rounded(type)
            try:
                tensor = self.arena.alloc(type)
            except ArenaOverflowError:
                assert self.fixed
                assert max(self.gaps()) < nbytes
                return
            assert not self.fixed or self.used + nbytes <= CAPACITY
            self.allocs += 1
            content = random.Random(self.allocs).randbytes(type.nbytes)
            array = np.frombuffer(content, type.dtype.numpy).reshape(type.shape)
            self.vm.write(tensor.handle, array)
            self.add(tensor, content)
            del tensor

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), elsewhere=st.booleans())
    def keep(self, data: st.DataObject, elsewhere: bool) -> None:
        group = self.group(data)
        source = data.draw(st.integers(0, len(group.tensors) - 1), label="source")
        nbytes, content = rounded(group.type), group.content
        if elsewhere:
            copy = self.other.keep(group.tensors[source])
            assert copy.type is group.tensors[source].type
            assert copy.arena is self.other
            back, place = copy, self.other.used
        else:
            back, place = group.tensors[source], self.other.used
        try:
            saved = self.arena.keep(back)
        except ArenaOverflowError:
            assert self.fixed
            assert max(self.gaps()) < nbytes
        else:
            assert (saved.arena, saved.base) == (self.arena, None)
            self.add(saved, content)
        assert self.other.used == place

    @rule()
    def mark(self) -> None:
        self.marks.append((self.arena.mark(), [*self.groups]))

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.marks) - 1), label="mark")
        mark, before = self.marks[index]
        self.arena.rewind(mark)
        self.passed += [later for later, _ in self.marks[index + 1 :]]
        del self.marks[index + 1 :]
        for group in [*self.groups]:
            if not any(group is earlier for earlier in before):
                self.end(group, "the arena was rewound")

    @precondition(lambda self: self.passed)
    @rule(data=st.data())
    def rewind_to_a_mark_that_has_passed(self, data: st.DataObject) -> None:
        mark = data.draw(st.sampled_from(self.passed))
        refuses(ArenaError, "the mark is no longer valid", self.arena.rewind, mark)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        group = self.group(data)
        # An index: hypothesis would keep what it drew alive.
        source = data.draw(st.integers(0, len(group.tensors) - 1), label="source")
        view = self.arena.view(group.tensors[source], TensorType("u8", (1, group.type.nbytes)))
        group.views.append(view)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group = self.group(data)
        if group.base is not None and data.draw(st.booleans()):
            group.base = None
        else:
            group.views = []
        if not group.tensors:
            self.groups.remove(group)

    @precondition(lambda self: any(group.base is not None for group in self.groups))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([g for g in self.groups if g.base is not None]))
        assert group.base is not None
        for view in group.views:
            refuses(
                ArenaError,
                "expected a tensor that owns its memory, got a view",
                self.arena.free,
                view,
            )
        self.arena.free(group.base)
        self.end(group, "arena.free freed it")

    @rule()
    def reset(self) -> None:
        self.arena.reset()
        self.end_all("the arena was reset")

    @rule()
    def enter(self) -> None:
        self.entered.append(ExitStack())
        assert self.entered[-1].enter_context(self.arena) is self.arena

    @precondition(lambda self: self.entered)
    @rule(fails=st.booleans())
    def leave(self, fails: bool) -> None:
        stack = self.entered.pop()
        if fails:
            with pytest.raises(ZeroDivisionError), stack:
                raise ZeroDivisionError
        else:
            stack.close()
        if not self.entered:
            self.end_all("the arena was reset")

    @precondition(lambda self: not self.fixed)
    @rule()
    def trim(self) -> None:
        self.arena.trim()
        if not self.groups:
            assert self.arena.capacity == 0

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def use_a_stale_tensor(self, data: st.DataObject) -> None:
        tensor, why = data.draw(st.sampled_from(self.stale))
        assert tensor.handle == STALE
        text = re.escape(
            f"use of a freed tensor: {tensor.type} of arena 'batch' was freed: {why}; copy it out "
            "first, for example with weights.keep(x)"
        )
        assert re.fullmatch(text, str(tensor.stale()))
        with pytest.raises(StaleTensorError, match=text if tensor.base is None else why):
            self.arena.view(tensor, tensor.type)
        if tensor.base is None:
            refuses(StaleTensorError, text, self.arena.free, tensor)
        refuses(HandleError, "", self.vm.read, tensor.handle)

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.arena.used == self.used
        assert self.arena.high_water == self.high_water
        assert self.arena.capacity == consumed(self.vm) - self.other.capacity
        assert self.arena.used <= self.arena.capacity
        if self.fixed:
            assert self.arena.capacity == CAPACITY

    @invariant()
    def live_regions_are_aligned_and_apart(self) -> None:
        spans = []
        for tensor in self.arena.live():
            storage, offset = address(tensor)
            assert offset % ALIGNMENT == 0
            array = machine(self.vm).array_of(tensor.handle)
            assert not array.size or first_byte(array) % ALIGNMENT == 0
            spans.append((storage, offset, offset + rounded(tensor.type)))
        assert len(spans) == len(self.groups)
        assert spans == sorted(spans)
        occupied = [(storage, start, end) for storage, start, end in spans if start < end]
        for (storage, _, end), (other, start, _) in itertools.pairwise(occupied):
            assert storage != other or end <= start  # an empty tensor is in nobody's way

    @invariant()
    def contents_survive(self) -> None:
        for group in self.groups:
            for tensor in group.tensors:
                assert self.vm.read(tensor.handle).tobytes() == group.content

    @invariant()
    def results_go_where_they_should(self) -> None:
        assert scope() is (self.arena if self.entered else self.outside)

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        while self.entered:
            self.leave(fails=False)
        live = [tensor for group in self.groups for tensor in group.tensors]
        for _ in range(2):
            self.arena.close()
        self.other.close()
        assert consumed(self.vm) == self.arena.capacity == self.arena.used == 0
        for tensor in live:
            assert "the arena was closed" in str(tensor.stale())
        refuses(ArenaError, "'batch' is closed", self.arena.alloc, TensorType("u8", (0,)))


EXAMPLES = 5 * settings.default.max_examples  # type: ignore[union-attr]
ArenaAgainstModel.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)
TestArenaAgainstModel = ArenaAgainstModel.TestCase
