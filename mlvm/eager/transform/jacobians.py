"""Jacobians and Hessians: `jvp` and `vjp` along all axes together, by `vmap`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from mlvm.core.errors import DTypeError
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.grad import (
    as_argnums,
    grad,
    require_function,
    resolve_argnums,
    vjp,
    with_args,
)
from mlvm.eager.functions.creation import eye
from mlvm.eager.functions.shapes import moveaxis, reshape, split
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.transform.jvp import TracedFunction, jvp, linearized
from mlvm.eager.transform.vmap import vmap
from mlvm.eager.tree import Tree, as_dicts, flatten


def _basis(types: Sequence[TensorType]) -> list[Tensor]:
    """Return unit vectors along all n elements of tensors of these types, each [n, ...]."""
    sizes = [math.prod(type.shape) for type in types]
    n, at, basis = sum(sizes), 0, []
    for type, size in zip(types, sizes, strict=True):
        basis.append(reshape(eye(n, size, k=-at, dtype=type.dtype), (n, *type.shape)))
        at += size
    return basis


def _split_axis(y: Tensor, types: Sequence[TensorType], axis: int) -> list[Tensor]:
    """Split an axis of y into the parts for tensors of these types."""
    sizes = [math.prod(type.shape) for type in types]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return list(split(y, ends, axis=axis)) if ends else [y]


def _named(what: str, derivative: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a derivative of `fn` so that its errors begin with the name `what`."""
    derivative.__name__ = what
    return wraps(fn, updated=())(hinted(derivative))


