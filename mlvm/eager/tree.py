"""Trees: nested dicts, lists, tuples, named tuples and Modules. What is none of these, and not
None, is a leaf. A Module has as children those of its fields that hold tensors or Modules; the
others stay as they are.

`flatten` takes a tree apart into its leaves and a structure, and `unflatten` puts one together;
nothing else walks a tree. A leaf's path names it: `MixerBlock_0/token_mixing/Dense_0/kernel`. A
list in a field of a Module counts as fields `name_0`, `name_1`, ... A tensor that occurs twice is
one tensor under two paths. A Module's buffers are part of the tree only with `buffers=True`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, NoReturn, Self, TypeAlias

import numpy as np

from mlvm.arena.arena import STALE
from mlvm.core.errors import DTypeError, PathError, ShapeError
from mlvm.core.ops.half import cast
from mlvm.core.types import Array, DType, TensorType, f32
from mlvm.eager.tensor.operands import NUMBERS, is_array
from mlvm.eager.tensor.reading import write
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tensor.values import array_of

__all__ = ["leaves", "map"]

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


def assign_buffers_too(copied: Node, module: Node) -> None:
    """From now on assign to the Module what is assigned to a buffer of its copy."""
    _ORIGINS[id(copied)] = weakref.ref(module)
    weakref.finalize(copied, _ORIGINS.pop, id(copied), None).atexit = False


class Node:
    """Base of classes whose fields are children in a tree; `nn.Module` is one.

    A field that was once assigned a `Buffer` stays a buffer, whatever is assigned to it later,
    until it is deleted.
    """

    _buffers: tuple[str, ...] = ()
    _as_dict: ClassVar[type[dict[str, Any]]] = dict
    """What `map_to_dicts` makes of it."""

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
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


_CONTAINERS: Final = (dict, list, tuple, Node)
_OPERANDS: Final = (Tensor, *NUMBERS)
_NUMBERS: Final = frozenset({bool, int, float, str, type(None)})


def holds_tensors(value: object) -> bool:
    """Whether a Module's field is part of the tree: a tensor, a Module, or a container of one. A
    `Buffer` in a container counts, so that it is refused as a leaf."""
    if isinstance(value, (Tensor, Node, Buffer)):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or _NUMBERS.issuperset({type(x) for x in value}):
        return False  # without a look at each of a million numbers
    return any(holds_tensors(x) for x in value)


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
    if not isinstance(tree, _CONTAINERS):
        given = type(tree).__name__
        raise DTypeError(f"a tree has tensors as leaves, not a {given}{_at(path)}")
    found = [(str(name), child) for name, child in _items(tree, buffers)]
    named = dict(found)
    if len(named) != len(found):
        names = ", ".join([name for name, _ in found])
        raise DTypeError(f"a name occurs twice among {names}{_at(path)}")
    return named


def _items(tree: Tree, buffers: bool) -> Iterable[tuple[Any, Tree]]:
    if isinstance(tree, Node):
        return [(name, x) for name, x in fields(tree, buffers=buffers) if holds_tensors(x)]
    return tree.items() if isinstance(tree, dict) else enumerate(tree)


# --- flatten and unflatten -----------------------------------------------------------


class Structure(NamedTuple):
    """A tree without its leaves: a container, the structures of its children by name, and how many
    leaves there are below. What is kept as it is has None for children."""

    container: Any
    parts: dict[Any, Structure] | None
    size: int


_LEAF: Final = Structure(None, None, 1)

Leaves: TypeAlias = list[tuple[str, Any]]
"""Leaves in order, each with its path."""

Ends: TypeAlias = Callable[[Any], bool | None]
"""Where a tree ends: True for a leaf, False for what is kept in the structure, None for a node."""

Remade: TypeAlias = Callable[[Node, dict[str, Any]], Any]
"""What becomes of a Module and its new children by name."""


def at_tensors(part: Any) -> bool | None:
    """All else is refused."""
    return True if isinstance(part, Tensor) else None if part is not None else False


def at_operands(part: Any) -> bool | None:
    """Arrays and numbers are leaves too."""
    if isinstance(part, _OPERANDS) or (not isinstance(part, _CONTAINERS) and is_array(part)):
        return True
    return at_tensors(part)


def among_others(part: Any) -> bool | None:
    """Tensors are leaves, and what is no container is kept."""
    return isinstance(part, Tensor) or (None if isinstance(part, _CONTAINERS) else False)


def anywhere(part: Any) -> bool | None:
    """Whatever is no container is a leaf."""
    return None if isinstance(part, _CONTAINERS) else part is not None


def flatten(
    tree: Tree, path: str | None = "", *, ends: Ends = at_tensors, buffers: bool = False
) -> tuple[Leaves, Structure]:
    """The leaves of a tree in order, each with its path, and the structure that is left; with
    `buffers` those in buffers too. Nothing has a path, nor needs a name of its own, without one.

    Raises `DTypeError` for what is no tree, and for a node that contains itself.
    """
    found: Leaves = []
    root = _flatten(found, path and "", {path: tree}, (), ends, buffers)
    return found, root[path]


def _flatten(
    found: Leaves,
    path: str | None,
    siblings: dict[Any, Tree],
    above: tuple[Tree, ...],
    ends: Ends,
    buffers: bool,
) -> dict[Any, Structure]:
    parts = {}
    for name, tree in siblings.items():
        end = ends(tree)
        if end is not None:
            if end:
                found.append((_join(path, name) or "", tree))
            parts[name] = _LEAF if end else Structure(tree, None, 0)
            continue
        here = _join(path, name)
        for each in above:
            if each is tree:
                given = type(tree).__name__
                raise DTypeError(f"a tree ends in tensors; this {given} contains itself{_at(here)}")
        before = len(found)
        below = (
            dict(_items(tree, buffers)) if path is None else children(tree, here, buffers=buffers)
        )
        inner = _flatten(found, here, below, (*above, tree), ends, buffers)
        parts[name] = Structure(tree, inner, len(found) - before)
    return parts


def unflatten(structure: Structure, leaves: Iterable[Any], remade: Remade | None = None) -> Tree:
    """A tree of that structure with these leaves; Modules become copies, unless they are `remade`
    otherwise. One that occurs twice, with the same leaves, also occurs twice in the result."""
    return _unflatten(structure, list(leaves), 0, remade or _with_children, {})


def _unflatten(
    structure: Structure, leaves: list[Any], start: int, remade: Remade, made: dict[Any, Any]
) -> Tree:
    if structure.parts is None:
        return leaves[start] if structure is _LEAF else structure.container
    tree, is_node = structure.container, isinstance(structure.container, Node)
    key = (id(tree), *[id(x) for x in leaves[start : start + structure.size]]) if is_node else ()
    if is_node and key in made:
        return made[key]
    parts = {}
    for name, part in structure.parts.items():
        leaf = part is _LEAF
        parts[name] = leaves[start] if leaf else _unflatten(part, leaves, start, remade, made)
        start += part.size
    if not is_node:
        return _like(tree, [*parts.values()])
    made[key] = remade(tree, parts)
    return made[key]


def _with_children(node: Node, parts: dict[str, Any]) -> Node:
    """A copy of a Module with other children, and with containers of its own."""
    copied = copy.copy(node)
    for name, field in vars(node).items():
        if name in parts:
            vars(copied)[name] = parts[name]
        elif isinstance(field, (list, tuple)) and holds_tensors(field):
            items = {f"{name}_{i}": item for i, item in enumerate(field)}
            if not parts.keys().isdisjoint(items):
                vars(copied)[name] = _like(field, [parts.get(each, items[each]) for each in items])
        elif isinstance(field, (dict, list, tuple)) and name not in node._buffers:
            vars(copied)[name] = replace(id, field, ())
    return copied


def _like(container: Any, items: list[Any]) -> Any:
    """The items in a dict, list, tuple or named tuple of the given one's class."""
    if type(container) is dict:
        return dict(zip(container, items, strict=True))
    if isinstance(container, dict) or (isinstance(container, list) and type(container) is not list):
        copied = copy.copy(container)  # which may have fields, too
        keys = container if isinstance(container, dict) else range(len(items))
        for key, item in zip(keys, items, strict=True):
            copied[key] = item
        return copied
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)


