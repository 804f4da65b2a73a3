"""Sharded tensors: each member of a group stores a shard of gradients, optimizer state and weights.

Rajbhandari et al., ZeRO, arXiv 1910.02054. A tensor of s elements is split in row-major order into
n shards of ceil(s / n) elements; the last shards are padded with zeros. All shards of a tensor
therefore have the same type, and elementwise ops can be applied to a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from mlvm.core.errors import ArgumentError, with_article
from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType, f32
from mlvm.eager.autodiff.tape import OperandVjp, taping
from mlvm.eager.functions import creation, shapes
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.optim.gradients import Parts, is_in_parts
from mlvm.eager.optim.optimizer import Optimizer, Whole
from mlvm.eager.parallel import collectives
from mlvm.eager.parallel.collectives import rank, size
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.reading import launch_for_values
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tree import (
    Node,
    Tree,
    array_for,
    containers,
    holds_tensors,
    load,
    named_tensors,
    replace,
    require_types,
)
from mlvm.parallel.membership import Shard, sharding_here

BUCKET_NBYTES: Final = 1 << 20
"""Bytes of a bucket: large enough to hide latency.

It is small, because the communication of the last bucket overlaps no computation."""

_GATHER_INTO: Final = Program.of_op("all_gather.out", 2, {}, 0)


def current_sharding() -> Shard | None:
    """Return the current sharding; None in a group with a single member."""
    return sharding_here() if size() > 1 else None


# --- pieces --------------------------------------------------------------------------


def piece_type(whole: TensorType) -> TensorType:
    """Return the type of each member's shard."""
    return whole.with_shape((max(1, -(-whole.size // size())),))


def piece_of_array(array: Array, whole: TensorType) -> Array:
    """Return this member's shard of an array."""
    [length] = piece_type(whole).shape
    piece = array.reshape(-1)[rank() * length : (rank() + 1) * length]
    return np.concatenate([piece, np.zeros(length - piece.size, array.dtype)])


def cut(x: Tensor) -> Tensor:
    """Return this member's shard of x, which all members have."""
    [length] = piece_type(x.type).shape
    start = min(rank() * length, x.size)
    stop = min(start + length, x.size)
    missing = length - (stop - start)
    if start == stop:
        return creation.zeros(length, dtype=x.dtype)
    piece = shapes.reshape(x, -1)[start:stop]
    return shapes.pad(piece, (0, missing)) if missing else _own(piece, x)


def scattered(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return this member's shard of the mean of each x over all members, in one exchange.

    All x have the same dtype."""
    return _of_row(collectives.reduce_scatter(_table(xs), "mean"), [x.type for x in xs])


def begin_scattered(xs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start an asynchronous `scattered`; the returned function waits and returns the shards."""
    table, types = _table(xs), [x.type for x in xs]
    row = collectives.reduce_scatter_start(table, "mean")

    def end() -> list[Tensor]:
        collectives.reduce_scatter_wait(row, table)
        return _of_row(row, types)

    return end


def _table(xs: Sequence[Tensor]) -> Tensor:
    """Arrange the tensors as a table with one row per member; a single tensor is only flattened."""
    tables = [_padded(x) for x in xs]
    if len(tables) == 1:
        return shapes.reshape(tables[0], -1)
    return shapes.concat([shapes.reshape(x, (size(), -1)) for x in tables], axis=1)


def _of_row(row: Tensor, types: Sequence[TensorType]) -> list[Tensor]:
    """Return the shards of tensors of these types from this member's row of the table."""
    if len(types) == 1:
        return [row]
    row = shapes.reshape(row, -1)
    return [_own(row[a:b], row) for a, b in _ranges(types)]


def gathered(pieces: Sequence[Tensor], wholes: Sequence[TensorType]) -> list[Tensor]:
    """Gather the tensors of these types from the members' shards, in one exchange.

    All have the same dtype."""
    if len(pieces) == 1:
        return [_unpadded(collectives.all_gather(pieces[0]), wholes[0])]
    table = shapes.reshape(collectives.all_gather(shapes.concat(pieces)), (size(), -1))
    ranges = zip(_ranges(wholes), wholes, strict=True)
    return [_unpadded(shapes.reshape(table[:, a:b], -1), whole) for (a, b), whole in ranges]


def gather_into(xs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Overwrite each x with the tensor gathered from the members' shards."""
    for bucket in buckets([x.type for x in xs]):
        each = [xs[i] for i in bucket]
        shards = [pieces[i] for i in bucket]
        if len(bucket) == 1 and each[0].size == shards[0].size * size():
            view = shapes.reshape(each[0], -1)
            launch_for_values(_GATHER_INTO, current_arena().vm, (view, shards[0]))
            continue
        for x, whole in zip(each, gathered(shards, [x.type for x in each]), strict=True):
            apply_into(x, COPY, whole)


def buckets(types: Sequence[TensorType]) -> list[list[int]]:
    """Return the indices of the tensors of each bucket.

    A bucket is a single tensor, or neighbours of the same dtype with at most `BUCKET_NBYTES` in
    total."""
    result: list[list[int]] = []
    nbytes = 0
    for i, type in enumerate(types):
        nbytes += type.nbytes
        if not result or types[result[-1][0]].dtype is not type.dtype or nbytes > BUCKET_NBYTES:
            result.append([])
            nbytes = type.nbytes
        result[-1].append(i)
    return result


def _own(part: Tensor, x: Tensor) -> Tensor:
    """Copy a slice of x."""
    return op.copy(part) if part is x or part.base is not None else part


def _padded(x: Tensor) -> Tensor:
    """Flatten x and pad it with zeros to the size of all shards: f[n * length]."""
    missing = size() * piece_type(x.type).size - x.size
    flat = shapes.reshape(x, -1)
    return shapes.pad(flat, (0, missing)) if missing else flat


def _unpadded(flat: Tensor, whole: TensorType) -> Tensor:
    return shapes.reshape(flat[: whole.size] if flat.size > whole.size else flat, whole.shape)


def _ranges(wholes: Sequence[TensorType]) -> Iterator[tuple[int, int]]:
    """Return the start and end of each tensor's shard among all shards of a member."""
    ends = [0]
    for whole in wholes:
        ends.append(ends[-1] + piece_type(whole).size)
    return pairwise(ends)


# --- sharded weights ----------------------------------------------------------------


def keep_parts(model: Tree) -> dict[str, TensorType]:
    """Shard the parameters of a Module, unless they are sharded already.

    Return the types of the unsharded parameters by path.

    A field with parameters is gathered whenever it is read; the gathered tensor lives as long as it
    is referenced, for example by a tape. Gradients flow through it to the shards, as the mean over
    all members. The Module's `state`, `load_state` and `load_parameters` accept unsharded tensors,
    and are collective calls. As a tree, the Module contains the shards.

    Raises `ArgumentError` if the tree is not a Module.
    """
    if not isinstance(model, Node):
        raise ArgumentError(
            f"shard='all': expected a Module, which gathers fields when they are read, got "
            f"{with_article(type(model).__name__)}: use shard='optimizer'"
        )
    if is_in_parts(model):
        return type(model)._wholes  # type: ignore[attr-defined,no-any-return]
    parts = containers(model)
    nodes = [each for each in parts if isinstance(each, Node) and not is_in_parts(each)]
    wholes = [{path: x.type for path, x in named_tensors(each).items()} for each in nodes]
    pieces: dict[int, Tensor] = {}
    for x in named_tensors(model).values():
        with x.arena.hosting():
            pieces[id(x)] = cut(x)
    for node, types in zip(nodes, wholes, strict=True):
        of_node: dict[str, Any] = {}
        fields = vars(node)
        for name, field in list(fields.items()):
            whole_types: list[TensorType | None] = []
            if name not in node._buffers and holds_tensors(field):
                fields[name] = replace(partial(_exchanged, pieces, whole_types), field, Tensor)
            if any(whole_types):
                of_node[name] = property(
                    partial(_whole_field, name, tuple(whole_types)), partial(_refuse_field, name)
                )
        node.__class__ = _class_in_parts(type(node), types, of_node)
    return wholes[0]


def _exchanged(pieces: Mapping[int, Tensor], wholes: list[TensorType | None], x: Tensor) -> Tensor:
    """Return the shard of a tensor; frozen tensors are not sharded."""
    wholes.append(x.type if id(x) in pieces else None)
    return pieces.get(id(x), x)


def _class_in_parts(
    kind: type[Node], wholes: dict[str, TensorType], properties: dict[str, Any]
) -> Any:
    """Return a class for one Module with sharded parameters; the types are given by path."""
    home = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    marks = {"_as_dict": Parts, "_wholes": wholes}
    methods = {
        "_whole": lambda self, tensors: gathered_by_path(tensors, wholes),
        "_load": lambda self, tensors, arrays, what: load_parts(tensors, wholes, arrays, what),
    }
    return type(kind.__name__, (kind,), {**home, **marks, **methods, **properties})


def _whole_field(name: str, types: tuple[TensorType | None, ...], node: Node) -> Any:
    """Return a field's value with gathered tensors instead of shards."""
    rest = iter(types)

    def whole(piece: Tensor) -> Tensor:
        type = next(rest)
        return piece if type is None else _whole(piece, type)

    return replace(whole, vars(node)[name], Tensor)


def _whole(piece: Tensor, type: TensorType) -> Tensor:
    """Gather the tensor of a shard, and record this on the tape."""
    [whole] = gathered([stop_gradient(piece)], [type])
    tape = taping()
    if tape is None:
        return whole
    is_tracked = piece.tape is tape
    if is_tracked:
        is_cast = piece.dtype.is_half and tape.nodes[piece.node] is not None
        of_piece = piece.type.with_dtype(f32) if is_cast else piece.type
        tape.add_node(whole, (OperandVjp(of_piece, _scattered_alone, ()),), (piece.node,), ())
    return whole


def _scattered_alone(g: Tensor) -> Tensor:
    """Return this member's shard of the mean, in f32 for half precision.

    The gradient flows to f32 weights that `Module.astype` has cast, and must not be rounded."""
    return scattered([op.astype(g, dtype=f32) if g.dtype.is_half else g])[0]


def _refuse_field(name: str, node: Node, value: Any) -> None:
    old = vars(node)[name]
    if value is None or (type(old) is type(value) is Tensor and old.type is value.type):
        vars(node)[name] = value
        return
    raise ArgumentError(
        f"{type(node).__name__}.{name} is sharded; change it with an optimizer, or with "
        f"load_parameters"
    )


# --- gathering sharded tensors -------------------------------------------------------


def gathered_by_path(
    tensors: Mapping[str, Tensor], wholes: Mapping[str, TensorType]
) -> dict[str, Tensor]:
    """Return the tensors with gathered tensors instead of shards; `wholes` has types by path."""
    result = dict(tensors)
    paths = [path for path in tensors if path in wholes]
    for bucket in buckets([wholes[path] for path in paths]):
        names = [paths[i] for i in bucket]
        whole = gathered([tensors[path] for path in names], [wholes[path] for path in names])
        result.update(zip(names, whole, strict=True))
    return result


def load_parts(
    tensors: Mapping[str, Tensor],
    wholes: Mapping[str, TensorType],
    arrays: Mapping[str, Any],
    what: str,
) -> None:
    """Load unsharded arrays into tensors by path; the paths in `wholes` are sharded."""
    if isinstance(arrays, Mapping):
        arrays = {path: array_for(path, array, what) for path, array in arrays.items()}
        expected = {path: wholes.get(path, x.type) for path, x in tensors.items()}
        require_types(expected, {path: TensorType.of(x) for path, x in arrays.items()}, what)
        for path, whole in wholes.items():
            arrays[path] = piece_of_array(arrays[path], whole)
    load(tensors, arrays, what)


# --- optimizers -----------------------------------------------------------------------


class _AllInParts(Whole):
    """Layout in which a member stores shards of parameters and state.

    `wholes` are the types of the unsharded parameters by path."""

    def __init__(self, wholes: Mapping[str, TensorType]) -> None:
        self.wholes = wholes

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return gathered_by_path(state, self._whole_state(state))

    def load_state(self, state: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
        load_parts(state, self._whole_state(state), arrays, "state")

    def _whole_state(self, paths: Iterable[str]) -> dict[str, TensorType]:
        """Return the unsharded types of sharded state."""
        # the state momentum/w belongs to the parameter w
        of = {path: path.partition("/")[2] for path in paths}
        return {path: self.wholes[of[path]] for path in of if of[path] in self.wholes}


class _StateInParts(_AllInParts):
    """Layout in which a member stores all parameters, but only a shard of the state."""

    def state_type(self, type: TensorType) -> TensorType:
        return piece_type(type)

    def given_types(self, grads: Tree, types: Mapping[str, TensorType]) -> Mapping[str, TensorType]:
        if isinstance(grads, Parts):
            return {path: piece_type(type) for path, type in types.items()}
        return types

    def pieces(self, tree: Tree, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(tree, Parts):
            return tensors
        return {path: cut(tensors[path]) for path in self.wholes if path in tensors}

    def gather(self, tensors: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
        gather_into(list(tensors.values()), list(pieces.values()))


def _layout(params: Tree, whole_needed_by: str | None) -> Whole:
    """Return the layout of the parameters for an optimizer that is created here."""
    shard = current_sharding()
    if shard is None:
        return Whole()
    if whole_needed_by is not None:
        raise ArgumentError(
            f"{whole_needed_by} needs whole parameters, but members store only parts of them with "
            f"shard={shard!r}; omit shard=, or use an elementwise optimizer, such as AdamW"
        )
    wholes = keep_parts(params) if shard == "all" else {}
    types = {path: wholes.get(path, x.type) for path, x in named_tensors(params).items()}
    return _AllInParts(types) if shard == "all" else _StateInParts(types)


Optimizer._hold = staticmethod(_layout)  # type: ignore[method-assign]
Parts._all_reduce = staticmethod(collectives.all_reduce)  # type: ignore[method-assign]
