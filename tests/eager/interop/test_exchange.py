"""Tensors and other libraries: memory that is lent, DLPack both ways, copies and pickles."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CopyError, DLPackError, ExchangeError, StaleTensorError
from mlvm.core.types import DType
from mlvm.eager.interop.exchange import OURS
from mlvm.machines.wire import WireVM
from tests.brief import cases, refuses

local = pytest.mark.local(reason="only a VM of this process lends memory")
untyped: Any = ml


def lent(x: ml.Tensor) -> np.ndarray[Any, Any]:
    return np.from_dlpack(x, copy=False)


# --- memory that is lent -------------------------------------------------------------


UFUNCS = [
    name
    for name in dir(np)
    if isinstance(ufunc := getattr(np, name), np.ufunc)
    and ufunc.signature is None
    and (hasattr(ml, name) or hasattr(ml, OURS.get(ufunc.__name__, "")))
]


@pytest.mark.parametrize("name", UFUNCS)
def test_a_ufunc_with_the_name_of_a_function_here_calls_it(name: str) -> None:
    ufunc = getattr(np, name)
    array = np.asarray([0.25, 0.5], np.float32)
    if name.startswith(("bitwise", "invert", "left", "right")):
        array = np.asarray([1, 2])
    if name.startswith("logical"):
        array = np.asarray([True, False])
    operands = [array] * ufunc.nin
    if name == "ldexp":
        operands[1] = np.asarray([1, -2], np.int32)
    result = ufunc(*[ml.asarray(each) for each in operands])
    assert isinstance(result, ml.Tensor)
    with np.errstate(invalid="ignore"):  # of acosh
        np.testing.assert_allclose(result.numpy(), ufunc(*operands), rtol=1e-6)


@local
@pytest.mark.parametrize("dtype", [name for name in DType.all if name != "bf16"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_memory_is_lent_read_only(dtype: str, shape: tuple[int, ...]) -> None:
    x = ml.ones(shape, DType.named(dtype))
    for view in (lent(x), np.from_dlpack(x), np.asarray(x, copy=False)):
        np.testing.assert_array_equal(view, np.ones(shape, x.dtype.numpy), strict=True)
        assert not view.flags.writeable
        if x.size:
            assert np.shares_memory(view, lent(ml.reshape(x, -1)))
    copies = np.asarray(x), np.asarray(x, "c16"), np.array(x), np.array(x, "c16"), x.numpy()
    assert [each.flags.writeable for each in copies] == [False, False, True, True, True]


@local
def test_an_update_moves_the_tensor_and_leaves_what_is_lent() -> None:
    x = ml.arange(3)
    view = lent(x)
    x += 10
    assert view.tolist() == [0, 1, 2]
    before = lent(x).ctypes.data
    x[0] = 7
    assert x.tolist() == [7, 11, 12]
    del view
    gc.collect()
    assert lent(x).ctypes.data == before  # nobody has it any more: it was written where it is


@local
def test_what_is_lent_outlives_tensor_reset_and_arena() -> None:
    arena = ml.Arena(ml.VM("lender"), "lends")
    with arena:
        one, other = lent(ml.full(5, 1)), lent(ml.full(5, 2))
        temporary = lent(ml.full(5, 3))
        del temporary
    capacity = arena.capacity
    for _ in range(3):
        with arena:
            tensors = [ml.full(5, 9) for _ in range(4)]
            assert not any(np.shares_memory(lent(x), one) for x in tensors)
            del tensors
    assert arena.capacity == capacity
    assert arena.used == 0
    arena.close()
    again = ml.Arena(ml.default_vm(), "another")
    with again:
        ml.full(5, 9)
    assert (one.tolist(), other.tolist()) == ([1] * 5, [2] * 5)


@local
def test_memory_comes_back_when_the_last_who_has_it_lets_go() -> None:
    arena = ml.Arena(ml.default_vm(), "lends")
    with arena:
        x = ml.full(5, 1)
        views = [lent(x), lent(ml.reshape(x, (1, 5)))[0, 1:]]
        address = lent(x).ctypes.data
    addresses = []
    for _ in range(3):
        with arena:
            addresses.append(lent(ml.full(5, 2)).ctypes.data)
        if views:
            views.pop()
        gc.collect()
    assert addresses[0] != address
    assert addresses[2] == address
    for i in range(50):
        with arena:
            view = lent(ml.full(5, i))
        assert view.tolist() == [i] * 5
    assert len(arena._placement.regions) < 5


@local
def test_what_is_freed_is_lent_on() -> None:
    arena = ml.Arena(ml.default_vm(), "lends", capacity=64)
    with arena.allocating():
        x = ml.full(5, 1)
        view = lent(x)
        arena.free(x)
        refuses(StaleTensorError, "", lent, x)
        refuses(ml.errors.MlvmError, "needs 64 bytes", ml.full, 5, 2)
        assert view.tolist() == [1] * 5
        del view
        assert ml.full(5, 2).tolist() == [2] * 5


def nowhere_to_lend(x: ml.Tensor) -> None:
    for refused in (lent, lambda x: np.asarray(x, copy=False)):
        error = refuses(CopyError, "no memory in this process that", refused, x)
        assert isinstance(error, BufferError)
        assert isinstance(error, ValueError)


@pytest.mark.local(reason="the wire needs a VM of this process behind it")
def test_what_has_no_memory_here_is_copied() -> None:
    with ml.Arena(WireVM(ml.VM("behind")), "far"):
        x = ml.arange(3)
        nowhere_to_lend(x)
        assert np.from_dlpack(x).flags.writeable
        np.testing.assert_array_equal(np.from_dlpack(x), [0, 1, 2])


def test_what_has_no_values_is_refused() -> None:
    x = ml.ones(3, device=ml.DryVM())
    nowhere_to_lend(x)
    refuses(ExchangeError, "no values to read", np.from_dlpack, x)

    def exported(x: ml.Tensor, copy: bool | None) -> ml.Tensor:
        np.from_dlpack(x + 1.0, copy=copy)
        return x

    refuses(ExchangeError, "cannot be exported", ml.capture(exported), ml.ones(3), None)
    refuses(CopyError, "no memory in this process that", ml.capture(exported), ml.ones(3), False)


@local
def test_memory_of_a_pad_is_not_lent() -> None:
    pad = ml.ScratchPad(ml.default_vm(), 128)
    x = pad.tensor("f32[4]", 0)
    nowhere_to_lend(x)
    assert np.from_dlpack(x).flags.writeable


# --- DLPack --------------------------------------------------------------------------


@local
def test_what_a_consumer_may_ask() -> None:
    x = ml.arange(3)
    assert x.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(x.__dlpack__(max_version=(1, 0)))
    assert "dltensor_versioned" not in repr(x.__dlpack__())
    refuses(CopyError, "shared read-only", x.__dlpack__, copy=False)
    copied = np.from_dlpack(x, copy=True)
    copied.fill(1)
    assert x.tolist() == [0, 1, 2]
    refuses(ExchangeError, "the processor", x.__dlpack__, dl_device=(2, 0))
    refuses(ExchangeError, "expected stream=None", lambda: untyped.ones(1).__dlpack__(stream=1))


def test_from_dlpack() -> None:
    source = np.arange(6.0).reshape(2, 3)
    x = ml.from_dlpack(source.T)
    source += 1
    assert (x.type, x[0].tolist()) == (ml.TensorType("f64", (3, 2)), [0.0, 3.0])
    vm = ml.VM("other")
    y = ml.from_dlpack(source, device=vm, copy=True)
    assert y.device is vm
    z = ml.from_dlpack(x)
    assert z is not x
    assert z.handle == x.handle
    refuses(CopyError, "ndarray", ml.from_dlpack, source, copy=False)
    refuses(CopyError, "f64", ml.from_dlpack, x, device=vm, copy=False)
    refused = refuses(DLPackError, "an object with __dlpack__, got a list", ml.from_dlpack, [1])
    assert isinstance(refused, AttributeError)


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    tracked = torch.tensor([1.0, 2.5], requires_grad=True)
    for read in (ml.asarray, ml.from_dlpack):
        assert read(torch.arange(3)).type == ml.TensorType("i64", (3,))
        sources = {"f32": tracked, "bf16": tracked.bfloat16(), "f16": tracked.half().detach()}
        for dtype, source in sources.items():
            assert read(source).type == ml.TensorType(dtype, (2,))
            assert read(source).tolist() == [1.0, 2.5]
        assert read(torch.tensor([1j]).conj()).tolist() == [-1j]
    x = ml.asarray([1.0, 2.0])
    assert torch.from_dlpack(x).tolist() == [1.0, 2.0]
    assert torch.asarray(x).tolist() == [1.0, 2.0]


# --- values copied in ----------------------------------------------------------------


def test_what_only_has_an_array_interface_keeps_its_dtype() -> None:
    class Image:
        pixels = np.full((2, 2), 7, np.uint8)

        def __init__(self) -> None:
            self.__array_interface__ = self.pixels.__array_interface__

    assert ml.asarray(Image()).type == ml.TensorType("u8", (2, 2))


# --- copies and pickles --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "f32", "c128"])
def test_copies_and_pickles(dtype: str) -> None:
    x = ml.ones((2, 3), dtype)
    arena = ml.Arena(ml.default_vm(), "copies")
    copiers: list[Any] = [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
    for again in copiers:
        with arena:
            y = again(x)
            assert y.arena is arena
            assert (y.type, y.tolist()) == (x.type, x.tolist())
            if dtype != "bool":
                y += y
            assert x.tolist() == ml.ones((2, 3), dtype).tolist()


def test_a_copy_lives_where_the_tensor_lives() -> None:
    with ml.Arena(ml.VM("there"), "there"):
        x = ml.ones(2)
        for again in (copy.copy, copy.deepcopy):
            with ml.Arena(ml.default_vm(), "here"):
                y = again(x)
            assert y.device is x.device
            assert y.tolist() == [1, 1]


# --- gradients ------------------------------------------------------------------------


@pytest.mark.local(reason="memory is lent")
@cases(
    "through",
    lambda x: np.clip(x, 0, 2),
    lambda x: np.array(x),
    lambda x: np.stack([x, x]),
    np.from_dlpack,
)
def test_no_gradient_is_lost_in_another_library(through: Any) -> None:
    x = ml.asarray([1.0, 2.0, 3.0])
    with pytest.raises(ml.errors.GradientError, match="another library cannot compute gradients"):
        ml.grad(lambda x: ml.sum(x * ml.asarray(through(x))))(x)
    constant = ml.grad(lambda x: ml.sum(x * through(ml.stop_gradient(x)[None])[0]))
    assert constant(x).shape == (3,)
