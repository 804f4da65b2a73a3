"""Eager tensors of arenas: what is kept stays, and what has ended cannot be used by mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArenaError, ArenaOverflowError, StaleTensorError
from tests.brief import cases, refuses


@pytest.fixture
def vm() -> ml.VM:
    return ml.VM()


# --- stale tensors --------------------------------------------------------------------

Ending = Callable[[ml.Arena, ml.Tensor], None]


MARKS: dict[str, Any] = {}
ENDINGS: dict[str, Ending] = {
    "reset": lambda arena, tensor: arena.reset(),
    "rewound": lambda arena, tensor: arena.rewind(MARKS[arena.name]),
    "freed": lambda arena, tensor: arena.free(tensor),
    "closed": lambda arena, tensor: arena.close(),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_every_use_of_a_tensor_that_has_ended_raises(how: str) -> None:
    arena = ml.Arena(ml.VM(), "batch")
    MARKS["batch"] = arena.mark()
    with arena.allocating():
        other, x = ml.ones((2, 3)), ml.asarray(np.ones((2, 3), np.float32))
        view = ml.reshape(x, (3, 2))
    tree = {"layers": [x, {"view": view}]}
    cached = x.handle
    ENDINGS[how](arena, x)
    if how != "closed":
        with arena.allocating():
            again = [ml.zeros((2, 3)) for _ in range(2)]  # one of them takes the bytes over
        assert cached in [tensor.handle for tensor in again]
    arena_of_keep = ml.Arena(arena.vm, "keeps")
    uses: list[Callable[[ml.Tensor], Any]] = [
        lambda t: t.numpy(), lambda t: t + 1, lambda t: ml.sum(t), lambda t: ml.reshape(t, (6,)),
        lambda t: t[0], lambda t: t.__iadd__(1), lambda t: ml.matmul(t, ml.matrix_transpose(t)),
        lambda t: arena_of_keep.keep(t), lambda t: ml.grad(lambda a: ml.sum(a * a))(t),
    ]  # fmt: skip
    with ml.Arena(arena.vm, "results").allocating():
        for tensor in (tree["layers"][0], tree["layers"][1]["view"], view.base):  # type: ignore[index]
            assert isinstance(tensor, ml.Tensor)
            assert how in repr(tensor)
            for use in uses:
                refuses(StaleTensorError, f"arena 'batch' was freed: .* {how}", use, tensor)
    if how != "closed":
        np.testing.assert_array_equal([tensor.numpy() for tensor in again], np.zeros((2, 2, 3)))
    del other


# --- keep, mark, holders --------------------------------------------------------------


def test_keep_copies_a_tensor_of_its_kind_into_another_arena(vm: ml.VM) -> None:
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with batch:
        x = ml.asarray(np.arange(6, dtype=np.int64).reshape(2, 3))
        best, flat = weights.keep(x), weights.keep(ml.reshape(x, (6,)))
        x += 1
    np.testing.assert_array_equal(best.numpy(), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(flat.numpy(), range(6))
    assert isinstance(best, ml.Tensor)
    assert (best.arena, flat.base, weights.used, batch.used) == (weights, None, 128, 0)
    with weights.allocating():
        np.testing.assert_array_equal((best + best).numpy(), [[0, 2, 4], [6, 8, 10]])
        x = ml.asarray(np.float32(3))  # no gradient flows through it
        np.testing.assert_array_equal(ml.grad(lambda x: x * batch.keep(x))(x).numpy(), 3)


def test_keep_refuses_what_it_cannot_copy() -> None:
    vm, elsewhere = ml.VM("here"), ml.VM("there")
    weights = ml.Arena(vm, "weights", capacity=64)
    with ml.Arena(elsewhere, "batch") as batch:
        x = ml.ones(3)
        refuses(ArenaError, r"here, got an f32\[3\] on there", weights.keep, x)
        assert batch.used == 64
    refuses(
        ArenaError,
        "arena 'weights': keep: expected a tensor, got an ndarray",
        weights.keep,  # type: ignore[arg-type]
        np.ones(3),
    )
    with ml.Arena(vm, "batch"), pytest.raises(ArenaOverflowError):
        weights.keep(ml.ones(100))
    assert weights.used == 0


@cases("capacity", None, 4096)
def test_a_loop_that_rewinds_finds_the_same_addresses(vm: ml.VM, capacity: int | None) -> None:
    arena = ml.Arena(vm, "batch", capacity=capacity)
    with arena:
        x = ml.ones(16)
        mark = arena.mark()
        used, addresses = arena.used, []
        for _ in range(4):
            y = x + 1
            z = ml.concat([y, x])
            del y
            addresses.append((z.handle, (z * 2).handle))
            arena.rewind(mark)
            assert arena.used == used
        assert len(set(addresses)) == 1
        np.testing.assert_array_equal(x.numpy(), np.ones(16))
        refuses(StaleTensorError, "the arena was rewound", z.numpy)
    refuses(ArenaError, "the mark is no longer valid: the arena was reset", arena.rewind, mark)


def test_rewind_refuses_marks_that_are_not_its_own(vm: ml.VM) -> None:
    arena, other = ml.Arena(vm, "batch"), ml.Arena(vm, "other")
    outer = arena.mark()
    inner = arena.mark()
    arena.rewind(inner)
    arena.rewind(outer)
    refuses(ArenaError, "the mark is no longer valid", arena.rewind, inner)
    refuses(
        ArenaError,
        "expected a mark of this arena, got one of arena 'other'",
        arena.rewind,
        other.mark(),
    )
    refuses(ArenaError, "expected a mark of this arena, got 3", arena.rewind, 3)  # type: ignore[arg-type]


def test_holders_tell_bytes_types_and_lines() -> None:
    arena = ml.Arena(ml.VM(), "batch", capacity=4096)
    with arena:
        x = ml.ones((3, 4))
        y = ml.sum(x, axis=0, dtype=ml.float64) + ml.ones(100, dtype=ml.float64)[:4]
        holders = arena.holders()
    line = test_holders_tell_bytes_types_and_lines.__code__.co_firstlineno + 3
    assert [(h.nbytes, str(h.type)) for h in holders] == [(64, "f32[3,4]"), (64, "f64[4]")]
    assert holders[0].line == f"{__file__}:{line}"
    assert str(holders[1]) == f"f64[4]: 64 bytes, {__file__}:{line + 1}"
    del y
    growing = ml.Arena(ml.VM(), "grows")
    with growing:
        x = ml.ones(3)
        assert [h.line for h in growing.holders()] == [None]
        with ml.record(growing):
            z = ml.ones(3)
        assert [h.line is None for h in growing.holders()] == [True, False]
        del z
        again = ml.ones(3)  # where z was, but not noted any more
        assert again.type is x.type
        assert [h.line for h in growing.holders()] == [None, None]


def test_an_overflow_names_the_largest_holders_and_their_lines() -> None:
    arena = ml.Arena(ml.VM(), "batch", capacity=1024)
    with arena:
        tensors = [ml.ones(n) for n in (16, 96, 16, 32)]
        del tensors[2]
        caught = refuses(ArenaOverflowError, "", ml.ones, 128)
    line = test_an_overflow_names_the_largest_holders_and_their_lines.__code__.co_firstlineno + 3
    assert str(caught) == (
        "arena 'batch': f32[128] needs 512 bytes; 448 of 1,024 bytes are free, in blocks of at "
        f"most 384; raise capacity= or free tensors; the largest tensors are f32[96]: 384 bytes, "
        f"{__file__}:{line}; "
        f"f32[32]: 128 bytes, {__file__}:{line}; f32[16]: 64 bytes, {__file__}:{line}"
    )


def test_an_empty_tensor_inside_of_merged_memory_splits_nothing() -> None:
    """It did: once it was free, a merge began at its place, inside of a tensor that lived."""
    arena = ml.Arena(ml.VM("mine"), "fixed", capacity=256)

    def of(n: int) -> Any:
        return arena.alloc(ml.TensorType(ml.float32, (n,)))

    first, empty, second, third, fourth = of(16), of(0), of(16), of(16), of(16)
    for each in (first, second):
        arena.free(each)
    merged = of(32)  # where both were, around the empty one
    arena.vm.write(merged.handle, np.ones(32, np.float32))
    for each in (empty, third, fourth):
        arena.free(each)
    neighbour = of(32)
    arena.vm.write(neighbour.handle, np.full(32, 2, np.float32))
    assert arena.vm.read(merged.handle).tolist() == [1.0] * 32
    arena.free(neighbour)
    assert arena.vm.read(merged.handle).tolist() == [1.0] * 32
