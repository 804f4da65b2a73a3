"""Planners, which prepare native kernels for calls of ops.

    @planner("layer_norm")
    def layer_norm(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
        ...

A planner receives the name of the op, the types of the result and the operands, and the attributes
as `Op.bind` returns them. It returns the kernel call, or None to use the reference kernel for these
types. The units and the work of a call must depend only on these inputs, so the bits also depend
only on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.dynamic_sizes import Length
from mlvm.core.op import OPS, Attributes
from mlvm.core.types import TensorType
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall

Types: TypeAlias = Sequence[TensorType]
Planner: TypeAlias = Callable[[Types, Attributes], KernelCall | None]
Plan: TypeAlias = Callable[[str, Types, Attributes], KernelCall | None]
Halves: TypeAlias = Literal["rows", "sum", "product", "own"]

PLANNERS: Final[dict[str, Planner]] = {}
"""Planners by op name."""
HALVES: Final[dict[str, Halves]] = {}
"""How kernels read half precision, by op name; see `planner`."""


@cache
def _integers(simd: str) -> dict[str, tuple[str, ...]]:
    """List the kernels of the instruction set in use.

    Each kernel has the names of the integers in its calls (`plan/names.h`).
    """
    kernels = _native.kernels().items()
    return {kernel: tuple([name.lower() for name in names]) for kernel, (_, names) in kernels}


def has_kernel(kernel: str) -> bool:
    """Return whether the instruction set in use has a kernel with this name."""
    return kernel in _integers(_native.simd())


def planner(*names: str, halves: Halves | None = None) -> Callable[[Plan], Plan]:
    """Register the decorated function as the planner of these ops.

    halves: how the kernels read half precision. "own": the planner supports it directly. The other
        values use f32 kernels (`planners/halves.py`). "rows": the units are rows. "sum": the kernel
        reads bf16 directly. "product": whole operands are converted, because separate calls convert
        large operands faster. None: not supported, as only elementwise ops and moves read half
        precision without it.
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
    """Create a call of a kernel by name, or return None if the kernel does not exist.

    `work`: nanoseconds on one thread.
    `integers`: by name; missing integers are 0.
    `scratch`, `shared`: bytes of memory per thread, and for all threads.
    `rest`: any number of integers after the named integers.
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
        """Return the number, or the current value of a formula, which each launch writes again."""
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
    """Call with formulas of sizes, for the planner of a call that runs it."""

    call: KernelCall
    kernel: str
    units: int
    work: float
    scratch: int
    shared: int


def unwrapped(call: KernelCall | OpenCall) -> KernelCall:
    """Return the call itself."""
    return call.call if isinstance(call, OpenCall) else call
