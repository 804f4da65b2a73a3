"""f16 and bf16: how they promote and convert, and every op against its kernel for f32."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import OpError
from mlvm.core.op import OPS
from mlvm.core.ops import half
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.core.types import Array, DType, TensorType, bf16, f16, f32, f64, promote
from mlvm.core.vm import VM
from mlvm.machines.local import LocalVM
from mlvm.machines.native import extension
from tests.brief import Before, refuses
from tests.cases import CASES, Case, packed, quantized
from tests.core.programs import put

HALVES = (f16, bf16)
REFERENCE, WORKERS = VM("reference"), LocalVM("workers", workers=2, native=False)
MACHINES = [REFERENCE, WORKERS]
if extension.EXTENSION is not None:
    MACHINES += [LocalVM("native", native=True), LocalVM("threads", native=True, threads=3)]


def bits(x: Array) -> Array:
    """Return bytes that differ where values do: those of each element, and one pattern for every
    nan."""
    x = np.asarray(x)
    if x.dtype in (f16.numpy, bf16.numpy):
        return np.where(np.isnan(half.widened(x)), np.uint16(0x7FFF), x.view(np.uint16))
    if x.dtype.kind in "fc":
        x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return np.ascontiguousarray(x).view(np.uint8)


# --- conversion ----------------------------------------------------------------------


def exactly(value: float, dtype: DType) -> float:
    """The value rounded to nearest even by the definition: among the halves next to it."""
    significant, lowest = (11, -24) if dtype is f16 else (8, -133)
    if value == 0 or not np.isfinite(value):
        return value
    exponent = max(int(np.frexp(value)[1]) - significant, lowest)
    rounded = float(np.ldexp(np.rint(np.ldexp(value, -exponent)), exponent))
    most = 65504.0 if dtype is f16 else float(2.0**128 - 2.0**120)
    return rounded if abs(rounded) <= most else float(np.copysign(np.inf, value))


def near_halves(draw: Any, dtype: DType) -> float:
    """A half, the middle of two, or what is next to either as an f32 or f64."""
    words = draw(st.integers(0, 0x7BFF if dtype is f16 else 0x7F7F))
    pair = np.array([words, words + 1], np.uint16).view(dtype.numpy)
    low, high = half.widened(pair).astype(np.float64)
    value = draw(st.sampled_from([low, low + (min(high, 2.0**128) - low) / 2]))
    step = draw(st.sampled_from([-1.0, 0.0, 1.0])) * draw(st.sampled_from([2.0**-23, 2.0**-50]))
    return float(value * (1 + step) * draw(st.sampled_from([1, -1])))


@given(st.data(), st.sampled_from(HALVES), st.sampled_from([f32, f64]))
def test_values_are_rounded_once_to_nearest_even(data: Any, dtype: DType, source: DType) -> None:
    values = np.array([near_halves(data.draw, dtype) for _ in range(8)]).astype(source.numpy)
    expected = [exactly(float(x), dtype) for x in values]
    for vm in MACHINES[::2]:
        result = launched(vm, "astype", [values], dtype=dtype.name)
        np.testing.assert_array_equal(half.widened(result), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_becomes_what_numpy_and_the_machines_agree_on(dtype: DType) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.numpy)
    wide = half.widened(every)
    if dtype is f16:
        expected = every.astype(np.float32)
    else:
        expected = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    assert np.array_equal(bits(wide), bits(expected))
    for vm in MACHINES:
        again = launched(vm, "astype", [wide], dtype=dtype.name)
        assert np.array_equal(bits(again), bits(every))
        for to in ("f32", "f64", "bool", "f16", "bf16", "c64"):
            ours = launched(vm, "astype", [every], dtype=to)
            assert np.array_equal(
                bits(ours), bits(launched(REFERENCE, "astype", [every], dtype=to))
            )


def test_integers_become_halves_with_one_rounding() -> None:
    whole = np.array([0, 1, -257, 2049, 2051, 65519, 65520, 2**24 + 1, 2**31 - 1], np.int64)
    for vm, dtype in itertools.product(MACHINES, HALVES):
        for kind in (np.int64, np.int32, np.uint16, np.uint8):
            x = whole.astype(kind)
            result = half.widened(launched(vm, "astype", [x], dtype=dtype.name))
            assert result.tolist() == [exactly(float(n), dtype) for n in x]


def test_numpy_does_not_compute_with_bf16() -> None:
    x = half.cast(np.array([1.5, 2.0]), bf16)
    with pytest.raises(TypeError):
        x + x
    untyped: Any = bf16
    for convert in (np.ones(2).astype, np.dtype):
        # By its name alone, numpy would convert to it by integer parts.
        refuses(TypeError, "", convert, untyped)
    assert half.shown(x).tolist() == [1.5, 2.0]
    assert TensorType.of(x) is TensorType("bf16", (2,))


# --- ops -----------------------------------------------------------------------------


def launched(vm: VM, name: str, operands: Sequence[Array], **attributes: Any) -> Array:
    """The op's result on a VM: written where it has a type beforehand."""
    op = OPS[name]
    bound = op.bind(attributes)
    type = op.infer([TensorType.of(x) for x in operands], bound)
    handles = [put(vm, x) for x in operands]
    try:
        if type is None:
            [result] = vm.launch(Program.of_op(name, len(handles), bound, 1), handles)
            return result
        handles = [vm.alloc_tensor(type), *handles]
        vm.launch(Program.of_op(name + ".out", len(handles), bound, 0), handles)
        written = vm.read(handles[0])
        [result_of_launch] = vm.launch(Program.of_op(name, len(handles) - 1, bound, 1), handles[1:])
        assert np.array_equal(bits(result_of_launch), bits(written))
        return written
    finally:
        for handle in handles:
            vm.dealloc_tensor(handle)


