"""Checks for tests: `check_gradients` for models, and `replacement` for users' host functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.errors import (
    ArgumentError,
    CheckError,
    GradientError,
    GradientMismatchError,
    brief,
    counted,
)
from mlvm.core.types import Array, DType, Shape, TensorType, c128, f64
from mlvm.eager.autodiff.grad import grad
from mlvm.eager.autodiff.host_call import call_host
from mlvm.eager.functions.creation import asarray
from mlvm.eager.functions.elements import astype
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Tree, among_others, flatten, named_leaves, named_tensors, substitute

__all__ = ["check_gradients", "replacement"]

Function: TypeAlias = Callable[..., Tree]
_STEP: Final = float(np.finfo(np.float64).eps) ** (1 / 3)


@hinted
def check_gradients(
    fn: Callable[..., Tree], *args: Any, order: int = 1, tolerance: float = 1e-6
) -> None:
    """Raise `GradientMismatchError` unless the gradients of `fn` agree with finite differences.

    `fn(*args)` returns a tree of tensors of any shapes; only floats are used. It is
    differentiated with respect to each argument that contains float tensors: a tensor, a Module,
    another tree. The other arguments are constants. Equal arguments must result in equal values, so
    draw with an explicit key. With an `order` of 2 the gradients of the gradient are also checked,
    and so on.

    The floats of the arguments are converted to f64, complex numbers to c128. Each element x of
    them is moved by h in both directions, for the central difference quotient (fn(x + h) - fn(x -
    h)) / 2h. A complex element is also moved by ih. This needs two or four calls of `fn` per
    element, so use small arguments. The results are summed with random weights, which are the same
    in every run, before gradient and quotient are compared; a single scalar has the weight 1.

    h is max(1, |x|) times the cube root of the machine epsilon, about 6e-6. The errors of the
    quotient are h^2 / 6 times the third derivative, and the rounding error epsilon |fn| / h. Each
    is about 1e-11 for values near 1 (Nocedal and Wright, Numerical Optimization, 2006, section
    8.1). `tolerance` allows for functions that are larger and more curved. It is relative to the
    largest quotient of a tensor, and absolute if that is below 1. At a kink, such as relu has at 0,
    the quotients are not gradients.

    Raises `ArgumentError` unless `order` is an int from 1 to 8 and `tolerance` a number >= 0,
    `GradientError` if there is nothing to differentiate, and the errors of `fn` and `grad`.

        >>> ml.testing.check_gradients(lambda x: ml.sum(ml.sin(x)), ml.asarray([1.0, 2.0]))

    Invalid calls:
        ml.testing.check_gradients(ml.sum, v, order=0)  # ArgumentError
        ml.testing.check_gradients(ml.sum, ints)  # GradientError
        ml.testing.check_gradients(ml.relu, ml.zeros(1))  # GradientMismatchError
    """
    if type(order) is not int or not 1 <= order <= 8:  # each order doubles the work
        raise ArgumentError(
            f"check_gradients: expected an int from 1 to 8 as order, got {brief(order)}"
        )
    if not isinstance(tolerance, float | int) or not tolerance >= 0:
        raise ArgumentError(
            f"check_gradients: expected a number >= 0 as tolerance, got {brief(tolerance)}"
        )
    wide = [substitute(_in_f64, arg) for arg in args]
    numbers = [i for i, arg in enumerate(wide) if _has_floats(arg)]
    if not numbers:
        raise GradientError("check_gradients: expected an argument with a float tensor, got none")
    _check(fn, wide, {i: f"argument {i}" for i in numbers}, order, tolerance, 1)


@hinted
def replacement(
    pattern: Callable[..., Tree], name: str, *types: TensorType, tolerance: float = 1e-5
) -> None:
    """Raise `CheckError` unless a host function of the current VM computes the pattern.

    Both run on random operands of these types and shapes, which are the same in every run: floats
    are normal, integers are 0 or 1. The results must have the same number and types as the results
    of the pattern. The values may differ by `tolerance`, relative to the largest value of a result,
    and absolute if that is below 1.

    Raises `ArgumentError` for an operand that is not a `TensorType`, `UnknownFunctionError`, and
    errors of the pattern and the function.

        >>> import numpy as np
        >>> vm = ml.VM("mine")
        >>> vm.register("relu2", lambda frame: frame.push(np.maximum(frame.param(0), 0)))
        >>> with ml.use(vm): ml.testing.replacement(ml.relu, "relu2", ml.TensorType("f32", (2, 3)))

    Invalid calls:
        ml.testing.replacement(ml.relu, "relu", 3)  # ArgumentError
        ml.testing.replacement(ml.exp, "sin", ml.TensorType("f32", (2,)))  # CheckError
        ml.testing.replacement(ml.relu, "none", ml.TensorType("f32", (2,)))  # UnknownFunctionError
    """
    rng, operands = np.random.default_rng(0), list[Tensor]()
    for type in types:
        if not isinstance(type, TensorType):
            raise ArgumentError(f"replacement: expected a TensorType as operand, got {brief(type)}")
        is_inexact, shape = type.dtype.is_inexact, type.shape
        drawn = rng.standard_normal(shape) if is_inexact else rng.integers(0, 2, shape)
        operands.append(astype(asarray(np.asarray(drawn)), type.dtype))
    expected = [y for _, y in named_leaves(pattern(*operands))]
    results = call_host(name, operands, None, {})
    if len(results) != len(expected):
        raise CheckError(
            f"{name}: expected {counted(len(expected), 'result')} as in the pattern, "
            f"got {len(results)}"
        )
    for i, (got, want) in enumerate(zip(results, expected, strict=True)):
        if got.type != want.type:
            raise CheckError(
                f"{name}: expected {want.type} as result {i} as in the pattern, got {got.type}"
            )
        x, y = (np.asarray(each.tolist(), np.complex128) for each in (got, want))
        wrong = ~np.isclose(x, y, tolerance, tolerance * max(1.0, abs(y).max(initial=0.0)), True)
        if wrong.any():
            raise CheckError(
                f"{name}: result {i}, {got.type}: {wrong.sum()} of {wrong.size} elements differ "
                f"from the pattern, by at most {abs(x - y)[wrong].max():.3g}; "
                "correct the replacement"
            )


def _in_f64(x: Tensor) -> Tensor:
    if not x.dtype.is_inexact:
        return x
    return astype(x, f64 if x.dtype.is_float else c128)


def _has_floats(tree: Tree) -> bool:
    return any(x.dtype.is_inexact for _, x in flatten(tree, None, ends=among_others)[0])


def _check(
    fn: Function,
    args: Sequence[Any],
    names: dict[int, str],
    orders: int,
    tolerance: float,
    order: int,
) -> None:
    """Check `fn` for the arguments with these numbers, and the gradients up to `orders`."""
    results = _results(fn(*args))
    if not results:
        raise GradientError(
            "check_gradients: expected a function that returns float tensors, got none"
        )
    weights = [asarray(weight) for weight in _weights([(y.shape, y.dtype) for y in results], order)]

    def gradients(weights: list[Tensor], *args: Any) -> Any:
        return grad(lambda *args: _weighted(weights, fn(*args)), tuple(names))(*args)

    for (number, name), gradient in zip(names.items(), gradients(weights, *args), strict=True):
        by_path = dict(named_leaves(gradient))
        for path, x in named_tensors(args[number]).items():
            quotients = _quotients(fn, args, number, x, [w.numpy() for w in weights])
            where = f"{name} at {path}" if path else name
            _compare(by_path[path].numpy(), quotients, tolerance, f"order {order}, {where}")
    if order < orders:
        moved = {0: "the cotangents", **{i + 1: name for i, name in names.items()}}
        _check(gradients, [weights, *args], moved, orders, tolerance, order + 1)


def _results(result: Tree) -> list[Tensor]:
    return [y for _, y in named_leaves(result) if y.dtype.is_inexact]


def _weights(types: Sequence[tuple[Shape, DType]], seed: int) -> list[Array]:
    """Return the weights of the results: random numbers, or 1 for a single real scalar."""
    if list(types) == [((), f64)]:
        return [np.ones(())]
    rng = np.random.default_rng(seed)

    def drawn(shape: Shape, dtype: DType) -> Array:
        weights = np.asarray(rng.standard_normal(shape))
        return weights if dtype.is_float else weights + 1j * rng.standard_normal(shape)

    return [drawn(*each) for each in types]


def _weighted(weights: Sequence[Tensor], result: Tree) -> Tensor:
    """Return the sum of all elements of the result's floats, times weights: f64[].

    For complex numbers it is the real part of the sum of y times the conjugate of w, which contains
    both parts."""
    parts = [
        op.sum(w * y) if y.dtype.is_float else op.real(op.sum(op.conj(w) * y))
        for w, y in zip(weights, _results(result), strict=True)
    ]
    return reduce(op.add, parts)


def _quotients(
    fn: Function, args: Sequence[Any], number: int, x: Tensor, weights: list[Array]
) -> Array:
    """Return the weighted difference quotients of `fn` for each element of the tensor x.

    x is a part of the argument with that number."""
    values = x.numpy()
    quotients = np.empty_like(values)
    for index in np.ndindex(values.shape):
        h = _STEP * max(1.0, abs(values[index]))
        quotients[index] = 0
        for unit in (1,) if x.dtype.is_float else (1, 1j):
            ends, results = [values[index] + h * unit, values[index] - h * unit], []
            for end in ends:
                moved = values.copy()
                moved[index] = end
                inputs = list(args)
                inputs[number] = substitute(_replaced(x, asarray(moved)), args[number])
                results.append([y.numpy() for y in _results(fn(*inputs))])
            changes = zip(weights, map(_change, *results), strict=True)
            total = sum(float(np.sum(np.conj(w) * change).real) for w, change in changes)
            quotients[index] += unit * total / abs(ends[0] - ends[1])
    return quotients


def _replaced(x: Tensor, by: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda each: by if each is x else each


def _change(high: Array, low: Array) -> Array:
    """Return high - low; 0 where they are equal, even if infinite."""
    return np.subtract(high, low, out=np.zeros_like(high), where=high != low)


def _compare(gradient: Array, quotients: Array, tolerance: float, where: str) -> None:
    """Raise `GradientMismatchError` with the element that differs most, unless they agree."""
    bound = tolerance * max(1.0, float(np.max(np.abs(quotients), initial=0.0)))
    distances = np.abs(gradient - quotients)
    wrong = ~(distances <= bound)  # also where a distance is nan
    if np.any(wrong):
        most = np.unravel_index(np.argmax(np.where(wrong, distances, -1.0)), distances.shape)
        index = f"[{','.join(map(str, most))}]" if most else ""
        raise GradientMismatchError(
            f"{where}{index}: the gradient is {gradient[most]:.9g}, the difference quotient "
            f"{quotients[most]:.9g}; {np.count_nonzero(wrong)} of {wrong.size} elements differ by "
            f"more than {bound:.2g}"
        )
