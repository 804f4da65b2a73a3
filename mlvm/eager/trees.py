"""Trees: nested dicts, lists, tuples, named tuples and Modules. What is none of these, and not
None, is a leaf. A Module has as children those of its fields that hold tensors or Modules; the
others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlvm.eager.tree import Tree, all_leaves, map_all

__all__ = ["leaves", "map"]


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
    return map_all(f, tree, *rest)


def leaves(tree: Tree, /) -> list[Any]:
    """The leaves of the tree in order, also those that occur twice; of None there are none.

    The leaves: tensors of any shapes, and anything else. Raises `DTypeError` for a node that
    contains itself.

        >>> ml.tree.leaves({"a": ml.ones(2), "b": [ml.zeros(1)]})
        [Tensor([1., 1.], f32[2]), Tensor([0.], f32[1])]
    """
    return all_leaves(tree)
