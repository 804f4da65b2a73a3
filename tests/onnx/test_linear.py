"""Linear models and trees of `ai.onnx.ml`, against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.cases.claim_tests import claims
from tests.onnx.making import computed

X = np.random.default_rng(0).normal(size=(5, 3)).astype("f4")
W = [0.5, -1.0, 2.0, 1.5, 0.25, -0.75]
BOTH = X @ np.array(W, "f4").reshape(2, 3).T
POWERS = np.exp(BOTH)

# x0 <= 0.5 ? (x1 > -0.5 ? 0 : 1) : 2, and a tree of one leaf; nan is above 0.5, and above -0.5
_ROWS = "treeids 777779|nodeids 012340|featureids 010000|truenodeids 120000|falsenodeids 430000"
TREES: Any = {f"nodes_{k}": [*map(int, x)] for k, x in map(str.split, _ROWS.split("|"))} | {
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_GT", *["LEAF"] * 4],
    "nodes_values": [0.5, -0.5, 0.0, 0.0, 0.0, 0.0],
    "nodes_missing_value_tracks_true": [0, 1, 0, 0, 0, 0],
}
POINTS = np.array([[0.5, 0], [0.5, -0.5], [0.6, 9], [np.nan, 0], [0, np.nan]], "f4")
LEAF = np.array([[0], [1], [2], [2], [0]], "f4")


def called_on(op: str, x: Any, **attributes: Any) -> Any:
    return computed(op, x, domain="ai.onnx.ml", **attributes)


def regressed(**attributes: Any) -> Any:
    own = {"target_treeids": [7, 7, 7, 9], "target_nodeids": [2, 3, 4, 0], "target_ids": [0] * 4}
    own |= {"target_weights": [1.0, 2.0, 3.0, 5.0], "base_values": [1.0]} | TREES
    return called_on("TreeEnsembleRegressor", POINTS, **(own | attributes))


def classified(
    labels: list[int], weights: list[float], ids: Any = (0,) * 4, how: str = "NONE"
) -> Any:
    own = {"class_treeids": [7, 7, 7, 9], "class_nodeids": [2, 3, 4, 0], "class_ids": ids} | TREES
    own |= {"classlabels_int64s": labels, "class_weights": weights, "post_transform": how}
    return called_on("TreeEnsembleClassifier", POINTS, outputs=2, **own)


test_rows = claims("onnx_linear", globals())
