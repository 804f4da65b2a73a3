"""Collectives of members with shared memory, which send no data.

For large tensors, each member combines one part and writes it to all members, in blocks that fit
into the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from mlvm.core.types import Array
from mlvm.parallel.communicator import BLOCK_NBYTES, Collective, Work, blocks, combine, flat

Arrays: TypeAlias = Sequence[tuple[Array, ...]]
"""Arrays of each member of a collective, in the order of `Collective.ranks`."""


def _all_reduce(call: Collective, arrays: Arrays, part: int, parts: int) -> None:
    members = [flat(each) for each in arrays]
    scratch = np.empty(BLOCK_NBYTES, np.uint8)
    for i, block in blocks(members[0], part, parts):
        each = [member[i][block] for member in members]
        total = scratch.view(each[0].dtype)[: each[0].size]
        combine(call.attributes["op"], each, total)
        for x in each:
            np.copyto(x, total)


def _reduce_scatter(call: Collective, arrays: Arrays, part: int, parts: int) -> None:
    outs, xs = (flat(each) for each in zip(*arrays, strict=True))
    for rank, block in blocks(outs, part, parts):
        out = outs[rank]
        pieces = [x[rank * out.size : (rank + 1) * out.size] for x in xs]
        combine(call.attributes["op"], [piece[block] for piece in pieces], out[block])


def _all_gather(call: Collective, arrays: Arrays, part: int, parts: int) -> None:
    outs, xs = (flat(each) for each in zip(*arrays, strict=True))
    for rank, block in blocks(xs, part, parts):
        x = xs[rank]
        for out in outs:
            np.copyto(out[rank * x.size : (rank + 1) * x.size][block], x[block])


def _from_one(call: Collective, arrays: Arrays, part: int, parts: int) -> None:
    """Copy the arrays of the root to the arrays of the other members.

    In a `send`, the root is the first of two members. A barrier has no arrays.
    """
    root = call.attributes.get("root", 0)
    sources = flat(arrays[root])
    others = [flat(each) for rank, each in enumerate(arrays) if rank != root]
    for i, block in blocks(sources, part, parts):
        for other in others:
            np.copyto(other[i][block], sources[i][block])


WORK: Final[Mapping[str, Work]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    **dict.fromkeys(("broadcast", "send", "recv", "barrier"), _from_one),
}
