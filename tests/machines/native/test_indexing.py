"""The native kernels that choose by indices and masks: against the reference, to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import OperandValueError
from mlvm.core.op import OPS
from mlvm.core.types import Array
from tests.brief import cases, output_of, refuses
from tests.machines.native.planners import (
    KERNELS,
    assert_same_bits,
    assert_same_in_place,
    native,
    planned,
    reference,
)

INTEGERS = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"]
ELEMENTS = ["?", "i2", "f4", "f8"]
NUMBERS = ["u1", "i1", "i2", "u4", "i8", "f4", "f8"]


def _numbers(rng: np.random.Generator, shape: Any, dtype: str) -> Array:
    """Floats whose sums depend on the order; integers that wrap around."""
    if dtype[0] == "f":
        return np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, shape), dtype)
    return np.asarray(rng.integers(0, 2 if dtype == "?" else 127, shape), dtype)


@st.composite
def _indexed(draw: st.DrawFn) -> tuple[np.random.Generator, list[int], int, str, int]:
    """Random numbers, a shape, an axis of it, a dtype for indices, and the lowest index."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(INTEGERS))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    return rng, shape, axis, kind, 0 if kind[0] == "u" else -shape[axis]


@given(_indexed(), st.lists(st.integers(0, 20), max_size=2), st.sampled_from(ELEMENTS))
def test_take_and_scatter_add(indexed: Any, places: list[int], dtype: str) -> None:
    rng, shape, axis, kind, low = indexed
    length = shape[axis]
    indices = np.asarray(rng.integers(low, length, places), kind)
    assert_same_bits("take", _numbers(rng, shape, dtype), indices, axis=axis)
    updates = [*shape[:axis], *places, *shape[axis + 1 :]]
    for number in NUMBERS:
        values = _numbers(rng, updates, number)
        assert_same_bits("scatter_add", values, indices, axis=axis, length=length)
        x = _numbers(rng, shape, number)
        assert_same_in_place("index_add", x, values, indices, axis=axis)


@given(_indexed(), st.integers(0, 20), st.sampled_from(ELEMENTS))
def test_along_an_axis(indexed: Any, count: int, dtype: str) -> None:
    rng, shape, axis, kind, low = indexed
    length = shape[axis]
    places = [*shape[:axis], count, *shape[axis + 1 :]]
    indices = np.asarray(rng.integers(low, length, places), kind)
    assert_same_bits("take_along_axis", _numbers(rng, shape, dtype), indices, axis=axis)
    for number in NUMBERS:
        x = _numbers(rng, places, number)
        assert_same_bits("scatter_add_along_axis", x, indices, axis=axis, length=length)


@given(_indexed(), st.lists(st.integers(0, 5), max_size=2), st.data())
def test_index_set(indexed: Any, places: list[int], data: st.DataObject) -> None:
    rng, shape, axis, kind, low = indexed
    axes = data.draw(st.integers(0, len(shape) - axis))
    length = int(np.prod(shape[axis : axis + axes]))
    if not length:
        places = [0]
    indices = np.asarray(rng.integers(low and -length, max(length, 1), places), kind)
    parts = shape[:axis], places, shape[axis + axes :]  # values broadcast along any of them
    given = [n for part in parts for n in (part if data.draw(st.booleans()) else [1] * len(part))]
    while given and given[0] == 1 and data.draw(st.booleans()):
        given = given[1:]
    dtype = data.draw(st.sampled_from([*ELEMENTS, "c8", "c16"]))
    x, values = _numbers(rng, shape, dtype), _numbers(rng, given, dtype)
    assert_same_in_place("index_set", x, values, indices, axis=axis, axes=axes)


@given(_indexed(), st.data(), st.sampled_from(ELEMENTS))
def test_dynamic_update(indexed: Any, data: st.DataObject, dtype: str) -> None:
    rng, shape, axis, kind, low = indexed
    rows = data.draw(st.integers(0, shape[axis]))
    last = min(shape[axis] - rows, shape[axis] - 1)
    start = np.asarray(data.draw(st.integers(0, last)), kind)
    if low and data.draw(st.booleans()):
        start = np.asarray(start.item() - shape[axis], kind)
    x = _numbers(rng, shape, dtype)
    update = _numbers(rng, [*shape[:axis], rows, *shape[axis + 1 :]], dtype)
    assert_same_in_place("dynamic_update", x, update, start, axis=axis)


