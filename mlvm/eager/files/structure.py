"""Structure of checkpoints: conversion of training state to tensors and plain values, and back.

Models, optimizers, pipelines and similar objects become tensors and plain values by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.errors import DTypeError, PathError, brief, counted
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.eager.files.safetensors import type_of
from mlvm.eager.functions.random import keys_of, set_state
from mlvm.eager.optim.averages import MultiSteps
from mlvm.eager.optim.optimizer import Optimizer
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import array_of
from mlvm.eager.tree import (
    Node,
    Where,
    differences,
    exactly,
    fits,
    flatten,
    load,
    no_match,
    require_live,
    require_types,
    unflatten,
)

Values: TypeAlias = dict[str, Any]
"""Tensors and arrays, or plain values, by path."""

_LOADERS: Final = "load_state", "restore", "set_state"
_CONTAINERS: Final = (dict, list, tuple)
_PLAIN: Final = frozenset({bool, int, float, str, type(None)})
_NUMBERS: Final = "hyperparameters"
_SCHEDULES: Final = "schedules"


class SavedStructure:
    """Tree of a checkpoint: `tensors` and arrays by path, and `plain` values.

    Plain values are numbers, strings, None, and lists and dicts of these. Objects with `state()`
    and `load_state`, `restore` or `set_state` are represented by this state. Optimizers include
    numeric hyperparameters and the state of schedules. `ml.random` represents the keys of each VM
    that has a tensor of the tree, in order, and then the current VM's keys.

    Raises `DTypeError` for any other value; `PathError` if two values have the same path.
    """

    def __init__(self, tree: Any, path: str = "") -> None:
        self.tree = tree
        self._leaves, self._structure = flatten(
            tree,
            path,
            ends=lambda part: None if part is tree and _is_container(part) else _ends(part),
        )
        self.tensors: Values = {}
        self.plain: Values = {}
        self.objects: dict[str, tuple[Any, SavedStructure]] = {}
        for path, x in sorted(self._leaves, key=lambda leaf: _is_keys(leaf[1])):  # keys last
            if isinstance(x, Tensor) or hasattr(x, "__array__"):
                self._add(self.tensors, {path: x if isinstance(x, Tensor) else _array(path, x)})
            elif loader_of(x) is not None:
                part = keys_of(self._vms()) if _is_keys(x) else x
                inner = SavedStructure(_state_of(part), path)
                self.objects[path] = part, inner
                self._add(self.tensors, inner.tensors)
                self._add(self.plain, inner.plain)
            elif _is_plain(x):
                self._add(self.plain, {path: x})
            else:
                raise DTypeError(
                    f"expected a tensor, an array, a number, a str, None, or an object with "
                    f"state() and load_state() as {path or 'value'}, got {brief(x)}"
                )

    def _vms(self) -> list[VMProtocol]:
        """Return the VMs with tensors of the tree, and the current VM."""
        arenas = [x.arena for x in self.tensors.values() if isinstance(x, Tensor)]
        vms: list[VMProtocol] = []
        for arena in (*arenas, current_arena()):
            if not any(arena.vm.is_same(vm) for vm in vms):
                vms.append(arena.vm)
        return vms

    def _add(self, values: Values, more: Values) -> None:
        twice = [path for path in more if path in self.tensors or path in self.plain]
        if twice:
            raise PathError(f"two values have the path {twice[0]!r}; rename one of them")
        values.update(more)

    def selected(self, where: Where | None) -> tuple[Values, Values]:
        """Select tensors and plain values by `where`.

        Raises `ArgumentError` if nothing matches."""
        if where is None:
            return self.tensors, self.plain
        tensors, plain = (
            {path: x for path, x in values.items() if fits(where, path, x)}
            for values in (self.tensors, self.plain)
        )
        if not tensors and not plain:
            raise no_match(where, [*self.tensors, *self.plain])
        return tensors, plain

    def take(self, arrays: Mapping[str, Array], plain: Values, where: Where | None) -> Any:
        """Write these values to the tree, and return it; `where` selects some of them.

        With `where`, additional values are allowed. Lists and dicts are changed in place; a tuple
        is replaced.

        Everything is checked before the first write. Raises `PathError` for paths that are missing
        or unknown, `DTypeError` and `ShapeError` for tensors of other types, `StaleTensorError`,
        and the errors that an object raises when the state is restored.
        """
        tensors, values = self.selected(where)
        if where is not None:
            arrays = {path: x for path, x in arrays.items() if path in tensors}
            plain = {path: x for path, x in plain.items() if path in values}
        texts = differences(tensors, arrays, "tensor") + differences(values, plain, "value")
        if texts:
            raise PathError(f"{'; '.join(texts)}; got {', '.join([*arrays, *plain]) or 'none'}")
        types = {
            path: x.type if isinstance(x, Tensor) else type_of(x) for path, x in tensors.items()
        }
        values_by_path = {path: exactly(arrays[path], type.dtype) for path, type in types.items()}
        for path, (x, _) in self.objects.items():
            if hasattr(x, "fitted") and path in values_by_path:
                values_by_path[path] = x.fitted(values_by_path[path])
        require_types(
            types, {path: TensorType.of(x) for path, x in values_by_path.items()}, "tensor"
        )
        require_live([x for x in self.tensors.values() if isinstance(x, Tensor)])
        now = self.tensors | values_by_path, self.plain | plain
        paths = values_by_path.keys() | (values.keys() if where is not None else self.plain.keys())
        self._load_objects(*now, paths)
        targets = {
            path: x for path, x in self._leaves if isinstance(x, Tensor) and path in values_by_path
        }
        load(targets, {path: values_by_path[path] for path in targets}, "tensor")
        return _refilled(self.tree, self._with(*now))

    def _load_objects(self, tensors: Values, plain: Values, paths: Set[str]) -> None:
        """Load the selected objects.

        Objects without tensors come first: if an object rejects the state, no object has
        changed."""
        objects = [
            (x, inner)
            for x, inner in self.objects.values()
            if not paths.isdisjoint([*inner.tensors, *inner.plain])
        ]
        done: list[tuple[Any, SavedStructure]] = []
        try:
            for x, inner in sorted(objects, key=lambda each: bool(each[1].tensors)):
                views = isinstance(x, (Node, Optimizer, MultiSteps))  # these copy the values
                _load_state(x, inner._with(tensors, plain, in_place=False, views=views))
                done.append((x, inner))
        except Exception:
            for x, inner in done:
                if not inner.tensors:
                    _load_state(x, inner.tree)
            raise

    def _with(
        self, tensors: Values, plain: Values, *, in_place: bool = True, views: bool = False
    ) -> Any:
        """Return a tree with this structure and these values, with copies of arrays unless `views`.

        Tensors that are written `in_place`, and objects, are shared."""
        leaves = []
        for path, x in self._leaves:
            if path in self.objects or (in_place and isinstance(x, Tensor)):
                leaves.append(x)
            elif path in tensors:
                value = tensors[path]  # an array of a file is read-only
                is_shared = views or isinstance(value, Tensor)
                copied = value if is_shared else np.array(value)
                leaves.append(copied[()] if isinstance(x, np.generic) else copied)
            else:
                leaves.append(plain[path])
        return unflatten(self._structure, leaves)


def loader_of(part: Any) -> Callable[[Any], object] | None:
    """Return the method that restores an object's `state()`; None if it has none."""
    if isinstance(part, type) or not callable(getattr(part, "state", None)):
        return None
    methods = (getattr(part, name, None) for name in _LOADERS)
    return next((each for each in methods if callable(each)), None)