def halved(case: Case, dtype: DType) -> tuple[list[Array], dict[str, Any]]:
    """The case with halves for its floats, in operands and in the attribute `dtype`."""
    named = case.attributes.get("dtype") in ("f32", "f64")
    attributes = {**case.attributes, **({"dtype": dtype.name} if named else {})}
    with np.errstate(all="ignore"):
        floats = [half.cast(x, dtype) if x.dtype.kind == "f" else x for x in case.inputs]
    return floats, attributes


def _cases() -> list[Any]:
    """The first case with floats, or with a float dtype, of every op; those without are of ops of
    integers and bools."""
    params = []
    for name, cases in CASES.items():
        if name in quantized.CASES or name in packed.CASES:  # they refuse halves, or lie otherwise
            continue
        if name == "view":  # its result depends on the number of bytes
            continue
        suited = [
            case
            for case in cases
            if any(x.dtype.kind == "f" for x in case.inputs)
            or case.attributes.get("dtype") in ("f32", "f64")
        ]
        params += [pytest.param(name, case, id=f"{name}-{i}") for i, case in enumerate(suited[:1])]
    return params


@pytest.mark.parametrize(("name", "case"), _cases())
def test_an_op_computes_in_f32_and_rounds_once(name: str, case: Case) -> None:
    op = OPS[name]
    for dtype in HALVES:
        operands, attributes = halved(case, dtype)
        type = op.infer([TensorType.of(x) for x in operands], op.bind(attributes))
        wide = [half.widened(x) if half.is_half(x) else x for x in operands]
        computed = "f64" if not op.inputs else "f32"
        if "dtype" in attributes and name != "astype":
            attributes_in_f32 = {**attributes, "dtype": computed}
        else:
            attributes_in_f32 = attributes
        results = {vm: launched(vm, name, operands, **attributes) for vm in MACHINES}
        for vm, result in results.items():
            exact = launched(vm, name, wide, **attributes_in_f32)
            if type is not None:
                assert TensorType.of(result) is type
                if name == "nextafter":  # is of the halves themselves
                    continue
                if name == "uniform":
                    assert (half.widened(result) < 1).all()
                    assert (half.widened(result) <= exact).all()
                    continue
                exact = half.cast(exact, type.dtype)
            elif op.copies_only:
                exact = half.cast(exact, dtype)
            assert np.array_equal(bits(result), bits(exact)), vm.name


