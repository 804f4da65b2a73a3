"""The context of calls: one frozen value for each thread and task."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.arena.context import Context, context, current, set_context
from tests.brief import ROOT
from tests.interrupting import interrupted


def test_fields_that_c_reads_have_the_order_of_the_enum() -> None:
    header = (ROOT / "mlvm/machines/native/src/language/dispatch.h").read_text()
    [names] = re.findall(r"enum ContextField \{([^}]*)\}", header)
    fields = [name.strip().lower() for name in names.split(",")]
    assert fields == list(Context._fields[: len(fields)])


def test_a_block_restores_its_own_fields_only() -> None:
    before = current()
    with context(line="a", key_state=1):
        assert (current().line, current().key_state) == ("a", 1)
        set_context(axes={"i": (2, None)})
        with context(line=None):
            assert (current().line, current().key_state) == (None, 1)
        assert current().line == "a"
    assert current() == before._replace(axes={"i": (2, None)})
    set_context(axes=before.axes)
    assert current() == before


def test_a_block_without_other_changes_restores_the_same_object() -> None:
    before = current()
    with context(line="a"), context(key_state=1):
        pass
    assert current() is before


def test_blocks_of_generators_need_not_be_nested() -> None:
    def inside(**fields: object) -> Generator[None]:
        with context(**fields):
            yield

    before = current()
    first, second = inside(line="a"), inside(key_state=1)
    next(first)
    next(second)
    first.close()
    assert (current().line, current().key_state) == (before.line, 1)
    second.close()
    assert current() == before


_VMS: list[Any] = [ml.VM("first"), ml.VM("second")]
_ARENAS = [ml.Arena(vm, vm.name) for vm in _VMS]
BLOCKS: dict[str, tuple[Callable[[int], Any], Callable[[], object]]] = {
    "default_dtype": (
        lambda i: ml.default_dtype(("f64", "f16")[i]),
        lambda: ("f64", "f16").index(ml.zeros(1).dtype.name),
    ),
    "autocast": (
        lambda i: ml.autocast(("bfloat16", "float16")[i]),
        lambda: ("bf16", "f16").index((ml.ones((1, 1)) @ ml.ones((1, 1))).dtype.name),
    ),
    "use": (lambda i: ml.use(_VMS[i]), lambda: _VMS.index(ml.zeros(1).device)),
    "arena": (lambda i: _ARENAS[i], lambda: _VMS.index(ml.zeros(1).device)),
    "allocating": (lambda i: _ARENAS[i].allocating(), lambda: _VMS.index(ml.zeros(1).device)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_the_same_kind_may_be_left_in_any_order(name: str) -> None:
    make, innermost = BLOCKS[name]
    before = current()

    def inside(i: int) -> Generator[None]:
        with make(i):
            yield

    for order in itertools.product(range(2), repeat=3):
        if name == "arena" and order in ((0, 1, 0), (1, 0, 1)):
            continue  # the first block and the last are the same object
        for leaves in itertools.permutations(range(3)):
            blocks, still = [inside(i) for i in order], [*range(3)]
            for block in blocks:
                next(block)
            for i in leaves:
                blocks[i].close()
                still.remove(i)
                assert not still or innermost() == order[still[-1]]
            assert current() == before
    with make(0):
        first = inside(1)
        next(first)
    assert innermost() == 1
    first.close()
    assert current() == before


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "allocating"])
def test_a_block_can_be_entered_again(name: str) -> None:
    make, innermost = BLOCKS[name]
    before = current()
    block = make(0)
    for _ in range(2):
        with block:
            with block, make(1):
                assert innermost() == 1
            assert innermost() == 0
        assert current() == before


def test_the_default_dtype_is_set_in_the_innermost_block() -> None:
    def inside() -> Generator[None]:
        with ml.default_dtype("f64"):
            yield

    block = inside()
    next(block)
    with ml.default_dtype("f16"):
        ml.set_default_dtype("bf16")
        block.close()
        assert ml.zeros(1).dtype == "bf16"
    assert ml.zeros(1).dtype == "f32"


def test_threads_begin_without_a_context_and_tasks_with_a_copy() -> None:
    seen: list[Context] = []

    async def task() -> None:
        seen.append(current())
        set_context(line="of the task")

    async def main() -> None:
        await asyncio.create_task(task())

    with context(line="a"), ml.Arena(ml.VM("v"), "x") as arena:
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        asyncio.run(main())
        assert (current().line, current().arena) == ("a", arena)
    assert seen[0] == Context()
    assert (seen[1].line, seen[1].arena) == ("a", arena)


def test_an_interrupt_leaves_no_field_set() -> None:
    def block() -> None:
        with context(line="a"):
            pass

    before, n = current(), 1
    while interrupted(block, n):
        assert current() == before
        n += 1
    assert n > 5


def in_arena(arena: ml.Arena) -> None:
    with arena:
        pass


def in_allocating(arena: ml.Arena) -> None:
    with arena.allocating():
        pass


def in_hosting(arena: ml.Arena) -> None:
    with arena.hosting():
        pass


def in_autocast(arena: ml.Arena) -> None:
    with ml.autocast("bfloat16"):
        pass


def in_default_dtype(arena: ml.Arena) -> None:
    with ml.default_dtype("f64"):
        pass


@pytest.mark.parametrize(
    "block", [in_arena, in_allocating, in_hosting, in_autocast, in_default_dtype]
)
def test_an_interrupt_leaves_no_block_open(block: Callable[[ml.Arena], None]) -> None:
    arena, n, uncaught = ml.Arena(ml.VM(), "batch"), 1, 0
    block(arena)
    before = current()
    while interrupted(lambda: block(arena), n):
        if current() != before:  # nothing can catch Ctrl-C before the first line of `__exit__`
            for left in current().arena_blocks:
                arena._leave(left, left)
            set_context(**before._asdict())
            uncaught += 1
        assert (current(), arena._inside) == (before, [])
        n += 1
    assert n > 5
    assert uncaught <= 1


def test_a_context_is_frozen_and_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        current().tape = None  # type: ignore[misc]
    with pytest.raises(KeyError), context(tapes=None):
        pass


def test_the_context_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with ml.Arena(ml.VM("v"), "batch"), ml.autocast("bfloat16"), ml.default_dtype("f64"):
        ml.debug.context()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(Context._fields)
    assert "batch" in lines[0]
    assert "default_dtype    f64" in lines
    assert "autocast_dtype   bf16" in lines
