"""Debugger of an execution: pdb's commands over ops, forwards and backwards.

`python -m mlvm debug FILE.mlvm` and `step.debug(x, y)` start it; docs/runs.md describes it.
"""

from __future__ import annotations

import cmd
import linecache
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from mlvm.core.errors import ArgumentError, MlvmError
from mlvm.core.ops.half import shown
from mlvm.core.sizes import parse_count
from mlvm.core.tables import table
from mlvm.core.types import Array, TensorType
from mlvm.eager.runs.breakpoints import Breakpoint, parse_breakpoint, require_known
from mlvm.eager.runs.execution import Executed, Execution, Ref
from mlvm.eager.runs.expressions import Expression
from mlvm.eager.runs.named_values import Values
from mlvm.eager.runs.nesting import LOOP
from mlvm.machines.files import require_suffix, write_file
from mlvm.machines.terminal import one_line
from mlvm.show.picture import timeline

_AROUND: Final = 5  # lines before and after the present one in `l`


class Debugger(cmd.Cmd):
    """Debugger of an execution, which reads commands and prints results.

    It writes to `stdout` and reads commands from `stdin`, by default the streams of the process.
    """

    prompt = "(mlvm) "

    def __init__(
        self, execution: Execution, *, stdin: TextIO | None = None, stdout: TextIO | None = None
    ) -> None:
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None and sys.stdin.isatty()
        self.execution = execution
        self.values = Values(execution)
        self.failed = 0
        self._breakpoints: dict[int, Breakpoint] = {}
        self._numbers = 0

    def run(self, commands: Sequence[str] | None = None) -> int:
        """Run these commands, or all commands of stdin; return the number of failed commands."""
        self._show_place()
        if commands is None:
            if not sys.stdin.isatty():
                self.prompt = ""
            while True:
                with suppress(KeyboardInterrupt):  # at the prompt
                    self.cmdloop()
                    break
                self._say("")
        else:
            for command in commands:
                if self.onecmd(command):
                    break
        return self.failed

    # --- cmd.Cmd ----------------------------------------------------------------------------

    def onecmd(self, line: str) -> bool:
        """Run a command.

        Return whether the debugger must stop."""
        command, space, rest = line.strip().partition(" ")
        try:
            return bool(super().onecmd(f"{_ALIASES.get(command, command)}{space}{rest.strip()}"))
        except KeyboardInterrupt:
            self._say(f"interrupted at position {self.execution.position}")
        except (MlvmError, OSError, MemoryError) as error:
            self.failed += 1
            self._say(f"error: {one_line(error)}")
        return False

    def emptyline(self) -> bool:
        """Repeat the last command, as in pdb."""
        return self.onecmd(self.lastcmd) if self.lastcmd else False

    def default(self, line: str) -> None:
        raise ArgumentError(f"unknown command {line.split()[0]!r}; h lists the commands")

    def do_q(self, _: str) -> bool:
        """q(uit): end the debugger."""
        return True

    def do_h(self, argument: str) -> None:
        """h(elp) [COMMAND]: list the commands, or describe one."""
        name = _ALIASES.get(argument, argument)
        if name and not hasattr(self, f"do_{name}"):
            raise ArgumentError(f"unknown command {argument!r}; h lists the commands")
        names = [name] if name else [x[3:] for x in dir(self) if x[:3] == "do_"]
        for each in names:
            text = getattr(self, f"do_{each}").__doc__
            if text and each != "help":  # the short name of help is h
                self._say("\n".join(line.strip() for line in text.strip().splitlines()))

    def do_help(self, arg: str) -> None:
        self.do_h(arg)

    # --- movement ---------------------------------------------------------------------------

    def do_s(self, _: str) -> None:
        """s(tep): execute one op, including ops inside loops, branches and functions."""
        self.execution.step()
        self._show_place()

    def do_n(self, _: str) -> None:
        """n(ext): execute ops until the next op at this level."""
        depth = self._depth(self.execution.position)
        self._forward(lambda at: self._depth(at) <= depth)

    def do_r(self, _: str) -> None:
        """r(eturn): execute ops until the end of this function, loop or branch."""
        depth = self._depth(self.execution.position)
        self._forward(lambda at: self._depth(at) < depth)

    def do_until(self, argument: str) -> None:
        """until LINE: execute ops until an op of a line, such as 12 or model.py:12."""
        target = parse_breakpoint(argument, self._file()) if argument else None
        if target is None or target.kind != "line":
            raise ArgumentError(f"until: expected a line, got {argument!r}")
        require_known(target, self.execution.program)
        self._forward(lambda at: target.stops(self.execution, self.values, at))

    def do_c(self, _: str) -> None:
        """c(ontinue): execute ops until a breakpoint, or until the end."""
        self._forward(lambda at: False)

    def do_rs(self, _: str) -> None:
        """rs: go back one op."""
        self._move(max(self.execution.position - 1, 0))

    def do_rn(self, _: str) -> None:
        """rn: go back to the previous op at this level."""
        depth = self._depth(self.execution.position)
        self._backward(lambda at: self._depth(at) <= depth)

    def do_rc(self, _: str) -> None:
        """rc: go back to a breakpoint, or to the start."""
        self._backward(lambda at: False)

    def do_goto(self, argument: str) -> None:
        """goto POSITION: go to a position, forwards or backwards."""
        if (position := parse_count(argument)) is None:
            raise ArgumentError(f"goto: expected a position, got {argument!r}")
        is_outside = False
        with suppress(MlvmError):  # if an op raises, `_move` stops there and raises the error
            is_outside = position > 0 and self.execution.op_at(position - 1) is None
        if is_outside:
            last = self.execution.length
            raise ArgumentError(f"goto: expected a position from 0 to {last}, got {argument}")
        self._move(position)

    # --- breakpoints ------------------------------------------------------------------------

    def do_b(self, argument: str) -> None:
        """b(reak) [LINE | FILE:LINE | OP | NAME | CONDITION]: set a breakpoint, or list all.

        It stops before an op of the line or with that name, and after the variable of that name
        gets a value, also by q[0] = 5. An input or state also stops it before each op that reads
        it. With a condition, such as any(isnan(q)), it stops after an op that makes the condition
        true; `result` is the result of each op. Without an argument, list the breakpoints."""
        if not argument:
            for number, each in self._breakpoints.items():
                self._say(f"{number}: {each}")
            return
        point = parse_breakpoint(argument, self._file())
        require_known(point, self.execution.program)
        self._numbers += 1
        self._breakpoints[self._numbers] = point
        self._say(f"breakpoint {self._numbers}: {point}")

    def do_cl(self, argument: str) -> None:
        """cl(ear) [NUMBER]: delete a breakpoint, or all breakpoints."""
        if not argument:
            self._breakpoints.clear()
        elif (number := parse_count(argument)) is None or number not in self._breakpoints:
            raise ArgumentError(f"cl: expected the number of a breakpoint, got {argument!r}")
        else:
            del self._breakpoints[number]

    # --- values -----------------------------------------------------------------------------

    def do_p(self, argument: str) -> None:
        """p(rint) NAME | REF | EXPRESSION: print a tensor or the value of an expression.

        Examples are q, %12, %12.1, input 0, state 3 and max(abs(q)) - 1."""
        named = self.values.find(argument) if argument else None
        if named is not None:
            ref, value = named.ref, self.values.array(named)
            of = "" if argument.replace(" ", "") == str(ref).replace(" ", "") else f"{argument} = "
            self._say(f"{of}{ref}: {TensorType.of(value)}")
        else:
            value = Expression(argument).value(self.values.lookup)
        self._say(text_of(value))

    def do_summary(self, argument: str) -> None:
        """summary NAME | REF: print the type, extrema, mean and number of nans of a tensor.

        Also print the location in the plan, the op that wrote it and the op that reads it next."""
        named = self.values.find(argument)
        if named is None:
            raise ArgumentError(f"summary: expected a name or reference, got {argument!r}")
        self._say("\n".join(self.values.summary(named.ref)))

    def do_result(self, _: str) -> None:
        """result: print the result of the op that was executed last."""
        op = self._last()
        if op is None or not op.results:
            raise ArgumentError("result: no op with a result was executed; s executes an op")
        for ref in op.results:
            self._say(f"{self.values.text(op)}\n{text_of(self.execution.value(ref))}")

    # --- the source and the plan -------------------------------------------------------------

    def do_bt(self, _: str) -> None:
        """bt: print the functions, loops and branches around the next op, and the line."""
        op = self.execution.op_at(self.execution.position)
        if op is None:
            self._say("at the end")
            return
        for level in op.path:
            self._say(f"  {level}" + (f": {level.line.text}" if level.line else ""))
        if op.line is not None:
            layer = f", layer {op.line.layer}" if op.line.layer else ""
            function = f" in {op.line.function}" if op.line.function else ""
            self._say(f"> {op.line}{function}{layer}: {op.line.text}")

    def do_l(self, _: str) -> None:
        """l(ist): print the source code around the present line."""
        op = self._op_here()
        line = op.line if op is not None else None
        if line is None:
            raise ArgumentError("l: the present op has no line; s goes to the next op")
        recorded = {
            each.number: each.text
            for each in self.execution.program.lines.values()
            if each.file == line.file
        }
        is_same = linecache.getline(line.file, line.number).strip() == line.text
        for n in range(max(line.number - _AROUND, 1), line.number + _AROUND + 1):
            text = linecache.getline(line.file, n).rstrip() if is_same else recorded.get(n)
            if text is not None:
                self._say(f"{n:5} {'->' if n == line.number else '  '} {text}")

    def do_w(self, _: str) -> None:
        """w(here): print the position, and the ops executed last and next."""
        if (op := self._last()) is not None:
            self._say(f"last: {self.values.text(op)}")
        self._show_place()

    def do_info(self, _: str) -> None:
        """info: print the inputs, states and results of the step, and the position."""
        program = self.execution.program
        step = program.step
        position = self.execution.position
        self._say(f"position {position}{', the end' if self.execution.is_finished else ''}")
        rows = [
            [f"{kind} {i}", str(type), self._described(kind, i, name)]
            for kind, types, names in (
                ("input", step.inputs, program.inputs),
                ("state", [*map(TensorType.of, step.states)], program.states),
                ("result", [each.type for each in step.results], program.results),
            )
            for i, (type, name) in enumerate(zip(types, names, strict=True))
        ]
        self._say("\n".join(table(rows, right=0)))

    def _described(self, kind: str, i: int, name: str) -> str:
        """Return the name of an input, state or result; without a name, the value of a number."""
        text = self.values.name(Ref(kind, i)) if kind == "state" and not name else name
        return f"the number {text}" if text != name and text != str(Ref(kind, i)) else name

    def do_arena(self, argument: str) -> None:
        """arena [FILE.svg]: print the tensors in scratch memory, or draw the plan over time."""
        if argument:
            require_suffix(argument, ".svg", "arena")
            write_file(Path(argument), self.picture())
            self._say(f"picture  {argument}")
            return
        planned = self.execution.program.step.planned
        moment = self.values.moment()
        live = [each for each in planned.lifetimes if each.start <= moment < each.end]
        used = sum(each.nbytes for each in live)
        total = planned.plan.nbytes
        tensors = "1 tensor" if len(live) == 1 else f"{len(live)} tensors"
        self._say(f"moment {moment}: {tensors}, {used:,} of {total:,} bytes of scratch")
        live.sort(key=lambda each: each.offset)
        first, rest = live[:40], live[40:]
        rows = [
            [_bar(x.offset, x.nbytes, total), f"{x.offset:,}", f"{x.nbytes:,}", str(x.type), x.op]
            for x in first
        ]
        if rows:
            self._say("\n".join(table([["", "offset", "bytes", "type", "op"], *rows], right=3)))
        if rest:
            self._say(f"and {len(rest)} more")

    def picture(self) -> str:
        """Return the plan over time as SVG text, with a line at the present moment."""
        recording, moment = self.execution.program.step.planned.recording(), self.values.moment()
        return timeline(recording, title=f"scratch memory; moment {moment} is now", now=moment)

    # --- helpers ----------------------------------------------------------------------------

    def _depth(self, position: int) -> int:
        """Return the number of levels around the op at a position; -1 at the end."""
        op = self.execution.op_at(position)
        return -1 if op is None else len(op.path)

    def _hit(self, position: int) -> Breakpoint | None:
        """Return the breakpoint at a position, or None."""
        points = self._breakpoints.values()
        return next((x for x in points if x.stops(self.execution, self.values, position)), None)

    def _forward(self, is_target: Callable[[int], bool]) -> None:
        """Execute ops until a target or a breakpoint."""
        self._moved(iter(self._next, None), is_target)

    def _next(self) -> int | None:
        return None if self.execution.step() is None else self.execution.position

    def _backward(self, is_target: Callable[[int], bool]) -> None:
        """Go back to a target or a breakpoint. The position changes only there."""
        self._moved(iter(range(self.execution.position - 1, -1, -1)), is_target)

    def _moved(self, positions: Any, is_target: Callable[[int], bool]) -> None:
        at = self.execution.position
        for at in positions:
            point = self._hit(at)
            if point is not None:
                self._say(f"breakpoint: {point}")
            if point is not None or is_target(at):
                break
        self._move(at)

    def _move(self, position: int) -> None:
        self.execution.run(position)
        self._show_place()

    def _last(self) -> Executed | None:
        """Return the op executed last."""
        position = self.execution.position
        return self.execution.op_at(position - 1) if position else None

    def _op_here(self) -> Executed | None:
        """Return the op that is executed next or, at the end, the last op."""
        return self.execution.op_at(self.execution.position) or self._last()

    def _file(self) -> str:
        op = self._op_here()
        return op.line.file if op is not None and op.line is not None else ""

    def _show_place(self) -> None:
        op = self.execution.next_op()
        at = f"[{self.execution.position}]"
        if op is None:
            self._say(f"{at} the end")
            return
        turns = [f"turn {level.turn}" for level in op.path if level.kind == LOOP]
        where = "" if op.line is None else f" {op.line}"
        within = f" in {op.line.function}" if op.line is not None and op.line.function else ""
        self._say(f"{at}{where}{within}{''.join(f', {each}' for each in turns)}")
        if op.line is not None and op.line.text:
            self._say(f"    {op.line.text}")
        self._say(f"    {self.values.text(op)}")

    def _say(self, text: str) -> None:
        self.stdout.write(f"{text}\n")


def text_of(array: Array) -> str:
    """Return the elements of a tensor, each with enough digits to make it unique."""
    return np.array2string(shown(array), floatmode="unique", separator=", ")


def _bar(offset: int, nbytes: int, total: int) -> str:
    """Draw the bytes of a tensor as a part of the memory."""
    width = 32  # letters
    first = offset * width // max(total, 1)
    last = max(-(-(offset + nbytes) * width // max(total, 1)), first + 1)
    return "." * first + "#" * (last - first) + "." * (width - last)


_ALIASES: Final = {
    "quit": "q", "exit": "q", "EOF": "q", "help": "h", "step": "s", "next": "n", "return": "r",
    "continue": "c", "cont": "c", "break": "b", "clear": "cl", "print": "p", "where": "w",
    "list": "l", "finish": "r", "reverse-step": "rs", "reverse-next": "rn",
    "reverse-continue": "rc", "unt": "until",
}  # fmt: skip
