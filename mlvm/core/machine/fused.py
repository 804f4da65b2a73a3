"""Host function `fused`: a chain of ops on one shape, run block by block for cache locality.

    push_str "fused"
    cfunc 4 0 {"chain": [["add", -1, 2, 3], ["tanh", 0, -1], ["sum", 1, 0, {"axis": 0}]],
               "outputs": 2}

The call writes to the first `outputs` parameters. A link of the chain consists of an op, the target
of the result, the operands, and optional attributes. A number >= 0 is a parameter, a negative
number is a temporary. The ops are elementwise (`Op.links`) on the chain's shape. The first link may
be a matrix product (`Op.heads`), and a link that writes to a parameter may be a reduction. The
results have the same bits as separate calls of the ops.

A `slice` of an operand is a window: the links read the operand itself, without a copy. A window
must precede the links that read it. A `slice_set` of a value of the chain's shape writes into a
window of a parameter. The other elements are copied from the first operand of the `slice_set`, if
that is a different tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.dynamic_sizes import always_equal
from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.memo import Memo
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes, Kernel, Op
from mlvm.core.ops import half
from mlvm.core.ops.block_memory import BLOCK_SIZE, memory_of
from mlvm.core.ops.layout import begin_as, window_index
from mlvm.core.rules import normalize_axes
from mlvm.core.types import Array, Shape, TensorType


class Link(NamedTuple):
    """Link `target = op(*sources)` of a chain; numbers >= 0 are parameters, others temporaries."""

    op: Op
    target: int
    sources: tuple[int, ...]
    attributes: Attributes = NO_ATTRIBUTES

    def renumbered(self, numbers: Mapping[int, int]) -> Link:
        """Return the link with new value numbers, looked up by the present numbers."""
        sources = tuple([numbers[source] for source in self.sources])
        return self._replace(target=numbers[self.target], sources=sources)


LONGEST_CHAIN: Final = 24
"""Largest number of links of a native chain that is not a large formula."""

READS_WINDOW: Final = "slice"
"""Name of the op for links that read a window of an operand."""
WRITES_WINDOW: Final = "slice_set"
"""Name of the op for links that write to a window of a parameter."""


def is_apart(reads: Attributes, writes: Attributes) -> bool | None:
    """Return whether two windows of the same tensor are disjoint; None if they are equal.

    The result is False if the bounds do not show it for all dynamic sizes.
    """
    if all(always_equal(reads[name], writes[name]) for name in ("start", "length", "step")):
        return None
    return any(
        _is_less(a[1], b[0]) or _is_less(b[1], a[0])
        for a, b in zip(_bounds(**reads), _bounds(**writes), strict=True)
    )


def _is_less(x: int, y: int) -> bool:
    """Return whether x < y for all values of dynamic sizes, without a guard."""
    difference = x - y
    return type(difference) is int and difference < 0


def _bounds(start: Shape, length: Shape, step: Shape) -> list[tuple[int, int]]:
    """Return the first and the last position of a window on each axis."""
    ends = [(at, at + by * (n - 1)) for at, n, by in zip(start, length, step, strict=True)]
    return [each if by > 0 else each[::-1] for each, by in zip(ends, step, strict=True)]


Index = tuple[slice, ...]


class _Step(NamedTuple):
    """Prepared link: the kernel, a getter of the operands, and the attributes, if any.

    The getter selects from the list of parameters, windows and temporaries.
    """

    kernel: Kernel
    operands: Callable[[list[Array]], tuple[Array, ...]]
    attributes: Attributes | None


class _Layout(NamedTuple):
    """Blocks and temporaries of a chain for certain types of parameters.

    Windows are numbered after the parameters, temporaries after the windows; each window has the
    number of a parameter. `sliced` are the parameters and windows that differ between blocks.
    `copies` are the results that are partly written, with the operands that provide the other
    elements.
    """

    steps: tuple[_Step, ...]
    blocks: tuple[Index, ...]
    temporaries: tuple[TensorType, ...]
    sliced: tuple[int, ...]
    ndim: int
    windows: tuple[tuple[int, Index], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    def with_windows(self, params: Sequence[Array]) -> list[Array]:
        return [*params, *[params[number][index] for number, index in self.windows]]


class Chain:
    """Links of a `fused` call, and the layouts by types.

    `kernels` replace the ops' kernels by name.
    """

    def __init__(
        self, links: Sequence[Link], outputs: int, kernels: Mapping[str, Kernel] | None = None
    ) -> None:
        self.links = tuple(links)
        self.outputs = outputs
        self._kernels = kernels or {}
        self._layouts: Memo[Any, _Layout] = Memo(256, "core.machine.fused layouts")
        self._inferred: tuple[tuple[TensorType, ...], dict[int, TensorType]] | None = None

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the `cfunc` that runs the chain; `parse` reads them."""
        chain = tuple(
            (op.name, target, *sources, *([dict(attributes)] if attributes else []))
            for op, target, sources, attributes in self.links
        )
        return {"chain": chain, "outputs": self.outputs}

    def __repr__(self) -> str:
        return " ".join(link.op.name for link in self.links)

    def infer(self, types: Sequence[TensorType]) -> Mapping[int, TensorType]:
        """Return the types of parameters and temporaries. Raises an `OpError` if one is invalid."""
        key, last = tuple(types), self._inferred
        if last is None or last[0] != key:
            last = self._inferred = key, self._infer(key)
        return last[1]

    def _infer(self, types: Sequence[TensorType]) -> dict[int, TensorType]:
        inferred = dict(enumerate(types))
        shape: Shape | None = None
        written: set[int] = set()
        windows: set[int] = set()
        for i, (op, target, sources, attributes) in enumerate(self.links):
            for source in sources:
                if source not in inferred or (0 <= source < self.outputs and source not in written):
                    raise ArgumentError(
                        f"{op.name} reads value {source} before the first write; "
                        "write it in an earlier link"
                    )
                if source in windows and source >= 0:
                    raise ArgumentError(
                        f"{op.name} reads value {source}, of which only a window was written; "
                        "write the whole value first"
                    )
            result = op.infer([inferred[source] for source in sources], attributes)
            if target in windows:
                raise ArgumentError(
                    f"{op.name}: value {target} is a window, which cannot be overwritten; "
                    "write to a different value"
                )
            if result is not None and op.name in (READS_WINDOW, WRITES_WINDOW):
                is_read = op.name == READS_WINDOW
                if sources[0] < self.outputs or is_read == (target >= 0):
                    raise ArgumentError(
                        f"{op.name}: expected a window of an operand, got value {sources[0]} "
                        f"and target {target}"
                    )
                windows.add(target)
                if is_read:
                    if target in written:
                        raise ArgumentError(
                            f"{op.name}: value {target} was already written; "
                            "write to a different value"
                        )
                    inferred[target] = result
                    written.add(target)
                    continue
                if inferred[sources[1]] is not result.with_shape(attributes["length"]):
                    raise ShapeError(
                        f"{op.name} expects values of the window's type, got "
                        f"{inferred[sources[1]]}; "
                        "convert the values"
                    )
            whole = op.links or (i == 0 and op.heads)
            sets = op.name == WRITES_WINDOW
            if result is None or not (whole or sets or (op.reduces and target >= 0)):
                raise ArgumentError(f"{op.name} cannot be part of a chain; call it separately")
            worked = result if whole else inferred[sources[-1 if sets else 0]]
            shape = worked.shape if shape is None else shape
            if worked.shape != shape:
                raise ShapeError(f"{op.name}: expected shape {shape} like the chain, got {worked}")
            if target in sources and not op.in_place:
                raise ArgumentError(
                    f"{op.name} must not overwrite operand {target} in place; "
                    "write to a different value"
                )
            if target in written and (target >= 0 or inferred[target] is not result):
                raise ArgumentError(
                    f"{op.name}: value {target} was already written; write to a different value"
                )
            if target >= self.outputs:
                raise ArgumentError(f"{op.name} must not write to parameter {target}, an operand")
            if target >= 0 and inferred[target] is not result:
                text = f"{op.name}: expected an output of type {result}, got {inferred[target]}"
                raise ShapeError(text)
            inferred[target] = result
            written.add(target)
        missing = set(range(self.outputs)) - written
        if missing:
            raise ArgumentError(
                f"the chain never writes parameter {min(missing)}; declare fewer outputs"
            )
        return inferred

    def kernel(self, op: Op) -> Kernel:
        """Return the kernel of an op: the VM's own, or the reference kernel."""
        return self._kernels.get(op.name, op.kernel)

    def may_replace(self, out: int, operand: int) -> bool:
        """Return whether parameter `out` may share the memory of `operand`.

        No link may read `operand` after `out` is written, and the op that writes it must work in
        place. Windows of `operand` must be disjoint from the written window, or equal to it.
        """
        written = False
        writer = next(link for link in self.links if link.target == out)
        if self.links[0].op.heads and operand in self.links[0].sources:
            return False  # later rows of the result read the whole operand
        sets = writer.op.name == WRITES_WINDOW and writer.sources[0] == operand
        for op, target, sources, attributes in self.links:
            if op.name == READS_WINDOW and operand in sources:
                is_disjoint = is_apart(attributes, writer.attributes) if sets else False
                if is_disjoint is False or (
                    is_disjoint is None and self._is_read_after(target, writer)
                ):
                    return False
                continue
            if written and operand in sources:
                return False
            if target == out:
                if operand in sources[op.in_place :]:
                    return False
                written = True
        return True

    def _is_read_after(self, window: int, writer: Link) -> bool:
        """Return whether a link reads a window after the link `writer`."""
        return any(window in each.sources for each in self.links[self.links.index(writer) + 1 :])

    def layout(self, params: Sequence[Array]) -> _Layout:
        key = tuple([(x.dtype, x.shape) for x in params])
        return self._layouts.get(key, lambda: self._lay_out([TensorType.of(x) for x in params]))

    def _lay_out(self, types: Sequence[TensorType]) -> _Layout:
        inferred = self.infer(types)
        links = [link for link in self.links if link.op.name != READS_WINDOW]
        shape = self._shape(links[0], inferred)
        # Number of leading axes along which blocks are cut.
        depth = 0 if links[0].op.heads else len(shape)
        windows: list[tuple[int, Index]] = []
        shapes = [type.shape for type in types]
        place: dict[int, int] = {}
        for op, target, sources, attributes in self.links:
            if op.reduces:  # the result must keep the axes along which blocks are cut
                axes = normalize_axes(attributes["axis"], len(shape))
                depth = min([depth, *axes]) if attributes.get("keepdims", True) else 0
            elif op.name in (READS_WINDOW, WRITES_WINDOW):
                place[target] = len(shapes)
                number = sources[0] if op.name == READS_WINDOW else target
                windows.append((number, window_index(**attributes)))
                shapes.append(tuple(attributes["length"]))
        blocks = tuple(_blocks(shape, depth))
        cut = len(blocks[0]) if len(blocks) > 1 else 0
        temporaries = {
            number: TensorType(type.dtype, _shape_of(blocks[0], shape))
            for number, type in inferred.items()
            if number < 0 and number not in place
        }
        place |= {number: len(shapes) + i for i, number in enumerate(temporaries)}
        steps, copies = [], []
        for op, target, sources, attributes in links:
            if op.name == WRITES_WINDOW:
                copies.append((target, sources[0]))
                operands = itemgetter(place[target], place.get(sources[1], sources[1]))
                steps.append(_Step(np.copyto, operands, None))
                continue
            numbers = (target, *sources)
            kernel = half.suited(op, self.kernel(op), [inferred[number] for number in numbers])
            operands = itemgetter(*[place.get(number, number) for number in numbers])
            steps.append(_Step(kernel, operands, attributes or None))
        sliced = tuple(i for i, each in enumerate(shapes) if any(_aligned(each, len(shape))[:cut]))
        return _Layout(
            tuple(steps),
            blocks,
            tuple(temporaries.values()),
            sliced,
            len(shape),
            tuple(windows),
            tuple(copies),
        )

    def _shape(self, link: Link, inferred: Mapping[int, TensorType]) -> Shape:
        """Return the shape of a link that is not a window."""
        op, target, sources, _ = link
        if op.name == WRITES_WINDOW:
            return inferred[sources[1]].shape
        return inferred[target if op.links or op.heads else sources[0]].shape


