"""Commands on recordings: `python -m mlvm diff | replay | verify`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlvm.core.errors import ArgumentError, counted
from mlvm.core.op import OPS
from mlvm.core.ops.half import shown
from mlvm.core.sizes import parse_count
from mlvm.core.types import Array, TensorType
from mlvm.eager.files import safetensors
from mlvm.eager.recording.debug import NonFinite, is_new, non_finite
from mlvm.eager.runs.breakpoints import nearest_lines
from mlvm.eager.runs.cells import storable
from mlvm.eager.runs.diff import diff, equality
from mlvm.eager.runs.execution import Executed, Execution, Ref
from mlvm.eager.runs.log import is_log
from mlvm.eager.runs.named_values import Values, statistics
from mlvm.eager.runs.replay import Mismatch, Replay, open_run
from mlvm.eager.runs.run import LOG, RecordedStep, Run
from mlvm.eager.runs.source import SourceLine
from mlvm.eager.runs.verification import verify
from mlvm.machines.files import write_array
from mlvm.machines.terminal import add_command
from mlvm.machines.versions import cause_of_other_bits


def add_to(commands: Any) -> None:
    """Add the commands to the parser of `python -m mlvm`."""
    add = add_command(commands, "diff", run_diff).add_argument
    add("a", metavar="A", help="the folder of a recording, of `ml.runs.record`")
    add("b", metavar="B", help="the folder of the second recording")

    add = add_command(commands, "replay", run_replay).add_argument
    add("folder", metavar="DIR", help="the folder of a recording")
    add("--step", type=int, metavar="N", help="the step, from 0 (default: the last one)")
    place = "show the tensors that this line of Python computes"
    add("--at", metavar="FILE:LINE", help=place)
    text = "find the first op with a nan or an infinity, in all steps or in the given one"
    add("--nan", action="store_true", help=text)
    text = "write state.safetensors and the inputs of the step, or the tensors of --at as .npy"
    add("--save", type=Path, metavar="DIR", help=text)

    add = add_command(commands, "verify", run_verify).add_argument
    add("folder", metavar="DIR", help="the folder of a recording")
    add("--steps", type=int, default=3, metavar="N", help="how many steps to compute")
    add("--seed", type=int, default=0, metavar="S", help="selects the steps")


def run_diff(options: argparse.Namespace) -> int:
    """Find the first step, op and line in which two recorded runs differ.

    The exit status is 1 if they differ.

    Example:
        python -m mlvm diff before after
    """
    a, b = open_run(options.a), open_run(options.b)
    difference = diff(a, b)
    if difference is not None:
        print(difference)
        return 1
    print(equality(a, b))
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Check that a recording is complete, and that its steps have the recorded bits.

    The exit status is 1 if the recording is incomplete or does not match the computation.

    Example:
        python -m mlvm verify before --steps 5 --seed 1
    """
    run = open_run(options.folder)
    verified = verify(Replay(run), steps=options.steps, seed=options.seed)
    if not verified.is_closed:
        print("the recording was not closed: steps may be missing at its end")
    for problem in verified.problems:
        print(f"problem: {problem}")
    _print_mismatches(run, verified.mismatches)
    skipped: dict[str, list[str]] = {}
    for number, reason in verified.skipped.items():
        skipped.setdefault(reason, []).append(str(number))
    for reason, numbers in skipped.items():
        which = f"step{'s' * (len(numbers) > 1)} {', '.join(numbers)} not computed: "
        print(f"{which if run.steps else ''}{reason}")
    if verified.unchecked:
        unchecked = counted(verified.unchecked, "step")
        print(f"{unchecked} without a program cannot be computed again")
    steps = ", ".join(map(str, verified.steps)) or "none"
    count = counted(len(run.steps), "step")
    print(f"{run.folder} {verified.outcome}: {count}, computed again: {steps}")
    print(f"digest of the log: {run.chain.hex()}")
    return 0 if verified.is_accepted else 1


