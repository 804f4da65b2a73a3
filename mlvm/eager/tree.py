"""Trees: nested dicts, lists, tuples, named tuples and Modules.

Any other value, except None, is a leaf. The children of a Module are the fields that contain
tensors or Modules; all other fields stay unchanged.

`flatten` splits a tree into leaves and a structure, and `unflatten` combines them; no other
function walks a tree. A leaf is named by a path: `MixerBlock_0/token_mixing/Dense_0/kernel`. The
items of a list in a field of a Module are named like fields, `name_0`, `name_1`, ... A tensor that
occurs twice is one tensor with two paths. A Module's buffers are part of the tree only with
`buffers=True`.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from types import (
    CellType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    NamedTuple,
    NoReturn,
    Self,
    TypeAlias,
    TypeVar,
)

import numpy as np

from mlvm.arena.arena import STALE
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    PathError,
    ShapeError,
    brief,
    user_line,
    with_article,
)
from mlvm.core.ops.half import cast
from mlvm.core.types import Array, DType, TensorType, f32
from mlvm.eager.tensor.context import bound
from mlvm.eager.tensor.number import class_of
from mlvm.eager.tensor.operands import NUMBERS, is_array
from mlvm.eager.tensor.reading import note_read, values_of, write
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tensor.values import array_of, items_of, members_of, module_of
from mlvm.eager.tensor.warn import NoEffectWarning, warn_at
from mlvm.eager.tensor.wrapper import hinted
from mlvm.machines.native.extension import EXTENSION

__all__ = ["leaves", "map"]

Tree: TypeAlias = Any
"""A Tensor, None (no leaves), or a dict, list, tuple or Module of trees."""


class Buffer:
    """Marker that turns a field of a Node into a buffer when it is assigned.

    The field gets the value."""

    __slots__ = ("value",)

    def __init__(self, value: Tree) -> None:
        self.value = value


_BUFFERS: Final = "_buffers"
_FROZEN: Final = "_frozen"
BUFFER_OF: Final = "_buffer_of"
MARKS: Final = frozenset({_BUFFERS, _FROZEN, BUFFER_OF})
"""Fields of a Node that describe other fields."""

_ORIGINS: Final[dict[int, weakref.ref[Node]]] = {}
"""For a Node, by id, the Node to which assignments to buffers are forwarded.

This is not a field, and a copy does not inherit it."""


def assign_buffers_too(copied: Node, module: Node) -> None:
    """Forward assignments to a buffer of the copy to the Module."""
    _ORIGINS[id(copied)] = weakref.ref(module)
    weakref.finalize(copied, _ORIGINS.pop, id(copied), None).atexit = False


_assigned: ContextVar[list[tuple[Node, dict[str, Any]]] | None] = ContextVar(
    "assigned", default=None
)
"""Nodes with fields that were assigned inside of `put_back`, and the previous fields."""


_flattened: ContextVar[set[int] | None] = ContextVar("flattened", default=None)
"""Ids of Nodes with fields that are read as children inside of `noting_flattened`."""


def noting_flattened(flattened: set[int] | None) -> AbstractContextManager[None]:
    """Add the ids of Nodes that are flattened inside the block to a set; None disables this."""
    return bound(_flattened, flattened)


@contextmanager
def put_back() -> Iterator[list[tuple[Node, dict[str, Any]]]]:
    """Restore after the block the fields of Nodes that it assigns; yield these Nodes."""
    assigned: list[tuple[Node, dict[str, Any]]] = []
    try:
        with bound(_assigned, assigned):
            yield assigned
    finally:
        for node, fields in reversed(assigned):
            vars(node).clear()
            vars(node).update(fields)


class Node:
    """Base of classes with fields that are children in a tree, such as `nn.Module`.

    A field that was once assigned a `Buffer` stays a buffer until it is deleted, whatever is
    assigned to it later. Children that are `_frozen` are treated as buffers until they are thawed.
    Assigning the class of a Node to a field, directly or in a list, raises `ArgumentError`, because
    the class was meant to be called.
    """

    _buffers: tuple[str, ...] = ()
    _frozen: tuple[str, ...] = ()
    _buffer_of: Node | None = None
    """The Node that this one represents in a list, where all of it is a buffer.

    A field gets that Node itself. In a copy of the copy it is the same Node."""

    _as_dict: ClassVar[type[dict[str, Any]]] = dict
    """The value in the result of `map_to_dicts`."""

    if not TYPE_CHECKING:  # otherwise a type checker would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if (assigned := _assigned.get()) is not None:
                assigned.append((self, dict(vars(self))))
            if value.__class__ is not Tensor and name != "__class__":
                _require_no_class(self, name, value)
            if issubclass(type(value), Node) and value._buffer_of is not None:
                value = Buffer(value._buffer_of)
            if issubclass(type(value), Buffer):
                value = value.value
                if name not in self._buffers:
                    vars(self)[_BUFFERS] = (*self._buffers, name)
            super().__setattr__(name, value)
            if name in self._buffers and id(self) in _ORIGINS:
                module = _ORIGINS[id(self)]()
                if module is not None:
                    setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        if (assigned := _assigned.get()) is not None:
            assigned.append((self, dict(vars(self))))
        super().__delattr__(name)
        for mark in {_BUFFERS, _FROZEN} & vars(self).keys():
            vars(self)[mark] = tuple([each for each in vars(self)[mark] if each != name])

    def __copy__(self) -> Self:
        """Copy the node with the same fields."""
        if (flattened := _flattened.get()) is not None:
            flattened.add(id(self))
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


def _require_no_class(owner: Node, name: str, value: Any) -> None:
    """Raise `ArgumentError` for a Module's class where an instance is expected."""
    if issubclass(type(value), type) and issubclass(value, Node):
        home = "nn." if module_of(value).startswith("mlvm.eager.nn.") else ""
        made_by: Any = getattr(value, "__init__")  # noqa: B009  mypy knows no such field of a type
        takes = made_by is not object.__init__ and len(signature(made_by).parameters) > 1
        arguments = "..." if takes else ""
        raise ArgumentError(
            f"{type(owner).__name__}: expected a layer as {name}, got the class {value.__name__}; "
            f"write {home}{value.__name__}({arguments})"
        )
    if issubclass(type(value), (list, tuple)):
        for i, each in enumerate(value):
            if issubclass(type(each), type):
                _require_no_class(owner, f"{name}[{i}]", each)


