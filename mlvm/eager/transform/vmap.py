"""`vmap`: a function of one example as a function of a batch of them.

The function is traced with stand-ins for the values of one lane, and run for all lanes at once by
the batching rules of its ops (see `mlvm.eager.transform.lanes`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from mlvm.core.errors import AttributeRefused, AxisRefused, DTypeError, ShapeError, brief
from mlvm.core.rules import normalize_axis
from mlvm.eager.autodiff.rules_batching import Lanes
from mlvm.eager.functions.creation import arange, asarray
from mlvm.eager.functions.shapes import moveaxis
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.operands import NUMBERS, is_array
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.transform.lanes import Batched, lanes_named
from mlvm.eager.transform.trace import run, traced
from mlvm.eager.tree import Node, Tree, anywhere, flatten, named_leaves, partners, unflatten

Axes: TypeAlias = Any
"""An axis, None, or a tree of such, which may end where the tree that it is for goes on."""

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
    """A function of batches, which has lanes along one axis of its arguments: in each lane it is
    `fn` of one example. The lanes are computed at once, by one call of each op.

    `in_axes` says which axis of the arguments has the lanes: one number for all positional
    arguments, or a tuple with one for each. None is for an argument that all lanes share. In the
    place of a number may stand a tree of numbers, such as a dict for an argument that is a dict;
    it may end earlier than the argument. Keyword arguments have their lanes along axis 0.
    `out_axes` says the same of the results; None is for one that is the same in all lanes.
    `axis_size` is the number of lanes, where no argument tells it. By `axis_name` collectives of
    `ml.parallel` find the lanes, as they find the members of a group.

    Arguments are trees of tensors and arrays, also Modules with stacked parameters; numbers and
    others are shared. Numbers that `fn` returns become tensors. Random keys that it takes from the
    global ones are others in each lane. A `cond` on a value with lanes runs both branches, and a
    loop goes on until the last lane is done. `fn` is called once for each call, and traced: so it
    cannot read values, nor update tensors from outside.

    The tensors: [..., n, ...] with n lanes -> fn's results with an axis of n. Raises `ShapeError`
    for arguments whose numbers of lanes differ, `AxisRefused` for an axis that one does not have,
    `AttributeRefused` for axes that do not fit the arguments, `CaptureError` for what `fn` cannot
    do.

        >>> x, y = ml.asarray([[1.0, 2.0], [3.0, 4.0]]), ml.asarray([10.0, 20.0])
        >>> ml.vmap(lambda row, y: ml.sum(row) * y, in_axes=(0, None))(x, y)
        Tensor([[ 30.,  60.],
                [ 70., 140.]], f32[2,2])
        >>> ml.vmap(ml.grad(lambda row: ml.sum(row * row)))(x)
        Tensor([[2., 4.],
                [6., 8.]], f32[2,2])
    """
    if not callable(fn):
        raise DTypeError(f"vmap: takes a function, not {brief(fn)}")
    name = getattr(fn, "__name__", type(fn).__name__)

    def batched(*args: Any, **kwargs: Any) -> Tree:
        given = _Given(fn, args, kwargs, in_axes, axis_size)

        def of_lanes(*lanes: Any) -> Tree:
            rest = iter(lanes)
            rank = None if axis_name is None else next(rest)
            leaves = [
                x if axis is None else next(rest)
                for x, axis in zip(given.leaves, given.axes, strict=True)
            ]
            args, kwargs = unflatten(given.structure, leaves)
            with lanes_named(axis_name, given.n, rank):
                return fn(*args, **kwargs)

        mapped = [
            moveaxis(x, axis, 0)
            for x, axis in zip(given.leaves, given.axes, strict=True)
            if axis is not None
        ]
        if axis_name is not None:
            mapped.insert(0, arange(given.n))
        trace = traced(of_lanes, [x.type.with_shape(x.shape[1:]) for x in mapped], _WHAT)
        meaning = Batched(given.n, axis_name)
        made = run(trace, meaning, [Lanes(x, True) for x in mapped])
        paths = [path for path, _ in named_leaves(trace.tree, buffers=True)]
        axes = _axes_of(trace.tree, out_axes, "out_axes", f"the results of {name}")
        results = [
            _with_lanes(meaning, v, axes[path], path) for v, path in zip(made, paths, strict=True)
        ]
        return trace.with_results(results)

    update_wrapper(batched, fn, updated=())
    return batched


class _Given:
    """The arguments of one call: their `leaves` and `structure`, for each leaf the axis that has
    the lanes, or None, and the number `n` of lanes."""

    def __init__(
        self,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...],
        kwargs: Mapping[str, Tree],
        in_axes: Axes,
        axis_size: int | None,
    ) -> None:
        tree = (args, dict(kwargs))
        found, self.structure = flatten(tree, ends=anywhere, buffers=True)
        axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        named = _axes_of(tree, (axes, 0), "in_axes", "the arguments")
        names = _names(fn, args)
        self.leaves: list[Any] = []
        self.axes: list[int | None] = []
        lanes: dict[str, tuple[int, str]] = {}
        for path, leaf in found:
            axis = named[path]
            where = _spelled(path, names)
            if axis is not None and not isinstance(leaf, Tensor):
                if isinstance(leaf, NUMBERS) and not isinstance(leaf, np.ndarray):
                    raise AttributeRefused(
                        f"vmap: {where} is {brief(leaf)}, a number without axes, and in_axes has "
                        f"{axis} for it; give in_axes None for what all lanes share"
                    )
                if is_array(leaf):
                    leaf = asarray(leaf)
                else:
                    axis = None
            if axis is not None:
                if not -leaf.ndim <= axis < leaf.ndim:
                    raise AxisRefused(
                        f"vmap: {where} is {leaf.type}, which has no axis {axis} for the lanes; "
                        f"give in_axes None for what all lanes share"
                    )
                axis = normalize_axis(axis, leaf.ndim)
                lanes[where] = leaf.shape[axis], f"{leaf.type} along axis {axis}"
            self.leaves.append(leaf)
            self.axes.append(axis)
        self.n = _count(lanes, axis_size)


def _count(lanes: Mapping[str, tuple[int, str]], axis_size: int | None) -> int:
    """The number of lanes, which all tell alike."""
    if axis_size is not None and (not isinstance(axis_size, (int, np.integer)) or axis_size < 0):
        raise AttributeRefused(f"vmap: axis_size is a number of lanes, not {brief(axis_size)}")
    counts = {count for count, _ in lanes.values()}
    if axis_size is not None:
        counts.add(int(axis_size))
    if not counts:
        raise AttributeRefused(
            "vmap: no argument has lanes; give in_axes an axis for one, or axis_size"
        )
    if len(counts) > 1:
        told = [f"{where} has {count}: {type}" for where, (count, type) in lanes.items()]
        if axis_size is not None:
            told.append(f"axis_size is {axis_size}")
        raise ShapeError(f"vmap: the numbers of lanes differ: {'; '.join(told)}")
    return counts.pop()


def _is_axis(part: Any) -> bool:
    return part is None or (
        isinstance(part, (int, np.integer)) and not isinstance(part, (bool, np.bool_))
    )


def _axes_of(tree: Tree, axes: Axes, name: str, of: str) -> dict[str, int | None]:
    """The axis of each leaf of a tree, by its path."""

    def ends(part: Any) -> bool | None:
        return None if isinstance(part, _CONTAINERS) else True

    def alike(part: Tree, beside: Tree) -> bool:
        return isinstance(part, _CONTAINERS) and isinstance(beside, _CONTAINERS)

    def differ(path: str, part: Tree, beside: Tree) -> NoReturn:
        raise AttributeRefused(
            f"vmap: {name} does not fit {of}: it has {_count_of(part)} where there "
            f"{'are' if isinstance(beside, _CONTAINERS) else 'is'} {_count_of(beside)}"
        )

    found, structure = flatten(axes, ends=ends)
    for _, axis in found:
        if not _is_axis(axis):
            raise AttributeRefused(
                f"vmap: {name} has axes, as ints or None, in tuples, lists and dicts; not "
                f"{brief(axis)}"
            )
    axis_of: dict[str, int | None] = {}
    beside = partners(structure, tree, alike, differ, buffers=True)
    for (path, axis), part in zip(found, beside, strict=True):
        below, _ = flatten(part, path, ends=anywhere, buffers=True)
        axis_of.update((each, None if axis is None else int(axis)) for each, _ in below)
    return axis_of


def _count_of(part: Tree) -> str:
    if isinstance(part, dict):
        return f"a dict of {', '.join(map(str, part)) or 'nothing'}"
    if isinstance(part, (list, tuple)):
        return f"{len(part)} items"
    return part.type.__str__() if isinstance(part, Tensor) else brief(part)


def _names(fn: Callable[..., Tree], args: tuple[Tree, ...]) -> list[str]:
    """What the function calls its arguments."""
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


def _spelled(path: str, names: list[str]) -> str:
    """The place of a leaf among the arguments, by name."""
    kind, first, *rest = path.split("/")
    name = names[int(first)] if kind == "0" else first
    return "/".join([name, *rest])


def _with_lanes(meaning: Batched, v: Lanes, axis: int | None, path: str) -> Tensor:
    """A result, with its lanes along that axis."""
    where = f"result {path}" if path else "the result"
    if axis is None:
        if v.batched:
            raise AttributeRefused(
                f"vmap: out_axes has None for {where}, which may differ between lanes; give it the "
                f"axis for the lanes"
            )
        return alias_of(v.x)
    if not -v.ndim - 1 <= axis <= v.ndim:
        raise AxisRefused(
            f"vmap: {where} is {v.x.type.with_shape(v.shape)} in a lane, which has no place for an "
            f"axis {axis} of lanes"
        )
    return alias_of(moveaxis(meaning.whole(v), 0, axis))
