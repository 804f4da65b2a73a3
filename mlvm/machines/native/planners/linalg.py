"""Matrix products: `kernels/linalg.c`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.machine.fused import Link
from mlvm.core.op import OPS, Attributes
from mlvm.core.ops.strides import broadcast_steps, merged
from mlvm.core.ops.windows import WINDOWS_PER_BLOCK
from mlvm.core.rules import broadcast_shapes
from mlvm.core.types import Shape, TensorType, bf16, f32, i64, u64
from mlvm.machines.native._native import LINES, KernelCall
from mlvm.machines.native.planner import Types, has_kernel, kernel_call, planner
from mlvm.machines.native.planners.chain import chain_call

Axis: TypeAlias = tuple[int, ...]
"""Length of a batch axis, and the strides of x and y along it."""

BLOCK: Final = WINDOWS_PER_BLOCK
"""Maximum number of products in a block of a sum."""
_CACHE: Final = 1 << 18
"""Bytes that stay in a processor's L2 cache together with other data."""
_PANEL: Final = 32
"""Maximum width of a panel of y: two vectors of AVX-512."""
MOST_PANELS: Final = 1 << 24
"""Maximum bytes of y that a thread copies, for a chain after the product."""
_AMX: Final = "bf16_amx"
_SIDE: Final = 32
"""Rows, columns and depth of a block of products in AMX tiles."""
_PAST_CACHES: Final = 1 << 22
"""Minimum bytes of a result that bypasses the caches."""


class Matrix(NamedTuple):
    """Matrix of an operand after transposition: lengths, and strides in elements."""

    rows: int
    columns: int
    row: int
    column: int

    @property
    def T(self) -> Matrix:
        return Matrix(self.columns, self.rows, self.column, self.row)


class Product(NamedTuple):
    """x @ y for each element of a batch, summed over `groups` (length and strides)."""

    dtype: str
    x: Matrix
    y: Matrix
    axes: Sequence[Axis] = ()
    groups: Axis = (1, 0, 0)
    panel: int = 0
    """Length of a panel of y, in units that kernels multiply together; 0 without panels."""
    block: int = 0
    """Length of a block of the sum; 0: blocks of equal length."""

    @property
    def batch(self) -> int:
        """Number of products in the batch."""
        return math.prod([axis[0] for axis in self.axes])

    @property
    def integers(self) -> dict[str, int]:
        """Integers of the product for kernels, by name in `plan/names.h`."""
        x, y, (groups, x_group, y_group) = self.x, self.y, self.groups
        lengths = {"m": x.rows, "n": y.columns, "k": x.columns, "groups": groups}
        of_x = {"x_row": x.row, "x_k": x.column, "x_group": x_group}
        of_y = {"y_k": y.row, "y_column": y.column, "y_group": y_group, "y_panel": self.panel}
        of_out = {"out_row": y.columns, "out_product": x.rows * y.columns}
        block = {"block": self.block or _block(x.columns), "axes": len(self.axes)}
        return {**lengths, **block, **of_x, **of_y, **of_out}

    @property
    def rest(self) -> list[int]:
        """Axes of the batch, as integers that follow the named integers."""
        return [number for axis in self.axes for number in axis]

    @property
    def work(self) -> float:
        """Estimated nanoseconds of the multiplications and memory traffic."""
        m, n, k = self.x.rows, self.y.columns, self.x.columns
        elements = m * n + self.groups[0] * (m * k + k * n)
        bytes_a_flop = 2 if self.dtype == "f64" else 1
        flops = 2 * self.groups[0] * m * n * k
        return 50 + self.batch * bytes_a_flop * (flops / 80 + elements / 5)


class ProductChain(NamedTuple):
    """Call that processes rows of a product while they are in the cache; a unit is a row.

    `child`: the call.
    `nparams`: the parameters of the whole call; the child has one more, the product, if `out` is
        None.
    `x`, `y`, `out`: the numbers of the factors and the product among the parameters.
    """

    child: KernelCall
    nparams: int
    x: int
    y: int
    out: int | None


# --- ops ---------------------------------------------------------------------------------


