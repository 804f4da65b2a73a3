"""Large selections that share the memory of their tensor until either of them changes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml

ROWS: Final = 20000
UPDATES: Final = (
    *("x += 1.0", "x[0] = 5.0", "x[-1] = 5.0", "x[9000:] = 2.0", "ml.add(x, 1.0, out=x)"),
    *("p += 1.0", "p[0] = 5.0", "p[-1] = 5.0", "p[5:] = 2.0", "ml.add(p, 1.0, out=p)"),
    *("add_one(x)", "add_one(p)", "add_one(q)", "q *= 3.0", "part_of_part[0] = 5.0"),
    *("x.arena.free(x)", "p.arena.free(p)", "x += p[:1]", "x[:] = x[::-1]", "x[:ROWS] = p"),
)


@ml.capture
def add_one(x: ml.Tensor) -> None:
    x += 1.0


def space() -> dict[str, Any]:
    """Return a tensor, parts of it that share its memory, and a view of a part."""
    x = ml.asarray(np.arange(ROWS * 12, dtype=np.float32).reshape(-1, 8))
    before = x.arena.used
    p = x[-ROWS:]
    part_of_part = p[10:-10]
    q = ml.reshape(p, -1)
    assert x.arena.used == before
    return {"x": x, "p": p, "q": q, "part_of_part": part_of_part}


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_changes_one_tensor(update: str) -> None:
    tensors = space()
    before = {name: x.numpy().copy() for name, x in tensors.items()}
    tensors = space()  # reading the values may have copied the parts
    exec(update, {**globals(), **tensors})
    changed = {name for name in tensors if f"({name})" in update or update.startswith(name)}
    changed |= {"x"} if "out=x" in update else {"p"} if "out=p" in update else set()
    for name in tensors.keys() - changed:
        np.testing.assert_array_equal(tensors[name].numpy(), before[name])


def test_a_part_keeps_the_memory_of_its_tensor() -> None:
    tensors = space()
    part, expected = tensors["part_of_part"], np.arange(ROWS * 12, dtype=np.float32)[4 * ROWS :]
    del tensors
    np.testing.assert_array_equal((part + 0.0).numpy(), expected.reshape(ROWS, 8)[10:-10])


@pytest.mark.parametrize("update", ["p += 1.0", "x += 1.0", "del x"])
def test_a_tape_keeps_the_value_of_a_part(update: str) -> None:
    def loss(w: ml.Tensor, tensors: dict[str, Any]) -> ml.Tensor:
        result = ml.sum(tensors["p"] * w * tensors["p"])
        exec(update, {}, tensors)
        return result

    w = ml.ones(8)
    expected = ml.grad(lambda w: ml.sum(ml.copy(space()["p"]) ** 2 * w))(w)
    got = ml.grad(loss)(w, space())
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-4)


def test_a_captured_function_uses_a_part_as_a_state() -> None:
    p = space()["p"]
    total = ml.capture(lambda x: ml.sum(p) + x)
    expected = float(ml.sum(ml.copy(space()["p"])))
    for x in (0.0, 1.0, 2.0):
        np.testing.assert_allclose(float(total(ml.asarray(x))), expected + x, rtol=1e-6)


def test_a_mark_frees_later_parts_only() -> None:
    x = space()["x"]
    early = x[-ROWS:]
    mark = x.arena.mark()
    late = x[:ROWS]
    x.arena.rewind(mark)
    assert float(early[-1, -1]) == ROWS * 12 - 1
    with pytest.raises(ml.errors.StaleTensorError):
        late.numpy()


@pytest.mark.parametrize("key", ["100:105", "::2", "::-1", ":, :4"])
def test_other_selections_are_copied(key: str) -> None:
    x = space()["x"]
    before = x.arena.used
    part = eval(f"x[{key}]", {"x": x})
    assert x.arena.used > before
    assert part.shape == eval(f"x[{key}]", {"x": np.empty(x.shape)}).shape
