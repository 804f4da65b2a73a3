"""Trees of tensors: nested dicts, lists, tuples and Modules, with the tensors as leaves.

A leaf's path names it: `MixerBlock_0/token_mixing/Dense_0/kernel`. A Module's fields are its
children; a field that is a list counts as fields `name_0`, `name_1`, ...
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from mlvm.core.errors import DTypeError
from mlvm.eager.tensor import Tensor

Tree: TypeAlias = Any
"""A Tensor, None (no leaves), or a dict, list, tuple or Module of trees."""


class Node:
    """Base of classes whose fields are children in a tree; `nn.Module` is one."""


def children(tree: Tree, path: str = "") -> dict[str, Tree]:
    """The children of an inner node by name, in order.

    Raises `DTypeError` for anything that is not part of a tree.
    """
    if isinstance(tree, dict):
        return {str(name): child for name, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return {str(i): child for i, child in enumerate(tree)}
    if isinstance(tree, Node):
        return dict(_fields(tree))
    where = f" at {path}" if path else ""
    raise DTypeError(f"a tree has tensors as leaves, not a {type(tree).__name__}{where}")


def _fields(node: Node) -> Iterator[tuple[str, Tree]]:
    for name, field in vars(node).items():
        if isinstance(field, (Tensor, Node)):
            yield name, field
        elif isinstance(field, dict) and any(isinstance(x, (Tensor, Node)) for x in field.values()):
            yield name, field
        elif isinstance(field, (list, tuple)) and any(isinstance(x, (Tensor, Node)) for x in field):
            yield from ((f"{name}_{i}", child) for i, child in enumerate(field))


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the tree with its path, in order. Raises `DTypeError` for other leaves."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif tree is not None:
        for name, child in children(tree, path).items():
            yield from leaves(child, f"{path}/{name}" if path else name)


def map_tree(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """A tree of `fn(leaf, *leaves of the others at the same place)`; Modules become dicts.

    Raises `DTypeError` where the others do not have the tree's structure.
    """
    if isinstance(tree, Tensor):
        return fn(tree, *others)
    if tree is None:
        return None
    below = children(tree)
    beside = [children(other) for other in others]
    for other in beside:
        if other.keys() != below.keys():
            raise DTypeError(f"two trees differ: {list(below)} beside {list(other)}")
    mapped = {
        name: map_tree(fn, child, *[other[name] for other in beside])
        for name, child in below.items()
    }
    return _like(tree, list(mapped.values())) if isinstance(tree, (list, tuple)) else mapped


def substitute(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The same tree with `fn(leaf)` for each leaf; Modules become shallow copies."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {name: substitute(fn, child) for name, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return _like(tree, [substitute(fn, child) for child in tree])
    if isinstance(tree, Node):
        twin = copy.copy(tree)
        vars(twin).update({name: substitute(fn, field) for name, field in vars(tree).items()})
        return twin
    return tree


def _like(sequence: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """The items in a list, tuple or named tuple as the given one is."""
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items)
    return type(sequence)(items)
