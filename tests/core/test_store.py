"""The free store against a model of dictionaries and bytearrays."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlvm.core import store as store_module
from mlvm.core.errors import DTypeError, HandleError, ShapeError
from mlvm.core.store import FreeStore, Handle
from mlvm.core.types import ALIGNMENT, MAX_NBYTES, Array, TensorType, aligned_array, f32
from tests.brief import Patch, cases, output_of, refuses
from tests.cases.claim_tests import claims

dtypes = st.sampled_from(["u8", "i16", "f32", "f64"])
types = st.builds(TensorType, dtypes, st.lists(st.integers(0, 3), max_size=2))


@dataclass
class Place:
    """Place of a model's tensor: in its storage's bytes, or in bytes that live as long as a tensor
    names them."""

    type: TensorType
    home: bytearray
    offset: int = 0
    storage: Handle | None = None

    @property
    def bytes(self) -> slice:
        return slice(self.offset, self.offset + self.type.nbytes)


class StoreAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = FreeStore()
        self.storages: dict[Handle, bytearray] = {}
        self.tensors: dict[Handle, Place] = {}
        self.ended: dict[Handle, str] = {}
        self.issued: set[Handle] = set()

    def issue(self, handle: Handle) -> Handle:
        assert handle not in self.issued
        assert handle > 0
        self.issued.add(handle)
        return handle

    def tensor(self, data: st.DataObject) -> Handle:
        return data.draw(st.sampled_from(sorted(self.tensors)), label="tensor")

    def storage(self, data: st.DataObject) -> Handle:
        return data.draw(st.sampled_from(sorted(self.storages)), label="storage")

    @rule(nbytes=st.integers(0, 200))
    def alloc_storage(self, nbytes: int) -> None:
        self.storages[self.issue(self.store.alloc_storage(nbytes))] = bytearray(nbytes)

    @rule(type=types)
    def alloc_tensor(self, type: TensorType) -> None:
        handle = self.issue(self.store.alloc_tensor(type))
        self.tensors[handle] = Place(type, bytearray(type.nbytes))

    @precondition(lambda self: self.storages)
    @rule(data=st.data(), type=types, offset=st.integers(-8, 200))
    def view(self, data: st.DataObject, type: TensorType, offset: int) -> None:
        storage = self.storage(data)
        home = self.storages[storage]
        if offset < 0 or offset + type.nbytes > len(home) or offset % type.dtype.itemsize:
            with pytest.raises(ShapeError, match=f"{re.escape(str(type))}.*offset"):
                self.store.tensor_from_storage(storage, type, offset)
        else:
            handle = self.issue(self.store.tensor_from_storage(storage, type, offset))
            self.tensors[handle] = Place(type, home, offset, storage)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        handle = self.tensor(data)
        place = self.tensors[handle]
        content = data.draw(st.binary(min_size=place.type.nbytes, max_size=place.type.nbytes))
        place.home[place.bytes] = content
        array = self.store.entry(handle).array
        array[...] = np.frombuffer(content, array.dtype).reshape(array.shape)

    def array(self, data: st.DataObject) -> tuple[Array, Place]:
        """An array as a launch may have it: new, or a tensor's, or the first part of one's."""
        if not self.tensors or data.draw(st.booleans(), label="new"):
            type = data.draw(types)
            return aligned_array(type), Place(type, bytearray(type.nbytes))
        handle = self.tensor(data)
        array, place = self.store.entry(handle).array, self.tensors[handle]
        if data.draw(st.booleans(), label="whole"):
            return array, place
        part = array.reshape(-1)[: array.size // 2]
        return part, replace(place, type=TensorType.of(part))

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        array, place = self.array(data)
        handle = self.issue(self.store.alloc_tensor(TensorType.of(array)))
        self.store.replace(handle, array)
        self.tensors[handle] = replace(place)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        handle = self.tensor(data)
        array, place = self.array(data)
        self.store.replace(handle, array)
        self.tensors[handle] = replace(place)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def dealloc_tensor(self, data: st.DataObject) -> None:
        handle = self.tensor(data)
        self.store.dealloc_tensor(handle)
        type = self.tensors.pop(handle).type
        self.ended[handle] = f"was a tensor {type}, freed by dealloc_tensor"

    @precondition(lambda self: self.storages)
    @rule(data=st.data())
    def dealloc_storage(self, data: st.DataObject) -> None:
        storage = self.storage(data)
        self.store.dealloc_storage(storage)
        nbytes = len(self.storages.pop(storage))
        self.ended[storage] = f"was a storage of {nbytes} bytes, freed by dealloc_storage"
        for handle in [h for h, place in self.tensors.items() if place.storage == storage]:
            type = self.tensors.pop(handle).type
            self.ended[handle] = f"was a tensor {type}, freed with storage {storage}"

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        x, y = self.tensor(data), self.tensor(data)
        if self.tensors[x].type is self.tensors[y].type:
            self.store.swap(x, y)
            self.tensors[x], self.tensors[y] = self.tensors[y], self.tensors[x]
        else:
            refuses(
                DTypeError, "swap: expected two tensors of one type, got ", self.store.swap, x, y
            )

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def use_after_end(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.ended)))
        live = next(iter(self.tensors), handle)
        for use in (
            lambda: self.store.entry(handle), lambda: self.store.dealloc_tensor(handle),
            lambda: self.store.dealloc_storage(handle),
            lambda: self.store.replace(handle, aligned_array(TensorType(f32))),
            lambda: self.store.tensor_from_storage(handle, TensorType(f32), 0),
            lambda: self.store.swap(handle, live), lambda: self.store.swap(live, handle),
        ):  # fmt: skip
            refuses(HandleError, re.escape(f" {handle} {self.ended[handle]}"), use)

    @precondition(lambda self: self.tensors and self.storages)
    @rule(data=st.data())
    def confuse(self, data: st.DataObject) -> None:
        tensor, storage = self.tensor(data), self.storage(data)
        with pytest.raises(
            HandleError, match=f"handle {storage} refers to a storage, not to a tensor"
        ):
            self.store.dealloc_tensor(storage)
        type = re.escape(str(self.tensors[tensor].type))
        with pytest.raises(
            HandleError, match=f"{tensor} refers to a tensor {type}, not to a storage"
        ):
            self.store.dealloc_storage(tensor)

    @invariant()
    def consumed_is_exact(self) -> None:
        """Each storage counts once, however many tensors name it."""
        own = {id(p.home): len(p.home) for p in self.tensors.values() if p.storage is None}
        assert self.store.consumed == sum(own.values()) + sum(map(len, self.storages.values()))

    @invariant()
    def tensors_are_what_the_model_says(self) -> None:
        for handle, place in self.tensors.items():
            entry = self.store.entry(handle)
            assert entry.type is TensorType.of(entry.array) is place.type
            assert entry.array.tobytes() == bytes(place.home[place.bytes])
            if place.type.nbytes:
                assert entry.array.ctypes.data % ALIGNMENT == place.offset % ALIGNMENT


TestStoreAgainstModel = StoreAgainstModel.TestCase


@cases("nbytes", -1, MAX_NBYTES + 1)
def test_an_impossible_size(nbytes: int) -> None:
    store = FreeStore()
    text = f"alloc_storage: expected a size of 0 to {MAX_NBYTES} bytes, got {nbytes}"
    refuses(ShapeError, text, store.alloc_storage, nbytes)
    assert store.consumed == 0


def test_the_fate_of_long_ended_handles_is_forgotten(monkeypatch: Patch) -> None:
    monkeypatch.setattr(store_module, "_TOMBSTONES", 2)
    store = FreeStore()
    handles = [store.alloc_tensor(TensorType(f32)) for _ in range(3)]
    for handle in handles:
        store.dealloc_tensor(handle)
    refuses(HandleError, "it was never created, or freed long ago", store.entry, handles[0])
    refuses(HandleError, "freed by dealloc_tensor", store.entry, handles[1])


def test_caches_are_cleared_when_a_handle_may_name_another_array() -> None:
    store = FreeStore()
    type = TensorType(f32, (2,))
    storage, x, y, z = store.alloc_storage(8), *(store.alloc_tensor(type) for _ in range(3))
    cache: dict[Any, Any] = {}

    def survives(change: Callable[[], object]) -> bool:
        cache[x] = store.entry(x).array
        store.caches[0] = cache
        change()
        return bool(cache)

    assert survives(lambda: store.alloc_tensor(type))
    other = FreeStore()
    foreign = other.entry(other.alloc_tensor(type))
    assert survives(lambda: store.adopt(foreign))
    assert survives(lambda: store.tensor_from_storage(storage, type, 0))
    assert not survives(lambda: store.swap(x, y))
    assert not survives(lambda: store.replace(y, aligned_array(type)))
    assert not survives(lambda: store.dealloc_tensor(z))
    assert not survives(lambda: store.dealloc_storage(storage))


def test_what_was_replaced_is_free() -> None:
    store = FreeStore()
    x = store.alloc_tensor(TensorType(f32, (100,)))
    memory = weakref.ref(store.entry(x).array.base)
    store.replace(x, aligned_array(TensorType("u8")))
    assert memory() is None
    assert store.consumed == 1


def test_a_read_only_array_is_copied() -> None:
    store = FreeStore()
    constant = np.arange(3)
    constant.flags.writeable = False
    handle = store.alloc_tensor(TensorType("i64", (3,)))
    store.replace(handle, constant)
    array = store.entry(handle).array
    assert array.flags.writeable
    assert array.ctypes.data % ALIGNMENT == 0
    np.testing.assert_array_equal(array, constant)
    assert store.consumed == 24


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked here")
def test_a_forked_process_that_serves_has_numbers_of_its_own() -> None:
    """Also where its parent has served before."""
    code = """
import os
from mlvm.core import store
store.number_apart()
child = os.fork()
store.number_apart()
print(f"{next(store._handles) >> 32}\\n", end="", flush=True)
if child: os.waitpid(child, 0)
"""
    assert len({*output_of("-c", code).split()}) == 2


test_rows = claims("store", globals())
