"""Trees of tensors: nested dicts, lists, tuples and Modules, with the tensors as leaves.

A leaf's path names it: `MixerBlock_0/token_mixing/Dense_0/kernel`. A Module's children are
those of its fields that hold tensors or Modules; a list among them counts as fields
`name_0`, `name_1`, ... A tensor that occurs twice is one tensor under two paths.

A Module's buffers are not part of the tree: a walk includes them only with `buffers=True`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias

import numpy as np

from mlvm.arena.arena import STALE
from mlvm.core.errors import DTypeError, PathError, ShapeError
from mlvm.core.ops.half import cast
from mlvm.core.types import Array, DType, TensorType, f32
from mlvm.eager.tensor.reading import write
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tensor.values import array_of

Tree: TypeAlias = Any
"""A Tensor, None (no leaves), or a dict, list, tuple or Module of trees."""


class Buffer:
    """Assigned to a field of a Node, it makes the field a buffer. The field gets the value."""

    __slots__ = ("value",)

    def __init__(self, value: Tree) -> None:
        self.value = value


_BUFFERS: Final = "_buffers"
_ORIGINS: Final[dict[int, weakref.ref[Node]]] = {}
"""For a Node, by its id, that to which a buffer is assigned too that is assigned here. It is no
field, and a copy has none."""


def assign_buffers_too(twin: Node, module: Node) -> None:
    """From now on assign to the Module what is assigned to a buffer of its twin."""
    _ORIGINS[id(twin)] = weakref.ref(module)
    weakref.finalize(twin, _ORIGINS.pop, id(twin), None).atexit = False


class Node:
    """Base of classes whose fields are children in a tree; `nn.Module` is one.

    A field that was once assigned a `Buffer` stays a buffer, whatever is assigned to it later,
    until it is deleted.
    """

    _buffers: tuple[str, ...] = ()
    _as_dict: ClassVar[type[dict[str, Any]]] = dict
    """What `map_tree` makes of it."""

    if not TYPE_CHECKING:  # else a type checker would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if isinstance(value, Buffer):
                value = value.value
                if name not in self._buffers:
                    vars(self)[_BUFFERS] = (*self._buffers, name)
            super().__setattr__(name, value)
            if name in self._buffers and id(self) in _ORIGINS:
                module = _ORIGINS[id(self)]()
                if module is not None:
                    setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in self._buffers:
            vars(self)[_BUFFERS] = tuple([each for each in self._buffers if each != name])

    def __copy__(self) -> Self:
        """Another one with the same fields."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin


_NUMBERS: Final = frozenset({bool, int, float, str, type(None)})


def holds_tensors(value: object) -> bool:
    """Whether a Module's field is part of the tree: a tensor, a Module, or a container of one. A
    `Buffer` in a container counts, so that it is refused as a leaf."""
    if isinstance(value, (Tensor, Node, Buffer)):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or _NUMBERS.issuperset(map(type, value)):
        return False  # without a look at each of a million numbers
    return any(map(holds_tensors, value))


def fields(node: Node, *, buffers: bool = False) -> Iterator[tuple[str, Any]]:
    """A Module's fields by name, in order of assignment; a list of children item by item."""
    for name, field in vars(node).items():
        if name == _BUFFERS or (name in node._buffers and not buffers):
            continue
        if isinstance(field, (list, tuple)) and holds_tensors(field):
            yield from ((f"{name}_{i}", item) for i, item in enumerate(field))
        else:
            yield name, field


def children(tree: Tree, path: str = "", *, buffers: bool = False) -> dict[str, Tree]:
    """The children of an inner node by name, in order.

    Raises `DTypeError` for anything that is not part of a tree, and for two of one name.
    """
    if isinstance(tree, dict):
        found = [(str(name), child) for name, child in tree.items()]
    elif isinstance(tree, (list, tuple)):
        found = [(str(i), child) for i, child in enumerate(tree)]
    elif isinstance(tree, Node):
        named_fields = fields(tree, buffers=buffers)
        found = [(name, field) for name, field in named_fields if holds_tensors(field)]
    else:
        given = type(tree).__name__
        raise DTypeError(f"a tree has tensors as leaves, not a {given}{_at(path)}")
    named = dict(found)
    if len(named) != len(found):
        names = ", ".join(name for name, _ in found)
        raise DTypeError(f"a name occurs twice among {names}{_at(path)}")
    return named