def chained_call(
    kernels: tuple[str, str],
    chain: ProductChain | None,
    nparams: int,
    units: int,
    work: float,
    integers: dict[str, int],
    scratch: int,
    rest: Sequence[int] = (),
) -> KernelCall | None:
    """Plan a product with the first kernel or, with a chain, with the second kernel."""
    if chain is None:
        first, _ = kernels
        return kernel_call(first, nparams, units, work, integers, scratch=scratch, rest=rest)
    child, work = chain.child, work + chain.child.work
    more: Any = {"scratch": scratch, "children": [child], "rest": rest}
    return kernel_call(kernels[1], chain.nparams, units, work, integers, **more)


def scratch_behind(child_scratch: int, chain: ProductChain | None) -> int:
    """Return the offset of the product in scratch memory, after the memory of the chain's call."""
    return child_scratch + (-(-chain.child.scratch // 64) * 64 if chain else 0)


@planner("matmul", halves="product")
def matmul(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, y = types
    if out.dtype in (i64, u64) and x.dtype is y.dtype is out.dtype:
        product = _product("i64", x, y, attributes)
        units, work = product.batch * product.x.rows, 4 * product.work
        return kernel_call("matmul_i64", 3, units, work, product.integers, rest=product.rest)
    float_product = _matmul(x, y, attributes)
    return float_product and call(float_product, rounding(out, types))


@planner("packed_matmul", halves="own")
def packed_matmul(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    product = _packed(types[1], types[2], attributes)
    return product and call(product, rounding(types[0], types))


def _packed(x: TensorType, panels: TensorType, attributes: Attributes) -> Product | None:
    y = panels.with_shape((x.shape[-2 if attributes["transpose_x"] else -1], attributes["columns"]))
    product = _matmul(x, y, {**attributes, "transpose_y": False})
    return product and in_panels(product, panels)


def in_panels(product: Product, panels: TensorType) -> Product:
    """Return the product with the second factor in panels."""
    _, rows, columns, _ = panels.shape
    return product._replace(y=product.y._replace(row=columns), panel=rows * columns)


def _matmul(x: TensorType, y: TensorType, attributes: Attributes) -> Product | None:
    dtype = factor_dtype(x, y, attributes)
    return None if dtype is None else _product(dtype, x, y, attributes)


def _product(dtype: str, x: TensorType, y: TensorType, attributes: Attributes) -> Product:
    if x.ndim == 1:
        x = x.with_shape((1, *x.shape))
    if y.ndim == 1:
        y = y.with_shape((*y.shape, 1))
    if x.ndim > 2 and y.ndim == 2 and not attributes["transpose_x"]:
        x = x.with_shape((math.prod(x.shape[:-1]), x.shape[-1]))
    axes = _batch_axes(x.shape[:-2], y.shape[:-2], math.prod(x.shape[-2:]), math.prod(y.shape[-2:]))
    return Product(dtype, *_matrices(x, y, attributes), axes)


@planner("batch_contract", halves="product")
def batch_contract(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    _, x, y = types
    dtype = factor_dtype(x, y, attributes)
    if dtype is None:
        return None
    batch = math.prod(x.shape[:-2])
    if attributes["transpose_x"] and not attributes["transpose_y"]:
        # The batch and the inner axis are contracted together.
        x = x.with_shape((batch * x.shape[-2], x.shape[-1]))
        y = y.with_shape((batch * y.shape[-2], y.shape[-1]))
        batch = 1
    groups = batch, math.prod(x.shape[-2:]), math.prod(y.shape[-2:])
    product = Product(dtype, *_matrices(x, y, attributes), groups=groups)
    return call(product, rounding(types[0], types))


def matmul_chain(
    x: TensorType, y: TensorType, attributes: Attributes, chain: ProductChain
) -> KernelCall | None:
    """Plan a matrix product and the chain on its rows.

    Return None if the product is a vector, or too large to process row by row.
    """
    product_of = _packed if "columns" in attributes else _matmul
    product = product_of(x, y, attributes)
    if product is None or (product.y.columns == 1 and not product.panel):
        return None
    return tiles(product, chain) if product.dtype != _AMX else _amx(product, chain)


def headed_call(links: Sequence[Link], types: Types) -> KernelCall | None:
    """Plan a chain whose first link is a matmul, on parameters of these types.

    The other links run on rows of the product while the rows are in the cache. Return None if a
    link has no row function, or the product does not support this.
    """
    head, *rest = links
    x_number, y_number = head.sources
    x, y = types[x_number], types[y_number]
    product = head.op.infer((x, y), head.attributes)
    if product is None or min(x.ndim, y.ndim) < 2 or not rest:
        return None
    if product.dtype is bf16:
        chain = rounding(product, types, (x_number, y_number), head.target, rest)
    else:
        chain = after(head, rest, product, types)
    return chain and matmul_chain(x, y, head.attributes, chain)


def after(
    head: Link, rest: Sequence[Link], product: TensorType, types: Types
) -> ProductChain | None:
    """Plan the links after a product in a chain on parameters of these types.

    Return None if a link has no row function.
    """
    is_result = head.target >= 0  # otherwise it is in scratch memory, the last parameter
    child_types = types if is_result else [*types, product]
    renamed = {} if is_result else {head.target: len(types)}
    renumbered = []
    for op, target, sources, attributes in rest:
        sources = tuple([renamed.get(source, source) for source in sources])
        renumbered.append(Link(op, target, sources, attributes))
        renamed.pop(target, None)
    child = chain_call(renumbered, child_types, unit=max(1, product.shape[-1]))
    if child is None:
        return None
    x, y = head.sources[:2]
    return ProductChain(child, len(types), x, y, head.target if is_result else None)


def rounding(
    product: TensorType,
    types: Types,
    factors: tuple[int, int] = (1, 2),
    target: int = 0,
    rest: Sequence[Link] = (),
) -> ProductChain | None:
    """Plan the chain after a product of bf16, which is computed in f32.

    The result is rounded to `target` before the remaining links. Return None for other products,
    and if a link has no row function.
    """
    if product.dtype is not bf16:
        return None
    link = Link(OPS["astype"], target, (len(types),), {"dtype": bf16.name})
    exact = product.with_dtype(f32)
    child = chain_call([link, *rest], [*types, exact], unit=max([1, *product.shape[-1:]]))
    return None if child is None else ProductChain(child, len(types), *factors, None)


# --- shared by all products ------------------------------------------------------------


def factor_dtype(x: TensorType, y: TensorType, attributes: Attributes) -> str | None:
    """Return the suffix of the kernels for these factors.

    For bf16, this selects AMX tiles if the processor supports them, otherwise pairs if it
    multiplies pairs and each sum consists of whole pairs.
    """
    if x.dtype is bf16 and y.dtype is bf16:
        length = x.shape[-2 if attributes["transpose_x"] and x.ndim > 1 else -1]
        if length and has_kernel("matmul_bf16_amx"):
            return _AMX
        return "bf16x2" if has_kernel("gemv_bf16x2") and length % 2 == 0 else "bf16"
    return float_dtype(x, y)


def float_dtype(*types: TensorType) -> str | None:
    """Return the suffix of the kernels for operands that are all f32 or all f64, otherwise None."""
    names = {type.dtype.name for type in types}
    name = names.pop()
    return name if not names and name in ("f32", "f64") else None


def _matrices(x: TensorType, y: TensorType, attributes: Attributes) -> tuple[Matrix, Matrix]:
    a, b = (Matrix(z.shape[-2], z.shape[-1], z.shape[-1], 1) for z in (x, y))
    return a.T if attributes["transpose_x"] else a, b.T if attributes["transpose_y"] else b


def _batch_axes(x: Shape, y: Shape, x_size: int, y_size: int) -> list[Axis]:
    """Merge the batch axes. A stride is 0 where the operand is broadcast."""
    lengths = broadcast_shapes(x, y)
    of_x = [x_size * step for step in broadcast_steps(x, len(lengths))]
    of_y = [y_size * step for step in broadcast_steps(y, len(lengths))]
    return merged([axis for axis in zip(lengths, of_x, of_y, strict=True) if axis[0] != 1])


def call(product: Product, chain: ProductChain | None = None) -> KernelCall | None:
    """Plan a product, by vectors or tiles.

    `chain` follows, unless the result is a vector. Return None for other bf16 products without a
    chain.
    """
    x, y = product.x, product.y
    if product.dtype == _AMX:
        if y.columns > 1 or product.panel:
            return chain and _amx(product)  # `_amx` rounds the result itself
        product = product._replace(dtype="bf16")
    if product.panel:
        return tiles(product, chain) if chain or not product.dtype.startswith("bf16") else None
    if y.columns == 1:
        # Rows of x times a vector: columns of the transposed x.
        axes = [(length, b, a) for length, a, b in product.axes]
        length, a, b = product.groups
        return vector(Product(product.dtype, y.T, x.T, axes, (length, b, a)), by_columns=False)
    if x.rows == 1:
        return vector(product, by_columns=True)
    if chain is None and product.dtype.startswith("bf16"):
        return None
    return tiles(product, chain)


def _block(k: int) -> int:
    """Return the length of the equal blocks of a sum of k products, at most BLOCK."""
    parts = -(-k // BLOCK)
    return -(-k // parts // 16) * 16 if parts > 1 else max(k, 1)


def vector(product: Product, *, by_columns: bool) -> KernelCall | None:
    """Plan a row times a matrix, or a matrix times a column with swapped parameters.

    The columns are added in the order of tiles.
    """
    x, y = (1, 2) if by_columns else (2, 1)
    unit, kernel = 64, f"gemv_{product.dtype}"
    units = product.batch * -(-product.y.columns // unit)
    integers = {**product.integers, "x": x, "y": y, "by_columns": by_columns, "unit": unit}
    return kernel_call(kernel, 3, units, product.work, integers, rest=product.rest)


def _amx(product: Product, chain: ProductChain | None = None) -> KernelCall | None:
    """Plan blocks of 32 x 32 sums in AMX tiles: `kernels/amx.c`."""
    (m, k, _, x_k), n = product.x, product.y.columns
    groups = product.groups[0]
    if not k:
        return None
    block = _even(k, 1024)
    panels = groups * _whole(k) * 2  # bytes per column
    rows, columns = _even(m, 256), _whole(n)
    if chain:
        rows = min(rows, max(_SIDE, _CACHE // (4 * max(n, 1)) // _SIDE * _SIDE))
        if columns * panels > MOST_PANELS and not product.panel:
            return None
    else:
        columns = _even(n, min(512, max(_SIDE, MOST_PANELS // panels // _SIDE * _SIDE)))
    # Scratch: rows of x, panels of y; then the scratch memory of the chain's child; then sums.
    strip = min(rows, _whole(m)) * block
    child_scratch = 2 * strip + columns * panels * (not product.panel)
    product_scratch = scratch_behind(child_scratch, chain)
    has_sums = chain is not None or groups > 1 or block < k
    by_columns = n > m and not chain
    unit = 2 * _SIDE if by_columns else _SIDE
    integers = product.integers | {"block": block, "copy_x": x_k != 1 or k % _SIDE != 0}
    integers |= {"x": chain.x if chain else 1, "y": chain.y if chain else 2}
    integers |= {"by_columns": by_columns, "unit": unit, "rows_at_once": rows}
    integers |= {"columns_at_once": columns, "strip_length": strip}
    integers |= {"child_scratch": child_scratch, "product_scratch": product_scratch}
    integers |= {"past": product.batch * m * n * 2 >= _PAST_CACHES}
    units = product.batch * -(-(n if by_columns else m) // unit)
    scratch = product_scratch + has_sums * rows * columns * 4
    kernels, work = (f"matmul_{_AMX}", f"matmul_chain_{_AMX}"), product.work / 8
    return chained_call(kernels, chain, 3, units, work, integers, scratch, product.rest)


def _whole(length: int) -> int:
    """Round a length up to a multiple of AMX blocks."""
    return -(-length // _SIDE) * _SIDE


def _even(length: int, most: int) -> int:
    """Return the length of equal parts of at most `most`, in whole AMX blocks."""
    return max(_SIDE, _whole(-(-length // -(-length // most)))) if length else _SIDE


def tiles(
    product: Product, chain: ProductChain | None = None, windows: dict[str, int] | None = None
) -> KernelCall | None:
    """Plan tiles of the result in registers. With `windows`, x are windows gathered from images."""
    x, y, groups = product.x, product.y, product.groups[0]
    m, n, k = x.rows, y.columns, x.columns
    halves, pack = product.dtype.startswith("bf16"), 2 if product.dtype == "bf16x2" else 1
    unit_size = 8 if product.dtype == "f64" else 4
    itemsize = unit_size // pack  # elements of the copied operands
    block = product.block or _block(k)
    # Read an operand in place if a copy would rarely be read, or the operand is in the cache.
    transposed = x.column != 1
    copy_x = bool(windows) or n > 128 or (transposed and groups * m * k * itemsize > _CACHE)
    copy_x = copy_x or product.dtype == "bf16" or (halves and transposed)
    crowded = y.row * itemsize % 4096 == 0  # rows evict each other from the caches
    turned = windows is not None and "run_y" in windows  # the kernel's runs are not contiguous
    copy_y = halves or turned or y.column != 1 or m > (24 if crowded else 48)
    if product.panel:
        copy_y = product.dtype == "bf16"
    rows = 144 if transposed else 96
    columns, at_once = n, max(1, -(-k // block) * groups)
    if chain:
        rows = max(12, min(rows, _CACHE // (n * unit_size + 1)))
        if n * k * itemsize > 4 * _CACHE:
            # rows of a product that a chain processes together if y does not fit into a core's
            # cache. With fewer rows, reading y more often would cost more than product rows that
            # have left the second-level cache.
            rows = 204
        if copy_y and at_once * block * n * itemsize > MOST_PANELS:
            return None
    else:
        parts = max(1, -(-n * block * itemsize // (16 * _CACHE)))
        columns = -(-n // parts)
        at_once = max(1, min(at_once, 4 * _CACHE // (itemsize * block * (columns + 1))))
    rows = -(-m // -(-m // rows) // 12) * 12 if m else 12
    strip = min(m, rows) * block // pack + 64 if copy_x else 0
    if windows and windows["copy_x"] == LINES:
        rows, strip = windows["rows_at_once"], windows["strip_length"]
    columns = -(-columns // 32) * 32 or 32
    by_columns = n > m and not chain and not windows
    # Scratch: rows of x, panels of y, then for a chain its child's scratch memory, and the product.
    strip = -(-strip // 16) * 16
    read_once = m <= rows  # by a single strip, so the next panel replaces it
    panels = block * (_PANEL if read_once else at_once * columns) // pack
    if not copy_y and (product.panel or n % _PANEL == 0):
        panels = 0
    child_scratch = (strip + panels) * unit_size
    product_scratch = -(-(child_scratch + (chain.child.scratch if chain else 0)) // 64) * 64
    scratch = product_scratch + (rows * n * unit_size if chain and chain.out is None else 0)
    unit = 64 if by_columns else 24
    integers = product.integers | {"copy_x": copy_x, "copy_y": copy_y}
    integers |= {"x": 1, "y": 2, "by_columns": by_columns, "unit": unit} | (windows or {})
    unit = integers["unit"]
    integers |= {"rows_at_once": rows, "columns_at_once": columns, "blocks_at_once": at_once}
    integers |= {"strip_length": strip, "child_scratch": child_scratch}
    integers |= {"product_scratch": product_scratch}
    if chain:
        integers |= {"x": chain.x, "y": chain.y, "out": -1 if chain.out is None else chain.out}
    units = product.batch * -(-(n if by_columns else m) // unit)
    kernels = f"matmul_{product.dtype}", f"matmul_chain_{product.dtype}"
    nparams = 3 + ("total" in integers)
    return chained_call(
        kernels, chain, nparams, units, product.work, integers, scratch, product.rest
    )
