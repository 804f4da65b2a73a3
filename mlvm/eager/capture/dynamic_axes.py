"""Dynamic axes: axes of a captured function's arguments with sizes that may change per launch.

In: the names from `capture(dynamic_axes={"tokens": (None, "time")})`, and the signature of a call.
Out: `OpenLength`s, each with the axes that share the size; for a trace the dynamic types of
tensors. A size above the bound and two sizes with the same name raise `ShapeError` before anything
runs.

Callers: `Captured` for each call that the fast path does not match; `trace`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError, brief, with_article
from mlvm.core.types import TensorType
from mlvm.eager.capture.guards.signature import Signature
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import kind_of
from mlvm.eager.tree import leaves

MAX_LENGTH: Final = 2**40
"""Maximum bound of a length: the bytes of a plan for the bounds must fit into 64 bits."""


class Axis(NamedTuple):
    """An axis of a tensor of a signature (by index). The size is `times` the size."""

    tensor: int
    axis: int
    times: int = 1

    def size_in(self, signature: Signature) -> int:
        """Return the size of the axis in a call."""
        return signature.tensors[self.tensor].shape[self.axis]


class OpenLength(NamedTuple):
    """A dynamic size: the axes that share it, and the user's name and bound, or None."""

    axes: tuple[Axis, ...]
    name: str | None = None
    at_most: int | None = None

    def size_in(self, signature: Signature) -> int:
        """Return the size in a call."""
        return self.axes[0].size_in(signature) // self.axes[0].times


class LengthSpec:
    """The axes that the user has named as dynamic.

    `names`: for each parameter, the axis names, as a tree like the argument.
    `lengths`: all names.
    `at_most`: the bound of a size, by name.
    `is_allowed`: whether any axis may become dynamic.
    """

    def __init__(self, fn: Callable[..., Any], lengths: object, at_most: object) -> None:
        self.is_allowed = lengths is not False
        self.names: dict[str, Any] = {}
        self.lengths: set[str] = set()
        self.at_most: dict[str, int] = {}
        self._parameters: inspect.Signature | None = None
        if lengths is None or lengths is False:
            if at_most is not None:
                raise ArgumentError(
                    "capture: max_sizes= needs named axes; write dynamic_axes= with the same names"
                )
            return
        if not isinstance(lengths, Mapping):
            raise ArgumentError(
                'capture: expected dynamic_axes={"x": (None, "time")} or False, '
                f"got {brief(lengths)}"
            )
        self.names = dict(lengths)
        names = self.lengths = set().union(*map(_names_in, self.names.values(), self.names))
        try:
            self._parameters = inspect.signature(fn)
        except (TypeError, ValueError):
            raise ArgumentError(
                "capture: dynamic_axes= needs a Python function with a signature; "
                "wrap it in a function"
            ) from None
        kinds = {each.kind for each in self._parameters.parameters.values()}
        unknown = [name for name in self.names if name not in self._parameters.parameters]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            others = ", ".join(self._parameters.parameters)
            raise ArgumentError(
                f"capture: expected parameters of the function ({others}) in "
                f"dynamic_axes=, got "
                f"{unknown[0]!r}"
            )
        if at_most is not None and not isinstance(at_most, Mapping):
            raise ArgumentError(
                f'capture: expected max_sizes={{"time": 512}}, got {brief(at_most)}'
            )
        for name, bound in dict(at_most or {}).items():
            if name not in names:
                raise ArgumentError(
                    f"capture: expected names of dynamic_axes= in max_sizes= "
                    f"({', '.join(sorted(names))}), got {name!r}"
                )
            is_integer = isinstance(bound, (int, np.integer)) and type(bound) is not bool
            if not is_integer or not 1 <= bound <= MAX_LENGTH:
                raise ArgumentError(
                    f"capture: expected max_sizes[{name!r}] as an int from 1 to 2**40, "
                    f"got {brief(bound)}"
                )
            self.at_most[name] = int(bound)

    def axes(self, signature: Signature, args: Any, kwargs: Any) -> list[OpenLength]:
        """Return the named axes of a call.

        Raises `ShapeError` for a size above the bound, for two sizes with the same name, and for a
        tensor with a rank other than the number of names."""
        if self._parameters is None:
            return []
        try:
            bound = self._parameters.bind(*args, **kwargs).arguments
        except TypeError:
            return []  # the call itself raises an error for this argument
        for parameter in self._parameters.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(parameter.name, {})
        parameters = self._parameters.parameters.values()
        rest = next((f"*{x.name}" for x in parameters if x.kind is x.VAR_POSITIONAL), None)
        unnamed = sorted(self.names.keys() - bound.keys())
        if rest is not None and unnamed:
            raise ArgumentError(
                f"capture: dynamic_axes= names {unnamed[0]!r}, but the arguments of {rest} have no "
                f"names; pass it as {unnamed[0]}=..."
            )
        ordinals = {id(x): i for i, x in enumerate(signature.tensors)}
        axes: dict[str, list[Axis]] = {}
        sizes: dict[str, tuple[int, str]] = {}
        for name, spec in self.names.items():
            value = bound.get(name)
            tensors = _tensors(value, spec, name)
            if not tensors and leaves(value):
                raise ArgumentError(
                    f"capture: dynamic_axes= names axes of {name!r}, expected tensors, got "
                    f"{_described(value)}; pass ml.asarray({name})"
                )
            for x, axes_of_x, path in tensors:
                for axis, length in _names_by_axis(axes_of_x, x.type, path).items():
                    size, where = x.shape[axis], f"axis {axis} of {path}"
                    most = self.at_most.get(length)
                    if most is not None and size > most:
                        raise ShapeError(
                            f"capture: expected at most {most} as {length!r} ({where}), got "
                            f"{size}: {x.type}"
                        )
                    expected, first = sizes.setdefault(length, (size, where))
                    if expected != size:
                        raise ShapeError(
                            f"capture: axes with the name {length!r} must have equal sizes, got "
                            f"{expected} at {first} and {size} at {where}"
                        )
                    if id(x) in ordinals:
                        axes.setdefault(length, []).append(Axis(ordinals[id(x)], axis))
        return [OpenLength(tuple(axes[name]), name, self.at_most.get(name)) for name in axes]


