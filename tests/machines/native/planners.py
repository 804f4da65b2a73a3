"""Running an op by its native kernel alone, and by its reference kernel, on the same arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.machine.fused import Link
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes
from mlvm.core.types import Array, TensorType, aligned_array, aligned_copy
from mlvm.machines.native import extension

if extension.EXTENSION is None:
    pytest.skip("the native machine was not built", allow_module_level=True)

from mlvm.machines.native._native import Pool
from mlvm.machines.native.kernels import native_kernels

POOLS = {threads: Pool(threads, worth_sharing=0) for threads in (1, 2, 3, 5)}
KERNELS = {threads: native_kernels(pool) for threads, pool in POOLS.items()}


def prepared(name: str, *inputs: Any, **attributes: Any) -> tuple[list[Array], Attributes]:
    """A result full of 0xFF bytes and the operands, as a VM has them; and the op's attributes."""
    op = OPS[name]
    bound = op.bind(attributes)
    operands = [aligned_copy(np.asarray(x)) for x in inputs]
    type = op.infer([TensorType.of(x) for x in operands], bound)
    assert type is not None
    out = aligned_array(type)
    out.reshape(-1).view(np.uint8)[...] = 0xFF
    return [out, *operands], bound


def planned(name: str, *inputs: Any, **attributes: Any) -> bool:
    """Return whether the op has a native kernel for operands of these types."""
    op = OPS[name]
    bound = op.bind(attributes)
    types = [TensorType.of(np.asarray(x)) for x in inputs]
    out = op.infer(types, bound)
    kernel: Any = KERNELS[1].get(name)
    return kernel is not None and out is not None and kernel.call([out, *types], bound) is not None


def assert_planned(name: str, *inputs: Any, **attributes: Any) -> None:
    """Check that the op has a native kernel for operands of these types."""
    dtypes = ", ".join(TensorType.of(np.asarray(x)).dtype.name for x in inputs)
    assert planned(name, *inputs, **attributes), f"no native row of {name} for {dtypes}"


def native(name: str, *inputs: Any, threads: int = 1, **attributes: Any) -> Array:
    """The op's result by its native kernel."""
    arrays, bound = prepared(name, *inputs, **attributes)
    KERNELS[threads][name](*arrays, **bound)
    return arrays[0]


def on_threads(
    name: str, *inputs: Any, threads: tuple[int, ...] = (1, 2, 3), **attributes: Any
) -> Array:
    """The op's result by its native kernel, which gives the same bits on each number of threads."""
    assert_planned(name, *inputs, **attributes)
    result, *others = (native(name, *inputs, threads=n, **attributes) for n in threads)
    assert {other.tobytes() for other in others} <= {result.tobytes()}
    return result


def assert_same_bits(
    name: str, *inputs: Any, threads: tuple[int, ...] = (1, 2, 3), **attributes: Any
) -> None:
    """Check that there is a native kernel, with the reference's bits on each number of threads."""
    result = on_threads(name, *inputs, threads=threads, **attributes)
    assert result.tobytes() == reference(name, *inputs, **attributes).tobytes()


def assert_same_in_place(name: str, x: Array, *inputs: Array, **attributes: Any) -> None:
    """Check the reference's bits, also where the result is written over the first operand."""
    assert_same_bits(name, x, *inputs, **attributes)
    (out, _, *others), bound = prepared(name, x, *inputs, **attributes)
    out[...] = x
    KERNELS[2][name](out, out, *others, **bound)
    assert out.tobytes() == reference(name, x, *inputs, **attributes).tobytes()


def links(*described: tuple[Any, ...]) -> list[Link]:
    """Links of a chain: the name of an op, the number of its result, and those of its operands."""
    return [
        Link(OPS[name], target, tuple(sources), OPS[name].bind({}) or NO_ATTRIBUTES)
        for name, target, *sources in described
    ]


def assert_near(
    name: str,
    *inputs: Any,
    rtol: float = 1e-4,
    atol: float = 1e-3,
    threads: tuple[int, ...] = (1, 2, 3),
    **attributes: Any,
) -> Array:
    """Check the native kernel against the reference of f64, and that threads change no bit."""
    result = on_threads(name, *inputs, threads=threads, **attributes)
    wide = [x.astype("f8") if x.dtype == np.float32 else x for x in inputs]
    np.testing.assert_allclose(result, reference(name, *wide, **attributes), rtol, atol)
    return result


def reference(name: str, *inputs: Any, **attributes: Any) -> Array:
    """The op's result by its reference kernel."""
    arrays, bound = prepared(name, *inputs, **attributes)
    with np.errstate(all="ignore"):
        OPS[name].kernel(*arrays, **bound)
    return arrays[0]
