"""Tensors in parts, one for each member of a group: what a member keeps of gradients, optimizer's
state and weights (Rajbhandari et al., ZeRO, arXiv 1910.02054).

A tensor of s elements is cut in row-major order into n pieces of ceil(s / n) elements, of which
the last ones are filled up with zeros. So every op that works element by element may work on a
piece, and all pieces of a tensor have one type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from mlvm.core.errors import AttributeRefused
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, TensorType, f32
from mlvm.eager.autodiff.tape import Pull, taping
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

Shard: TypeAlias = Literal["optimizer", "all"]
"""What members keep in parts: the optimizer's state, or the weights too."""

BUCKET_NBYTES: Final = 1 << 20
"""Bytes that members exchange at once: so many that a meeting's latency does not count, and so few
that the last ones, which nothing is computed beside, do not either."""

_GATHER_INTO: Final = Program.of_op("all_gather.out", 2, {}, 0)

_wanted: ContextVar[Shard | None] = ContextVar("shard", default=None)


@contextmanager
def sharding(shard: Shard | None) -> Iterator[None]:
    """Inside, optimizers are made to keep this in parts, and gradients are averaged for them."""
    before = _wanted.set(shard)
    try:
        yield
    finally:
        _wanted.reset(before)


def wanted() -> Shard | None:
    """What is kept in parts here and now; nothing in a group of one."""
    return _wanted.get() if size() > 1 else None


def sharing_of(vm: VMProtocol) -> tuple[int, int, Shard | None]:
    """What a step on this VM depends on that it does not reach by itself: the rank, the size of the
    group, and what is kept in parts."""
    return *collectives.place_of(vm), _wanted.get()


# --- pieces --------------------------------------------------------------------------