def run_replay(options: argparse.Namespace) -> int:
    """Compute a recorded step again, and show its values.

    The exit status is 1 if the bits differ. With --nan it is 1 if there is a nan or an infinity, or
    a step without a program, which cannot be searched.

    Examples:
        python -m mlvm replay before
        python -m mlvm replay before --step 0 --at train.py:13
    """
    replay = Replay(open_run(options.folder))
    count = len(replay.run.steps)
    if not count:
        replay.run.step(0, "replay")
    if options.nan and (options.at is not None or options.save is not None):
        raise ArgumentError("replay: --nan accepts only --step, not --at or --save; omit them")
    if options.nan:
        return _show_nan(replay, range(count) if options.step is None else [options.step])
    number = count - 1 if options.step is None else options.step
    step = replay.run.step(number, "replay")
    if options.save is not None and is_log(options.save / LOG):
        raise ArgumentError(f"replay: --save {options.save} is a recording; name another folder")
    if options.at is not None:
        return _show_line(replay, number, options.at, options.save)
    if options.save is not None:
        _save(replay, number, options.save)
    mismatches = replay.replay(number)
    names = step.table.digested(len(step.results))
    values = [f"{names[i]} {x}" for i, x in step.values.items()]
    print(f"step {number} of {step.table.function}: {', '.join(values) or 'it returns no scalar'}")
    _print_mismatches(replay.run, mismatches)
    print("the bits differ" if mismatches else "equal bits")
    return 1 if mismatches else 0


def _print_mismatches(run: Run, mismatches: Sequence[Mismatch]) -> None:
    for mismatch in mismatches:
        print(f"mismatch: {mismatch}")
    cause = cause_of_other_bits(run.versions).removeprefix("; ")
    if mismatches and cause and not any(cause in each.what for each in mismatches):
        print(cause)


def _save(replay: Replay, number: int, folder: Path) -> None:
    """Write the inputs of a step and the state before it."""
    moment = replay.at(number)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: storable(array) for name, array in moment.state.items()}
    types = {name: safetensors.type_of(array) for name, array in arrays.items()}
    safetensors.write(folder / "state.safetensors", types, arrays.__getitem__, {})
    written: set[str] = set()
    for name, array in moment.inputs.items():
        file = _file_name(name)
        while file in written:
            file += "_"
        written.add(file)
        write_array(folder / f"{file}.npy", array)
    print(f"wrote state.safetensors and {counted(len(moment.inputs), 'input')} to {folder}")


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name) or "value"


def _show_line(replay: Replay, number: int, place: str, folder: Path | None) -> int:
    """Print the tensors that a line computes in a step, or write them to a folder."""
    file, _, text = place.rpartition(":")
    if (line := parse_count(text)) is None:
        raise ArgumentError(f"replay: expected --at as FILE:LINE, got {place!r}")
    execution = replay.execution(number)
    ops: list[Executed] = []
    lines: dict[SourceLine, None] = {}
    for op in iter(execution.step, None):
        if op.line is not None:
            lines[op.line] = None
        if op.line is None or op.line.number != line or not op.line.file.endswith(file):
            continue
        if op.turns and op.turns != (ops[-1].turns if ops else ""):
            print(f"in {op.turns}:")
        ops.append(op)
        for i, ref in enumerate(op.results):
            array = execution.value(ref)
            name = op.names[0] if op.names else ""
            print(f"{f'%{op.position} {name}'.rstrip()} = {op.name}: {summary(array)}")
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                suffix = f".{i}" if i else ""
                write_array(
                    folder / f"{op.position:05}-{_file_name(name or op.name)}{suffix}.npy", array
                )
    if not ops:
        places = nearest_lines(lines, file, line)
        of = f"step {number} of {replay.run.steps[number].table.function}"
        raise ArgumentError(f"replay: no op of {of} was recorded at {place}{places}")
    if folder is not None:
        count = counted(sum(len(op.results) for op in ops), "tensor")
        print(f"wrote {count} to {folder}")
    return 0


def summary(array: Array) -> str:
    """Describe a tensor: type, statistics of several elements, and the first elements."""
    about = [str(TensorType.of(array)), statistics(array) if array.size > 1 else ""]
    first = [*map(str, shown(array).reshape(-1)[:8])]
    return f"{', '.join(filter(None, about))}: {', '.join(first + ['...'] * (array.size > 8))}"