def _is_keys(part: Any) -> bool:
    """Return whether the value is `ml.random`: that state belongs to the VMs."""
    return loader_of(part) is set_state


def _array(path: str, x: Any) -> Array:
    """Convert an array of any library to numpy, once."""
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(
            f"{path} is a masked array; a file cannot store masks; fill it: x.filled(0)"
        )
    try:
        return array_of(x)
    except DTypeError as error:
        raise DTypeError(f"{path}: {error.reason}") from None


def _optimizer_of(x: Any) -> Optimizer | None:
    """Return an optimizer, or the optimizer inside a wrapper such as `MultiSteps`."""
    inner = x.optimizer if isinstance(x, MultiSteps) else x
    return inner if isinstance(inner, Optimizer) else None


def _state_of(x: Any) -> Any:
    state, optimizer = x.state(), _optimizer_of(x)
    if optimizer is None:
        return state
    schedules = [each.state() for each in _schedules_of(optimizer)]
    besides = {_SCHEDULES: schedules} if schedules else {}
    return {**state, _NUMBERS: _numbers_of(optimizer), **besides}


def _load_state(x: Any, state: Any) -> None:
    optimizer = _optimizer_of(x)
    if optimizer is not None:
        _set_numbers(optimizer, state[_NUMBERS])
        for schedule, its in zip(_schedules_of(optimizer), state.get(_SCHEDULES, []), strict=True):
            _load_state(schedule, its)
        besides = _NUMBERS, _SCHEDULES
        state = {name: each for name, each in state.items() if name not in besides}
    loader: Any = loader_of(x)
    loader(state)