def test_what_counts_stays_as_it_is_beside_halves() -> None:
    """bf16 has neither 257 nor 1003: trials, and lengths of sequences."""
    key, n, p = np.zeros(2, np.uint64), np.array([257, 1003]), np.ones((2, 1))
    of_steps, of_states = np.zeros((258, 1, 1)), np.zeros((1, 259, 1, 1))
    floats = [of_steps + 1, np.zeros((1, 1, 1)), of_steps, of_states, np.zeros((1, 1))]
    for vm in MACHINES:
        drawn = launched(vm, "binomial", [key, n, half.cast(p[:, 0], bf16)], shape=(2,))
        assert drawn.tolist() == n.tolist()
        drawn = launched(vm, "multinomial", [key, n, half.cast(p, bf16)], shape=(2,))
        assert drawn[:, 0].tolist() == n.tolist()
        operands = [*(half.cast(x, bf16) for x in floats), n[:1]]
        result = launched(vm, "recurrence_vjp", operands, cell="tanh", reverse=False)
        assert half.widened(result[255:258]).tolist() == [1, 2, 0]


def test_the_walk_leaves_no_op_of_floats_out() -> None:
    walked = {param.values[0] for param in _cases()}
    rest = set(OPS) - walked - {"pack_panels"}  # whose halves tests/eager/capture/test_hoist.py has
    for name in rest:
        op = OPS[name]
        defaults = {each.name: each.default for each in op.attributes.values()}
        for dtype in HALVES:
            operands = [TensorType(dtype, (2, 2))] * max(1, len(op.inputs))
            refuses((OpError, TypeError), "", op.infer, operands, defaults)


@pytest.mark.parametrize("vm", MACHINES, ids=lambda vm: vm.name)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_sum_is_accumulated_in_f32(vm: VM, dtype: DType) -> None:
    """In the half itself it would stop growing at 2048, or at 256."""
    ones = half.cast(np.ones(5000), dtype)
    assert half.widened(launched(vm, "sum", [ones])) == exactly(5000.0, dtype)
    row = ones.reshape(1, -1)
    product = launched(vm, "matmul", [row, row], transpose_y=True)
    assert half.widened(product) == exactly(5000.0, dtype)


@pytest.mark.parametrize("vm", MACHINES, ids=lambda vm: vm.name)
def test_operands_of_several_dtypes(vm: VM) -> None:
    x = np.array([0.1, 1.0, 300.0])
    values = {dtype: half.cast(x, dtype) for dtype in (f16, bf16, f32, f64)}
    for a, b in itertools.product((f16, bf16), (f16, bf16, f32, f64)):
        out = promote(a, b)
        result = launched(vm, "multiply", [values[a], values[b]])
        assert TensorType.of(result).dtype is out
        wide = np.float64 if out is f64 else np.float32
        exact = half.shown(values[a]).astype(wide) * half.shown(values[b]).astype(wide)
        assert np.array_equal(bits(result), bits(half.cast(exact, out)))


INTEGERS = [np.array([257, 2049, 70_000, -513], np.int32), np.array([257, 2**62 + 1, 3, -(2**55)])]