def partners(
    structure: Structure,
    other: Tree,
    alike: Callable[[Tree, Tree], bool],
    differ: Callable[[str, Tree, Tree], NoReturn],
    *,
    buffers: bool = False,
) -> list[Any]:
    """What another tree has at the places of the leaves. Where two nodes are not `alike`, or their
    children have other names, `differ` is called with their path and both."""
    found: list[Any] = []
    left = [("", structure, other)]
    while left:
        path, part, beside = left.pop()
        if part is _LEAF:
            found.append(beside)
        elif not alike(part.container, beside):
            differ(path, part.container, beside)
        elif part.parts is not None:
            given = children(beside, path, buffers=buffers)
            if given.keys() != part.parts.keys():
                differ(path, part.container, beside)
            below = [(_join(path, name), x, given[name]) for name, x in part.parts.items()]
            left.extend(reversed(below))
    return found


def containers(tree: Tree, *, buffers: bool = False) -> list[Any]:
    """The dicts, lists, tuples and Modules that a tree is made of, each once."""
    found: dict[int, Any] = {}
    left = [flatten(tree, buffers=buffers)[1]]
    while left:
        part = left.pop()
        if part.parts is not None:
            found[id(part.container)] = part.container
            left.extend(part.parts.values())
    return list(found.values())