N = TypeVar("N", bound=Node)


def buffer_of(node: N) -> N:
    """Return a new Node with the same children that is a buffer in any field.

    Assignments to buffers are forwarded to this Node."""
    copied = copy.copy(node)
    vars(copied)[BUFFER_OF] = node
    assign_buffers_too(copied, node)
    return copied


_BASES: Final[tuple[Any, ...]] = (OrderedDict, defaultdict, dict, list, tuple)
_CONTAINERS: Final = (dict, list, tuple, Node)
_OPERANDS: Final = (Tensor, *NUMBERS)
_NUMBERS: Final = frozenset({bool, int, float, str, type(None)})


def holds_tensors(value: Any) -> bool:
    """Return whether a Module's field is part of the tree.

    It is part of the tree if it is a tensor, a Module or a container of these. A `Buffer` in a
    container also counts, so that it is rejected as a leaf."""
    kind = type(value)  # isinstance might run user code
    if kind is Tensor or kind in _NUMBERS:
        return kind is Tensor
    if issubclass(kind, (Tensor, Node, Buffer)):
        return True
    if not issubclass(kind, (dict, list, tuple)):
        return False
    if issubclass(kind, dict):
        value = list(value.values())
    if _NUMBERS.issuperset({type(x) for x in value}):
        return False  # without checking each of a million numbers
    return any(holds_tensors(x) for x in value)


