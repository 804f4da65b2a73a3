"""Table of the kernels of a device by op, and instructions for writing one.

A row of the table is a function, the op's `Maker`. It receives the facts about the device, the
types of the result and the operands, and the op's attributes. It returns the calls that fill the
result in order, or None if the op's reference kernel should run on the host.

    @kernel("softmax")
    def _softmax(device: Facts, types: Types, *, axis: int) -> Calls:
        out, x = types
        ...
        text = source("softmax.c", DT=x.dtype.name)
        return [Call(text, "softmax", (rows * 64,), (64,), (0, 1, np.int32(columns)))]

A call is data: the launcher compiles the source (once per text), creates the kernels, and replaces
the arguments by memory. An argument is

    an int           that parameter: 0 is the result, 1 the first operand
    a numpy scalar   itself: np.int32, np.int64, np.uint64, np.float32
    Scratch(k, n)    n bytes of memory during these calls; equal k refer to the same memory
    REFUSED          the flag that a kernel sets if it rejects a value

Tensors, scratch memory and REFUSED need two parameters each, which `TENSOR` of `source/common.h`
declares: the memory, and the offset of the first byte. Tensors are packed, in row-major order. A
result without elements is not launched; an operand may be empty. `out` may overlap an operand only
if the op allows it (`Op.in_place`). Sources are C for a device, after the macros of common.h, and
valid in both OpenCL C 1.2 and CUDA C. They are files in `source/` or texts that Python generates.

The order of all operations must depend only on types and attributes. It must never depend on
timing, or on the number of units in the `Facts`, so that every run computes the same bits. Do not
use atomic additions of floats.

A kernel rejects a value (an index out of range, a probability of 2) with `REFUSE`, and continues
with a valid value. The host checks the flag when it next waits, and raises the reference kernel's
error for the operand that the `Maker` names: `@kernel("take", judges=2)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.op import OPS
from mlvm.core.types import DType, TensorType

_SOURCE: Final = Path(__file__).with_name("source")

Types: TypeAlias = Sequence[TensorType]


class Scratch(NamedTuple):
    """Uninitialized memory for the calls of an op."""

    name: str
    nbytes: int


class _Refused:
    """Type of `REFUSED`."""

    def __repr__(self) -> str:
        return "REFUSED"


REFUSED: Final = _Refused()

Argument: TypeAlias = "int | np.generic | Scratch | _Refused"


class Call(NamedTuple):
    """Launch of the kernel `entry` of a source: `size` work items in groups of `group`.

    The launcher rounds each size up to whole groups; the kernel ignores the additional items. A
    call that `begins` copies an operand to the result. It is omitted if both are the same memory,
    so an op can work in place (`begin_as` of `moves`).
    """

    source: str
    entry: str
    size: tuple[int, ...]
    group: tuple[int, ...]
    args: tuple[Argument, ...]
    begins: bool = False


GROUP: Final = 64
"""Work items of a group of a flat call."""


def flat_call(
    text: str, entry: str, items: int, args: Sequence[Argument], *numbers: int | np.generic
) -> Call:
    """Return the call of a kernel of a source on a number of work items.

    The arguments are followed by the numbers, of which ints become i64.
    """
    scalars = [x if isinstance(x, np.generic) else np.int64(x) for x in numbers]
    return Call(text, entry, (items,), (GROUP,), (*args, *scalars))


Calls: TypeAlias = "Sequence[Call] | None"
Maker: TypeAlias = Callable[..., Calls]


class Facts(NamedTuple):
    """Facts about a device for makers of kernels.

    is_cpu: the device is a processor, with caches instead of local memory
    """

    name: str
    has_f64: bool
    is_cpu: bool
    units: int
    local_bytes: int
    most_items: int

    def has(self, dtype: DType) -> bool:
        """Return whether kernels can compute with the dtype."""
        return dtype.kind not in ("complex", "storage") and (self.has_f64 or dtype.name != "f64")


@dataclass(frozen=True)
class DeviceRow:
    """Row of the table of kernels.

    judges: number of the parameter with values that may be rejected, or 0.
    computes: whether it requires dtypes with which the device can compute.
    """

    make: Maker
    judges: int = 0
    computes: bool = False


KERNELS: Final[dict[str, DeviceRow]] = {}
"""Rows by op name. An op without a row runs on the host."""


def kernel(*names: str, judges: int = 0, computes: bool = False) -> Callable[[Maker], Maker]:
    """Register the decorated function as the maker of these ops."""

    def declare(make: Maker) -> Maker:
        for name in names:
            if name in KERNELS or name not in OPS:
                raise ValueError(f"{name!r} already has a kernel, or is not an op; remove one")
            KERNELS[name] = DeviceRow(make, judges, computes)
        return make

    return declare


@cache
def _text(file: str) -> str:
    return (_SOURCE / file).read_text(encoding="ascii")


def source(*files: str, **defines: str | int) -> str:
    """Return a source to compile: common.h, a `#define` per keyword, the files of `source/`."""
    lines = [f"#define {name} {value}\n" for name, value in defines.items()]
    return "".join([_text("common.h"), *lines, *map(_text, files)])