# --- what is made with them ----------------------------------------------------------


def map(f: Callable[..., Any], tree: Tree, /, *rest: Tree) -> Tree:
    """The same tree with `f(leaf, *what the rest has at its place)` for each leaf, as
    `jax.tree.map` makes it.

    Each of the rest has the tree's structure, and anything where the tree has a leaf. Beside a
    Module it may have a dict, as gradients and `Module.parameters` have one. Modules become copies,
    which share their buffers. Two places with one tensor, and one partner, have one result.

    The leaves: tensors of any shapes, and anything else. Raises `DTypeError` where structures
    differ, and for a node that contains itself.

        >>> ml.tree.map(ml.negative, {"a": ml.ones(2), "b": [ml.zeros(1)]})
        {'a': Tensor([-1., -1.], f32[2]), 'b': [Tensor([-0.], f32[1])]}
    """
    found, structure = flatten(tree, ends=anywhere)
    beside = [partners(structure, each, _are_alike, _differ) for each in rest]
    made: dict[tuple[int, ...], Any] = {}
    results = []
    for (path, leaf), *others in zip(found, *beside, strict=True):
        if any(each is None for each in others):
            _differ(path, leaf, None)
        key = tuple([id(each) for each in (leaf, *others)])
        if key not in made or not isinstance(leaf, Tensor):
            made[key] = f(leaf, *others)
        results.append(made[key])
    return unflatten(structure, results)


def _are_alike(tree: Tree, other: Tree) -> bool:
    return isinstance(other, _CONTAINERS) if tree is not None else other is None


def _differ(path: str, tree: Tree, other: Tree) -> NoReturn:
    if isinstance(tree, _CONTAINERS) and isinstance(other, _CONTAINERS):
        text = f"{list(children(tree))} beside {list(children(other))}"
    else:
        text = f"{type(tree).__name__} beside {type(other).__name__}"
    raise DTypeError(f"two trees differ{_at(path)}: {text}")