def fields(node: Node, *, buffers: bool = False, frozen: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a Module's fields by name, in order of assignment; lists of children item by item.

    Buffers are included with `buffers`, frozen fields with `buffers` or `frozen`."""
    if (flattened := _flattened.get()) is not None:
        flattened.add(id(node))
    if node._buffer_of is not None and not buffers:
        return
    left_out = () if buffers or frozen else node._frozen
    skipped = () if buffers else node._buffers
    for name, field in vars(node).items():
        if name in MARKS or name in skipped:
            continue
        if isinstance(field, (list, tuple)) and holds_tensors(field):
            items = ((f"{name}_{i}", item) for i, item in enumerate(field))
            yield from (each for each in items if each[0] not in left_out) if left_out else items
        elif name not in left_out:
            yield name, field


def children(tree: Tree, path: str = "", *, buffers: bool = False) -> dict[str, Tree]:
    """Return the children of an inner node by name, in order.

    Raises `DTypeError` if it is not a node, or two children have the same name.
    """
    if not issubclass(type(tree), _CONTAINERS):
        kind = type(tree).__name__
        hint = ""
        if isinstance(tree, Buffer):
            hint = "; buffers are fields, or Modules in a list; use freeze for a tensor in a list"
        elif isinstance(tree, str):
            hint = "; pass the model itself, which is a tree, not names of model.parameters()"
        elif isinstance(tree, (float, int)) or hasattr(tree, "__array__"):
            hint = "; convert it with ml.asarray(...)"
        raise DTypeError(f"expected a tensor as leaf, got {with_article(kind)}{_at(path)}{hint}")
    pairs = [*_items(tree, buffers)]
    named = {str(name): child for name, child in pairs}
    if len(named) != len(pairs):
        names = ", ".join([str(name) for name, _ in pairs])
        raise DTypeError(f"expected distinct names, got {names}{_at(path)}")
    return named


def _items(tree: Tree, buffers: bool) -> Iterable[tuple[Any, Tree]]:
    if issubclass(type(tree), Node):
        return [pair for pair in fields(tree, buffers=buffers) if holds_tensors(pair[1])]
    return items_of(tree) if issubclass(type(tree), dict) else enumerate(members_of(tree))


# --- flatten and unflatten -----------------------------------------------------------


class Structure(NamedTuple):
    """A tree without leaves: a container, the structures of the children, and the leaf count.

    The children are given by name. An object that is kept unchanged has None as children."""

    container: Any
    parts: dict[Any, Structure] | None
    size: int


_LEAF: Final = Structure(None, None, 1)
_NOTHING: Final = Structure(None, None, 0)

Leaves: TypeAlias = list[tuple[str, Any]]
"""Leaves in order, each with the path."""

Ends: TypeAlias = Callable[[Any], bool | None]
"""Predicate of leaves: True for a leaf, False for a value that stays in the structure, None for a
node."""

Remade: TypeAlias = Callable[[Node, dict[str, Any]], Any]
"""Function that rebuilds a Module from new children by name."""


def at_tensors(part: Any) -> bool | None:
    """Stop at tensors; reject other leaves."""
    if issubclass(type(part), Tensor):
        return True
    return None if part is not None else False


def at_operands(part: Any) -> bool | None:
    """Stop at tensors, arrays and numbers."""
    kind = class_of(part)
    if issubclass(kind, _OPERANDS) or (not issubclass(kind, _CONTAINERS) and is_array(part)):
        return True
    return at_tensors(part)


def among_others(part: Any) -> bool | None:
    """Stop at tensors; keep other leaves in the structure."""
    kind = type(part)
    return issubclass(kind, Tensor) or (None if issubclass(kind, _CONTAINERS) else False)


def within_containers(kinds: type | tuple[type, ...]) -> Ends:
    """Stop at values of these classes in dicts, lists and tuples; keep other values."""

    def ends(part: Any) -> bool | None:
        kind = class_of(part)
        return issubclass(kind, kinds) or (None if issubclass(kind, (dict, list, tuple)) else False)

    return ends


def anywhere(part: Any) -> bool | None:
    """Stop at anything that is not a container."""
    return None if issubclass(type(part), _CONTAINERS) else part is not None


def flatten(
    tree: Tree, path: str | None = "", *, ends: Ends = at_tensors, buffers: bool = False
) -> tuple[Leaves, Structure]:
    """Flatten a tree to the leaves in order, each with the path, and the structure.

    With `buffers`, buffers are included. If `path` is None, leaves have no paths, and names may
    repeat.

    Raises `DTypeError` if it is not a tree, or a node contains itself.
    """
    pairs: Leaves = []
    root = _flatten(pairs, path and "", {path: tree}, (), ends, buffers)
    return pairs, root[path]


def _flatten(
    pairs: Leaves,
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
                pairs.append((_join(path, name) or "", tree))
            parts[name] = _LEAF if end else Structure(tree, None, 0)
            continue
        here = _join(path, name)
        for each in above:
            if each is tree:
                kind = type(tree).__name__
                raise DTypeError(
                    f"expected a finite tree, but this {kind} contains itself{_at(here)}; "
                    "break the cycle"
                )
        before = len(pairs)
        below = (
            dict(_items(tree, buffers)) if path is None else children(tree, here, buffers=buffers)
        )
        inner = _flatten(pairs, here, below, (*above, tree), ends, buffers) if below else {}
        parts[name] = Structure(tree, inner, len(pairs) - before)
    return parts


def unflatten(structure: Structure, leaves: Iterable[Any], remade: Remade | None = None) -> Tree:
    """Build a tree with that structure and these leaves.

    Modules are copied, or built by `remade`. A Module that occurs twice with the same leaves is
    also one Module in the result."""
    return _unflatten(structure, list(leaves), 0, remade or _with_children, {})


def _unflatten(
    structure: Structure, leaves: list[Any], start: int, remade: Remade, copies: dict[Any, Any]
) -> Tree:
    if structure.parts is None:
        return leaves[start] if structure is _LEAF else structure.container
    tree, is_node = structure.container, isinstance(structure.container, Node)
    key = (id(tree), *[id(x) for x in leaves[start : start + structure.size]]) if is_node else ()
    if is_node and key in copies:
        return copies[key]
    parts = {}
    for name, part in structure.parts.items():
        leaf = part is _LEAF
        parts[name] = leaves[start] if leaf else _unflatten(part, leaves, start, remade, copies)
        start += part.size
    if not is_node:
        return like(tree, [*parts.values()])
    copies[key] = remade(tree, parts)
    return copies[key]


def _with_children(node: Node, parts: dict[str, Any]) -> Node:
    """Copy a Module with other children and new containers."""
    copied = node.__copy__()
    own = vars(copied)
    for name, field in vars(node).items():
        if name in parts:
            own[name] = parts[name]
        elif field.__class__ in _NUMBERS:
            continue
        elif isinstance(field, (list, tuple)) and holds_tensors(field):
            items = {f"{name}_{i}": item for i, item in enumerate(field)}
            if not parts.keys().isdisjoint(items):
                own[name] = like(field, [parts.get(each, items[each]) for each in items])
        elif isinstance(field, (dict, list, tuple)) and name not in node._buffers:
            own[name] = replace(id, field, ())
    return copied


def like(container: Any, items: list[Any]) -> Any:
    """Return the items in a dict, list, tuple or named tuple of the given class."""
    kind = type(container)
    if kind is dict:
        return dict(zip(container, items, strict=True))
    if kind is list or kind is tuple:
        return kind(items)
    base = next(each for each in _BASES if isinstance(container, each))
    try:  # without the class's constructor or other methods, which may accept any arguments
        copied = base.__new__(kind, *([items] if base is tuple else []))
    except TypeError:  # a C class, such as `time.struct_time`
        return kind(items)
    if base is not tuple:  # subclasses of tuple have no slots
        _fill(copied, container, base, items)
    with suppress(AttributeError):
        fields = object.__getattribute__(container, "__dict__")
        object.__getattribute__(copied, "__dict__").update(fields)
    return copied


def _fill(copied: Any, container: Any, base: Any, items: list[Any]) -> None:
    """Store the items in a new list or dict, and copy the container's slots."""
    if base is list:
        list.extend(copied, items)
    else:
        if base is defaultdict:
            copied.default_factory = container.default_factory
        for (key, _), item in zip(items_of(container), items, strict=True):
            base.__setitem__(copied, key, item)
    for each in type(container).__mro__:
        for slot in vars(each).values() if each not in _BASES else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # the field has no value
                    slot.__set__(copied, slot.__get__(container))


def partners(
    structure: Structure,
    other: Tree,
    alike: Callable[[Tree, Tree], bool],
    differ: Callable[[str, Tree, Tree], NoReturn],
    *,
    buffers: bool = False,
) -> list[Any]:
    """Return the subtrees of `other` at the positions of the leaves.

    `differ` is called with a path and both nodes if they are not `alike`, or the children have
    different names."""
    parts: list[Any] = []
    left = [("", structure, other)]
    while left:
        path, part, other_part = left.pop()
        if part is _LEAF:
            parts.append(other_part)
        elif not alike(part.container, other_part):
            differ(path, part.container, other_part)
        elif part.parts is not None:
            others = children(other_part, path, buffers=buffers)
            if others.keys() != part.parts.keys():
                differ(path, part.container, other_part)
            below = [(_join(path, name), x, others[name]) for name, x in part.parts.items()]
            left.extend(reversed(below))
    return parts


def named_nodes(tree: Tree) -> Iterator[tuple[str, Node]]:
    """Yield each Module of a tree once, including those in buffers, with the first path.

    The order is the order of the tree."""
    left, visited = [("", tree)], set[int]()
    while left:
        path, part = left.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, Node):
            yield path, part
            named: Any = fields(part, buffers=True)
        else:
            named = part.items() if isinstance(part, dict) else enumerate(part)
        left += reversed(
            [
                (_join(path, str(name)), child)
                for name, child in named
                if isinstance(child, _CONTAINERS) and holds_tensors(child)
            ]
        )