def _show_nan(replay: Replay, numbers: Sequence[int]) -> int:
    """Print the first op of these steps with a result that contains nan or infinity.

    Also print the input, state or constant from which the nan or infinity comes. Steps without a
    program cannot be searched. Return 1 if there are such steps, or a nan or infinity."""
    is_found, skipped = False, list[str]()
    for number in numbers:
        step = replay.run.step(number, "replay")
        if not step.table.file:
            skipped.append(f"{step.table.function} has no program: {step.table.reason}")
            bad = [x for x in step.values.values() if not np.isfinite(x)]
            if is_found := bool(bad):
                print(f"step {number}: the result is {bad[0]}")
        elif len(numbers) == 1 or _may_have_nan(replay, step):
            is_found = _print_nan(replay, step)
        if is_found:
            break
    if skipped:
        print(f"{counted(len(skipped), 'step')} cannot be searched: {skipped[0]}")
    if not is_found and len(skipped) < len(numbers):
        print(f"no nan and no infinity in {counted(len(numbers) - len(skipped), 'step')}")
    return int(is_found or bool(skipped))


def _may_have_nan(replay: Replay, step: RecordedStep) -> bool:
    """Return whether a step returns or writes nan or infinity."""
    if any(not np.isfinite(value) for value in step.values.values()):
        return True
    return any(non_finite(array) for array in replay.results(step.number))


class _Origin(NamedTuple):
    """Origin of a value with a nan or infinity.

    outside: the input, state or constant that contains it; None if an op computes it.
    op: the first op with a result that contains it, except views. bad: the element of this result.
    """

    outside: Ref | None
    op: Executed | None = None
    bad: NonFinite | None = None


def _print_nan(replay: Replay, step: RecordedStep) -> bool:
    """Print the first nan or infinity of a step; return False if there is none."""
    execution = replay.execution(step.number)
    computed, origin = _first_nan(execution)
    if origin is None:
        inputs = [Ref("input", i) for i in range(len(step.table.operands))]
        origin = next((_Origin(x) for x in inputs if _bad(execution, x)), None)
    if origin is None:
        return False
    text = f"step {step.number}: "
    if origin.outside is not None:
        array = execution.value(origin.outside)
        what = replay.origin(step, execution, origin.outside)
        text += f"the {what}, {TensorType.of(array)}, is {non_finite(array)}; "
    if origin.op is None:
        print(f"{text}no op computes a nan from it")
    later = computed if computed is not None and computed.op is not origin.op else None
    for each in (origin, later):
        if each is not None and each.op is not None:
            is_first = computed is not None and origin.outside is None and later is None
            finite = "; the operands are finite" if is_first else ""
            print(f"{text}the result of {each.op.name} is {each.bad}{finite}")
            _print_op(replay, step, execution, each.op)
            text = "from it: "
    return True


def _print_op(replay: Replay, step: RecordedStep, execution: Execution, op: Executed) -> None:
    print(f"  {Values(execution).text(op)}")
    for i, (ref, type) in enumerate(zip(op.operands, op.operand_types, strict=True)):
        print(f"       operand {i}: {type}, {replay.origin(step, execution, ref)}")
    if op.line is not None:
        print(f"  {op.line}: {replay.run.text_at(op.line)}")


def _bad(execution: Execution, ref: Ref) -> NonFinite | None:
    return None if ref.kind == "scratch" else non_finite(execution.value(ref))


def _first_nan(execution: Execution) -> tuple[_Origin | None, _Origin | None]:
    """Return the first op that computes a nan, or an infinity that no operand contains.

    Also return the origin of this op's operand that is not finite, or else of this result. If no
    op computes one, return the origin of the first result of the step that is not finite."""
    origins: dict[Ref, _Origin] = {}  # of results that are not finite
    first: dict[Ref, _Origin] = {}  # by the input or state
    for op in iter(execution.step, None):
        operands = [_bad(execution, ref) for ref in op.operands]
        wrong = [
            origins.get(x, _Origin(x)) for x, bad in zip(op.operands, operands, strict=True) if bad
        ]
        opdef = OPS.get(op.name)
        is_view = opdef is not None and opdef.copies_only and len(op.operands) == 1
        for ref in op.results:
            bad = _bad(execution, ref)
            if bad is None:
                continue
            before = wrong[0] if wrong else _Origin(None)
            here = before if before.op or (wrong and is_view) else _Origin(before.outside, op, bad)
            if here.op is not None and here.outside is not None and here.outside.kind == "input":
                here = first.setdefault(here.outside, here)
            if is_new(op.name, bad, operands, op.attributes):
                return _Origin(before.outside, op, bad), here
            origins[ref] = here
    for location in execution.program.step.results:
        ref, array = execution.at(location)
        if non_finite(array):
            return None, origins.get(ref, _Origin(ref if ref.is_outside else None))
    return None, None