def leaves(tree: Tree, path: str = "", *, buffers: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the tree with its path, in order; with `buffers` those in buffers too.

    Raises `DTypeError` for other leaves, and for a node that contains itself.
    """
    found: list[tuple[str, Tensor]] = []
    _collect(found, path, tree, (), buffers, strict=True)
    return iter(found)


def all_leaves(tree: Tree) -> list[Any]:
    """What `map_all` calls its function with, in order."""
    found: list[tuple[str, Any]] = []
    _collect(found, "", tree, (), False, strict=False)
    return [leaf for _, leaf in found]


def _collect(
    found: list[tuple[str, Any]],
    path: str,
    tree: Tree,
    above: tuple[Tree, ...],
    buffers: bool,
    *,
    strict: bool,
) -> None:
    if isinstance(tree, Tensor) or (_ends(tree) and not strict and tree is not None):
        found.append((path, tree))
    elif tree is not None:
        above = _below(above, tree, path)
        for name, child in children(tree, path, buffers=buffers).items():
            _collect(found, _join(path, name), child, above, buffers, strict=strict)


def _ends(tree: Tree) -> bool:
    """Whether it has no children, as it is no container: a leaf, or None."""
    return not isinstance(tree, (dict, list, tuple, Node))


def _below(above: tuple[Tree, ...], node: Tree, path: str) -> tuple[Tree, ...]:
    """The nodes `above` and this one. Raises `DTypeError` if it is one of them already."""
    for each in above:
        if each is node:
            given = type(node).__name__
            raise DTypeError(f"a tree ends in tensors; this {given} contains itself{_at(path)}")
    return (*above, node)


def named_tensors(tree: Tree, *, buffers: bool = False) -> dict[str, Tensor]:
    """The tensors of the tree by path, each once, under the first of its paths; with `buffers`
    those in buffers too.

    Raises `DTypeError` for other leaves, and for two tensors of one path.
    """
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, x in leaves(tree, buffers=buffers):
        if named.get(path, x) is not x:
            raise DTypeError(f"two tensors have the path {path}")
        if id(x) not in seen:
            seen.add(id(x))
            named[path] = x
    return named


def map_tree(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """A tree of `fn(leaf, *leaves of the others at the same place)`; Modules become dicts.

    Raises `DTypeError` where the others do not have the tree's structure, for leaves that are
    no tensors, and for a node that contains itself.
    """
    return _map(fn, "", tree, others, (), None)


def map_all(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """`map_tree` with leaves of any kind, whose partners may be trees. Modules become copies with
    the same buffers. A tensor or Module that occurs twice, with the same partners, also occurs
    twice in the result."""
    return _map(fn, "", tree, others, (), {})


def _map(
    fn: Callable[..., Any],
    path: str,
    tree: Tree,
    others: tuple[Tree, ...],
    above: tuple[Tree, ...],
    made: dict[tuple[int, ...], Any] | None,
) -> Tree:
    """`map_all` if `made` has its results so far, by the ids of what they were made of; else
    `map_tree`."""
    strict = made is None
    for other in others:
        if (
            (tree is None) != (other is None)
            or (strict and isinstance(tree, Tensor) != isinstance(other, Tensor))
            or (not strict and _ends(other) > _ends(tree))
        ):
            given = f"{type(tree).__name__} beside {type(other).__name__}"
            raise DTypeError(f"two trees differ{_at(path)}: {given}")
    if tree is None:
        return None
    if made is not None and isinstance(tree, (Tensor, Node)):
        key = tuple([id(each) for each in (tree, *others)])
        if key not in made:
            if isinstance(tree, Tensor):
                made[key] = fn(tree, *others)
            else:
                made[key] = _with_children(tree, _mapped(fn, path, tree, others, above, made))
        return made[key]
    if isinstance(tree, Tensor) or (_ends(tree) and not strict):
        return fn(tree, *others)
    mapped = _mapped(fn, path, tree, others, above, made)
    if isinstance(tree, (list, tuple)):
        return _like(tree, list(mapped.values()))
    if isinstance(tree, dict):
        parts = dict(zip(tree, mapped.values(), strict=True))
        return parts if type(tree) is dict else _copy_with(tree, parts.items())
    return mapped if tree._as_dict is dict else tree._as_dict(mapped)


def _mapped(
    fn: Callable[..., Any],
    path: str,
    tree: Tree,
    others: tuple[Tree, ...],
    above: tuple[Tree, ...],
    made: dict[tuple[int, ...], Any] | None,
) -> dict[str, Tree]:
    """`_map` of each child of an inner node, by name."""
    above = _below(above, tree, path)
    below = children(tree, path)
    beside = [children(other, path) for other in others]
    for other in beside:
        if other.keys() != below.keys():
            raise DTypeError(f"two trees differ{_at(path)}: {list(below)} beside {list(other)}")
    return {
        name: _map(fn, _join(path, name), child, tuple([y[name] for y in beside]), above, made)
        for name, child in below.items()
    }


def _with_children(node: Node, mapped: Mapping[str, Any]) -> Node:
    """A copy of a Module with other children, by the names that `children` gives them."""
    twin = copy.copy(node)
    for name, field in vars(node).items():
        if name == _BUFFERS or name in node._buffers:
            continue
        if name in mapped:
            vars(twin)[name] = mapped[name]
        elif isinstance(field, (list, tuple)) and holds_tensors(field):
            items = [mapped.get(f"{name}_{i}", item) for i, item in enumerate(field)]
            vars(twin)[name] = _like(field, items)
    return twin


Twins: TypeAlias = list[tuple[Node, Node]]
"""Modules, each with the copy that `substitute` made of it."""


def substitute(fn: Callable[[Tensor], Tensor], tree: Tree, twins: Twins | None = None) -> Tree:
    """The same tree with `fn(leaf)` for each leaf. Modules become shallow copies with the same
    buffers; they are added to `twins`.

    A tensor or Module that occurs twice also occurs twice in the result: `fn` is called once for
    each tensor.
    """
    return replace(partial(_substituted, fn, {}, twins), tree, (Tensor, Node))


def _substituted(
    fn: Callable[[Tensor], Tensor], made: dict[int, Tree], twins: Twins | None, part: Tensor | Node
) -> Tree:
    """`substitute` for one part of a tree. `made` has the results for earlier parts, by id.

    It is no closure: one that names itself would keep the tensors until garbage is collected.
    """
    if id(part) in made:
        return made[id(part)]
    if isinstance(part, Tensor):
        made[id(part)] = fn(part)
        return made[id(part)]
    twin = made[id(part)] = copy.copy(part)
    if twins is not None:
        twins.append((part, twin))
    inside = partial(_substituted, fn, made, twins)
    for name, field in vars(part).items():
        if name not in part._buffers:
            vars(twin)[name] = replace(inside, field, (Tensor, Node))
    return twin


def with_leaves(tree: Tree, tensors: Iterator[Tensor]) -> Tree:
    """The tree with the next of the tensors in the place of each of its own, in the order of
    `leaves`; Modules become shallow copies."""
    return replace(partial(_filled, tensors), tree, (Tensor, Node))


def _filled(tensors: Iterator[Tensor], part: Tensor | Node) -> Tree:
    if isinstance(part, Tensor):
        return next(tensors)
    twin = copy.copy(part)
    for name, field in vars(part).items():
        vars(twin)[name] = replace(partial(_filled, tensors), field, (Tensor, Node))
    return twin


def replace(fn: Callable[[Any], Any], tree: Any, kinds: type | tuple[type, ...] = Tensor) -> Any:
    """The nested dicts, lists and tuples with `fn(part)` for each part of these kinds; any other
    part stays."""
    if isinstance(tree, kinds):
        return fn(tree)
    if isinstance(tree, dict):
        parts = {name: replace(fn, part, kinds) for name, part in tree.items()}
        return parts if type(tree) is dict else _copy_with(tree, parts.items())
    if isinstance(tree, (list, tuple)):
        return _like(tree, [replace(fn, part, kinds) for part in tree])
    return tree


def rebind_buffers(twins: Twins) -> None:
    """Give each Module the buffers that were assigned to its twin since."""
    for module, twin in twins:
        for name in twin._buffers:
            if vars(twin)[name] is not vars(module).get(name):
                setattr(module, name, Buffer(vars(twin)[name]))


def require_types(
    expected: Mapping[str, TensorType], given: Mapping[str, TensorType], what: str
) -> None:
    """Raise unless `given` has just the expected paths, each with its expected type.

    `PathError` names the paths that are missing or unknown, `DTypeError` and `ShapeError` the first
    whose dtype or shape is wrong. `what` says what each is: "gradient", "parameter".
    """
    missing = [path for path in expected if path not in given]
    unknown = [path for path in given if path not in expected]
    if missing or unknown:
        texts = [
            f"{word} {what}{'s' * (len(paths) > 1)} {', '.join(map(repr, paths))}"
            for word, paths in (("missing", missing), ("unknown", unknown))
            if paths
        ]
        raise PathError(f"{'; '.join(texts)}; given are {', '.join(given) or 'none'}")
    for path, type in expected.items():
        if given[path].dtype is not type.dtype:
            name = type.dtype.long_name
            way = f"ml.astype(x, ml.{name})" if type.dtype.is_half else f"astype({name!r})"
            raise DTypeError(
                f"{what} {path!r} is {type}, given {given[path]}: convert it with {way}"
            )
        if given[path] is not type:
            raise ShapeError(f"{what} {path!r} is {type}, given {given[path]}")


def load(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any], what: str) -> None:
    """Write arrays (numpy's, tensors, or others that `asarray` reads, such as PyTorch's parameters)
    over the tensors of their paths. From and to float16 and bfloat16, f32 is taken where it has the
    very values.

    Everything is checked before the first write. Raises `DTypeError` for what is no mapping to
    arrays, what `require_types` raises, `StaleTensor`, and `GradientError` while a tape needs
    the old values.
    """
    if not isinstance(arrays, Mapping):
        raise DTypeError(f"arrays come by path, in a mapping, not in a {type(arrays).__name__}")
    copied = {path: array_for(path, array, what) for path, array in arrays.items()}
    for path, array in copied.items():
        if path in tensors:
            copied[path] = _exactly(array, tensors[path].dtype)
    types = {path: TensorType.of(array) for path, array in copied.items()}
    require_types({path: x.type for path, x in tensors.items()}, types, what)
    require_live(tensors.values())
    for path, x in tensors.items():
        make_exclusive(x)
        x.tape = None
        write(x, copied[path])


def array_for(path: str, array: Any, what: str) -> Array:
    """The values of an array for `load`. Raises `DTypeError`, with the path, for no array."""
    if not hasattr(array, "__array__") and not hasattr(array, "__dlpack__"):
        raise DTypeError(f"{what} {path!r} must be an array, not a {type(array).__name__}")
    try:
        return array_of(array)
    except DTypeError as error:
        raise DTypeError(f"{what} {path!r}: {error.reason}") from None


def _exactly(array: Array, dtype: DType) -> Array:
    """A half as f32, or f32 as a half that has the same values; any other array as it is."""
    own = DType.of(array.dtype)
    if not (own.is_half and dtype is f32) and not (own is f32 and dtype.is_half):
        return array
    found = cast(array, dtype)
    return found if np.array_equal(cast(found, f32), cast(array, f32), equal_nan=True) else array


def require_live(tensors: Iterable[Tensor]) -> None:
    """Raise `StaleTensor` for the first tensor whose memory was given back."""
    for x in tensors:
        if x.handle == STALE:
            raise x.stale()


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _like(sequence: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """The items in a list, tuple or named tuple of the given one's class."""
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items)
    if isinstance(sequence, list) and type(sequence) is not list:
        return _copy_with(sequence, enumerate(items))
    return type(sequence)(items)


def _copy_with(container: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A copy of a dict or list of another class, which has fields too, with these items."""
    twin = copy.copy(container)
    for key, item in items:
        twin[key] = item
    return twin