def _schedules_of(optimizer: Optimizer) -> list[Any]:
    """Return the hyperparameters with a state, such as `optim.Plateau`, each once."""
    holders = optimizer, *optimizer.groups
    options = [x for each in holders for x in _options_of(each, optimizer).values()]
    return [*{id(x): x for x in options if loader_of(x) is not None}.values()]


def _numbers_of(optimizer: Optimizer) -> list[Values]:
    """Return the numeric hyperparameters of the optimizer and each group."""
    return [
        {name: [*x] if isinstance(x, tuple) else x for name, x in _own(each, optimizer).items()}
        for each in (optimizer, *optimizer.groups)
    ]


def _own(holder: Any, optimizer: Optimizer) -> Values:
    options = _options_of(holder, optimizer)
    numbers = {name: float(x) if isinstance(x, Tensor) else x for name, x in options.items()}
    return {name: x for name, x in numbers.items() if not callable(x)}


def _options_of(holder: Any, optimizer: Optimizer) -> Values:
    """Return the hyperparameters of an optimizer or a group."""
    return {name: x for name, x in vars(holder).items() if name in optimizer._options}


def _set_numbers(optimizer: Optimizer, numbers: list[Values]) -> None:
    """Assign numbers to numeric hyperparameters; a schedule stays, and determines the rate."""
    holders = [optimizer, *optimizer.groups]
    names = {name for each in numbers for name in each if name not in optimizer._options}
    if len(numbers) != len(holders) or names:
        what = f"no {', '.join(sorted(names))}" if names else f"{len(holders) - 1} groups"
        raise PathError(
            f"{optimizer!r} has {what}, but the file has {counted(len(numbers) - 1, 'group')}; "
            "create the optimizer with the same groups"
        )
    for holder, values in zip(holders, numbers, strict=True):
        for name in _own(holder, optimizer).keys() & values.keys():
            x = values[name]
            setattr(holder, name, tuple(x) if isinstance(x, list) else x)


def _is_container(part: Any) -> bool:
    return isinstance(part, _CONTAINERS) and loader_of(part) is None


def _ends(part: Any) -> bool | None:
    try:
        return None if _is_container(part) and not _is_plain(part) else True
    except RecursionError:  # `flatten` names the object that contains itself
        return None


def _is_plain(part: Any) -> bool:
    """Return whether JSON round-trips the value."""
    if type(part) is dict:
        return all(type(name) is str for name in part) and _are_plain(part.values())
    return _are_plain(part) if type(part) is list else type(part) in _PLAIN


def _are_plain(parts: Iterable[Any]) -> bool:
    return all(map(_is_plain, parts))


def _refilled(tree: Any, source: Any) -> Any:
    """Copy the contents of lists and dicts from `source`, which has the same structure."""
    if isinstance(tree, dict) and not isinstance(source, dict):
        return source
    if isinstance(tree, dict):
        filled = {
            name: _refilled(tree[name], x) if name in tree else x for name, x in source.items()
        }
        for name in [*tree]:
            if name not in filled:
                del tree[name]
        tree.update(filled)
        return tree
    if isinstance(tree, list) and isinstance(source, list):
        tree[:] = [_refilled(old, x) for old, x in zip(tree, source, strict=False)]
        tree += source[len(tree) :]
        return tree
    return source