@cases("behind", 1, 2, 15, 16, 17, 70)
def test_more_indices_than_are_looked_at_together(behind: int) -> None:
    rng = np.random.default_rng(behind)
    indices = rng.integers(-50, 50, 777)
    assert_same_bits("take", _numbers(rng, (3, 50, behind), "f4"), indices, axis=1)
    assert_same_bits("take", _numbers(rng, (3, 50), "f4"), indices, axis=1)
    x = _numbers(rng, (3, 777, behind), "f4")
    assert_same_bits("scatter_add", x, indices, axis=1, length=50)
    y = _numbers(rng, (3, 50, behind), "f4")
    for values in (x, x[:1], x[0], x[:, :1], x[..., :1], x[0, 0, 0]):
        assert planned("index_set", y, values, indices, axis=1)
        assert_same_in_place("index_set", y, values, indices, axis=1)
    along = rng.integers(-50, 50, x.shape)
    assert_same_bits("take_along_axis", _numbers(rng, (3, 50, behind), "f4"), along, axis=1)
    assert_same_bits("scatter_add_along_axis", x, along, axis=1, length=50)


@cases("kinds", ("i8",), ("u1", "i2"), ("i4", "u4", "i1"))
@cases("count", 0, 1, 300, 9000)
def test_flat_indices(kinds: tuple[str, ...], count: int) -> None:
    rng, lengths = np.random.default_rng(count), (50, 7, 100)[: len(kinds)]
    indices = [
        rng.integers(-n if kind[0] == "i" else 0, n, count).astype(kind)
        for n, kind in zip(lengths, kinds, strict=True)
    ]
    assert_same_bits("flat_indices", *indices, lengths=lengths)


def test_sums_of_special_values() -> None:
    x = np.array([-0.0, np.inf, -np.inf, 1e-45, 1e-45, -0.0], "f4")
    indices = np.array([0, 1, 1, 2, 2, 3])
    sums = native("scatter_add", x, indices, axis=0, length=5)
    np.testing.assert_array_equal(sums, np.array([0, np.nan, 3e-45, 0, 0], "f4"))
    assert_same_bits("scatter_add", x[[0, 3, 4, 5]], indices[[0, 3, 4, 5]], axis=0, length=5)


# --- indices out of range --------------------------------------------------------------


def _refused(name: str, *inputs: Array, **attributes: Any) -> None:
    """The native kernel raises the reference's error, and writes nothing."""
    bound = OPS[name].bind(attributes)
    messages = set()
    for kernel in (KERNELS[1][name], KERNELS[3][name], OPS[name].kernel):
        out = np.full_like(reference(name, *inputs[:-1], inputs[-1] * 0, **attributes), 7)
        caught = refuses(OperandValueError, "", kernel, out, *inputs, **bound)
        assert (out == 7).all()
        messages.add(str(caught))
    assert len(messages) == 1


@pytest.mark.parametrize("kind", INTEGERS)
def test_indices_out_of_range_are_refused(kind: str) -> None:
    x, bad = np.ones((4, 3), "f4"), [4, 100, int(np.iinfo(kind).max)]
    if kind[0] == "i":
        bad += [-5, int(np.iinfo(kind).min)]
    for index in bad:
        for shape in ((1,), (3,), (300,)):
            indices = np.zeros(shape, kind)
            indices[-1] = index
            _refused("take", x, indices, axis=0)
            _refused("scatter_add", np.ones((*shape, 3)), indices, axis=0, length=4)
            _refused("flat_indices", np.zeros(shape, "u1"), indices, lengths=(1, 4))
            _refused("index_set", x, x[:1], indices, axis=0)
            _refused("one_hot", indices, num_classes=4)
        along = np.zeros((4, 3), kind)
        along[2, 1] = index
        _refused("take_along_axis", x, along, axis=0)
        _refused("dynamic_update", x, x[:2], np.array(index, kind), axis=0)
        _refused("scatter_add_along_axis", x, along, axis=0, length=4)


# --- one_hot, masks ----------------------------------------------------------------


@cases("dtype", "bool", "u8", "i16", "i64", "f32", "f64")
@cases("count, classes", (0, 3), (1, 1), (7, 17), (3000, 10), (2, 9000))
def test_one_hot(count: int, classes: int, dtype: str) -> None:
    for kind in ("u1", "i8"):
        indices = np.random.default_rng(1).integers(0, min(classes, 200), count).astype(kind)
        assert_same_bits("one_hot", indices, num_classes=classes, dtype=dtype)


def _assert_masked(mask: Array, behind: Any, dtype: str, rng: np.random.Generator) -> None:
    """Check the three ops that a mask chooses elements for."""
    updates = _numbers(rng, (int(mask.sum()), *behind), dtype)
    x = _numbers(rng, (*mask.shape, *behind), dtype)
    assert_same_bits("mask_scatter", updates, mask, shape=x.shape)
    assert_same_in_place("mask_set", x, updates, mask)
    for threads in (1, 2, 3):
        chosen: Any = KERNELS[threads]["boolean_index"]
        np.testing.assert_array_equal(chosen(x, mask), x[mask], strict=True)