def warn_of_hidden(tree: Tree) -> None:
    """Warn of Modules with parameters in a field with a value that is not a tree.

    Such a value is a dataclass, a deque, a function, a generator, or any other object."""
    nodes = list(named_nodes(tree)) if isinstance(tree, _CONTAINERS) else []
    visited = {id(node) for _, node in nodes}
    for path, node in nodes:
        for name, field in vars(node).items():
            hidden = None if name in MARKS else _hidden(field, visited, 4)
            if hidden is not None:
                warn_at(
                    user_line(),
                    f"{type(node).__name__}.{name}{_at(path)} is "
                    f"{with_article(type(field).__name__)}, in "
                    f"which {with_article(hidden)} is neither trained nor saved: put it "
                    f"into a field of its "
                    f"own, or a list or dict in one",
                    NoEffectWarning,
                )


def _hidden(part: Any, visited: set[int], depth: int) -> str | None:
    """Return the class of a hidden Module that has tensors and is not in `visited`, or None."""
    if isinstance(part, GeneratorType):
        return "Module that it makes"
    if isinstance(part, Node):
        unseen = id(part) not in visited and flatten(part, None, ends=among_others)[0]
        return type(part).__name__ if unseen else None
    if not depth or isinstance(part, (Tensor, type, ModuleType)) or type(part) in _NUMBERS:
        return None
    inner: Iterable[Any] = ()
    if isinstance(part, dict):
        inner = part.values()
    elif isinstance(part, (list, tuple, set, frozenset, deque)):
        inner = () if _NUMBERS.issuperset({type(x) for x in part}) else part
    elif isinstance(part, MethodType):
        inner = (part.__self__,)
    elif isinstance(part, partial):
        inner = (part.func, *part.args, *part.keywords.values())
    elif isinstance(part, FunctionType):
        reached = [part.__globals__.get(name) for name in part.__code__.co_names]
        inner = [cell.cell_contents for cell in part.__closure__ or () if cell != _EMPTY]
        inner += [x for x in reached if isinstance(x, Node)]
    else:
        names = {**getattr(part, "__dict__", {}), **getattr(part, "__dataclass_fields__", {})}
        inner = [getattr(part, name, None) for name in names]
    classes = (_hidden(x, visited, depth - 1) for x in list(inner))
    return next((x for x in classes if x is not None), None)