@pytest.mark.parametrize("vm", MACHINES, ids=lambda vm: vm.name)
@pytest.mark.parametrize("dtype", HALVES)
def test_an_integer_beside_a_half_is_made_one(vm: VM, dtype: DType) -> None:
    x = half.cast(np.array([256.0, 2048.0, np.inf, -512.0]), dtype)
    no = np.zeros(4, np.bool_)
    for integers in [*INTEGERS, INTEGERS[0].astype(np.uint16)]:
        cast = half.cast(integers, dtype)
        for name in ("add", "subtract", "equal", "less", "atan2", "pow", "where", "concat"):
            first = [no] if name == "where" else []
            result = launched(vm, name, [*first, x, integers])
            exact = launched(vm, name, [*first, x, cast])
            assert np.array_equal(bits(result), bits(exact)), name
            result = launched(vm, name, [*first, integers, x])
            exact = launched(vm, name, [*first, cast, x])
            assert np.array_equal(bits(result), bits(exact)), name
        chain = [["subtract", -1, 2, 3], ["where", 0, 4, 3, -1], ["less", 1, 2, 3]]
        outs = [vm.alloc_tensor(TensorType(dtype, (4,))), vm.alloc_tensor(TensorType.of(no))]
        handles = [*outs, *[put(vm, value) for value in (x, integers, no)]]
        vm.launch(Program.of_op("fused", 5, {"chain": chain, "outputs": 2}, 0), handles)
        assert np.array_equal(bits(vm.read(handles[0])), bits(launched(vm, "subtract", [x, cast])))
        assert np.array_equal(vm.read(handles[1]), launched(vm, "less", [x, cast]))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_next_half_is_next_to_every_half(dtype: DType) -> None:
    infinity = 0x7C00 if dtype is f16 else 0x7F80
    words = np.arange(infinity + 1, dtype=np.uint16)
    x = words.view(dtype.numpy)
    up, down, zero = (half.cast(np.array(v), dtype) for v in (np.inf, -np.inf, 0.0))
    upwards = np.minimum(words + 1, infinity)
    downwards = np.where(words > 0, words.astype(int) - 1, 0x8001)
    for vm in MACHINES:
        for other, expected in ((up, upwards), (down, downwards)):
            result = launched(vm, "nextafter", [x, other]).view(np.uint16)
            assert np.array_equal(result, expected)
            negative = launched(vm, "negative", [x])
            mirrored = launched(vm, "negative", [other])
            result = launched(vm, "nextafter", [negative, mirrored]).view(np.uint16)
            assert np.array_equal(result, expected.astype(np.uint16) ^ 0x8000)
        nan = half.cast(np.array(np.nan), dtype)
        for operands in ([x, nan], [nan, x]):
            assert np.isnan(half.widened(launched(vm, "nextafter", operands))).all()
        minus = half.cast(np.array(-0.0), dtype)
        assert launched(vm, "nextafter", [zero, minus]).view(np.uint16) == 0x8000
        wide = launched(
            vm, "nextafter", [half.cast(np.array(1.0), dtype), np.full((), 2, np.float32)]
        )
        assert wide == np.nextafter(np.float32(1), np.float32(2))
    if dtype is f16:
        with np.errstate(over="ignore"):
            assert np.array_equal(np.nextafter(x, up[()]).view(np.uint16), upwards)


@pytest.mark.parametrize("vm", MACHINES, ids=lambda vm: vm.name)
def test_what_is_f64_is_rounded_once(vm: VM) -> None:
    value = 1 + 2**-11 + 2**-40  # in f32 the middle of two f16
    padded = launched(vm, "pad", [half.cast(np.zeros(1), f16)], widths=((1, 0),), value=value)
    assert half.widened(padded).tolist() == [1 + 2**-10, 0]
    x = np.array([1 + 2**-11, 2**-40])
    for name in ("sum", "cumulative_sum"):
        attributes = {"axis": 0} if name == "cumulative_sum" else {}
        result = launched(vm, name, [x], dtype="f16", **attributes)
        assert half.widened(result).ravel()[-1] == 1 + 2**-10


@pytest.mark.parametrize("vm", MACHINES, ids=lambda vm: vm.name)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_chain_has_the_bits_of_its_links(vm: VM, dtype: DType) -> None:
    rng = np.random.default_rng(3)
    shape = (3, 700)
    x, y = (half.cast(rng.normal(size=shape), dtype) for _ in range(2))
    w = half.cast(rng.normal(size=(700, 5)), dtype)
    chain = [["add", -1, 2, 3], ["tanh", -2, -1], ["multiply", 0, -2, 2], ["sum", 1, 0, {"axis": 1, "keepdims": False, "dtype": None}]]  # fmt: skip  # noqa: E501
    outs = [vm.alloc_tensor(TensorType(dtype, each)) for each in (shape, (3,))]
    program = Program.of_op("fused", 4, {"chain": chain, "outputs": 2}, 0)
    handles = [*outs, put(vm, x), put(vm, y)]
    vm.launch(program, handles)
    step = partial(launched, vm)
    product = step("multiply", [step("tanh", [step("add", [x, y])]), x])
    assert np.array_equal(bits(vm.read(handles[0])), bits(product))
    assert np.array_equal(bits(vm.read(handles[1])), bits(step("sum", [product], axis=1)))
    headed = [["matmul", -1, 1, 2, {"transpose_x": False, "transpose_y": False}], ["exp", 0, -1]]
    program = Program.of_op("fused", 3, {"chain": headed, "outputs": 1}, 0)
    handles = [vm.alloc_tensor(TensorType(dtype, (3, 5))), handles[2], put(vm, w)]
    vm.launch(program, handles)
    expected = step("exp", [step("matmul", [x, w])])
    assert np.array_equal(bits(vm.read(handles[0])), bits(expected))