def leaves(tree: Tree, /) -> list[Any]:
    """The leaves of the tree in order, also those that occur twice; of None there are none.

    The leaves: tensors of any shapes, and anything else. Raises `DTypeError` for a node that
    contains itself.

        >>> ml.tree.leaves({"a": ml.ones(2), "b": [ml.zeros(1)]})
        [Tensor([1., 1.], f32[2]), Tensor([0.], f32[1])]
    """
    return [leaf for _, leaf in flatten(tree, ends=anywhere)[0]]


def map_to_dicts(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """A tree of `fn(leaf)`; Modules become dicts."""
    found, structure = flatten(tree)
    return as_dicts(structure, [fn(x) for _, x in found])


def as_dicts(structure: Structure, leaves: Iterable[Any]) -> Tree:
    """`unflatten`, with dicts in the place of Modules."""
    return unflatten(structure, leaves, lambda node, parts: node._as_dict(parts))


Copies: TypeAlias = list[tuple[Node, Node]]
"""Modules, each with its copy."""


def copied(structure: Structure, leaves: Iterable[Any], copies: Copies) -> Tree:
    """`unflatten`, which adds each Module and its copy to `copies`."""

    def remade(node: Node, parts: dict[str, Any]) -> Node:
        copies.append((node, _with_children(node, parts)))
        return copies[-1][1]

    return unflatten(structure, leaves, remade)


def substitute(fn: Callable[[Tensor], Tensor], tree: Tree, copies: Copies | None = None) -> Tree:
    """The same tree with `fn(leaf)` for each leaf. Modules become shallow copies with the same
    buffers; they are added to `copies`. `fn` is called once for a tensor that occurs twice, and
    what is no tensor stays."""
    found, structure = flatten(tree, None, ends=among_others)
    made = {key: fn(x) for key, x in {id(x): x for _, x in found}.items()}
    return copied(structure, [made[id(x)] for _, x in found], [] if copies is None else copies)


def with_leaves(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    """The tree with these tensors in the places of its own, in buffers too, in the order of
    `flatten`; Modules become shallow copies."""
    return unflatten(flatten(tree, buffers=True)[1], tensors)


def replace(fn: Callable[[Any], Any], tree: Any, kinds: type | tuple[type, ...] = Tensor) -> Any:
    """The nested dicts, lists and tuples with `fn(part)` for each part of these kinds; any other
    part stays."""

    def ends(part: Any) -> bool | None:
        if isinstance(part, kinds):
            return True
        return None if isinstance(part, (dict, list, tuple)) else False

    if isinstance(tree, kinds):
        return fn(tree)  # most results are one tensor
    found, structure = flatten(tree, None, ends=ends)
    return unflatten(structure, [fn(part) for _, part in found])


def named_leaves(tree: Tree, path: str = "", *, buffers: bool = False) -> list[tuple[str, Tensor]]:
    """Each tensor of the tree with its path, in order; with `buffers` those in buffers too."""
    return flatten(tree, path, buffers=buffers)[0]


def named_tensors(tree: Tree, *, buffers: bool = False) -> dict[str, Tensor]:
    """The tensors of the tree by path, each once, under the first of its paths; with `buffers`
    those in buffers too.

    Raises `DTypeError` for other leaves, and for two tensors of one path.
    """
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, x in named_leaves(tree, buffers=buffers):
        if named.get(path, x) is not x:
            raise DTypeError(f"two tensors have the path {path}")
        if id(x) not in seen:
            seen.add(id(x))
            named[path] = x
    return named


def rebind_buffers(copies: Copies) -> None:
    """Give each Module the buffers that were assigned to its copied since."""
    for module, copied in copies:
        for name in copied._buffers:
            if vars(copied)[name] is not vars(module).get(name):
                setattr(module, name, Buffer(vars(copied)[name]))


# --- tensors by path -----------------------------------------------------------------


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


def _join(path: str | None, name: str) -> Any:
    return f"{path}/{name}" if path else name if path == "" else None


def _at(path: str | None) -> str:
    return f" at {path}" if path else ""