def piece_type(whole: TensorType) -> TensorType:
    """The type of each member's piece."""
    return whole.with_shape((max(1, -(-whole.size // size())),))


def piece_of_array(array: Array, whole: TensorType) -> Array:
    """This member's piece of an array."""
    [length] = piece_type(whole).shape
    piece = array.reshape(-1)[rank() * length : (rank() + 1) * length]
    return np.concatenate([piece, np.zeros(length - piece.size, array.dtype)])


def cut(x: Tensor) -> Tensor:
    """This member's piece of x, which all members have."""
    [length] = piece_type(x.type).shape
    start = min(rank() * length, x.size)
    stop = min(start + length, x.size)
    missing = length - (stop - start)
    if start == stop:
        return creation.zeros(length, dtype=x.dtype)
    piece = shapes.reshape(x, -1)[start:stop]
    return shapes.pad(piece, (0, missing)) if missing else _own(piece, x)


def scattered(xs: Sequence[Tensor]) -> list[Tensor]:
    """Of the mean of each x over all members this one's piece: in one meeting, so all have one
    dtype."""
    return _of_row(collectives.reduce_scatter(_table(xs), "mean"), [x.type for x in xs])


def begin_scattered(xs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin what `scattered` does, and go on. What is returned ends it, and has the pieces."""
    table, types = _table(xs), [x.type for x in xs]
    row = collectives.reduce_scatter_start(table, "mean")

    def end() -> list[Tensor]:
        collectives.reduce_scatter_wait(row, table)
        return _of_row(row, types)

    return end


def _table(xs: Sequence[Tensor]) -> Tensor:
    """The tensors with a row for each member, or one of them flat."""
    tables = [_padded(x) for x in xs]
    if len(tables) == 1:
        return shapes.reshape(tables[0], -1)
    return shapes.concat([shapes.reshape(x, (size(), -1)) for x in tables], axis=1)


def _of_row(row: Tensor, types: Sequence[TensorType]) -> list[Tensor]:
    """The pieces of tensors of these types that this member's row of their table has."""
    if len(types) == 1:
        return [row]
    row = shapes.reshape(row, -1)
    return [_own(row[a:b], row) for a, b in _ranges(types)]


def gathered(pieces: Sequence[Tensor], wholes: Sequence[TensorType]) -> list[Tensor]:
    """The tensors of these types that the members have the pieces of: in one meeting, so all have
    one dtype."""
    if len(pieces) == 1:
        return [_unpadded(collectives.all_gather(pieces[0]), wholes[0])]
    table = shapes.reshape(collectives.all_gather(shapes.concat(pieces)), (size(), -1))
    ranges = zip(_ranges(wholes), wholes, strict=True)
    return [_unpadded(shapes.reshape(table[:, a:b], -1), whole) for (a, b), whole in ranges]


def gather_into(xs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Overwrite each x with what the members have the pieces of."""
    for bucket in buckets([x.type for x in xs]):
        each = [xs[i] for i in bucket]
        given = [pieces[i] for i in bucket]
        if len(bucket) == 1 and each[0].size == given[0].size * size():
            view = shapes.reshape(each[0], -1)
            launch_for_values(_GATHER_INTO, current_arena().vm, (view, given[0]))
            continue
        for x, whole in zip(each, gathered(given, [x.type for x in each]), strict=True):
            apply_into(x, COPY, whole)


def buckets(types: Sequence[TensorType]) -> list[list[int]]:
    """The numbers of the tensors that are exchanged at once: neighbours of one dtype, and of
    `BUCKET_NBYTES` at most unless it is one alone."""
    found: list[list[int]] = []
    nbytes = 0
    for i, type in enumerate(types):
        nbytes += type.nbytes
        if not found or types[found[-1][0]].dtype is not type.dtype or nbytes > BUCKET_NBYTES:
            found.append([])
            nbytes = type.nbytes
        found[-1].append(i)
    return found


def _own(part: Tensor, x: Tensor) -> Tensor:
    """The part of x, with bytes of its own."""
    return op.copy(part) if part is x or part.base is not None else part


def _padded(x: Tensor) -> Tensor:
    """The elements of x, and zeros until there are as many as all pieces have: f[n * length]."""
    missing = size() * piece_type(x.type).size - x.size
    flat = shapes.reshape(x, -1)
    return shapes.pad(flat, (0, missing)) if missing else flat


def _unpadded(flat: Tensor, whole: TensorType) -> Tensor:
    return shapes.reshape(flat[: whole.size] if flat.size > whole.size else flat, whole.shape)


def _ranges(wholes: Sequence[TensorType]) -> Iterator[tuple[int, int]]:
    """Where each tensor's piece begins and ends among the pieces of all of them."""
    ends = [0]
    for whole in wholes:
        ends.append(ends[-1] + piece_type(whole).size)
    return pairwise(ends)


# --- weights in parts ----------------------------------------------------------------


def keep_parts(model: Tree) -> dict[str, TensorType]:
    """Leave this member its pieces of the Module's parameters, and no more, unless it has been
    done before. Returns the types of the whole parameters by path.

    A field that holds parameters is gathered whenever it is read; what was read lives as long as
    somebody uses it, as a tape does. A gradient goes back through that to the pieces: it is the
    mean over all members. The Module's `state`, `load_state` and `load_parameters` are about whole
    tensors, as before, and meetings of all members. As a tree, it has the pieces.

    Raises `AttributeRefused` for a tree that is no Module.
    """
    if not isinstance(model, Node):
        raise AttributeRefused(
            f"weights are kept in parts by a Module, whose fields are gathered when they are read; "
            f"a {type(model).__name__} cannot do that: take shard='optimizer'"
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
            found: list[TensorType | None] = []
            if name not in node._buffers and holds_tensors(field):
                fields[name] = replace(partial(_exchanged, pieces, found), field, Tensor)
            if any(found):
                of_node[name] = property(
                    partial(_whole_field, name, tuple(found)), partial(_refuse_field, name)
                )
        node.__class__ = _class_in_parts(type(node), types, of_node)
    return wholes[0]


def _exchanged(pieces: Mapping[int, Tensor], found: list[TensorType | None], x: Tensor) -> Tensor:
    """The piece of a tensor; what is frozen stays whole."""
    found.append(x.type if id(x) in pieces else None)
    return pieces.get(id(x), x)


def _class_in_parts(
    kind: type[Node], wholes: dict[str, TensorType], properties: dict[str, Any]
) -> Any:
    """A class for one Module whose parameters, by path of these types, are kept in parts."""
    home = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    marks = {"_as_dict": Parts, "_wholes": wholes}
    methods = {
        "_whole": lambda self, tensors: gathered_by_path(tensors, wholes),
        "_load": lambda self, tensors, arrays, what: load_parts(tensors, wholes, arrays, what),
    }
    return type(kind.__name__, (kind,), {**home, **marks, **methods, **properties})


def _whole_field(name: str, types: tuple[TensorType | None, ...], node: Node) -> Any:
    """What a field holds, with whole tensors for its pieces."""
    rest = iter(types)

    def whole(piece: Tensor) -> Tensor:
        type = next(rest)
        return piece if type is None else _whole(piece, type)

    return replace(whole, vars(node)[name], Tensor)


def _whole(piece: Tensor, type: TensorType) -> Tensor:
    """The tensor of a piece, recorded on the tape."""
    [whole] = gathered([stop_gradient(piece)], [type])
    tape = taping()
    if tape is None:
        return whole
    is_tracked = piece.tape is tape
    if is_tracked:
        is_cast = piece.dtype.is_half and tape.nodes[piece.node] is not None
        of_piece = piece.type.with_dtype(f32) if is_cast else piece.type
        tape.leave(whole, (Pull(of_piece, _scattered_alone, ()),), (piece.node,), ())
    return whole


def _scattered_alone(g: Tensor) -> Tensor:
    """This member's piece of the mean; in f32 of halves, so that it is not rounded on the way back
    to f32 weights that `Module.astype` made halves of."""
    return scattered([op.astype(g, dtype=f32) if g.dtype.is_half else g])[0]


def _refuse_field(name: str, node: Node, value: Any) -> None:
    held = vars(node)[name]
    if value is None or (type(held) is type(value) is Tensor and held.type is value.type):
        vars(node)[name] = value
        return
    raise AttributeRefused(
        f"{type(node).__name__}.{name} is kept in parts; change it by an optimizer, or by "
        f"load_parameters"
    )


# --- whole tensors of what is in parts ----------------------------------------------


def gathered_by_path(
    tensors: Mapping[str, Tensor], wholes: Mapping[str, TensorType]
) -> dict[str, Tensor]:
    """The tensors, with whole ones for the pieces: `wholes` has the types of those, by path."""
    result = dict(tensors)
    paths = [path for path in tensors if path in wholes]
    for bucket in buckets([wholes[path] for path in paths]):
        names = [paths[i] for i in bucket]
        found = gathered([tensors[path] for path in names], [wholes[path] for path in names])
        result.update(zip(names, found, strict=True))
    return result


def load_parts(
    tensors: Mapping[str, Tensor],
    wholes: Mapping[str, TensorType],
    arrays: Mapping[str, Any],
    what: str,
) -> None:
    """`load` of whole arrays into tensors of which some are pieces: those of `wholes`, by path."""
    if isinstance(arrays, Mapping):
        arrays = {path: array_for(path, array, what) for path, array in arrays.items()}
        expected = {path: wholes.get(path, x.type) for path, x in tensors.items()}
        require_types(expected, {path: TensorType.of(x) for path, x in arrays.items()}, what)
        for path, whole in wholes.items():
            arrays[path] = piece_of_array(arrays[path], whole)
    load(tensors, arrays, what)


# --- optimizers -----------------------------------------------------------------------


class _AllInParts(Whole):
    """This member has pieces of the parameters, and the state of each: `wholes` are the types of
    the whole parameters by path."""

    def __init__(self, wholes: Mapping[str, TensorType]) -> None:
        self.wholes = wholes

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return gathered_by_path(state, self._whole_state(state))

    def load_state(self, state: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
        load_parts(state, self._whole_state(state), arrays, "state")

    def _whole_state(self, paths: Iterable[str]) -> dict[str, TensorType]:
        """The types of the whole tensors of state that is in parts."""
        of = {path: path.partition("/")[2] for path in paths}  # the state momentum/w is beside w
        return {path: self.wholes[of[path]] for path in of if of[path] in self.wholes}


class _StateInParts(_AllInParts):
    """This member has whole parameters, and the state of its piece of each."""

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


def _held(params: Tree, whole_needed_by: str | None) -> Whole:
    """What an optimizer that is made here has of the parameters."""
    shard = wanted()
    if shard is None:
        return Whole()
    if whole_needed_by is not None:
        raise AttributeRefused(
            f"{whole_needed_by} looks at whole parameters, of which members keep parts with "
            f"shard={shard!r}; leave shard= out, or take one that goes by elements, such as AdamW"
        )
    wholes = keep_parts(params) if shard == "all" else {}
    types = {path: wholes.get(path, x.type) for path, x in named_tensors(params).items()}
    return _AllInParts(types) if shard == "all" else _StateInParts(types)


Optimizer._hold = staticmethod(_held)  # type: ignore[method-assign]
Parts._all_reduce = staticmethod(collectives.all_reduce)  # type: ignore[method-assign]
