"""`python -m mlvm plan BUFFERS.csv`: offsets for the buffers of a CSV file.

Captured steps use the same planner.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from mlvm.arena.planner import MOST_EFFORT, Block, Plan, plan_within
from mlvm.arena.recording import Lifetime, Recording
from mlvm.core.errors import MlvmError, brief
from mlvm.core.sizes import MAX_TERM
from mlvm.core.types import TensorType, u8
from mlvm.machines.files import format_of, require_suffix, require_writable, write_file
from mlvm.machines.terminal import whole_number
from mlvm.show.picture import timeline

EFFORT: Final = 500
"""The effort of the command, if it is not given: it plans one set of buffers, not many."""

_COLUMNS: Final = ("id", "lower", "upper", "size")
_OFFSET: Final = "offset"
_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]{1,40}\s*")


class BuffersError(MlvmError, ValueError):
    """A CSV file that has no valid buffers, or buffers that do not fit.

    The text names the file and the line.
    """


class BufferTable(NamedTuple):
    """Buffers of a CSV file.

    columns: the names of the columns, in the order of the file.
    rows: the fields of each buffer, by column.
    blocks: sizes and lifetimes.
    """

    columns: Sequence[str]
    rows: Sequence[Mapping[str, str]]
    blocks: Sequence[Block]

    def to_csv(self, offsets: Sequence[int]) -> str:
        """Return the file with the offsets as the last column."""
        columns = [*(name for name in self.columns if name != _OFFSET), _OFFSET]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for row, offset in zip(self.rows, offsets, strict=True):
            writer.writerow({**row, _OFFSET: offset})
        return text.getvalue()


def add_options(add: Callable[..., object]) -> None:
    """Add the options of the command."""
    add("file", metavar="BUFFERS.csv", help="the buffers")
    least = "bytes that are enough, such as 1048576 or 64M; without it, as few as possible"
    add("--capacity", type=whole_number, metavar="N", help=least)
    add("--out", type=Path, metavar="CSV", help="write the buffers with a column `offset`")
    effort = "multiple of the search that a captured step may do"
    add("--effort", type=_effort, default=EFFORT, metavar="N", help=effort)
    add("--plot", type=Path, metavar="SVG", help="draw the buffers over time and offset")


def _effort(text: str) -> int:
    effort = whole_number(text)
    if effort > MOST_EFFORT:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_EFFORT}, got {text}")
    return effort


def plan_buffers(options: argparse.Namespace, data: bytes) -> None:
    """Plan offsets for the buffers of a CSV file with this content.

    Print a line, and write the files of `--out` and `--plot`.

    Raises `BuffersError`, also if the buffers do not fit, `ArgumentError` for a picture name that
    does not end in .svg, and `OSError`.
    """
    file, capacity = Path(options.file), options.capacity
    buffers = read_buffers(options.file, data)
    if options.plot is not None:
        require_suffix(options.plot, ".svg", "--plot")
    for path in (options.out, options.plot):
        if path is not None:
            require_writable(path)
    _require_each_fits(file, buffers, capacity)
    plan, nodes = plan_within(buffers.blocks, capacity, alignment=1, effort=options.effort)
    if capacity is not None and plan.lower_bound > capacity:
        raise BuffersError(
            f"{file}: the capacity is {capacity:,} bytes, but {plan.lower_bound:,} are in use at "
            "the same "
            "time; no plan can be smaller"
        )
    if capacity is not None and plan.nbytes > capacity:
        raise BuffersError(
            f"{file}: found no plan within {capacity:,} bytes by {nodes:,} search nodes; the "
            f"smallest one has {plan.nbytes:,} bytes, the lower bound is {plan.lower_bound:,}. "
            f"Allow more nodes, as with --effort {10 * options.effort}"
        )
    if options.out is not None:
        write_file(options.out, buffers.to_csv(plan.offsets))
    if options.plot is not None:
        write_file(options.plot, timeline(recorded(buffers, plan), title=f"Plan of {file.name}"))
    ratio = plan.nbytes / plan.lower_bound if plan.lower_bound else 1.0
    print(
        f"total {plan.nbytes:,} bytes, lower bound {plan.lower_bound:,}, ratio {ratio:.4f}, "
        f"nodes {nodes:,}"
    )


def _require_each_fits(file: Path, buffers: BufferTable, capacity: int | None) -> None:
    """Raise `BuffersError` for a buffer that exceeds the capacity, also if it is never in use."""
    for row, block in zip(buffers.rows, buffers.blocks, strict=True):
        if capacity is not None and block.nbytes > capacity:
            raise BuffersError(
                f"{file}: the capacity is {capacity:,} bytes, but buffer {brief(row['id'])} has "
                f"{block.nbytes:,}; no plan can be smaller"
            )


def read_buffers(file: str, data: bytes) -> BufferTable:
    """Read the content of a CSV file with the columns id, lower, upper and size, in any order.
    Other columns are kept.

    Raises `BuffersError` with the line for a file that is no such table. Columns may be missing or
    repeated, and fields missing or no integers. A size may be below 1, a number beyond 2**62. A
    buffer may end before it starts, and an id may be empty or repeated.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        text = format_of(data[:4096]) or f"line {line}: not UTF-8 text; save the file as UTF-8"
        raise BuffersError(f"{file}: {text}") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    columns: list[str] = []
    rows: list[dict[str, str]] = []
    blocks: list[Block] = []
    line_of: dict[str, int] = {}
    total = 0
    try:
        for fields in reader:
            if not any(map(str.strip, fields)):
                continue
            where = f"{file}: line {reader.line_num}"
            if not columns:
                columns = _columns([field.strip() for field in fields], where)
                continue
            if len(fields) != len(columns):
                raise BuffersError(
                    f"{where}: expected {len(columns)} fields, {', '.join(columns)}, got "
                    f"{len(fields)}"
                )
            row = dict(zip(columns, fields, strict=True))
            block = _block(row, where)
            name = row["id"].strip()
            if name in line_of:
                raise BuffersError(
                    f"{where}: expected ids that differ, got {brief(name)} as in line "
                    f"{line_of[name]}"
                )
            line_of[name] = reader.line_num
            total += block.nbytes
            if total > MAX_TERM:
                raise BuffersError(
                    f"{where}: the sizes together exceed the limit of 2**62 bytes; use smaller "
                    "sizes"
                )
            rows.append(row)
            blocks.append(block)
    except csv.Error as error:
        raise BuffersError(f"{file}: line {reader.line_num}: {error}") from None
    if not columns:
        raise BuffersError(
            f"{file}: expected a line with the columns {', '.join(_COLUMNS)}, got an empty file"
        )
    return BufferTable(columns, rows, blocks)


