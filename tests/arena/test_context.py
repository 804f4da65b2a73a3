"""The context of calls: one frozen value for each thread and task."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Generator

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


@pytest.mark.parametrize("block", [in_arena, in_allocating, in_hosting])
def test_an_interrupt_leaves_no_block_of_an_arena(block: Callable[[ml.Arena], None]) -> None:
    arena, n, uncaught = ml.Arena(ml.VM(), "batch"), 1, 0
    block(arena)
    before = current()
    while interrupted(lambda: block(arena), n):
        if current() != before:  # nothing can catch Ctrl-C before the first line of `__exit__`
            [left] = current().arena_blocks
            arena._leave(left)
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
