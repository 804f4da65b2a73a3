"""What a checkpoint is made of: a structure of models, optimizers, pipelines and the like is told
as tensors and plain values by path, and these are written over one like it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.errors import DTypeError, PathError, brief
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
    nothing_meant,
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


class Structure:
    """A tree: its `tensors`, and arrays, by path, and its `plain` values, which are numbers, texts,
    None, and lists and dicts of these. Of an object with `state()` and `load_state`, `restore` or
    `set_state` it has the state, and of an optimizer the hyperparameters that are numbers, and the
    state of schedules that have one, too. `ml.random` has the keys of each VM on which a tensor of
    the tree lies, in order, and of the current VM.

    Raises `DTypeError` for a part that is none of these, and `PathError` for two of one path.
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
        self.objects: dict[str, tuple[Any, Structure]] = {}
        for path, x in sorted(self._leaves, key=lambda leaf: _is_keys(leaf[1])):  # which come last
            if isinstance(x, Tensor) or hasattr(x, "__array__"):
                self._add(self.tensors, {path: x if isinstance(x, Tensor) else _array(path, x)})
            elif loader_of(x) is not None:
                part = keys_of(self._vms()) if _is_keys(x) else x
                inner = Structure(_state_of(part), path)
                self.objects[path] = part, inner
                self._add(self.tensors, inner.tensors)
                self._add(self.plain, inner.plain)
            elif _is_plain(x):
                self._add(self.plain, {path: x})
            else:
                raise DTypeError(
                    f"{path or 'it'} must be a tensor, an array, a number, a text, None, or an "
                    f"object with state() and load_state(), not {brief(x)}"
                )

    def _vms(self) -> list[VMProtocol]:
        """The VMs on which tensors of the tree lie, and the current one."""
        arenas = [x.arena for x in self.tensors.values() if isinstance(x, Tensor)]
        found: list[VMProtocol] = []
        for arena in (*arenas, current_arena()):
            if not any(arena.vm.is_same(vm) for vm in found):
                found.append(arena.vm)
        return found

    def _add(self, values: Values, more: Values) -> None:
        twice = [path for path in more if path in self.tensors or path in self.plain]
        if twice:
            raise PathError(f"two parts have the path {twice[0]!r}")
        values.update(more)

    def meant(self, where: Where | None) -> tuple[Values, Values]:
        """The tensors and plain values that are meant. Raises `AttributeRefused` where none is."""
        if where is None:
            return self.tensors, self.plain
        tensors, plain = (
            {path: x for path, x in values.items() if fits(where, path, x)}
            for values in (self.tensors, self.plain)
        )
        if not tensors and not plain:
            raise nothing_meant(where, [*self.tensors, *self.plain])
        return tensors, plain

    def take(self, arrays: Mapping[str, Array], plain: Values, where: Where | None) -> Any:
        """Write these over the tree, and return it: with a `where` those that are meant, of which
        there may be more. Lists and dicts are changed in place; a tuple is another one.

        Everything is checked before the first write. Raises `PathError` for paths that are missing
        or unknown, `DTypeError` and `ShapeError` for tensors of other types, `StaleTensor`, and
        what an object raises that takes its state back.
        """
        tensors, values = self.meant(where)
        if where is not None:
            arrays = {path: x for path, x in arrays.items() if path in tensors}
            plain = {path: x for path, x in plain.items() if path in values}
        texts = differences(tensors, arrays, "tensor") + differences(values, plain, "value")
        if texts:
            raise PathError(
                f"{'; '.join(texts)}; given are {', '.join([*arrays, *plain]) or 'none'}"
            )
        types = {
            path: x.type if isinstance(x, Tensor) else type_of(x) for path, x in tensors.items()
        }
        found = {path: exactly(arrays[path], type.dtype) for path, type in types.items()}
        for path, (x, _) in self.objects.items():
            if hasattr(x, "fitted") and path in found:
                found[path] = x.fitted(found[path])
        require_types(types, {path: TensorType.of(x) for path, x in found.items()}, "tensor")
        require_live([x for x in self.tensors.values() if isinstance(x, Tensor)])
        now = self.tensors | found, self.plain | plain
        meant = found.keys() | (values.keys() if where is not None else self.plain.keys())
        self._load_objects(*now, meant)
        given = {path: x for path, x in self._leaves if isinstance(x, Tensor) and path in found}
        load(given, {path: found[path] for path in given}, "tensor")
        return _refilled(self.tree, self._with(*now))

    def _load_objects(self, tensors: Values, plain: Values, meant: Set[str]) -> None:
        """Those of which something is meant. Those without tensors come first: if one refuses its
        state, all is as it was."""
        wanted = [
            (x, inner)
            for x, inner in self.objects.values()
            if not meant.isdisjoint([*inner.tensors, *inner.plain])
        ]
        done: list[tuple[Any, Structure]] = []
        try:
            for x, inner in sorted(wanted, key=lambda each: bool(each[1].tensors)):
                views = isinstance(x, (Node, Optimizer, MultiSteps))  # which copy it themselves
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
        """A tree like this one with these values, of arrays copies unless `views` do. Tensors of it
        that are written `in_place`, and objects, are its own."""
        made = []
        for path, x in self._leaves:
            if path in self.objects or (in_place and isinstance(x, Tensor)):
                made.append(x)
            elif path in tensors:
                value = tensors[path]  # that of a file cannot be written to
                kept = views or isinstance(value, Tensor)
                copied = value if kept else np.array(value)
                made.append(copied[()] if isinstance(x, np.generic) else copied)
            else:
                made.append(plain[path])
        return unflatten(self._structure, made)