def test_machines_give_the_same_bits() -> None:
    """This holds where the kernels of f32 do: conversions of halves add nothing."""
    rng = np.random.default_rng(4)
    for dtype, n in itertools.product(HALVES, (1, 513, 70_000)):
        x, y = (half.cast(rng.normal(size=n) * 100, dtype) for _ in range(2))
        for name, operands in {
            "add": [x, y], "divide": [x, y], "sqrt": [x], "less": [x, y], "maximum": [x, y],
            "floor": [x], "flip": [x], "isnan": [x], "negative": [x], "square": [y],
        }.items():  # fmt: skip
            results = [bits(launched(vm, name, operands)) for vm in MACHINES]
            assert all(np.array_equal(results[0], other) for other in results[1:]), (name, n)


@pytest.mark.parametrize("vm", MACHINES, ids=lambda vm: vm.name)
def test_in_place(vm: VM) -> None:
    x = half.cast(np.array([1.0, 2.0, 3.0, 4.0]), bf16)
    handle, other = put(vm, x), put(vm, x)
    vm.launch(Program.of_op("add.out", 3, {}, 0), [handle, handle, other])
    assert half.widened(vm.read(handle)).tolist() == [2.0, 4.0, 6.0, 8.0]
    part = put(vm, x[:2])
    attributes = {"start": (1,), "step": (2,)}
    vm.launch(Program.of_op("slice_add.out", 3, attributes, 0), [handle, handle, part])
    assert half.widened(vm.read(handle)).tolist() == [2.0, 5.0, 6.0, 10.0]
    attributes = {"start": (0,), "length": (2,), "step": (1,)}
    vm.launch(Program.of_op("slice_set.out", 3, attributes, 0), [handle, handle, part])
    assert half.widened(vm.read(handle)).tolist() == [1.0, 2.0, 6.0, 10.0]


def test_an_index_out_of_range_is_named() -> None:
    x = half.cast(np.ones((3, 2)), bf16)
    for vm in MACHINES:
        with pytest.raises(OpError, match=r"index 3 .*out of range"):
            launched(vm, "take", [x, np.array([3])], axis=0)


def test_kernels_of_ones_own_get_f32() -> None:
    dtypes = []

    def add(out: Array, x: Array, y: Array) -> None:
        dtypes.append({a.dtype.name for a in (out, x, y)})
        np.add(x, y, out)

    vm = VM(kernels={"add": add})
    x = half.cast(np.array([1.5]), bf16)
    assert half.widened(launched(vm, "add", [x, x])).tolist() == [3.0]
    assert dtypes == [{"float32"}] * 2


def test_an_instrument_sees_the_halves_themselves() -> None:
    x = half.cast(np.array([1.5]), bf16)
    types: list[list[str]] = []
    watch = Before(lambda _, xs: types.append([str(TensorType.of(x)) for x in xs]))
    for vm in MACHINES:
        types.clear()
        with vm.instrumented(watch):
            launched(vm, "add", [x, x])
        assert types[0] == ["bf16[1]"] * 3


@pytest.mark.parametrize("vm", MACHINES, ids=lambda vm: vm.name)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_zero_of_either_sign_is_false(vm: VM, dtype: DType) -> None:
    program = assemble(
        ".const one i64[] 1\n.const zero i64[] 0\n.func main 0 *\n    load_arg 0\n"
        "    jump_if_false no\n    push_const one\n    halt\nno:\n    push_const zero\n    halt\n"
    )
    handle = vm.alloc_tensor(TensorType(dtype))
    for value, expected in ((0.0, 0), (-0.0, 0), (1e-7, 1), (float("nan"), 1)):
        vm.write(handle, half.cast(np.array(value), dtype))
        [result] = vm.launch(program, [handle])
        assert result == expected


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i16", "u8", "f32", "i64", "c64"])
def test_a_view_moves_the_bytes_of_halves(dtype: str) -> None:
    operand = np.arange(16, dtype="u2").reshape(2, 8)
    for half_dtype in HALVES:
        x = operand.view(half_dtype.numpy)
        for vm in MACHINES:
            there = launched(vm, "view", (x,), dtype=dtype)
            back = launched(vm, "view", (there,), dtype=half_dtype.name)
            assert there.tobytes() == back.tobytes() == operand.tobytes()