@hinted
def jacfwd(
    fn: Callable[..., Tree],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of `fn` in forward mode, column by column.

    It uses `linearize`, with a tangent along each element of the arguments `argnums`. It is
    efficient for functions with fewer inputs than outputs; use `jacrev` for all others.

    Arguments and results are trees of tensors of any shapes. The Jacobian has the structure of the
    result. Each leaf has the structure of the argument, or is a tuple for several arguments. Each
    leaf of that structure has the shape [*shape of the result, *shape of the argument]. A result
    that is not a float has None. With `has_aux` the function returns `(jacobian, aux)`. Arguments
    are real; with `holomorphic` arguments, results and derivatives are complex.

    Raises `DTypeError` for arguments of other dtypes, and the errors of `jvp` and `grad`.

        >>> ml.jacfwd(lambda x: x * x)(ml.asarray([1.0, 2.0]))
        Tensor([[2., 0.],
                [0., 4.]], f32[2,2])

    Invalid calls:
        ml.jacfwd(ml.sin)(ints)  # DTypeError
        ml.jacfwd(ml.floor)(v)  # GradientError
    """
    several, requested = not isinstance(argnums, int), as_argnums(argnums)
    require_function(fn)

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        numbers = resolve_argnums(requested, args)

        def of(*diff_args: Any) -> Any:
            return fn(*with_args(args, numbers, diff_args), **kwargs)

        traced_fn = TracedFunction(of, [args[i] for i in numbers], "jacfwd", has_aux)
        types = [x.type for x in traced_fn.xs]
        _require_kind("jacfwd", types, "an argument", holomorphic)
        _, aux, structure, linear = linearized(traced_fn)
        columns: Any = vmap(lambda *ts: linear(ts))(*_basis(types))

        def row(y: Tensor | None) -> Tree:
            if y is None:
                return None
            _require_kind("jacfwd", [y.type] if holomorphic else [], "a result", holomorphic)
            parts = _split_axis(moveaxis(y, 0, -1), types, -1)
            shaped = [
                reshape(part, (*y.shape[1:], *type.shape))
                for part, type in zip(parts, types, strict=True)
            ]
            trees, rest = [], iter(shaped)
            for each in traced_fn.structures:
                trees.append(as_dicts(each, [next(rest) for _ in range(each.size)]))
            return tuple(trees) if several else trees[0]

        result = as_dicts(structure, [row(y) for y in columns])
        return (result, aux) if has_aux else result

    return _named("jacfwd", jacobian, fn)


@hinted
def jacrev(
    fn: Callable[..., Tree],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of `fn` in reverse mode, row by row.

    It uses `vjp`, with a cotangent along each element of the result. It is efficient for functions
    with fewer outputs than inputs. Otherwise it is like `jacfwd`. Results are real; with
    `holomorphic` results and arguments are complex.

    The result: [...] of any shape. Raises `DTypeError` for results of other dtypes, and the errors
    of `vjp` and `grad`.

        >>> ml.jacrev(lambda x: ml.sum(x * x, axis=1))(ml.asarray([[1.0, 2.0]]))
        Tensor([[[2., 4.]]], f32[1,1,2])

    Invalid calls:
        ml.jacrev(lambda x: x + 0j)(v)  # DTypeError
        ml.jacrev(ml.floor)(v)  # GradientError
    """
    several, requested = not isinstance(argnums, int), as_argnums(argnums)
    require_function(fn)

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        numbers = resolve_argnums(requested, args)

        @wraps(fn, updated=())
        def of(*diff_args: Any) -> Any:
            result = fn(*with_args(args, numbers, diff_args), **kwargs)
            return result if has_aux else (result, None)

        value, pull, aux = vjp(of, *[args[i] for i in numbers], has_aux=True)
        ys, structure = flatten(value)
        types = [y.type for _, y in ys if y.dtype.is_inexact]
        _require_kind("jacrev", types, "a result", holomorphic)

        def pulled(*gs: Tensor) -> Any:
            rest = iter(gs)
            each = [next(rest) if y.dtype.is_inexact else None for _, y in ys]
            return pull(as_dicts(structure, each))

        leaves, inner = flatten(vmap(pulled)(*_basis(types)))
        if holomorphic:
            _require_kind("jacrev", [x.type for _, x in leaves], "an argument", holomorphic)
            leaves = [(path, op.conj(x)) for path, x in leaves]
        cut = [iter(_split_axis(x, types, 0)) for _, x in leaves]

        def row(y: Tensor) -> Tree:
            if not y.dtype.is_inexact:
                return None
            parts = [next(each) for each in cut]
            shaped = [reshape(part, (*y.shape, *part.shape[1:])) for part in parts]
            trees = as_dicts(inner, shaped)
            return trees if several else trees[0]

        jacobians = as_dicts(structure, [row(y) for _, y in ys])
        return (jacobians, aux) if has_aux else jacobians

    return _named("jacrev", jacobian, fn)


@hinted
def hessian(
    fn: Callable[..., Tree],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the second derivatives of `fn`: `jacfwd(jacrev(fn))`.

    The Hessian has the structure of the result. Each leaf has the structure of the argument, and
    each leaf of that has the same structure again. The shape is [*shape of the result, *shape of
    one argument, *shape of the other]. The options are the same as for `jacfwd`. `hvp`, the product
    with a vector, costs only about two gradients.

    The result: [...] of any shape, usually a scalar. Raises the errors of `jacfwd` and `jacrev`.

        >>> ml.hessian(lambda x: ml.sum(x**3))(ml.asarray([1.0, 2.0]))
        Tensor([[ 6.,  0.],
                [ 0., 12.]], f32[2,2])

    Invalid calls:
        ml.hessian(ml.sin)(ints)  # DTypeError
    """
    options: Any = {"has_aux": has_aux, "holomorphic": holomorphic}
    return _named("hessian", jacfwd(jacrev(fn, argnums, **options), argnums, **options), fn)


@hinted
def hvp(
    fn: Callable[..., Tensor],
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    argnums: int | Sequence[int] = 0,
) -> Any:
    """Return the product of the Hessian of `fn` with the tangents: `jvp(grad(fn), ...)[1]`.

    It is the derivative of the gradient in the direction of the tangents (Pearlmutter, Fast exact
    multiplication by the Hessian, 1994).

    `fn(*primals)` is a float scalar. The primals are trees of tensors of any shapes, such as
    parameters and a batch. A tangent has the structure of the primal, or is None for a constant.
    The product has the structure of the gradient, with `argnums` as in `grad`.

    Raises the errors of `grad` and `jvp`.

        >>> x, v = ml.asarray([1.0, 2.0]), ml.asarray([1.0, 0.0])
        >>> ml.hvp(lambda x: ml.sum(x**3), (x,), (v,))
        Tensor([6., 0.], f32[2])

    Invalid calls:
        ml.hvp(ml.sin, (v,), (v,))  # GradientError
    """
    return jvp(grad(fn, argnums), primals, tangents)[1]


def _require_kind(what: str, types: Sequence[TensorType], of: str, holomorphic: bool) -> None:
    """Raise `DTypeError` unless the types are real, or complex with `holomorphic`."""
    for type in types:
        if holomorphic and type.dtype.kind != "complex":
            raise DTypeError(
                f"{what}: expected {of} of a complex dtype with holomorphic=True, got {type}"
            )
        if not holomorphic and not type.dtype.is_float:
            hint = "; see holomorphic=True" if type.dtype.kind == "complex" else ""
            raise DTypeError(f"{what}: expected {of} of a real float dtype, got {type}{hint}")
