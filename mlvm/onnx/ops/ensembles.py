"""Ensembles of decision trees of `ai.onnx.ml`, as exported from scikit-learn, XGBoost and LightGBM.

All trees advance together: in each round, every row moves to a child of its node in every tree.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.memo import memoized
from mlvm.core.types import Array
from mlvm.onnx.ops.linear import transformed
from mlvm.onnx.table import NodeCall, op

_MODES: Final = {
    "BRANCH_LEQ": ml.less_equal,
    "BRANCH_LT": ml.less,
    "BRANCH_GTE": ml.greater_equal,
    "BRANCH_GT": ml.greater,
    "BRANCH_EQ": ml.equal,
    "BRANCH_NEQ": ml.not_equal,
}

_AGGREGATES: Final[dict[str, tuple[Any, float]]] = {
    "SUM": (ml.sum, 0.0),
    "AVERAGE": (ml.mean, 0.0),
    "MIN": (ml.min, math.inf),
    "MAX": (ml.max, -math.inf),
}
"""Functions of the leaves' weights, and the values of absent ones."""


class Trees(NamedTuple):
    """Nodes of all trees; the children of a leaf are the leaf.

    roots: node of each tree. depth: most branches from a root to a leaf.
    weights: contributions of the leaves, [nodes, targets].
    present: where weights are.
    leaves: of each tree.
    """

    modes: list[str]
    features: Array
    values: Array
    children: tuple[Array, Array]
    follows_nan: Array
    roots: Array
    depth: int
    weights: Array
    present: Array
    leaves: list[Array]


def _numbers(node: Any, name: str, dtype: Any) -> Array:
    """Return an attribute that is a list or a tensor."""
    listed = node.attributes.get(name) or node.attributes.get(f"{name}_as_tensor")
    return np.asarray([] if listed is None else listed, dtype)


@memoized(64)
def _trees(node: Any, kind: str, targets: int, dtype: Any) -> Trees:
    at = NodeCall(node, np, None)
    owners, numbers, modes = at["nodes_treeids"], at["nodes_nodeids"], at["nodes_modes"]
    places = {pair: i for i, pair in enumerate(zip(owners, numbers, strict=True))}
    is_leaf = np.array([mode == "LEAF" for mode in modes])

    def children(name: str) -> Array:
        pairs = zip(owners, at[name], strict=True)
        own = enumerate(zip(is_leaf, pairs, strict=True))
        return np.array([i if ends else places[pair] for i, (ends, pair) in own], np.int64)

    both = children("nodes_truenodeids"), children("nodes_falsenodeids")
    inner = np.flatnonzero(~is_leaf)
    roots = np.setdiff1d(np.arange(len(modes)), np.concatenate([x[inner] for x in both]))
    depth, front = 0, roots
    while (front := np.unique(np.concatenate([x[front] for x in both])))[~is_leaf[front]].size:
        depth += 1
        if depth > len(modes):
            raise ModelError("expected trees, got nodes in a cycle")
    weights, present = np.zeros((len(modes), targets), dtype), np.zeros((len(modes), targets), bool)
    names = [f"{kind}_{x}" for x in ("treeids", "nodeids", "ids")]
    rows = zip(*(at[x] for x in names), _numbers(node, f"{kind}_weights", dtype), strict=True)
    merged: Any = {"MIN": min, "MAX": max}.get(at.get("aggregate_function"), operator.add)
    for tree, leaf, target, weight in rows:
        place = places[tree, leaf], target
        if not 0 <= target < targets:
            raise ModelError(f"expected a {kind} from 0 to {targets - 1}, got {target}")
        if kind == "target" and targets == 1 and present[place]:  # runtimes differ
            raise ModelError(f"expected a single weight of node {leaf} of tree {tree}, got more")
        weights[place] = merged(weights[place], weight) if present[place] else weight
        present[place] = True
    tracks: Any = at.get("nodes_missing_value_tracks_true") or [0] * len(modes)
    values = _numbers(node, "nodes_values", dtype)
    if kind == "target" and targets == 1 and values[is_leaf & ~present[:, 0]].any():
        raise ModelError("expected a weight of each leaf with a value, got none")  # undefined
    features = np.asarray(at["nodes_featureids"], np.int64)
    of_tree = np.unique(owners, return_inverse=True)[1]
    leaves = [np.flatnonzero(is_leaf & (of_tree == i)) for i in range(of_tree.max(initial=-1) + 1)]
    tracks = np.asarray(tracks, bool)
    return Trees(modes, features, values, both, tracks, roots, depth + 1, weights, present, leaves)