_EMPTY: Final = CellType()


def containers(tree: Tree, *, buffers: bool = False) -> list[Any]:
    """Return the dicts, lists, tuples and Modules of a tree, each once."""
    result: dict[int, Any] = {}
    left = [flatten(tree, buffers=buffers)[1]]
    while left:
        part = left.pop()
        if part.parts is not None:
            result[id(part.container)] = part.container
            left.extend(part.parts.values())
    return list(result.values())


# --- selection of tensors ------------------------------------------------------------

Where: TypeAlias = str | Callable[[str, Tensor], bool]
"""Selection of a tree's tensors: a pattern for paths, `blocks_*/mlp`, in which `*` also matches
"/", or a function of path and tensor. A pattern that matches the path of a part selects all
tensors in it."""


def fits(where: object, path: str, x: Any) -> bool:
    """Return whether `where` selects the tensor with that path.

    Raises `ArgumentError` if it is not a `Where`."""
    if callable(where):
        return bool(where(path, x))
    if not isinstance(where, str):
        raise ArgumentError(
            f"expected a pattern of paths, or a function of path and tensor, got {brief(where)}"
        )
    ends = [i for i, letter in enumerate(path) if letter == "/"]
    return any(fnmatchcase(path[:end], where) for end in (*ends, len(path)))


def selected(leaves: Leaves, where: Where | None) -> set[int]:
    """Return the ids of the tensors that `where` selects by at least one path.

    Raises `ArgumentError` if there are none."""
    if where is None:
        return {id(x) for _, x in leaves}
    ids = {id(x) for path, x in leaves if fits(where, path, x)}
    if not ids:
        raise no_match(where, [path for path, _ in leaves])
    return ids


def no_match(where: Where, paths: Iterable[str], what: str = "tensor") -> ArgumentError:
    """Return the error if `where` matches none of the paths."""
    name = repr(where) if isinstance(where, str) else "this function"
    hint = ", with / between names" if isinstance(where, str) and "." in where else ""
    there = ", ".join(paths) or "none"
    return ArgumentError(f"no {what} matches {name}; expected{hint}: {there}")


def pruned(structure: Structure, flags: Iterable[bool]) -> Structure:
    """Prune a structure to the flagged leaves.

    All other leaves are removed from dicts and Modules, and replaced by None in lists and tuples.
    """
    return _pruned(structure, iter(flags))


def _pruned(structure: Structure, flags: Iterator[bool]) -> Structure:
    if structure.parts is None:
        return structure if structure is not _LEAF or next(flags) else _NOTHING
    tree, parts = structure.container, {}
    for name, part in structure.parts.items():
        parts[name] = _pruned(part, flags)
    size = sum(part.size for part in parts.values())
    if isinstance(tree, (dict, Node)):
        is_missing = [part is _NOTHING for part in parts.values()]
        if isinstance(tree, dict):
            tree, keys = copy.copy(tree), [*tree]
            for key in [key for key, is_gone in zip(keys, is_missing, strict=True) if is_gone]:
                del tree[key]
        parts = {name: part for name, part in parts.items() if part is not _NOTHING}
    return Structure(tree, parts, size)


