"""Rows of a Ray dataset by index, for a pipeline."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from mlvm.core.errors import PipelineError, brief
from mlvm.core.extras import extra
from mlvm.core.types import Array
from mlvm.input.datasets import parts_of
from mlvm.input.sampling import Indices


class RayRows:
    """`Dataset` of the rows of a `ray.data.Dataset`, which stay in Ray's object store.

    A batch reads the blocks that contain the rows. Ray fetches a block of another host once, and
    does not copy the numbers of a block of this host.
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "materialize"):
            raise PipelineError(
                f"from_ray: expected a ray.data.Dataset, got {brief(dataset)}; otherwise write "
                f"ml.Pipeline(data, batch_size)"
            )
        self._ray = extra("ray", "ray")
        self._blocks: list[Any] = dataset.materialize().to_numpy_refs()
        lengths = [len(self._columns(i)[0]) for i in range(len(self._blocks))]
        self._starts = np.array([0, *accumulate(lengths)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _columns(self, block: int) -> tuple[Array, ...]:
        return parts_of(self._ray.get(self._blocks[block]))

    def __getitem__(self, indices: Indices) -> tuple[Array, ...]:
        numbers = np.asarray(indices)
        blocks = np.searchsorted(self._starts, numbers, "right") - 1
        out: tuple[Array, ...] = ()
        for block in np.unique(blocks).tolist():
            columns, rows = self._columns(block), np.flatnonzero(blocks == block)
            if not out:
                shapes = [(len(numbers), *column.shape[1:]) for column in columns]
                empty = [
                    np.empty(shape, column.dtype)
                    for shape, column in zip(shapes, columns, strict=True)
                ]
                out = columns._make(empty) if hasattr(columns, "_make") else tuple(empty)
            for array, column in zip(out, columns, strict=True):
                array[rows] = column[numbers[rows] - self._starts[block]]
        return out