def _aligned(shape: Shape, ndim: int) -> list[bool]:
    """Return for each of `ndim` axes whether the right-aligned shape is longer than 1 there."""
    return [False] * (ndim - len(shape)) + [n != 1 for n in shape]


def _blocks(shape: Shape, depth: int) -> list[Index]:
    """Split the shape along the first `depth` axes into blocks of about `BLOCK_SIZE` elements.

    All but the last of these axes are split into single indices.
    """
    axis = next((k for k in range(depth) if math.prod(shape[k + 1 :]) <= BLOCK_SIZE), depth - 1)
    if math.prod(shape) <= BLOCK_SIZE or axis < 0:
        return [()]
    step = max(1, BLOCK_SIZE // math.prod(shape[axis + 1 :]))
    last = [slice(i, min(i + step, shape[axis])) for i in range(0, shape[axis], step)]
    return [
        (*[slice(i, i + 1) for i in outer], part)
        for outer in np.ndindex(*shape[:axis])
        for part in last
    ]


def _shape_of(block: Index, shape: Shape) -> Shape:
    return (*[part.stop - part.start for part in block], *shape[len(block) :])


class Workspace:
    """Memory for temporaries, shared by chains that run one after the other."""

    def __init__(self) -> None:
        self._buffers: list[Array] = []

    def take(self, types: Sequence[TensorType]) -> list[Array]:
        """Return a buffer for each type. Later calls return the same memory again."""
        while len(self._buffers) < len(types):
            self._buffers.append(memory_of(8 * BLOCK_SIZE, dtype=np.dtype(np.uint8)))
        return [*map(TensorType.over, types, self._buffers)]


class Bound:
    """Chain bound to certain parameters: the kernel calls for every block, in order."""

    def __init__(self, chain: Chain, params: Sequence[Array], workspace: Workspace) -> None:
        self.chain = chain
        layout = chain.layout(params)
        self.calls: list[tuple[Kernel, tuple[Array, ...], Attributes | None]] = [
            (begin_as, (params[out], params[x]), None) for out, x in layout.copies
        ]
        self.calls += [
            (step.kernel, step.operands(values), step.attributes)
            for values in _on_blocks(layout, params, workspace.take(layout.temporaries))
            for step in layout.steps
        ]

    def __repr__(self) -> str:
        return repr(self.chain)


def bound(chain: Chain, params: Sequence[Array], workspace: Workspace) -> Chain | Bound:
    """Return the chain, bound to these parameters if it has few calls."""
    layout = chain.layout(params)
    # Maximum number of calls of a bound chain. Each costs memory, and saves less in large chains.
    if len(layout.blocks) * len(layout.steps) > 2048 or any(
        type.nbytes > 8 * BLOCK_SIZE for type in layout.temporaries
    ):
        return chain
    return Bound(chain, params, workspace)


def run(*params: Array, chain: Chain | Bound) -> None:
    """Run every link on one block, then on the next block; the kernel of `fused`."""
    if isinstance(chain, Bound):
        for kernel, operands, attributes in chain.calls:
            if attributes is None:
                kernel(*operands)
            else:
                kernel(*operands, **attributes)
        return
    layout = chain.layout(params)
    buffers = [memory_of(*type.shape, dtype=type.dtype.numpy) for type in layout.temporaries]
    for out, x in layout.copies:
        begin_as(params[out], params[x])
    for values in _on_blocks(layout, params, buffers):
        for step in layout.steps:
            step.kernel(*step.operands(values), **(step.attributes or {}))


def _on_blocks(
    layout: _Layout, params: Sequence[Array], buffers: Sequence[Array]
) -> Iterator[list[Array]]:
    """Yield the parameters, windows and temporaries of each block."""
    _, blocks, _, sliced, ndim, _, _ = layout
    params = layout.with_windows(params)
    if len(blocks) == 1:
        yield [*params, *buffers]
        return
    wide = {i: params[i].reshape((1,) * (ndim - params[i].ndim) + params[i].shape) for i in sliced}
    for block in blocks:
        values = list(params)
        for i, x in wide.items():
            values[i] = x[
                tuple([p if n != 1 else slice(None) for p, n in zip(block, x.shape, strict=False)])
            ]
        rows = block[-1].stop - block[-1].start  # the last block of an axis may have fewer rows
        part = (*[slice(None)] * (len(block) - 1), slice(rows))
        yield [*values, *[buffer[part] for buffer in buffers]]


def parse(attributes: Attributes, kernels: Mapping[str, Kernel] | None = None) -> Chain:
    """Return the chain that the attributes of a `cfunc` describe. Raises `ArgumentError`."""
    try:
        return _parse(attributes, kernels)
    except ArgumentError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            'expected {"chain": [[op, target, source, ..., {attributes}], ...], "outputs": n}'
        ) from error


def _parse(attributes: Attributes, kernels: Mapping[str, Kernel] | None) -> Chain:
    links = []
    for name, target, *rest in attributes["chain"]:
        link_attributes = rest.pop() if rest and isinstance(rest[-1], Mapping) else NO_ATTRIBUTES
        if name not in OPS:
            raise ArgumentError(f"expected the name of an op, got {name!r}")
        numbers = [target, *rest]
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            raise ArgumentError(f"{name}: expected numbers of parameters, got {numbers}")
        links.append(Link(OPS[name], target, tuple(rest), OPS[name].bind(link_attributes)))
    outputs = attributes["outputs"]
    if not links or type(outputs) is not int or outputs < 1 or len(attributes) > 2:
        raise ArgumentError(
            f"expected at least one link and one output, got {len(links)} links and "
            f"outputs={outputs!r}"
        )
    return Chain(links, outputs, kernels)