def _columns(names: list[str], where: str) -> list[str]:
    """Return the names of columns, if all that are needed are there once."""
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise BuffersError(
            f"{where}: expected the columns {', '.join(_COLUMNS)}, got no {', '.join(missing)} in "
            f"{brief(', '.join(names))}"
        )
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise BuffersError(f"{where}: expected columns that differ, got {brief(repeated)} twice")
    return names


def _block(row: Mapping[str, str], where: str) -> Block:
    """Return the block of a row."""
    if not row["id"].strip():
        raise BuffersError(f"{where}: expected an id, got an empty field")
    numbers = []
    for name in _COLUMNS[1:]:
        if not _INTEGER.fullmatch(row[name]):
            raise BuffersError(f"{where}: expected {name} as an integer, got {brief(row[name])}")
        numbers.append(int(row[name]))
        if abs(numbers[-1]) > MAX_TERM:
            raise BuffersError(f"{where}: {name} is {numbers[-1]}; the limit is 2**62")
    lower, upper, size = numbers
    if size < 1:
        raise BuffersError(f"{where}: expected a size of 1 byte or more, got {size}")
    if upper < lower:
        raise BuffersError(f"{where}: expected upper >= lower, got lower {lower}, upper {upper}")
    return Block(size, lower, upper)


def recorded(buffers: BufferTable, plan: Plan) -> Recording:
    """Return a plan as a recording, for a picture that names buffers by id.

    The moments are the moments in the file. If these are too many, they are the indices of the
    moments at which a buffer starts or is freed.
    """
    times = sorted({time for block in buffers.blocks for time in (block.start, block.end)})
    first, last = times[0] if times else 0, times[-1] if times else 1
    is_long = last - first > (1 << 16)  # maximum number of events in a plot
    numbers = {time: i for i, time in enumerate(times)} if is_long else {x: x for x in times}
    lifetimes = [
        Lifetime(
            TensorType(u8, (block.nbytes,)),
            offset,
            block.nbytes,
            numbers[block.start],
            numbers[block.end],
            op=row["id"].strip(),
        )
        for row, block, offset in zip(buffers.rows, buffers.blocks, plan.offsets, strict=True)
    ]
    first, last = (0, len(times) - 1) if is_long else (first, last)
    return Recording("plan", plan.nbytes, max(last, first + 1), lifetimes, first=first)
