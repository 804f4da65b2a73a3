"""Scratch pads: tensors where one wants them, over each other, and no further than the pad."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import ArenaError, HandleError, MachineError, ShapeError, StaleTensorError
from mlvm.core.types import TensorType
from mlvm.core.vm import VM
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims


def test_tensors_lie_where_they_are_asked_for_and_share_bytes(vm: VM) -> None:
    with ScratchPad(vm, 256) as pad:
        assert (pad.capacity, vm.consumed_size_in_mib() * 2**20) == (256, 256)
        words, row = pad.tensor("u32[16]", 0), pad.tensor(TensorType("u8", (4,)), 4)
        vm.write(words.handle, np.arange(16, dtype=np.uint32))
        np.testing.assert_array_equal(vm.read(row.handle), [1, 0, 0, 0])
        vm.write(row.handle, np.full(4, 255, np.uint8))
        assert vm.read(words.handle)[1] == 2**32 - 1
        assert pad.used == 68
        assert [str(tensor.type) for tensor in pad.live()] == ["u32[16]", "u8[4]"]
    assert vm.consumed_size_in_mib() == 0
    for tensor in (words, row):
        assert "arena 'scratch' was freed: the arena was closed" in str(tensor.stale())
        refuses(HandleError, "", vm.read, tensor.handle)
    refuses(ArenaError, "scratch pad 'scratch' is closed", pad.tensor, "u8[1]", 0)


offsets = st.integers(-8, 80)
types = st.sampled_from([TensorType(t, (n,)) for t in ("u8", "f32", "f64") for n in (0, 1, 7, 8)])


@given(st.lists(st.tuples(types, offsets, st.integers(0, 255), st.booleans()), max_size=20))
def test_a_pad_is_its_bytes(writes: list[tuple[TensorType, int, int, bool]]) -> None:
    """After any write through any tensor, every tensor shows the pad's bytes."""
    vm = VM()
    pad, model = ScratchPad(vm, 64), np.zeros(64, np.uint8)
    live = []
    for type, offset, value, keep in writes:
        inside = offset >= 0 and offset + type.nbytes <= 64
        if not inside or offset % type.dtype.itemsize:
            with pytest.raises(ArenaError, match="ends at byte" if not inside else "multiple of"):
                pad.tensor(type, offset)
            continue
        tensor = pad.tensor(type, offset)
        vm.write(tensor.handle, np.full(type.shape, value, type.dtype.numpy))
        model[offset : offset + type.nbytes] = np.frombuffer(
            np.full(type.shape, value, type.dtype.numpy).tobytes(), np.uint8
        )
        if keep:
            live.append((tensor, offset))
        del tensor
        for other, start in live:
            expected = model[start : start + other.type.nbytes].tobytes()
            assert vm.read(other.handle).tobytes() == expected
    assert pad.used == sum(tensor.type.nbytes for tensor, _ in live)
    whole = pad.tensor("u8[64]", 0)
    np.testing.assert_array_equal(vm.read(whole.handle), model)


def test_eager_tensors_compute_in_a_pad() -> None:
    vm = ml.VM()
    with ml.ScratchPad(vm, 128, name="pad") as pad, ml.Arena(vm, "batch"):
        x, bits = pad.tensor("f32[4]", 0), pad.tensor("u32[4]", 0)
        assert isinstance(x, ml.Tensor)
        x += ml.ones(4)
        np.testing.assert_array_equal(bits.numpy(), np.ones(4, np.float32).view(np.uint32))
        np.testing.assert_array_equal((ml.reshape(x, (2, 2)) * 2).numpy(), np.full((2, 2), 2))
        y = pad.tensor("f32[4]", 4)
        refuses(MachineError, "overlaps an operand", ml.negative, x, out=y)
    text = "arena 'pad' was freed: the arena was closed"
    refuses(StaleTensorError, text, ml.add, x, 1)
    refuses(StaleTensorError, text, ml.add, x, x, out=x)
    refuses(StaleTensorError, text, ml.reshape, x, (2, 2))


def test_tensors_at_one_place_have_one_handle_each_type() -> None:
    pad = ScratchPad(VM(), 64)
    x, y = pad.tensor("f32[4]", 0), pad.tensor("f32[4]", 0)
    assert x.handle == y.handle != pad.tensor("f32[2,2]", 0).handle
    views = pad.views_created
    pad.free(x)
    assert (x.handle, y.handle > 0, pad.used) == (0, True, 16)
    for _ in range(100):
        pad.tensor("f32[4]", 0)
    assert pad.views_created == views
    assert len(pad._placement.regions) == 3
    pad.reset()
    assert (y.handle, pad.used, pad.live()) == (0, 0, [])


def test_a_pad_gives_no_tensor_a_place_by_itself() -> None:
    vm = ml.VM()
    pad = ml.ScratchPad(vm, 4096)
    text = r"cannot choose an offset: call tensor\('f32\[4\]', offset\)"
    with pad.allocating(), pytest.raises(ArenaError, match=text):
        ml.zeros(4)
    assert (pad.used, pad.live()) == (0, [])


def test_a_raw_pad_leaves_it_to_the_vm(vm: VM) -> None:
    pad = ScratchPad(vm, 64, raw=True)
    assert pad.tensor("f32[4]", 48).handle
    for offset in (52, -4, 1):
        refuses(ShapeError, "", pad.tensor, "f32[4]", offset)
    gc.collect()
    assert (pad.used, pad.live()) == (0, [])


@cases("nbytes", -1, 1.5, None, True, "much", 2**63)
def test_a_pad_has_a_number_of_bytes(nbytes: Any) -> None:
    refuses(ArenaError, "scratch pad 'scratch': expected a size from 0", ScratchPad, VM(), nbytes)
    assert ScratchPad(VM(), "4 KiB").nbytes == 4096


test_rows = claims("scratch_pad", globals())


def placed(type: Any, offset: Any) -> None:
    pad = ScratchPad(VM(), 64)
    try:
        pad.tensor(type, offset)
    finally:
        assert (pad.used, pad.views_created) == (0, 0)