def _is_axes(spec: Any) -> bool:
    """Return whether the value names axes of a tensor.

    It is a tuple with a name or None for each axis, or a dict of names by axis."""
    if isinstance(spec, tuple):
        return all(each is None or isinstance(each, str) for each in spec)
    pairs = spec.items() if isinstance(spec, Mapping) else ()
    return bool(pairs) and all(type(n) is int and isinstance(name, str) for n, name in pairs)


def _names_by_axis(spec: Any, type: TensorType, path: str) -> dict[int, str]:
    """Return the names of a tensor's axes, by axis from 0.

    Raises `ShapeError` if the tensor does not have these axes."""
    if isinstance(spec, tuple):
        fits, pairs = len(spec) == type.ndim, enumerate(spec)
    else:
        fits, pairs = all(-type.ndim <= axis < type.ndim for axis in spec), spec.items()
    if not fits:
        raise ShapeError(f"capture: expected {path} with the axes {spec}, got {type}")
    return {axis % type.ndim: name for axis, name in pairs if name is not None}


def _described(value: Any) -> str:
    return str(value.type) if isinstance(value, Tensor) else with_article(kind_of(value))


def _names_in(spec: Any, path: str) -> set[str]:
    """Return the names in a tree of axes.

    Raises `ArgumentError` for any other value."""
    if _is_axes(spec):
        return {each for each in (spec if isinstance(spec, tuple) else spec.values()) if each}
    if isinstance(spec, Mapping):
        return set().union(*[_names_in(each, f"{path}[{key!r}]") for key, each in spec.items()])
    if isinstance(spec, (list, tuple)) and not any(isinstance(each, str) for each in spec):
        return set().union(*[_names_in(each, f"{path}[{i}]") for i, each in enumerate(spec)])
    raise ArgumentError(
        f"capture: expected dynamic_axes of {path} as (None, 'time'), a name or None for each "
        f"axis, as {{1: 'time'}}, or as a tree of these, got {brief(spec)}"
    )


def _tensors(value: Any, spec: Any, path: str) -> list[tuple[Tensor, Any, str]]:
    """Return the tensors of an argument, with axis names and paths.

    The names of one tensor's axes apply to all tensors at that position of the tree."""
    fields = value._asdict() if hasattr(value, "_asdict") else value  # a named tuple
    pairs: Iterable[tuple[Any, Any, Any]]
    if _is_axes(spec):
        if isinstance(value, Tensor):
            return [(value, spec, path)]
        if not isinstance(value, (list, tuple, dict)):
            return []
        items = fields.items() if isinstance(fields, dict) else enumerate(fields)
        pairs = [(key, part, spec) for key, part in items]
    elif value is None:
        return []
    elif isinstance(spec, Mapping):
        names = fields if isinstance(fields, Mapping) else {}
        for name in spec:
            if name not in names:
                others = ", ".join(map(str, names)) or _described(value)
                raise ArgumentError(
                    f"capture: expected items of {path} ({others}) in dynamic_axes=, got {name!r}"
                )
        pairs = [(name, names[name], each) for name, each in spec.items()]
    elif not isinstance(value, (list, tuple)) or len(spec) != len(value):
        got = len(value) if isinstance(value, (list, tuple)) else _described(value)
        raise ShapeError(f"capture: expected {path} as a list of {len(spec)}, got {got}")
    else:
        pairs = [(i, part, each) for i, (part, each) in enumerate(zip(value, spec, strict=True))]
    return [x for key, part, each in pairs for x in _tensors(part, each, f"{path}[{key!r}]")]


def sizes_of(signature: Signature) -> dict[Axis, int]:
    """Return the sizes of all axes of a call's tensors."""
    shapes = enumerate([x.shape for x in signature.tensors])
    return {Axis(i, axis): n for i, shape in shapes for axis, n in enumerate(shape)}


def may_open(signature: Signature, number: int) -> bool:
    """Return whether axes of that tensor may be dynamic: no other tensor shares the memory."""
    x = signature.tensors[number]
    return (
        not signature.is_reached(x)
        and not signature.is_reached(x.root)
        and not any(x is each for each in signature.in_fields)
        and not any(each is not x and each.root is x.root for each in signature.tensors)
    )


def open_types(
    axes: Sequence[OpenLength], signature: Signature, lengths: Sequence[Any]
) -> dict[int, TensorType]:
    """Return the dynamic types of tensors, by id, for the sizes of a trace."""
    shapes: dict[int, list[Any]] = {}
    for each, length in zip(axes, lengths, strict=True):
        for axis in each.axes:
            shape = shapes.setdefault(axis.tensor, list(signature.tensors[axis.tensor].shape))
            shape[axis.axis] = length if axis.times == 1 else length * axis.times
    tensors = signature.tensors
    return {id(tensors[i]): TensorType(tensors[i].dtype, shape) for i, shape in shapes.items()}
