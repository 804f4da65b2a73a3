"""Jacobians and Hessians: `jvp` and `vjp` along all axes at once, by `vmap`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from mlvm.core.errors import DTypeError
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.grad import among, as_argnums, grad, vjp, with_given
from mlvm.eager.functions.creation import eye
from mlvm.eager.functions.shapes import moveaxis, reshape, split
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.transform.jvp import Traced, jvp, linearized
from mlvm.eager.transform.vmap import vmap
from mlvm.eager.tree import Tree, as_dicts, flatten


def _basis(types: Sequence[TensorType]) -> list[Tensor]:
    """Unit vectors along all elements of tensors of these types: of each [n, ...], for n elements
    in all."""
    sizes = [math.prod(type.shape) for type in types]
    n, at, found = sum(sizes), 0, []
    for type, size in zip(types, sizes, strict=True):
        block = eye(n, size, k=-at, dtype=type.dtype)
        found.append(reshape(block, (n, *type.shape)))
        at += size
    return found


def _cut(y: Tensor, types: Sequence[TensorType], axis: int) -> list[Tensor]:
    """The parts of an axis of y that belong to tensors of these types."""
    sizes = [math.prod(type.shape) for type in types]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return list(split(y, ends, axis=axis)) if ends else [y]


def jacfwd(
    fn: Callable[..., Tree],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """A function that returns the Jacobian of `fn` with respect to `argnums`, column by column: by
    `linearize`, with a tangent along each element of the arguments.

    It is for functions with fewer inputs than outputs; `jacrev` is for the others.

    Arguments and results are trees of tensors of any shapes. The Jacobian has the structure of the
    result; at each leaf it has that of the argument, or a tuple of several; there it has
    [*shape of the result, *shape of the argument]. A result that is no float has None. With
    `has_aux` the function returns `(jacobian, aux)`. Arguments are real; with `holomorphic` they
    are complex, as are the results, and it is the matrix of complex derivatives.

    Raises `DTypeError` for arguments of other dtypes, and what `jvp` and `grad` raise.

        >>> ml.jacfwd(lambda x: x * x)(ml.asarray([1.0, 2.0]))
        Tensor([[2., 0.],
                [0., 4.]], f32[2,2])
    """
    several, asked = not isinstance(argnums, int), as_argnums(argnums)

    @wraps(fn, updated=())
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        numbers = among(asked, args)

        def of(*given: Any) -> Any:
            return fn(*with_given(args, numbers, given), **kwargs)

        made = Traced(of, [args[i] for i in numbers], "jacfwd", has_aux)
        types = [x.type for x in made.xs]
        _require("jacfwd", types, "an argument", holomorphic)
        _, aux, structure, linear = linearized(made)
        columns: Any = vmap(lambda *ts: linear(ts))(*_basis(types))

        def row(y: Tensor | None) -> Tree:
            if y is None:
                return None
            _require("jacfwd", [y.type] if holomorphic else [], "a result", holomorphic)
            parts = _cut(moveaxis(y, 0, -1), types, -1)
            shaped = [
                reshape(part, (*y.shape[1:], *type.shape))
                for part, type in zip(parts, types, strict=True)
            ]
            trees, rest = [], iter(shaped)
            for each in made.structures:
                trees.append(as_dicts(each, [next(rest) for _ in range(each.size)]))
            return tuple(trees) if several else trees[0]

        found = as_dicts(structure, [row(y) for y in columns])
        return (found, aux) if has_aux else found

    return jacobian


def jacrev(
    fn: Callable[..., Tree],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """A function that returns the Jacobian of `fn` with respect to `argnums`, row by row: by `vjp`,
    with a cotangent along each element of the result.

    It is for functions with fewer outputs than inputs, and else as `jacfwd` describes it. Results
    are real; with `holomorphic` they are complex, as are the arguments.

    The result: [...] of any shape. Raises `DTypeError` for results of other dtypes, and what `vjp`
    and `grad` raise.

        >>> ml.jacrev(lambda x: ml.sum(x * x, axis=1))(ml.asarray([[1.0, 2.0]]))
        Tensor([[[2., 4.]]], f32[1,1,2])
    """
    several, asked = not isinstance(argnums, int), as_argnums(argnums)

    @wraps(fn, updated=())
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        numbers = among(asked, args)

        def of(*given: Any) -> Any:
            result = fn(*with_given(args, numbers, given), **kwargs)
            return result if has_aux else (result, None)

        value, pull, aux = vjp(of, *[args[i] for i in numbers], has_aux=True)
        ys, structure = flatten(value)
        types = [y.type for _, y in ys if y.dtype.is_inexact]
        _require("jacrev", types, "a result", holomorphic)

        def pulled(*gs: Tensor) -> Any:
            rest = iter(gs)
            each = [next(rest) if y.dtype.is_inexact else None for _, y in ys]
            return pull(as_dicts(structure, each))

        rows = vmap(pulled)(*_basis(types))
        found, inner = flatten(rows)
        if holomorphic:
            _require("jacrev", [x.type for _, x in found], "an argument", holomorphic)
            found = [(path, op.conj(x)) for path, x in found]
        cut = [iter(_cut(x, types, 0)) for _, x in found]

        def row(y: Tensor) -> Tree:
            if not y.dtype.is_inexact:
                return None
            parts = [next(each) for each in cut]
            shaped = [reshape(part, (*y.shape, *part.shape[1:])) for part in parts]
            trees = as_dicts(inner, shaped)
            return trees if several else trees[0]

        jacobians = as_dicts(structure, [row(y) for _, y in ys])
        return (jacobians, aux) if has_aux else jacobians

    return jacobian


def hessian(
    fn: Callable[..., Tree],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """A function that returns the second derivatives of `fn` with respect to `argnums`:
    `jacfwd(jacrev(fn))`, forward over reverse.

    It has the structure of the result; at each leaf that of the argument, and at each of its leaves
    that again, with [*shape of the result, *shape of the one, *shape of the other]. The options are
    those of `jacfwd`. For the product with a vector see `hvp`, which costs about as much as two
    gradients.

    The result: [...] of any shape, mostly a scalar. Raises what `jacfwd` and `jacrev` raise.

        >>> ml.hessian(lambda x: ml.sum(x**3))(ml.asarray([1.0, 2.0]))
        Tensor([[ 6.,  0.],
                [ 0., 12.]], f32[2,2])
    """
    options: Any = {"has_aux": has_aux, "holomorphic": holomorphic}
    return jacfwd(jacrev(fn, argnums, **options), argnums, **options)


def hvp(
    fn: Callable[..., Tensor],
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    argnums: int | Sequence[int] = 0,
) -> Any:
    """The product of the Hessian of `fn` with the tangents: the derivative of its gradient in their
    direction, `jvp(grad(fn, argnums), primals, tangents)[1]` (Pearlmutter, Fast exact
    multiplication by the Hessian, 1994).

    `fn(*primals)` is a float scalar. The primals are trees of tensors of any shapes, such as
    parameters and a batch; a tangent has its primal's structure, or is None for one that stays.
    The product has that of the gradient, `argnums` as in `grad`.

    Raises what `grad` and `jvp` raise.

        >>> x, v = ml.asarray([1.0, 2.0]), ml.asarray([1.0, 0.0])
        >>> ml.hvp(lambda x: ml.sum(x**3), (x,), (v,))
        Tensor([6., 0.], f32[2])
    """
    return jvp(grad(fn, argnums), primals, tangents)[1]


def _require(what: str, types: Sequence[TensorType], of: str, holomorphic: bool) -> None:
    """Raise `DTypeError` for a type that is not real, or not complex if `holomorphic`."""
    for type in types:
        if holomorphic and type.dtype.kind != "complex":
            raise DTypeError(f"{what}: with holomorphic=True {of} is complex, not {type}")
        if not holomorphic and not type.dtype.is_float:
            hint = "; see holomorphic=True" if type.dtype.kind == "complex" else ""
            raise DTypeError(f"{what}: {of} is a real float, not {type}{hint}")
