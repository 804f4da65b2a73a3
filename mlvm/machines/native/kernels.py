"""The native kernels as the machine's table of kernels takes them: functions of arrays."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from mlvm.core.errors import OpError
from mlvm.core.machine.callee import Fused, Kernels
from mlvm.core.machine.fused import HEADS, MOST_LAYOUTS, Chain, Link
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes, Kernel, Op
from mlvm.core.ops import half
from mlvm.core.ops.blocks import memory_of
from mlvm.core.ops.half import is_half
from mlvm.core.remembered import Remembered
from mlvm.core.types import Array, DType, TensorType
from mlvm.machines.native import planners as twins
from mlvm.machines.native._native import Plan, Pool
from mlvm.machines.native.planner import TWINS, Twin, Types
from mlvm.machines.native.planners.chain import chain_plan
from mlvm.machines.native.planners.elementwise import row_of
from mlvm.machines.native.planners.linalg import headed_plan

for _room in pkgutil.iter_modules(twins.__path__):
    importlib.import_module(f"{twins.__name__}.{_room.name}")

_MOST_PLANS: Final = 2048
_MOVES: Final = frozenset(
    [
        "concat",
        "copy",
        "dynamic_update",
        "flip",
        "full",
        "mask_scatter",
        "permute_dims",
        "reshape",
        "roll",
        "slice",
        "take",
    ]
)
"""What kernels do with elements of any size, complex ones too: they only move them."""


class NativeKernel:
    """A kernel that runs its twin's plan, or what it stands for where there is none.

    Values that the plan refuses go to the reference kernel, which says what is wrong with them.
    Halves that no plan takes are computed with in f32, by the f32's plan.
    """

    takes_halves = True

    convert: half.Convert
    """How halves are converted: `native_kernels` says."""

    def __init__(self, op: Op, prepare: Twin, pool: Pool) -> None:
        self._op = op
        self._prepare = prepare
        self._pool = pool
        self._plans: Remembered[Any, Plan | None] = Remembered(_MOST_PLANS)

    def plan(self, types: Types, attributes: Attributes) -> Plan | None:
        """The plan for a result and operands of these types; None if the reference kernel runs."""
        key = tuple(types), repr(attributes) if attributes else ""
        if key not in self._plans:
            fits = self._fit(types, attributes)
            self._plans[key] = self._prepare(types, attributes) if fits else None
        return self._plans[key]

    def _fit(self, types: Types, attributes: Attributes) -> bool:
        """Whether the types suit the op. On a raw VM nobody has asked. A kernel would take a
        complex element for another of its size, if it did more than to move it."""
        moves = self._op.name in _MOVES or self._op.links  # these have row functions by dtype
        if not moves and any(type.dtype.kind == "complex" for type in types):
            return False
        if any(map(is_half, types)) and not (self._op.copies_only or self._op.links):
            return False
        try:
            return self._op.infer(types[1:], attributes) is types[0]
        except OpError:
            return False

    def __call__(self, *arrays: Array, **attributes: Any) -> None:
        types = [TensorType.of(x) for x in arrays]
        plan = self.plan(types, attributes)
        if plan is not None and plan.run(self._pool, *arrays):
            return
        kernel = self._op.kernel
        if any(map(is_half, types)):
            kernel = partial(half.run, self._op, self if plan is None else kernel, self.convert)
        kernel(*arrays, **attributes)


class NativeFused:
    """The kernel of `fused`: one plan for the whole chain if every link has a row function.

    Else its links run one after the other, each by the kernel of its op, and links that have row
    functions together where they follow each other. Temporaries then have the chain's whole shape.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ways: WeakKeyDictionary[Chain, dict[Any, Plan | _Parts]] = WeakKeyDictionary()

    def plan(self, types: Types, attributes: Attributes) -> Plan | None:
        """The plan of attributes["chain"] for parameters of these types; None if it has parts."""
        chain = attributes["chain"]
        way = self._way(chain, types, tuple(types))
        return way if isinstance(way, Plan) else None

    def __call__(self, *params: Array, chain: Chain) -> None:
        types = [TensorType.of(x) for x in params]
        way = self._way(chain, types, tuple(types))
        if isinstance(way, Plan):
            way.run(self._pool, *params)
        else:
            way.run(self._pool, params)

    def _way(self, chain: Chain, types: Types, key: tuple[TensorType, ...]) -> Plan | _Parts:
        ways = self._ways.setdefault(chain, Remembered(MOST_LAYOUTS))
        if key not in ways:
            native = all(isinstance(chain.kernel(link.op), NativeKernel) for link in chain.links)
            prepare = headed_plan if chain.links[0].op.name in HEADS else chain_plan
            ways[key] = (native and prepare(chain.links, types)) or _Parts(chain, types)
        return ways[key]