def freeze(tree: Tree, where: Where | None, *, frozen: bool) -> None:
    """Treat parameters as buffers from now on or, if not `frozen`, as parameters again.

    A parameter that occurs in several positions of the tree is frozen in all of them.

    Raises `ArgumentError` for a list within a list, or a dict, of which only a part would be
    frozen, and if `where` selects nothing. In these cases nothing has changed.
    """
    candidates: list[tuple[Node, str, Leaves, bool]] = []
    left, visited = [("", tree)], set[int]()
    while left:
        path, node = left.pop()
        if id(node) in visited or node._buffer_of is not None:
            continue
        visited.add(id(node))
        for name, child in fields(node, frozen=True):
            if holds_tensors(child):
                inside = flatten(child, _join(path, name), ends=_at_tensors_and_nodes)[0]
                tensors = [each for each in inside if isinstance(each[1], Tensor)]
                nodes = [each for each in inside if isinstance(each[1], Node)]
                left += nodes
                candidates.append((node, name, tensors, bool(nodes)))
    ids = selected([x for each in candidates for x in each[2]], where)
    changes: dict[int, tuple[Node, set[str]]] = {}
    for node, name, tensors, mixed in candidates:
        which = [id(x) in ids for _, x in tensors]
        if any(which):
            if mixed or not all(which):
                others = ", ".join([path for path, _ in tensors])
                text = "what a dict or an inner list has is frozen together, and alone"
                raise ArgumentError(f"{type(node).__name__}.{name}: {text}: {others}")
            changes.setdefault(id(node), (node, set()))[1].add(name)
    for node, names in changes.values():
        before = [name for name in node._frozen if name not in names]
        vars(node)[_FROZEN] = tuple(sorted({*before, *names}) if frozen else before)


def _at_tensors_and_nodes(part: Any) -> bool | None:
    return True if isinstance(part, Node) else at_tensors(part)


# --- functions based on flatten and unflatten ----------------------------------------


@hinted
def map(f: Callable[..., Any], tree: Tree, /, *rest: Tree) -> Tree:
    """Map each leaf to `f(leaf, *others)`, with the subtrees of `rest` at the same position.

    It corresponds to `jax.tree.map`. Each tree in `rest` has the tree's structure, with any objects
    at the leaves. It may contain a dict instead of a Module, as gradients and `Module.parameters`
    do. Modules become copies, which share buffers with the originals. Positions with the same
    tensor and the same subtrees share one result.

    The leaves: tensors of any shapes, and any other objects. Raises `DTypeError` if the structures
    differ, or a node contains itself.

        >>> ml.tree.map(ml.negative, {"a": ml.ones(2), "b": [ml.zeros(1)]})
        {'a': Tensor([-1., -1.], f32[2]), 'b': [Tensor([-0.], f32[1])]}

    Invalid calls:
        ml.tree.map(ml.add, [v], [v, v])  # DTypeError
    """
    pairs, structure = flatten(tree, ends=anywhere)
    columns = [partners(structure, each, _are_alike, _differ) for each in rest]
    mapped: dict[tuple[int, ...], Any] = {}
    results = []
    for (path, leaf), *others in zip(pairs, *columns, strict=True):
        if any(each is None for each in others):
            _differ(path, leaf, None)
        key = tuple([id(each) for each in (leaf, *others)])
        if key not in mapped or not isinstance(leaf, Tensor):
            mapped[key] = f(leaf, *others)
        results.append(mapped[key])
    return unflatten(structure, results)


def _are_alike(tree: Tree, other: Tree) -> bool:
    return isinstance(other, _CONTAINERS) if tree is not None else other is None


def _differ(path: str, tree: Tree, other: Tree) -> NoReturn:
    if isinstance(tree, _CONTAINERS) and isinstance(other, _CONTAINERS):
        text = f"{list(children(tree))} beside {list(children(other))}"
    else:
        text = f"{type(tree).__name__} beside {type(other).__name__}"
    raise DTypeError(f"two trees differ{_at(path)}: {text}")


@hinted
def leaves(tree: Tree, /) -> list[Any]:
    """Return the leaves of the tree in order, including repeated leaves; None has no leaves.

    The leaves: tensors of any shapes, and any other objects. Raises `DTypeError` if a node contains
    itself.

        >>> ml.tree.leaves({"a": ml.ones(2), "b": [ml.zeros(1)]})
        [Tensor([1., 1.], f32[2]), Tensor([0.], f32[1])]

    Invalid calls:
        ml.tree.leaves(endless)  # DTypeError
    """
    return [leaf for _, leaf in flatten(tree, ends=anywhere)[0]]