def loader_of(part: Any) -> Callable[[Any], object] | None:
    """What takes back the state of an object that its `state()` tells; None for other things."""
    if isinstance(part, type) or not callable(getattr(part, "state", None)):
        return None
    found = (getattr(part, name, None) for name in _LOADERS)
    return next((each for each in found if callable(each)), None)


def _is_keys(part: Any) -> bool:
    """Test for `ml.random`, whose state is that of VMs."""
    return loader_of(part) is set_state


def _array(path: str, x: Any) -> Array:
    """An array as one of numpy, which is read once."""
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{path} is a masked array, and a file has no masks")
    try:
        return array_of(x)
    except DTypeError as error:
        raise DTypeError(f"{path}: {error.reason}") from None


def _optimizer_of(x: Any) -> Optimizer | None:
    """The optimizer that has hyperparameters, of what is one or stands around one."""
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
    """The hyperparameters that are objects with a state, such as `optim.Plateau`, each once."""
    options = [
        x
        for each in (optimizer, *optimizer.groups)
        for name, x in vars(each).items()
        if name in optimizer._options
    ]
    return [*{id(x): x for x in options if loader_of(x) is not None}.values()]


def _numbers_of(optimizer: Optimizer) -> list[Values]:
    """The hyperparameters that are numbers: the optimizer's, and those that each group has."""
    return [
        {name: [*x] if isinstance(x, tuple) else x for name, x in _own(each, optimizer).items()}
        for each in (optimizer, *optimizer.groups)
    ]


def _own(holder: Any, optimizer: Optimizer) -> Values:
    found = {name: x for name, x in vars(holder).items() if name in optimizer._options}
    found = {name: float(x) if isinstance(x, Tensor) else x for name, x in found.items()}
    return {name: x for name, x in found.items() if not callable(x)}


def _set_numbers(optimizer: Optimizer, numbers: list[Values]) -> None:
    """Assign numbers to what are numbers: a schedule stays, and says the rate by the updates."""
    holders = [optimizer, *optimizer.groups]
    names = {name for each in numbers for name in each if name not in optimizer._options}
    if len(numbers) != len(holders) or names:
        what = f"no {', '.join(sorted(names))}" if names else f"{len(holders) - 1} groups"
        raise PathError(f"{optimizer!r} has {what}, and the file's has {len(numbers) - 1} groups")
    for holder, given in zip(holders, numbers, strict=True):
        for name in _own(holder, optimizer).keys() & given.keys():
            x = given[name]
            setattr(holder, name, tuple(x) if isinstance(x, list) else x)


def _is_container(part: Any) -> bool:
    return isinstance(part, _CONTAINERS) and loader_of(part) is None


def _ends(part: Any) -> bool | None:
    try:
        return None if _is_container(part) and not _is_plain(part) else True
    except RecursionError:  # `flatten` says what contains itself
        return None


def _is_plain(part: Any) -> bool:
    """Whether JSON gives it back as it is."""
    if type(part) is dict:
        return all(type(name) is str for name in part) and _are_plain(part.values())
    return _are_plain(part) if type(part) is list else type(part) in _PLAIN


def _are_plain(parts: Iterable[Any]) -> bool:
    return all(map(_is_plain, parts))


def _refilled(tree: Any, made: Any) -> Any:
    """The lists and dicts of a tree with what is in those of another one like it."""
    if isinstance(tree, dict) and not isinstance(made, dict):
        return made
    if isinstance(tree, dict):
        filled = {name: _refilled(tree[name], x) if name in tree else x for name, x in made.items()}
        for name in [*tree]:
            if name not in filled:
                del tree[name]
        tree.update(filled)
        return tree
    if isinstance(tree, list) and isinstance(made, list):
        tree[:] = [_refilled(old, x) for old, x in zip(tree, made, strict=False)]
        tree += made[len(tree) :]
        return tree
    return made