class _Part(NamedTuple):
    """A plan for some links of a chain, or the kernel of one; and the numbers of its parameters."""

    work: Plan | Kernel
    numbers: tuple[int, ...]
    attributes: Attributes


class _Parts:
    """A chain in parts. Temporaries are parameters behind those that are given."""

    def __init__(self, chain: Chain, types: Types) -> None:
        known = chain.infer(types)
        order = [*range(len(types)), *[number for number in known if number < 0]]
        self._temporaries = [known[number] for number in order if number < 0]
        place = {number: i for i, number in enumerate(order)}
        self._parts: list[_Part] = []
        all_types = [known[number] for number in order]
        for native, run in groupby(chain.links, lambda link: _has_row(chain, link, known)):
            links = [
                Link(op, place[target], tuple([place[source] for source in sources]), attributes)
                for op, target, sources, attributes in run
            ]
            part = _plan_of(links, all_types) if native and len(links) > 1 else None
            if part is not None:
                self._parts.append(part)
                continue
            self._parts += [
                _Part(chain.kernel(op), (target, *sources), attributes)
                for op, target, sources, attributes in links
            ]

    def run(self, pool: Pool, params: Sequence[Array]) -> None:
        arrays = [
            *params,
            *[memory_of(*type.shape, dtype=type.dtype.numpy) for type in self._temporaries],
        ]
        for work, numbers, attributes in self._parts:
            operands = [arrays[number] for number in numbers]
            if isinstance(work, Plan):
                work.run(pool, *operands)
            else:
                work(*operands, **attributes)


def _has_row(chain: Chain, link: Link, known: Mapping[int, TensorType]) -> bool:
    op, target, sources, attributes = link
    operands = [known[source] for source in sources]
    return (
        op.links
        and isinstance(chain.kernel(op), NativeKernel)
        and row_of(op, known[target], operands, attributes) is not None
    )


def _plan_of(links: Sequence[Link], types: Types) -> _Part | None:
    """The plan of links between parameters."""
    targets = [link.target for link in links]
    if len(targets) > len({*targets}):  # a temporary is written again
        return None
    sources = {source for link in links for source in link.sources} - {*targets}
    numbers = (*targets, *sorted(sources))
    place = {number: i for i, number in enumerate(numbers)}
    renumbered = [
        Link(op, place[target], tuple([place[source] for source in sources]), attributes)
        for op, target, sources, attributes in links
    ]
    plan = chain_plan(renumbered, [types[number] for number in numbers])
    return None if plan is None else _Part(plan, numbers, NO_ATTRIBUTES)


def native_kernels(pool: Pool) -> Kernels:
    """A native kernel for each op that has a twin, and for `fused`. They share the pool's
    threads."""
    ops = {name: NativeKernel(OPS[name], prepare, pool) for name, prepare in TWINS.items()}

    def convert(out: Array, x: Array) -> None:
        ops["astype"](out, x, dtype=DType.of(out.dtype).name)

    for name, kernel in ops.items():
        kernel.convert = half.convert if name == "astype" else convert
    return {**ops, Fused.name: NativeFused(pool)}