def _reached(at: NodeCall, x: Any, kind: str, targets: int) -> tuple[Trees, Any]:
    """Return the trees, and the leaf of each tree that each row reaches, [N, trees]."""
    dtype = np.float64 if x.dtype == ml.float64 else np.float32
    trees = _trees(at.node, kind, targets, dtype)
    x = ml.astype(x, ml.float64 if dtype is np.float64 else ml.float32)
    features, values, follows, *children = (
        ml.asarray(each) for each in (*trees[1:3], trees.follows_nan, *trees.children)
    )
    modes = {mode: ml.asarray(np.array(trees.modes) == mode) for mode in {*trees.modes} - {"LEAF"}}
    place = ml.broadcast_to(ml.asarray(trees.roots), (x.shape[0], len(trees.roots)))
    for _ in range(trees.depth):
        feature, value, yes, no, of_nan = (
            ml.take(each, place, axis=0) for each in (features, values, *children, follows)
        )
        element = ml.take_along_axis(x, feature, axis=1)
        goes = ml.logical_and(ml.isnan(element), of_nan)
        for mode, mask in modes.items():
            own = ml.take(mask, place, axis=0)
            goes = ml.logical_or(goes, ml.logical_and(own, _MODES[mode](element, value)))
        place = ml.where(goes, yes, no)
    return trees, place


def _base_values(at: NodeCall, *sizes: int) -> Array:
    """Return the base values, of one of these sizes. Raises `ModelError`."""
    base = _numbers(at.node, "base_values", np.float64)
    if base.size not in sizes:
        shown = " or ".join(map(str, sizes))
        raise ModelError(f"expected {shown} base values, got {base.size}")
    return base


@op("ai.onnx.ml.TreeEnsembleRegressor", "tensors")
def tree_regressor(at: NodeCall, x: Any) -> Any:
    targets, how = at.get("n_targets", 1), at.get("aggregate_function", "SUM")
    trees, place = _reached(at, x, "target", targets)
    weights, base = ml.take(ml.asarray(trees.weights), place, axis=0), _base_values(at, 0, targets)
    reduce, absent = _AGGREGATES[how]
    there: Any = ml.take(ml.asarray(trees.present), place, axis=0) if targets > 1 else True
    y = reduce(ml.where(there, weights, absent), axis=1)
    y = y + ml.asarray(base, dtype=y.dtype) if base.size else y
    if targets > 1:  # a leaf may have no weight of a target
        y = ml.where(ml.any(there, axis=1), y, 0.0)
    return transformed(at, ml.astype(y, ml.float32))


@op("ai.onnx.ml.TreeEnsembleClassifier", "tensors")
def tree_classifier(at: NodeCall, x: Any) -> Any:
    labels = at.get("classlabels_int64s")
    if not labels:
        raise ModelError("classes that are strings are not supported")
    if len(labels) == 1:  # runtimes differ
        raise ModelError("expected at least 2 classes, got 1")
    classes = ml.asarray(np.array(labels, np.int64))
    if len(labels) == 2:
        best, y = _of_two_classes(at, x)
        return ml.take(classes, best, axis=0), ml.astype(y, ml.float32)
    trees, place = _reached(at, x, "class", len(labels))
    scores = ml.sum(ml.take(ml.asarray(trees.weights), place, axis=0), axis=1)
    base, compared = _base_values(at, 0, len(labels)), scores
    if base.size:
        scores = compared = scores + ml.asarray(base, dtype=scores.dtype)
    elif not np.any([trees.present[x].all(axis=0) for x in trees.leaves], axis=0).all():
        if not any(trees.present[x].any(axis=1).all() for x in trees.leaves):
            raise ModelError("expected a weight in each leaf of a tree, got leaves without weights")
        there = ml.any(ml.take(ml.asarray(trees.present), place, axis=0), axis=1)
        compared = ml.where(there, scores, -math.inf)  # a class without a score is not chosen
    best = ml.argmax(compared, axis=1)
    return ml.take(classes, best, axis=0), transformed(at, ml.astype(scores, ml.float32))


def _of_two_classes(at: NodeCall, x: Any) -> tuple[Any, Any]:
    """Return the class and the scores of each row, from scores of the second class only."""
    if {*at["class_ids"]} != {0} or _numbers(at.node, "base_values", np.float64).size > 1:
        raise ModelError("expected weights and a base value of one class of two, got both")
    trees, place = _reached(at, x, "class", 1)
    score = ml.sum(ml.take(ml.asarray(trees.weights), place, axis=0), axis=1)
    base = _base_values(at, 0, 1)
    if base.size:
        there = ml.any(ml.take(ml.asarray(trees.present), place, axis=0), axis=1)
        score = ml.where(there, score + float(base[0]), 0.0)
    is_share = bool((_numbers(at.node, "class_weights", np.float32) >= 0).all())
    best = ml.astype(ml.greater(score[:, 0], 0.5 if is_share else 0.0), ml.int64)
    how = at.get("post_transform", "NONE")
    if how == "LOGISTIC":
        return best, ml.sigmoid(ml.concat([-score, score], axis=1))
    if is_share and how != "PROBIT":  # onnxruntime returns shares as they are
        return best, ml.concat([1.0 - score, score], axis=1)
    raise ModelError(
        f"expected post_transform='LOGISTIC' for two classes with a single score, got {how!r}"
    )