@given(
    st.lists(st.integers(0, 9), max_size=2),
    st.lists(st.integers(0, 5), max_size=2),
    st.sampled_from([*ELEMENTS, "u1", "c8", "c16"]),
    st.floats(0, 1),
)
def test_masks(covered: list[int], behind: list[int], dtype: str, share: float) -> None:
    rng = np.random.default_rng(3)
    _assert_masked(np.asarray(rng.random(covered) < share), behind, dtype, rng)


@cases("behind", (), (2,), (5,), (600,))
def test_masks_in_several_units(behind: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    mask = rng.random((77, 513)) < 0.3 if behind != (600,) else rng.random(300) < 0.3
    _assert_masked(mask, behind, "f4", rng)


def test_masks_of_length_0_and_values_that_broadcast() -> None:
    x, none = np.ones((3, 4), "f4"), np.zeros((0, 4), "?")
    np.testing.assert_array_equal(native("mask_scatter", x[:0, 0], none, shape=(3, 4)), 0 * x)
    np.testing.assert_array_equal(native("mask_set", x, x[:0, 0], none), x)
    chosen: Any = KERNELS[1]["boolean_index"]
    assert chosen(x, none).shape == (0,)
    rows = np.array([True, False, True])
    expected = np.array([[2] * 4, [1] * 4, [3] * 4], "f4")
    np.testing.assert_array_equal(native("mask_set", x, expected[::2, :1], rows), expected)


def test_another_number_of_updates_is_refused() -> None:
    x, mask = np.ones(5, "f4"), np.arange(5) > 1
    for kernel in (KERNELS[1], KERNELS[3]):
        for count in (0, 2, 4):
            for name, operands in [("mask_scatter", ()), ("mask_set", (x,))]:
                out, attributes = np.full(5, 7, "f4"), {} if operands else {"shape": (5,)}
                work = partial(kernel[name], out, *operands, x[:count], mask, **attributes)
                refuses(OperandValueError, "the mask selects 3 elements", work)
                assert (out == 7).all()


_SHARED_INDICES = """
import itertools, sys, threading, time
import numpy as np
from mlvm.core.program.program import Program
from mlvm.machines.local import LocalVM as VM
from tests.core.programs import put

COUNT, ROWS = 200_000, 8
zeros, x, wide = np.zeros(COUNT, "i8"), np.zeros(COUNT, "f4"), np.zeros((COUNT, ROWS), "f4")
small, narrow = np.zeros(9, "f4"), np.zeros((9, ROWS), "f4")
CASES = [  # each has one operand whose integers change
    ("take", [small, None], {"axis": 0}),
    ("take", [narrow, None], {"axis": 0}),
    ("take_along_axis", [small, None], {"axis": 0}),
    ("scatter_add", [x, None], {"axis": 0, "length": 9}),
    ("scatter_add", [wide, None], {"axis": 0, "length": 9}),
    ("index_add", [small, x, None], {"axis": 0}),
    ("index_set", [small, x, None], {"axis": 0}),
    ("flat_indices", [zeros, None], {"lengths": (1, 9)}),
    ("scatter_add_along_axis", [x, None], {"axis": 0, "length": 9}),
    ("one_hot", [None], {"num_classes": 9}),
    ("softmax_cross_entropy", [wide, None], {}),
    ("mask_scatter", [small, None], {"shape": [COUNT]}),
    ("mask_scatter", [narrow, None], {"shape": [COUNT, ROWS]}),
    ("mask_set", [x, small, None], {}),
    ("boolean_index", [x, None], {}),
    ("boolean_index", [wide, None], {}),
]
for native, (name, inputs, attributes) in itertools.product([True, False], CASES):
    print(native, name, [i is None or i.shape for i in inputs], flush=True)
    kind = "?" if "mask" in name or name == "boolean_index" else "i8"
    good, bad = np.zeros(COUNT, kind), np.full(COUNT, 2**40).astype(kind)
    good[:9] = kind == "?"
    mine, others = VM(native=native), VM(native=native)
    handles = [put(mine, good if i is None else i) for i in inputs]
    shared = mine.share(handles[[i is None for i in inputs].index(True)], others)
    program, ended, ran = Program.of_op(name, len(inputs), attributes, 1), threading.Event(), 0

    def change():
        while not ended.is_set():
            others.write(shared, bad)
            others.write(shared, good)
            time.sleep(0.0002)

    changer = threading.Thread(target=change, daemon=True)
    changer.start()
    begin = time.monotonic()  # on a busy machine the bad ones are met again and again
    while (so_long := time.monotonic() - begin) < 0.1 or (native and not ran and so_long < 30):
        try:
            mine.launch(program, handles)
        except Exception:  # it met the bad ones
            continue
        ran += 1
    ended.set()
    changer.join()
    assert ran or not native, name  # numpy may be too slow for it
"""


def test_indices_that_another_vm_changes_meanwhile_stay_in_their_tensors() -> None:
    output_of("-c", _SHARED_INDICES)