def map_to_dicts(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Map the tensors of a tree; Modules become dicts."""
    pairs, structure = flatten(tree)
    return as_dicts(structure, [fn(x) for _, x in pairs])


def as_dicts(structure: Structure, leaves: Iterable[Any]) -> Tree:
    """Unflatten with dicts instead of Modules."""
    return unflatten(structure, leaves, lambda node, parts: node._as_dict(parts))


Copies: TypeAlias = list[tuple[Node, Node]]
"""Modules, each with a copy."""


def copied(structure: Structure, leaves: Iterable[Any], copies: Copies) -> Tree:
    """Unflatten, and append each Module with the copy to `copies`."""

    def remade(node: Node, parts: dict[str, Any]) -> Node:
        copies.append((node, _with_children(node, parts)))
        return copies[-1][1]

    return unflatten(structure, leaves, remade)


def substitute(fn: Callable[[Tensor], Tensor], tree: Tree, copies: Copies | None = None) -> Tree:
    """Map the tensors of a tree, each once.

    Modules become shallow copies with the same buffers, and are appended to `copies`. Other leaves
    do not change."""
    pairs, structure = flatten(tree, None, ends=among_others)
    mapped = {key: fn(x) for key, x in {id(x): x for _, x in pairs}.items()}
    return copied(structure, [mapped[id(x)] for _, x in pairs], [] if copies is None else copies)


def with_leaves(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    """Replace the tensors of a tree, including those in buffers, in the order of `flatten`.

    Modules become shallow copies."""
    return unflatten(flatten(tree, buffers=True)[1], tensors)


def replace(fn: Callable[[Any], Any], tree: Any, kinds: type | tuple[type, ...] = Tensor) -> Any:
    """Map each value of these kinds in nested dicts, lists and tuples; keep other values."""
    if issubclass(class_of(tree), kinds):
        return fn(tree)  # most results are one tensor
    pairs, structure = flatten(tree, None, ends=within_containers(kinds))
    return unflatten(structure, [fn(part) for _, part in pairs])


def named_leaves(tree: Tree, path: str = "", *, buffers: bool = False) -> list[tuple[str, Tensor]]:
    """Return each tensor of the tree with the path, in order; with `buffers`, include buffers."""
    pairs: Leaves = []
    if _lists_leaves(pairs, tree, path, 0):
        return pairs
    return flatten(tree, path, buffers=buffers)[0]


_PLAIN_DEPTH: Final = 8


def _lists_leaves(pairs: Leaves, tree: Tree, path: str, depth: int) -> bool:
    """List the leaves of a tree of dicts, such as the gradients of a Module.

    Return False for any other tree, and for a tree that is deep or contains itself."""
    if type(tree) is not dict or depth == _PLAIN_DEPTH:
        return False
    for name, child in tree.items():
        if type(name) is not str:
            return False
        here = f"{path}/{name}" if path else name
        if child.__class__ is Tensor:
            pairs.append((here, child))
        elif child is not None and not _lists_leaves(pairs, child, here, depth + 1):
            return False
    return True


class Snapshot:
    """Containers of a tree and the items at one time.

    While they are unchanged, the leaves and paths are also unchanged. It refers only to the
    tensors: a container may refer to the owner of the snapshot."""

    def __init__(self, tree: Tree) -> None:
        self._tensors: list[Tensor] = []  # kept alive: no other object may get the ids
        self._rows = _rows_of(tree, self._tensors)

    def holds(self, tree: Tree) -> bool:
        """Return whether the tree has the same items; False if a recorder notes reads."""
        return _flattened.get() is None and _rows_of(tree, []) == self._rows


def _rows_of(tree: Tree, tensors: list[Tensor]) -> list[Any]:
    """Return the keys of each container, or the length of a list, and the ids of the items.

    The tensors are added to a list; their ids are negative."""
    rows: list[Any] = []
    containers, visited = [tree] * issubclass(type(tree), _CONTAINERS), {id(tree)}
    for value in containers:
        if issubclass(type(value), Node):
            value = vars(value)
        if issubclass(type(value), dict):
            items = [*dict.values(value)]
            rows.append([*dict.keys(value)])
        else:
            items = [*members_of(value)]
            rows.append(len(items))
        for item in items:
            if item.__class__ is Tensor:
                tensors.append(item)
                rows.append(-id(item))
                continue
            rows.append(id(item))
            if issubclass(type(item), _CONTAINERS) and id(item) not in visited:
                visited.add(id(item))
                containers.append(item)
    return rows


def named_tensors(tree: Tree, *, buffers: bool = False) -> dict[str, Tensor]:
    """Return the tensors of the tree by path, each once, by the first path.

    With `buffers`, include buffers. Raises `DTypeError` if there are other leaves, or two tensors
    have the same path.
    """
    named: dict[str, Tensor] = {}
    visited: set[int] = set()
    for path, x in named_leaves(tree, buffers=buffers):
        if named.get(path, x) is not x:
            raise DTypeError(f"two tensors have the path {path}; rename one")
        if id(x) not in visited:
            visited.add(id(x))
            named[path] = x
    return named


def rebind_buffers(copies: Copies) -> None:
    """Assign to each Module the buffers that were assigned to the copy since the copy was made."""
    for module, copied in copies:
        for name in copied._buffers:
            if vars(copied)[name] is not vars(module).get(name):
                setattr(module, name, Buffer(vars(copied)[name]))


# --- tensors by path -----------------------------------------------------------------


def require_types(
    expected: Mapping[str, TensorType], actual: Mapping[str, TensorType], what: str
) -> None:
    """Raise unless `actual` has exactly the expected paths, each with the expected type.

    `PathError` names the paths that are missing or unknown, `DTypeError` and `ShapeError` the first
    path with a wrong dtype or shape. `what` describes each value: "gradient", "parameter".
    """
    if actual == expected:
        return
    texts = differences(expected, actual, what)
    if texts:
        raise PathError(f"{'; '.join(texts)}; got {', '.join(actual) or 'none'}")
    for path, type in expected.items():
        if actual[path].dtype is not type.dtype:
            name = type.dtype.long_name
            remedy = f"ml.astype(x, ml.{name})" if type.dtype.is_half else f"astype({name!r})"
            raise DTypeError(
                f"{what} {path!r}: expected {type}, got {actual[path]}; convert it with {remedy}"
            )
        if actual[path] is not type:
            remedy = "a gradient has the shape of its parameter, as ml.grad returns it"
            remedy = remedy if what == "gradient" else "create the model with the same sizes"
            raise ShapeError(f"{what} {path!r}: expected {type}, got {actual[path]}; {remedy}")


def differences(expected: Iterable[str], actual: Iterable[str], what: str) -> list[str]:
    """Describe missing and unknown paths."""
    left, right = dict.fromkeys(expected), dict.fromkeys(actual)
    missing = [path for path in left if path not in right]
    unknown = [path for path in right if path not in left]
    return [
        f"{word} {what}{'s' * (len(paths) > 1)} {', '.join([repr(path) for path in paths])}"
        for word, paths in (("missing", missing), ("unknown", unknown))
        if paths
    ]


def load(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any], what: str) -> None:
    """Write arrays to the tensors with the same paths.

    The arrays are numpy arrays, tensors, or objects that `asarray` reads, such as PyTorch's
    parameters. float16 and bfloat16 are converted from and to f32 if the values are exact.

    Everything is checked before the first write. Raises `DTypeError` if `arrays` is not a mapping
    to arrays; the errors of `require_types`; `StaleTensorError` if a tensor was freed;
    `GradientError` if a tape needs the old values.
    """
    if not isinstance(arrays, Mapping):
        raise DTypeError(
            f"expected a mapping of arrays by path, got {with_article(type(arrays).__name__)}"
        )
    others = {path: array for path, array in arrays.items() if array is not tensors.get(path)}
    copied = {path: array_for(path, array, what) for path, array in others.items()}
    for path, array in copied.items():
        if path in tensors:
            copied[path] = exactly(array, tensors[path].dtype)
    types = {
        path: TensorType.of(copied[path]) if path in copied else x.type
        for path, x in arrays.items()
    }
    require_types({path: x.type for path, x in tensors.items()}, types, what)
    require_live(tensors.values())
    for path, array in copied.items():
        x = tensors[path]
        make_exclusive(x)
        x.tape = None
        write(x, array)


def array_for(path: str, array: Any, what: str) -> Array:
    """Return the values of an array for `load`.

    Raises `DTypeError`, with the path, if it is not an array."""
    if not hasattr(array, "__array__") and not hasattr(array, "__dlpack__"):
        raise DTypeError(
            f"{what} {path!r}: expected an array, got {with_article(type(array).__name__)}"
        )
    try:
        if isinstance(array, Tensor) and array.dtype.is_storage:
            note_read(array)
            return values_of(array)  # numpy has no such dtype, and returns a wider one
        return array_of(array)
    except DTypeError as error:
        raise DTypeError(f"{what} {path!r}: {error.reason}") from None


def exactly(array: Array, dtype: DType) -> Array:
    """Convert half precision to f32, or f32 to half precision if the values are exact.

    Other arrays are returned unchanged."""
    own = DType.of(array.dtype)
    if not (own.is_half and dtype is f32) and not (own is f32 and dtype.is_half):
        return array
    converted = cast(array, dtype)
    return (
        converted
        if np.array_equal(cast(converted, f32), cast(array, f32), equal_nan=True)
        else array
    )


def require_live(tensors: Iterable[Tensor]) -> None:
    """Raise `StaleTensorError` for the first tensor that was freed."""
    tensors = [*tensors]
    if EXTENSION is not None and EXTENSION.are_alive(tensors):
        return
    for x in tensors:
        if x.handle == STALE:
            raise x.stale()


def _join(path: str | None, name: str) -> Any:
    return f"{path}/{name}" if path else name if path == "" else None


def _at(path: str | None) -> str:
    return f" at {path}" if path else ""
