"""Native kernels as functions of arrays, for the machine's table of kernels."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mlvm.core.errors import OpError
from mlvm.core.machine.callee import Fused, Kernels
from mlvm.core.machine.fused import Chain, Link
from mlvm.core.memo import Memo, exact_repr
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes, Kernel, Op
from mlvm.core.ops import half
from mlvm.core.ops.block_memory import memory_of
from mlvm.core.ops.half import is_half
from mlvm.core.types import Array, DType, TensorType
from mlvm.machines.native import planners
from mlvm.machines.native._native import KernelCall, Pool
from mlvm.machines.native.fallbacks import fallback
from mlvm.machines.native.planner import HALVES, PLANNERS, Planner, Types, unwrapped
from mlvm.machines.native.planners.chain import chain_call
from mlvm.machines.native.planners.elementwise import row_of
from mlvm.machines.native.planners.halves import halves_call
from mlvm.machines.native.planners.indexing import boolean_index
from mlvm.machines.native.planners.linalg import headed_call
from mlvm.machines.native.planners.quantized import integer_headed_call

for _room in pkgutil.iter_modules(planners.__path__):
    importlib.import_module(f"{planners.__name__}.{_room.name}")


class NativeKernel:
    """Kernel that runs the planner's call, or the reference kernel if the planner returns None.

    If the call rejects values, the reference kernel raises the error. Types without a call are
    converted first (`fallbacks.py`); half-precision results are rounded afterwards.
    """

    takes_halves = True

    convert: half.Convert
    """Conversion of half precision, set by `native_kernels`."""

    def __init__(self, op: Op, planner: Planner, pool: Pool) -> None:
        self.op = op
        self._planner = planner
        self._pool = pool
        self._calls: Memo[Any, KernelCall | None] = Memo(2048, "machines.native calls")

    def call(self, types: Types, attributes: Attributes) -> KernelCall | None:
        """Return the call for these types, or None if the reference kernel runs.

        `types` contains the type of the result, then the types of the operands.
        """
        key = tuple(types), exact_repr(attributes) if attributes else ""
        return self._calls.get(key, lambda: self.plan(types, attributes))

    def plan(
        self, types: Types, attributes: Attributes, *, are_inferred: bool = False
    ) -> KernelCall | None:
        """Plan the call without caching it: the types may have dynamic sizes.

        are_inferred: whether the result type is known to be the type that the op infers
        """
        if not self._fit(types, attributes, are_inferred):
            return None
        halves = HALVES.get(self.op.name) if any(map(is_half, types)) else None
        if halves in ("rows", "sum"):
            return halves_call(self.op.name, types, attributes)
        call = self._planner(types, attributes)
        if call is None and halves == "product":
            call = halves_call(self.op.name, types, attributes)
        return call

    def _fit(self, types: Types, attributes: Attributes, are_inferred: bool) -> bool:
        """Return whether the types are valid for the op, which a raw VM does not check.

        Only kernels that move elements support complex numbers. Other kernels would read them as
        real numbers of the same size.
        """
        moves = self.op.copies_only or self.op.links  # their row functions are selected by dtype
        if not moves and any(type.dtype.kind == "complex" for type in types):
            return False
        if any(map(is_half, types)) and not (moves or self.op.name in HALVES):
            return False
        try:
            return are_inferred or self.op.infer(types[1:], attributes) is types[0]
        except OpError:
            return False

    def __call__(self, *arrays: Array, **attributes: Any) -> None:
        types = [TensorType.of(x) for x in arrays]
        call = self.call(types, attributes)
        if call is not None and call.run(self._pool, *arrays):
            return
        if call is None and self._run_converted(types, arrays, attributes):
            return
        kernel = self.op.kernel
        if any(map(is_half, types)):
            kernel = partial(half.run, self.op, self if call is None else kernel, self.convert)
        kernel(*arrays, **attributes)

    def _run_converted(self, types: Types, arrays: Sequence[Array], attributes: Attributes) -> bool:
        """Run the call of the fallback if its result is the same; return whether it ran."""
        wide = fallback(self.op, types, attributes)
        if wide is None or wide.types[0] is not types[0]:
            return False
        call = self.call(*wide)
        if call is None:
            return False
        operands = [*arrays]
        for i, type in enumerate(wide.types):
            if type is not types[i]:
                operands[i] = memory_of(*type.shape, dtype=type.dtype.numpy)
                self.convert(operands[i], arrays[i])
        return call.run(self._pool, *operands)


class NativeSelection:
    """Kernel of `boolean_index`, which counts the selected rows and then copies them."""

    takes_halves = True

    def __init__(self, op: Op, pool: Pool) -> None:
        self.op = op
        self._pool = pool

    def __call__(self, x: Array, mask: Array) -> Array:
        mask = mask.copy()  # a different VM may change it
        row = x.shape[mask.ndim :]
        call = boolean_index(mask.size, math.prod(row) * x.itemsize)
        if call is None or mask.shape != x.shape[: mask.ndim]:
            chosen: Array = self.op.kernel(x, mask)
            return chosen
        out = memory_of(int(np.count_nonzero(mask)), *row, dtype=x.dtype)
        call.run(self._pool, out, x, mask)
        return out


class NativeFused:
    """Kernel of `fused`: one call for the whole chain if every link has a row function.

    Otherwise the links run one after the other with the kernels of the ops. Adjacent links with row
    functions run together. Temporaries then have the whole shape of the chain.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._plans: WeakKeyDictionary[Chain, Memo[Any, KernelCall | Parts]] = WeakKeyDictionary()

    def call(self, types: Types, attributes: Attributes) -> KernelCall | None:
        """Return the call of the chain in `attributes`, or None if the chain has parts.

        The parameters have these types.
        """
        plan = self.plan_for(attributes["chain"], types)
        return plan if isinstance(plan, KernelCall) else None

    def __call__(self, *params: Array, chain: Chain) -> None:
        plan = self.plan_for(chain, [TensorType.of(x) for x in params])
        if isinstance(plan, KernelCall):
            plan.run(self._pool, *params)
        else:
            plan.run(self._pool, params)

    def plan(self, types: Types, attributes: Attributes) -> KernelCall | None:
        """Plan the call without caching it: the types may have dynamic sizes."""
        links = attributes["chain"].links
        is_native = all(isinstance(attributes["chain"].kernel(x.op), NativeKernel) for x in links)
        head = links[0].op
        if not is_native or not head.heads:
            return chain_call(links, types) if is_native else None
        plan = integer_headed_call if head.name.startswith("integer") else headed_call
        return plan(links, types)

    def plan_for(self, chain: Chain, types: Types) -> KernelCall | Parts:
        """Return the call of a chain for parameters of these types, or the parts of the chain."""
        plans = self._plans.get(chain)
        if plans is None:
            plans = self._plans.setdefault(chain, Memo(256, "machines.native chains"))
        plan = partial(self.plan, types, {"chain": chain})
        return plans.get(tuple(types), lambda: plan() or Parts(chain, types))


