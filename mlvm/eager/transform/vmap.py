"""`vmap`: apply a function of a single example to a batch of examples.

The function is traced with placeholders for one element of the batch, and interpreted for the batch
by the batching rules of ops (see `mlvm.eager.transform.batching`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from mlvm.core.errors import ArgumentError, AxisError, DTypeError, ShapeError, brief, counted
from mlvm.core.rules import normalize_axis
from mlvm.core.types import TensorType
from mlvm.eager.functions.creation import arange, asarray
from mlvm.eager.functions.shapes import moveaxis
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.number import index_of
from mlvm.eager.tensor.operands import NUMBERS, is_array
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.transform.batching import BatchingInterpreter, named_axis
from mlvm.eager.transform.trace import interpret, trace_function
from mlvm.eager.tree import Node, Tree, anywhere, flatten, named_leaves, partners, unflatten
from mlvm.step.batch_rules import Batched

Axes: TypeAlias = Any
"""An axis, None, or a tree of these, which may end above the leaves of the tree of arguments."""

_WHAT: Final = "a function of vmap"
_CONTAINERS: Final = (dict, list, tuple, Node)


@hinted
def vmap(
    fn: Callable[..., Tree],
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    axis_size: int | None = None,
    axis_name: str | None = None,
) -> Callable[..., Tree]:
    """Vectorize `fn` over an axis of the arguments: each op runs once for the batch.

    Arguments:

    - `fn`: a function of a single example.

    - `in_axes`: the batch axis of the arguments: one number for all positional arguments, or a
      tuple with one number per argument. None means that all elements of the batch share the
      argument. A number may be replaced by a tree of numbers, such as a dict for an argument that
      is a dict; the tree may end earlier than the argument. Keyword arguments are always batched
      along axis 0. Default: 0.

    - `out_axes`: the batch axis of the results; None for a result that is equal for all elements.
      Default: 0.

    - `axis_size`: the batch size, required if no argument has a batch axis.

    - `axis_name`: a name by which collectives of `ml.parallel` refer to the batch, as they refer to
      the members of a group.

    Arguments of the returned function are trees of tensors and arrays, including Modules with
    stacked parameters; numbers and other objects are shared. Numbers that `fn` returns are
    converted to tensors. Each element draws different random keys from the global keys. A `cond` on
    a batched value runs both branches, and a loop continues until the last element is done. Each
    call of the returned function calls and traces `fn` once. `fn` can therefore not read values, or
    update tensors from outside.

    The tensors: [..., n, ...] with batch size n -> fn's results with an axis of n. Raises
    `ShapeError` if the batch sizes of arguments differ, and `AxisError` for an axis that an
    argument does not have. Raises `ArgumentError` for axes that do not fit the arguments, and
    `CaptureError` for a function that cannot be traced.

        >>> x, y = ml.asarray([[1.0, 2.0], [3.0, 4.0]]), ml.asarray([10.0, 20.0])
        >>> ml.vmap(lambda row, y: ml.sum(row) * y, in_axes=(0, None))(x, y)
        Tensor([[ 30.,  60.],
                [ 70., 140.]], f32[2,2])
        >>> ml.vmap(ml.grad(lambda row: ml.sum(row * row)))(x)
        Tensor([[2., 4.],
                [6., 8.]], f32[2,2])

    Invalid calls:
        ml.vmap(ml.add)(v, v[:1])  # ShapeError
        ml.vmap(ml.abs, 5)(v)  # AxisError
        ml.vmap(ml.abs, None)(v)  # ArgumentError
        ml.vmap(float)(v)  # CaptureError
    """
    if not callable(fn):
        raise DTypeError(f"vmap: expected a function, got {brief(fn)}")
    name = getattr(fn, "__name__", type(fn).__name__)

    def batched(*args: Any, **kwargs: Any) -> Tree:
        arguments = _MappedArguments(fn, args, kwargs, in_axes, axis_size)

        def of_element(*parts: Any) -> Tree:
            rest = iter(parts)
            rank = None if axis_name is None else next(rest)
            leaves = [
                x if axis is None else next(rest)
                for x, axis in zip(arguments.leaves, arguments.axes, strict=True)
            ]
            args, kwargs = unflatten(arguments.structure, leaves)
            with named_axis(axis_name, arguments.n, rank):
                return fn(*args, **kwargs)

        mapped = [
            moveaxis(x, axis, 0)
            for x, axis in zip(arguments.leaves, arguments.axes, strict=True)
            if axis is not None
        ]
        if axis_name is not None:
            mapped.insert(0, arange(arguments.n))
        trace = trace_function(of_element, [x.type.with_shape(x.shape[1:]) for x in mapped], _WHAT)
        interpreter = BatchingInterpreter(arguments.n, axis_name)
        outputs = interpret(trace, interpreter, [Batched(x, True) for x in mapped])
        paths = [path for path, _ in named_leaves(trace.tree, buffers=True)]
        axes = _axes_of(trace.tree, out_axes, "out_axes", f"the results of {name}")
        results = [
            _with_axis(interpreter, v, axes[path], path)
            for v, path in zip(outputs, paths, strict=True)
        ]
        return trace.with_results(results)

    update_wrapper(batched, fn, updated=())
    return batched


class _MappedArguments:
    """Arguments of a call.

    leaves, structure: the flattened arguments. axes: for each leaf the batch axis, or None. n: the
    batch size.
    """

    def __init__(
        self,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...],
        kwargs: Mapping[str, Tree],
        in_axes: Axes,
        axis_size: int | None,
    ) -> None:
        tree = (args, dict(kwargs))
        leaves, self.structure = flatten(tree, ends=anywhere, buffers=True)
        axes = tuple(in_axes) if issubclass(type(in_axes), list) else in_axes
        is_same = type(axes) is int and axes == 0
        named = _axes_of(tree, 0 if is_same else (axes, 0), "in_axes", "the arguments")
        name_of = partial(_leaf_name, fn, args)
        self.leaves: list[Any] = []
        self.axes: list[int | None] = []
        sizes: dict[str, tuple[int, TensorType, int]] = {}
        for path, leaf in leaves:
            axis = named[path]
            if axis is not None and not issubclass(type(leaf), Tensor):
                if isinstance(leaf, NUMBERS) and not isinstance(leaf, np.ndarray):
                    raise ArgumentError(
                        f"vmap: {name_of(path)} is {brief(leaf)}, a number, which has no axis "
                        f"{axis}; give in_axes None for an argument that is not batched"
                    )
                if is_array(leaf):
                    leaf = asarray(leaf)
                else:
                    axis = None
            if axis is not None:
                if not -leaf.ndim <= axis < leaf.ndim:
                    raise AxisError(
                        f"vmap: {name_of(path)} is {leaf.type}, which has no axis {axis}; "
                        f"give in_axes None for an argument that is not batched"
                    )
                axis = normalize_axis(axis, leaf.ndim)
                sizes[path] = leaf.shape[axis], leaf.type, axis
            self.leaves.append(leaf)
            self.axes.append(axis)
        self.n = _count(sizes, axis_size, name_of)


def _count(
    sizes: Mapping[str, tuple[int, TensorType, int]],
    axis_size: int | None,
    name_of: Callable[[str], str],
) -> int:
    """Return the batch size, on which all arguments must agree."""
    if axis_size is not None and (not isinstance(axis_size, (int, np.integer)) or axis_size < 0):
        raise ArgumentError(f"vmap: expected axis_size of 0 or more, got {brief(axis_size)}")
    counts = [count for count, _, _ in sizes.values()]
    if axis_size is not None:
        counts.append(index_of(axis_size))
    if not counts:
        raise ArgumentError("vmap: no argument is batched; give in_axes an axis, or axis_size")
    if any(count != counts[0] for count in counts):
        spelled = [
            f"{name_of(path)} has {count}: {type} along axis {axis}"
            for path, (count, type, axis) in sizes.items()
        ]
        if axis_size is not None:
            spelled.append(f"axis_size is {axis_size}")
        raise ShapeError(f"vmap: expected equal batch sizes, got {'; '.join(spelled)}")
    return counts[0]


def _is_axis(part: Any) -> bool:
    kind = type(part)
    return part is None or (issubclass(kind, (int, np.integer)) and kind is not bool)


def _axes_of(tree: Tree, axes: Axes, name: str, of: str) -> dict[str, int | None]:
    """Return the axis of each leaf of a tree, by path."""
    if _is_axis(axes):
        axis = None if axes is None else int(axes)
        return {path: axis for path, _ in flatten(tree, ends=anywhere, buffers=True)[0]}

    def ends(part: Any) -> bool | None:
        return None if isinstance(part, _CONTAINERS) else True

    def alike(part: Tree, other: Tree) -> bool:
        return isinstance(part, _CONTAINERS) and isinstance(other, _CONTAINERS)

    def differ(path: str, part: Tree, other: Tree) -> NoReturn:
        raise ArgumentError(
            f"vmap: {name} does not fit {of}: expected {_count_of(other)}, got {_count_of(part)}"
        )

    axis_leaves, structure = flatten(axes, ends=ends)
    for _, axis in axis_leaves:
        if not _is_axis(axis):
            raise ArgumentError(
                f"vmap: {name}: expected ints or None in tuples, lists and dicts, got {brief(axis)}"
            )
    axis_of: dict[str, int | None] = {}
    parts = partners(structure, tree, alike, differ, buffers=True)
    for (path, axis), part in zip(axis_leaves, parts, strict=True):
        below, _ = flatten(part, path, ends=anywhere, buffers=True)
        axis_of.update((each, None if axis is None else int(axis)) for each, _ in below)
    return axis_of


def _count_of(part: Tree) -> str:
    if isinstance(part, dict):
        return f"a dict of {', '.join(map(str, part)) or 'nothing'}"
    if isinstance(part, (list, tuple)):
        return counted(len(part), "item")
    return described(part)


def _names(fn: Callable[..., Tree], args: tuple[Tree, ...]) -> list[str]:
    """Return the names of the function's parameters for the arguments."""
    try:
        bound = inspect.signature(fn).bind_partial(*args)
    except (TypeError, ValueError):
        return [f"argument {i}" for i in range(len(args))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(value))]
        else:
            names.append(name)
    return names


def _leaf_name(fn: Callable[..., Tree], args: tuple[Tree, ...], path: str) -> str:
    """Return the name of a leaf among the arguments."""
    kind, first, *rest = path.split("/")
    name = _names(fn, args)[int(first)] if kind == "0" else first
    return "/".join([name, *rest])


def _with_axis(interpreter: BatchingInterpreter, v: Batched, axis: int | None, path: str) -> Tensor:
    """Return a result with the batch along that axis."""
    where = f"result {path}" if path else "the result"
    if axis is None:
        if v.is_batched:
            raise ArgumentError(
                f"vmap: out_axes has None for {where}, which is batched; give it an axis"
            )
        return alias_of(v.x)
    if not -v.ndim - 1 <= axis <= v.ndim:
        raise AxisError(
            f"vmap: {where} is {v.x.type.with_shape(v.shape)} for one element, so "
            f"out_axes cannot be {axis}; use a smaller axis"
        )
    return alias_of(moveaxis(interpreter.as_batch(v), 0, axis))
