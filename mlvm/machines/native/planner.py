"""Planners, which prepare the native kernel of an op's call.

    @planner("layer_norm")
    def layer_norm(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
        ...

It takes the op's name, the types of the result and the operands, and the op's attributes as
`Op.bind` returns them, and returns the kernel's call; None leaves these types to the reference
kernel. A call's units and its work must not depend on any other facts, so that its bits depend only
on these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.lengths import Length
from mlvm.core.op import OPS, Attributes
from mlvm.core.types import TensorType
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall

Types: TypeAlias = Sequence[TensorType]
Planner: TypeAlias = Callable[[Types, Attributes], KernelCall | None]
Plan: TypeAlias = Callable[[str, Types, Attributes], KernelCall | None]
Halves: TypeAlias = Literal["rows", "sum", "product", "own"]

PLANNERS: Final[dict[str, Planner]] = {}
"""By op name."""
HALVES: Final[dict[str, Halves]] = {}
"""How the kernels of ops read halves, by op name, as `planner` declares it."""


@cache
def _integers(simd: str) -> dict[str, tuple[str, ...]]:
    """List the kernels of the instruction set in use.

    Each has the names of the integers of its calls (`plan/names.h`).
    """
    kernels = _native.kernels().items()
    return {kernel: tuple([name.lower() for name in names]) for kernel, (_, names) in kernels}


def has_kernel(kernel: str) -> bool:
    """Return True if the instruction set in use has a kernel of that name."""
    return kernel in _integers(_native.simd())


def planner(*names: str, halves: Halves | None = None) -> Callable[[Plan], Plan]:
    """Make the decorated function the planner of these ops.

    halves: how their kernels read halves. "own": the planner itself plans them. The others are
        calls of f32's kernels (`planners/halves.py`): "rows", whose units are rows; "sum", which
        reads bf16 itself; "product", whose operands are widened whole, since large ones are better
        widened by separate calls. None: only elementwise ops and moves read halves.
    """

    def declare(plan: Plan) -> Plan:
        for name in names:
            PLANNERS[OPS[name].name] = partial(plan, name)
            if halves is not None:
                HALVES[name] = halves
        return plan

    return declare


def kernel_call(
    kernel: str,
    nparams: int,
    units: int,
    work: float,
    integers: Mapping[str, int],
    floats: Sequence[float] = (),
    *,
    scratch: int = 0,
    shared: int = 0,
    children: Sequence[KernelCall] = (),
    rest: Iterable[int] = (),
    rows: Sequence[str] = (),
) -> KernelCall | None:
    """Make a call of the kernel of that name; None if there is none.

    `work`: nanoseconds on one thread.
    `integers`: by name; others are 0.
    `scratch`, `shared`: bytes of memory for each thread, and for all.
    `rest`: integers after those with names, in any number.
    `rows`: the row functions of a chain.
    """
    names = _integers(_native.simd()).get(kernel)
    if names is None:
        return None
    reals, parts, rest = tuple(floats), tuple(children), tuple(rest)
    call: Any = _native.kernel_call(
        kernel, nparams, units, work, names, integers, reals, scratch, shared, parts, rest, rows
    )
    if call is not NotImplemented:
        return call  # type: ignore[no-any-return]
    ints = [*[integers.get(name, 0) for name in names], *rest]
    patches: list[int] = []

    def present(slot: int, number: Any) -> Any:
        """Return the number; of a formula its present value, which each launch writes again."""
        if not issubclass(type(number), Length):
            return number
        patches.extend((slot, number.formula()))
        return number.present

    fields = units, work, scratch, shared
    units, work, scratch, shared = [present(-1 - i, x) for i, x in enumerate(fields)]
    floats = [present(-5 - i, x) for i, x in enumerate(floats)]
    ints = [present(i, x) for i, x in enumerate(ints)]
    parts = tuple(map(unwrapped, children))
    call = KernelCall(
        kernel, nparams, ints, floats, units, work, scratch, shared, parts, rows, patches
    )
    return OpenCall(call, kernel, *fields) if patches else call  # type: ignore[return-value]


class OpenCall(NamedTuple):
    """A call with formulas of lengths, for the planner of another call that runs it."""

    call: KernelCall
    kernel: str
    units: int
    work: float
    scratch: int
    shared: int


def unwrapped(call: KernelCall | OpenCall) -> KernelCall:
    """Return the call itself."""
    return call.call if isinstance(call, OpenCall) else call
