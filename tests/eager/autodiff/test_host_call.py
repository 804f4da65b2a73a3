"""ml.host_call: host functions as part of eager code, and gradients through them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    ArgumentError,
    CaptureError,
    DTypeError,
    GradientError,
    HandleError,
    HostFunctionError,
    MachineError,
    MlvmError,
    UnknownFunctionError,
)
from mlvm.core.machine.frame import Frame
from mlvm.core.types import Array
from mlvm.eager.autodiff import host_call as calls
from mlvm.eager.autodiff.tape import Tape
from mlvm.eager.tensor.update import live_tapes
from tests.brief import cases, refuses
from tests.machines.libraries import EXAMPLE, compile_c, needs_compiler
from tests.wired import machine


def param(frame: Frame, i: int) -> Array:
    x = frame.param(i)
    assert isinstance(x, np.ndarray)
    return x


def sine(frame: Frame) -> None:
    frame.push(np.sin(param(frame, 0)))


def scale(frame: Frame) -> None:
    frame.push(param(frame, 0) * frame.attributes.get("by", 1))


def product(frame: Frame) -> None:
    frame.push(param(frame, 0) * param(frame, 1))


def polar(frame: Frame) -> None:
    """( x y -- r angle n ) with an integer between for good measure."""
    x, y = param(frame, 0), param(frame, 1)
    frame.push(np.hypot(x, y))
    frame.push(7)
    frame.push(np.arctan2(y, x))
    frame.push(np.array(x.size))


@pytest.fixture
def vm() -> Iterator[ml.VM]:
    vm = ml.VM("calls")
    for fn in (sine, scale, product, polar):
        machine(vm).register(fn.__name__, fn)
    machine(vm).register("drop", lambda frame: None)
    with ml.Arena(vm, "calls"):
        yield vm
    assert not any(isinstance(tape, Tape) and tape.nodes for tape in live_tapes)


def tensor(*values: float) -> ml.Tensor:
    return ml.asarray(np.array(values))


def sine_vjp(g: ml.Tensor, x: ml.Tensor, out: ml.Tensor) -> ml.Tensor:
    return g * ml.cos(x)


def own_sine(x: ml.Tensor) -> ml.Tensor:
    """A sine whose derivative, and its derivative, go through `call` again."""
    return ml.host_call("sine", x, vjp=lambda g, x, out: g * own_sine(x + np.pi / 2))


POLAR_VJP = (
    lambda g, x, y, out: g[0] * x / out[0] - g[1] * y / out[0] ** 2,
    lambda g, x, y, out: g[0] * y / out[0] + g[1] * x / out[0] ** 2,
)

# --- values --------------------------------------------------------------------------


def test_one_several_and_no_results(vm: ml.VM) -> None:
    x = tensor(3.0, 0.5)
    y = ml.host_call("sine", x)
    assert isinstance(y, ml.Tensor)
    np.testing.assert_array_equal(y.numpy(), np.sin([3.0, 0.5]))
    r, angle, size = ml.host_call("polar", x, tensor(4.0, 0.0))
    assert r.numpy().tolist() == [5.0, 0.5]
    np.testing.assert_allclose(angle.numpy(), [np.arctan2(4, 3), 0])
    assert size.item() == 2
    assert ml.host_call("drop", x) is None
    assert ml.host_call("drop") is None


def test_a_result_is_a_copy(vm: ml.VM) -> None:
    machine(vm).register("same", lambda frame: frame.push(frame.param(0)))
    x = tensor(1.0)
    y = ml.host_call("same", x)
    y += 1.0
    assert x.item() == 1.0


def test_attributes_tell_programs_apart(vm: ml.VM) -> None:
    x = tensor(2.0)
    for by in (1, 1.0, True, -0.0, 0.0, np.float64(3.0), 4):
        assert str(ml.host_call("scale", x, by=by).item()) == str(2.0 * by)
    assert ml.host_call("scale", x).item() == 2.0
    attributes: list[Any] = []
    machine(vm).register("see", lambda frame: attributes.append(dict(frame.attributes)))
    ml.host_call("see", a=[1, (True, None)], name="x", vm="y")
    assert attributes == [{"a": (1, (True, None)), "name": "x", "vm": "y"}]


def test_a_call_is_one_program_however_often(vm: ml.VM) -> None:
    x = tensor(2.0)
    ml.host_call("scale", x, by=5)
    before = len(calls._programs)
    for _ in range(3):
        ml.host_call("scale", x, by=5)
    assert len(calls._programs) == before


def test_a_replaced_function_is_seen(vm: ml.VM) -> None:
    x = tensor(2.0)
    ml.host_call("scale", x)
    machine(vm).register("scale", lambda frame: frame.push(np.array(9.0)))
    assert ml.host_call("scale", x).item() == 9.0


@cases(
    "args, attributes, error, message",
    (("sina",), {}, UnknownFunctionError, r"no function 'sina' \(did you mean 'sin"),
    ((7,), {}, UnknownFunctionError, "expected a function's name, a str, got 7"),
    (
        ("sine", 3.0),
        {},
        DTypeError,
        r"^sine\(\): expected tensors, got a float; convert with ml.asarray$",
    ),
    (("scale",), {"by": {}}, ArgumentError, r"^scale\(\): expected attributes of None.*got a dict"),
    (("scale",), {"by": [np.ones(2)]}, ArgumentError, "got an ndarray"),
    (
        ("add.out",),
        {},
        ArgumentError,
        "expected a function that returns results; use ml.add with out=",
    ),
    (("sine",), {}, MachineError, "sine: parameter 0 does not exist; the call has 0"),
)
def test_what_is_refused(
    vm: ml.VM, args: Any, attributes: Any, error: type[Exception], message: str
) -> None:
    refuses(error, message, ml.host_call, *args, **attributes)


def test_operands_of_another_vm_are_refused(vm: ml.VM) -> None:
    with ml.Arena(ml.VM("other"), "other"):
        x = ml.zeros((2,))
        with ml.Arena(vm, "here"), pytest.raises(HandleError, match="is on the VM other"):
            ml.host_call("sine", x)


# --- gradients -----------------------------------------------------------------------


def test_gradients_nest(vm: ml.VM) -> None:
    x = tensor(0.5)
    first = ml.grad(lambda x: ml.sum(own_sine(x)))
    second = ml.grad(lambda x: ml.sum(first(x)))
    third = ml.grad(lambda x: ml.sum(second(x)))
    derivatives = [f(x).item() for f in (first, second, third)]
    np.testing.assert_allclose(derivatives, [np.cos(0.5), -np.sin(0.5), -np.cos(0.5)])


def test_several_operands_and_results(vm: ml.VM) -> None:
    """r^2 angle, whose gradient is 2 x angle - y and 2 y angle + x."""

    def loss(x: ml.Tensor, y: ml.Tensor) -> Any:
        r, angle, _ = ml.host_call("polar", x, y, vjp=POLAR_VJP)
        return ml.sum(r * r * angle)

    x, y = np.array([3.0, -1.0]), np.array([4.0, 0.5])
    dx, dy = ml.grad(loss, (0, 1))(tensor(*x), tensor(*y))
    angle = np.arctan2(y, x)
    np.testing.assert_allclose(dx.numpy(), 2 * x * angle - y)
    np.testing.assert_allclose(dy.numpy(), 2 * y * angle + x)
    [only_y] = [ml.grad(loss, 1)(tensor(*x), tensor(*y))]
    np.testing.assert_array_equal(only_y.numpy(), dy.numpy())


def test_a_result_that_is_no_float_has_no_cotangent(vm: ml.VM) -> None:
    cotangents: list[Any] = []

    def rule(g: Any, x: ml.Tensor, y: ml.Tensor, out: Any) -> ml.Tensor:
        cotangents.append(g)
        return x

    x = tensor(3.0)
    ml.grad(lambda x: ml.sum(ml.host_call("polar", x, x, vjp=(rule, rule))[1]))(x)
    for zeros, one, none in cotangents:
        assert (zeros.numpy().tolist(), one.numpy().tolist(), none) == ([0.0], [1.0], None)
    assert len(cotangents) == 2


def test_a_cotangent_is_summed_to_a_broadcast_operand(vm: ml.VM) -> None:
    def loss(x: ml.Tensor, y: ml.Tensor) -> Any:
        rules = (lambda g, x, y, out: g * y, lambda g, x, y, out: g * x)
        return ml.sum(ml.host_call("product", x, y, vjp=rules))

    dx, dy = ml.grad(loss, (0, 1))(ml.asarray(2.0), ml.asarray([3.0, 4.0]))
    assert dx.numpy().tolist() == 7.0
    assert dy.numpy().tolist() == [2.0, 2.0]


def test_without_a_rule_a_gradient_names_the_function(vm: ml.VM) -> None:
    x = tensor(1.0)
    with pytest.raises(GradientError, match="sine has no gradient for operand 0, an f64"):
        ml.grad(lambda x: ml.sum(ml.host_call("sine", x)))(x)
    rules = (lambda g, x, y, out: g * y, None)
    with pytest.raises(GradientError, match="product has no gradient for operand 1"):
        ml.grad(lambda x: ml.sum(ml.host_call("product", x, x, vjp=rules)))(x)


def test_an_operand_that_nothing_depends_on_needs_no_rule(vm: ml.VM) -> None:
    rules = (lambda g, x, y, out: g * y, None)
    y = tensor(5.0)
    gradient = ml.grad(lambda x: ml.sum(ml.host_call("product", x, y, vjp=rules)))(tensor(1.0))
    assert gradient.item() == 5.0
    stopped = ml.grad(lambda x: ml.sum(x * ml.host_call("sine", ml.stop_gradient(x))))(y)
    np.testing.assert_allclose(stopped.numpy(), np.sin([5.0]))


@cases(
    "vjp, message",
    (lambda g, x, out: None, r"vjp for operand 0 to return an f64\[2\], got None"),
    (lambda g, x, out: ml.zeros((3,)), r"operand 0 to return an f64\[2\], got f32\[3\]"),
    (lambda g, x, out: ml.asarray([1, 2]), r"got i64\[2\]"),
    (lambda g, x, out: ml.asarray(1.0), r"got f32\[\]"),
)
def test_a_rule_that_returns_no_cotangent(vm: ml.VM, vjp: Any, message: str) -> None:
    with pytest.raises(GradientError, match=message):
        ml.grad(lambda x: ml.sum(ml.host_call("sine", x, vjp=vjp)))(tensor(1.0, 2.0))


@pytest.mark.parametrize("vjp", ["sine", (sine_vjp, sine_vjp), (), (3,)])
def test_a_vjp_that_is_none(vm: ml.VM, vjp: Any) -> None:
    text = "expected a function as vjp, or for 1 operand a tuple of 1"
    refuses(GradientError, text, ml.host_call, "sine", tensor(1.0), vjp=vjp)


def test_what_a_rule_needs_is_kept_when_it_is_updated(vm: ml.VM) -> None:
    y = tensor(2.0)

    def loss(x: ml.Tensor) -> Any:
        rules = (lambda g, x, y, out: g * y, None)
        out = ml.host_call("product", x, y, vjp=rules)
        y.__iadd__(1.0)
        return ml.sum(out)

    assert ml.grad(loss)(tensor(3.0)).item() == 2.0
    assert y.item() == 3.0


# --- functions in C ------------------------------------------------------------------


@pytest.mark.processor(reason="C functions work in memory of the host")
@needs_compiler
def test_a_c_function_with_a_gradient(vm: ml.VM, tmp_path: Path) -> None:
    machine(vm).register_library(compile_c(EXAMPLE, tmp_path / "example_c.so", "-std=c99"))

    def softclip(x: ml.Tensor) -> Any:
        rule = lambda g, x, out: g * (1.0 - (out / 2.0) ** 2)  # noqa: E731
        return ml.host_call("softclip", x, limit=2.0, vjp=rule)

    def reference(x: ml.Tensor) -> Any:
        return 2.0 * ml.tanh(x / 2.0)

    x = tensor(-3.0, 0.1, 2.0)
    np.testing.assert_allclose(softclip(x).numpy(), reference(x).numpy())
    for order in range(2):
        ours, theirs = softclip, reference
        for _ in range(order + 1):
            ours = ml.grad(lambda x, f=ours: ml.sum(f(x)))  # type: ignore[misc]
            theirs = ml.grad(lambda x, f=theirs: ml.sum(f(x)))  # type: ignore[misc]
        np.testing.assert_allclose(ours(x).numpy(), theirs(x).numpy(), rtol=1e-10)
    least, greatest = ml.host_call("min_max", ml.asarray([5, -2, 3]))
    assert [least.item(), greatest.item()] == [-2, 5]
    assert ml.host_call("nothing", x) is None
    refuses(HostFunctionError, "softclip: limit must be > 0", ml.host_call, "softclip", x, limit=-1)


# --- with a type rule -----------------------------------------------------------------------


@pytest.fixture
def typed(vm: ml.VM) -> ml.VM:
    """A VM with functions that have type rules. A VM elsewhere gets none."""
    if not hasattr(vm, "register"):
        pytest.skip("functions are registered where the VM is")

    def spread(frame: Frame) -> None:
        x = param(frame, 0)
        frame.push(x.min())
        frame.push(x + np.float32(frame.attributes["k"]))

    vm.register("squares", lambda f: f.push(param(f, 0) ** 2), nparams=1, result=lambda x: x)
    vm.register("product", lambda f: f.push(param(f, 0) * param(f, 1)), result=lambda x, y: x)
    vm.register("spread", spread, result=lambda x, k: (ml.TensorType(x.dtype), x))
    vm.register("short", lambda f: f.push(param(f, 0)[:1]), result=lambda x: x)
    return vm


def squared(x: ml.Tensor) -> Any:
    return ml.host_call("squares", x, vjp=lambda g, x, out: 2.0 * g * x)


def test_a_typed_function_is_captured(typed: ml.VM) -> None:
    with ml.use(typed):
        step = ml.capture(lambda x: ml.host_call("spread", squared(x), k=2), check=1)
        for n in (2, 3, 4, 5, 3):
            x = ml.arange(float(n))
            least, rest = step(x)
            assert (float(least), rest.tolist()) == (0.0, [i * i + 2.0 for i in range(n)])
        rows = ml.reshape(ml.arange(6.0), (2, 3))
        total = ml.capture(lambda xs: ml.scan(lambda c, x: (c + squared(x), None), ml.zeros(3), xs))
        assert total(rows)[0].tolist() == [9.0, 17.0, 29.0]
        either = ml.capture(lambda x: ml.cond(x[0] > 0.0, lambda: squared(x), lambda: x))
        assert either(ml.asarray([2.0])).tolist() == [4.0]
        assert either(ml.asarray([-2.0])).tolist() == [-2.0]


@pytest.mark.parametrize("wrap", [lambda fn: fn, ml.capture])
def test_a_typed_function_is_transformed(typed: ml.VM, wrap: Any) -> None:
    def loss(x: ml.Tensor) -> ml.Tensor:
        return ml.sum(squared(x * 1.0))

    with ml.use(typed):
        x = ml.reshape(ml.arange(6.0), (2, 3))
        slopes = (2.0 * x).tolist()
        assert wrap(ml.vmap(squared))(x).tolist() == (x * x).tolist()
        assert wrap(ml.vmap(lambda r: ml.host_call("spread", r, k=1)[0]))(x).tolist() == [0.0, 3.0]
        assert wrap(ml.vmap(squared))(ml.ones((0, 3))).shape == (0, 3)
        assert wrap(ml.vmap(ml.grad(loss)))(x).tolist() == slopes
        assert wrap(ml.grad(lambda x: ml.sum(ml.vmap(loss)(x))))(x).tolist() == slopes
        assert wrap(ml.jacrev(ml.grad(loss)))(x[0]).tolist() == (2.0 * ml.eye(3)).tolist()
        y, bias = x[1], ml.ones(3)
        rules = (lambda g, x, y, out: g * y, None)
        scaled = ml.vmap(lambda r: ml.sum(ml.host_call("product", r, bias, vjp=rules)))
        assert wrap(ml.grad(lambda x: ml.sum(scaled(x))))(x).tolist() == ml.ones((2, 3)).tolist()
        both = ml.vmap(
            lambda r: ml.grad(lambda b: ml.sum(ml.host_call("product", r, b, vjp=rules)))(y)
        )
        refuses(GradientError, "product has no gradient for operand 1", wrap(both), x)
        refuses(GradientError, "squares has a custom_vjp", lambda: ml.jvp(squared, (x,), (x,)))


def test_wrong_type_rules_are_refused(typed: ml.VM) -> None:
    typed.register("untyped", lambda f: f.push(param(f, 0)))
    wrong: Any = lambda x: "f32[2]"  # noqa: E731
    typed.register("text", lambda f: f.push(param(f, 0)), result=wrong)
    register: Any = typed.register
    refuses(MachineError, "a function of types as result", register, "x", sine, result=3)
    with ml.use(typed):
        text = r"short: expected results f32\[3\] by its type rule, got f32\[1\]"
        refuses(MachineError, text, ml.host_call, "short", ml.ones(3))
        refuses(
            MachineError, "text: expected its type rule to return", ml.host_call, "text", ml.ones(2)
        )
        captured = ml.capture(lambda x: ml.host_call("untyped", x))
        refuses(CaptureError, "without a type rule, .* result=lambda x: x", captured, ml.ones(2))
        refuses(MlvmError, r"f32\[1\]", ml.capture(lambda x: ml.host_call("short", x)), ml.ones(3))
        text = r"expected results f32\[3\] by its type rule, got f32\[1\]"
        refuses(
            MachineError,
            "short: " + text,
            ml.capture(lambda x: ml.host_call("short", x)),
            ml.ones(3),
        )


def test_wrong_functions_and_rules_name_the_mistake(typed: ml.VM) -> None:
    register: Any = typed.register
    copy = lambda f: f.push(param(f, 0))  # noqa: E731
    one = ml.TensorType("f32", (2,))
    for name in ("add", "add.out", "fused"):
        text = f"register: '{name}' is an op of mlvm; choose a different name"
        refuses(MachineError, text, register, name, copy)
    refuses(MachineError, "register: expected a name as str, got 3", register, 3, copy)
    text = r"g: expected a function of types as result, got .*; write result=lambda x"
    refuses(MachineError, text, register, "g", copy, result=one)
    text = r"g: .* got numpy's sin; write lambda frame: frame.push\(np.sin\(frame.param\(0\)\)\)"
    refuses(MachineError, text, register, "g", np.sin)
    rows: list[tuple[Any, dict[str, Any], str]] = [
        (lambda x, y: x, {}, r"g: its type rule takes \(x, y\), the call has 1 operand$"),
        (lambda x: x, {"k": 1}, r"takes \(x\), the call has 1 operand and attributes k"),
        (lambda x: 1 / 0, {}, "g: its type rule raised ZeroDivisionError: division by zero"),
        (lambda x: (x, x), {}, "g: expected its type rule to return 1 type "),
    ]
    with ml.use(typed):
        for rule, attributes, text in rows:
            register("g", copy, nresults=1, result=rule)
            for wrap in (lambda fn: fn, ml.capture):
                fn = wrap(lambda x, attributes=attributes: ml.host_call("g", x, **attributes))
                refuses(MachineError, text, fn, ml.ones(2))
        register("g", lambda f: f.push(-1), result=lambda x: x)
        text = r"g: expected results f32\[2\] by its type rule, got Int -1; push an array"
        for wrap in (lambda fn: fn, ml.capture):
            refuses(MachineError, text, wrap(lambda x: ml.host_call("g", x)), ml.ones(2))
        text = r"squares: expected vjp to take \(g, \*operands, out\), 3 arguments, got .*\(g\)"
        wrong = ml.grad(lambda x: ml.sum(ml.host_call("squares", x, vjp=lambda g: g)))
        for fn in (wrong, ml.vmap(wrong)):
            refuses(GradientError, text, fn, ml.ones((2, 2)))