class _Part(NamedTuple):
    """Call for several links of a chain, or the kernel of a single link; and parameter numbers."""

    work: KernelCall | Kernel
    numbers: tuple[int, ...]
    attributes: Attributes


class Parts:
    """Chain in parts. The numbers of temporaries follow the numbers of parameters."""

    def __init__(self, chain: Chain, types: Types) -> None:
        inferred = chain.infer(types)
        order = [*range(len(types)), *[number for number in inferred if number < 0]]
        self.temporaries = [inferred[number] for number in order if number < 0]
        place = {number: i for i, number in enumerate(order)}
        self.parts: list[_Part] = []
        all_types = [inferred[number] for number in order]
        for native, run in groupby(chain.links, lambda link: _has_row(chain, link, inferred)):
            links = [link.renumbered(place) for link in run]
            part = _call_of(links, all_types) if native and len(links) > 1 else None
            alone = [_Part(chain.kernel(x.op), (x.target, *x.sources), x.attributes) for x in links]
            self.parts += alone if part is None else [part]

    def run(self, pool: Pool, params: Sequence[Array]) -> None:
        temporaries = [memory_of(*type.shape, dtype=type.dtype.numpy) for type in self.temporaries]
        arrays = [*params, *temporaries]
        for work, numbers, attributes in self.parts:
            operands = [arrays[number] for number in numbers]
            if isinstance(work, KernelCall):
                work.run(pool, *operands)
            else:
                work(*operands, **attributes)


def _has_row(chain: Chain, link: Link, types: Mapping[int, TensorType]) -> bool:
    op, target, sources, attributes = link
    native = op.links and isinstance(chain.kernel(op), NativeKernel)
    operands = [types[source] for source in sources]
    return native and row_of(op, types[target], operands, attributes) is not None


def _call_of(links: Sequence[Link], types: Types) -> _Part | None:
    """Build the call of links between parameters, or return None."""
    targets = [link.target for link in links]
    if len(targets) > len({*targets}):  # a temporary would be written twice
        return None
    sources = {source for link in links for source in link.sources} - {*targets}
    numbers = (*targets, *sorted(sources))
    place = {number: i for i, number in enumerate(numbers)}
    renumbered = [link.renumbered(place) for link in links]
    call = chain_call(renumbered, [types[number] for number in numbers])
    return None if call is None else _Part(unwrapped(call), numbers, NO_ATTRIBUTES)


def native_kernels(pool: Pool) -> Kernels:
    """Create the native kernels: all ops with a planner, `boolean_index` and `fused`.

    They share the threads of the pool.
    """
    ops = {name: NativeKernel(OPS[name], planner, pool) for name, planner in PLANNERS.items()}

    def convert(out: Array, x: Array) -> None:
        ops["astype"](out, x, dtype=DType.of(out.dtype).name)

    for name, kernel in ops.items():
        kernel.convert = half.convert if name == "astype" else convert
    selection = NativeSelection(OPS["boolean_index"], pool)
    return {**ops, selection.op.name: selection, Fused.name: NativeFused(pool)}
