"""One HTML page that shows a step or a script: memory over time, programs, and calls over time.

The page works offline. The data are columns of numbers; texts are indices into one list.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from mlvm.arena.recording import Recording, merged_if_many
from mlvm.core.errors import line_of, shortened
from mlvm.core.machine.decode import argument_of
from mlvm.core.program.assembly import format_constant, format_function
from mlvm.core.program.program import Program
from mlvm.core.sizes import parse_count
from mlvm.core.types import Array, TensorType
from mlvm.show.calls import calls_in, label_of, name_of
from mlvm.show.report import short
from mlvm.show.session import ScriptSession
from mlvm.show.svg import COLOURS, home_colour
from mlvm.show.vm_trace import VMTrace

MOST_ALIKE: Final = 16
"""Number of arenas or VMs of one name up to which a page shows each alone."""

Columns = dict[str, list[Any]]


class Step(NamedTuple):
    """Planned program to show.

    `recording`: tensors in the scratch memory, by offset and moment.
    `moments`: pc in main of the call at each moment.
    `lines`: lines of Python by function and pc.
    `arguments`: description of each argument.
    """

    program: Program
    recording: Recording
    moments: Sequence[int]
    lines: Mapping[tuple[str, int], str]
    arguments: Sequence[str]


def step_page(step: Step, title: str, *, before: float | None = None) -> str:
    """Return the page of a step.

    Source files that changed after the time `before` are not quoted.
    """
    content = _Content(before)
    content.add_step(step, title)
    return content.page(title)


def session_page(
    session: ScriptSession, steps: Sequence[Step], title: str, *, failed: str | None = None
) -> str:
    """Return the page of a script's run and of the steps that it planned.

    `failed`, the description of the script's error, is shown at the top.
    """
    ran = any(x.lifetimes for x in session.recordings) or any(x.spans for x in session.traces)
    content = _Content(None, failed=failed or "", nothing="" if ran else "nothing of mlvm ran")
    content.add_session(session, steps, title)
    for number, step in enumerate(steps, 1):
        content.add_step(step, f"captured step {number}{_begins(step)}")
    return content.page(title)


def _begins(step: Step) -> str:
    """Return the line of Python of the step's first call, after a comma."""
    first = min(step.lines, default=None, key=lambda place: (place[0] != "main", place[1]))
    return f", {short(step.lines[first])}" if first is not None else ""


class _Content:
    """Builder of a page's data."""

    def __init__(self, before: float | None, *, failed: str = "", nothing: str = "") -> None:
        self._before = before
        self._messages = {"failed": failed, "nothing": nothing}
        self._strings: dict[str, int] = {"": 0}
        self._sources: dict[int, str] = {}
        self._programs: list[dict[str, Any]] = []
        self._numbers: dict[Program, int] = {}
        # by identity, because different programs often have the same hash
        self._number_of_id: dict[int, int] = {}
        self._labels: list[dict[int, str]] = []  # labels of each program's calls, by pc
        self._only: list[dict[str, int]] = []  # pcs of calls with a unique name
        self._views: list[dict[str, Any]] = []

    def page(self, title: str) -> str:
        """Return the page as HTML text."""
        data = {
            "strings": list(self._strings),
            "homes": list(map(home_colour, self._strings)),
            "colours": COLOURS,
            "sources": self._sources,
            "programs": self._programs,
            "views": self._views,
        }
        parts = {"TITLE": escape(title), "STYLE": _file("page.css"), "CODE": _file("page.js")}
        parts["DATA"] = in_script(data)
        parts["SAID"] = "".join(
            f'<p id="{which}" role="alert">{escape(text)}</p>\n'
            for which, text in self._messages.items()
            if text
        )
        return filled("page.html", parts)

    def add_step(self, step: Step, name: str) -> None:
        """Add a view of the plan's scratch memory over the moments of the program."""
        program = self._program(step.program, name, step.lines, step.arguments)
        recording, moments = step.recording, step.moments
        pane = self._pane("scratch memory of the plan", recording, None)
        count = len(moments)
        pane["blocks"]["program"] = [program] * len(recording.lifetimes)
        pane["blocks"]["pc"] = [
            moments[each.start] if each.start < count else -1 for each in recording.lifetimes
        ]
        names = self._labels[program]
        spans = _Spans()
        for moment, pc in enumerate(moments):
            line = step.lines.get(("main", pc), "")
            spans.add(
                moment, moment + 1, name=self._string(names.get(pc, "call")),
                about=0, bytes=0, line=self._line(line), program=program, pc=pc,
            )  # fmt: skip
        self._views.append(
            {
                "name": name,
                "clock": False,
                "last": max(recording.moments, count),
                "since": 0,
                "panes": [pane],
                "lanes": [spans.lane("calls")] if count else [],
                "programs": [program],
            }
        )

    def add_session(self, session: ScriptSession, steps: Sequence[Step], name: str) -> None:
        """Add a view of arenas, VMs and queues over time."""
        for number, step in enumerate(steps, 1):
            self._program(step.program, f"captured step {number}", step.lines, step.arguments)
        recordings = [each for each in session.recordings if each.lifetimes]
        recordings = merged_if_many(recordings, MOST_ALIKE)
        recordings.sort(key=lambda each: each.high_water, reverse=True)
        session.began = _first(session)
        lanes = [lane for vm in _by_name(session.traces) for lane in self._vm_lanes(*vm, session)]
        panes = [self._pane(_name_of_pane(each), each, session) for each in recordings]
        lanes += self._wait_lanes(session)
        partly = [track["since"] for track in (*panes, *lanes) if track["forgotten"]]
        self._views.append(
            {
                "name": name,
                "clock": True,
                "last": _us(session.ended - session.began),
                "since": min(partly, default=0),
                "panes": panes,
                "lanes": lanes,
                "programs": list(range(len(self._programs))),
            }
        )

    def _pane(
        self, name: str, recording: Recording, session: ScriptSession | None
    ) -> dict[str, Any]:
        """Return the pane of an arena: tensors over time.

        Times are seconds if these were recorded, else event numbers. `forgotten` tensors were freed
        before `since`.
        """
        first, times = recording.first, recording.times

        def at(moment: int) -> float:
            if session is None or not times:
                return moment
            index = max(moment, first) - first
            began, ended = session.began, session.ended
            return _us((times[index] * 1e9 if index < len(times) else ended) - began)

        used = recording.used()
        changes = [i for i in range(len(used)) if not i or used[i] != used[i - 1]]
        lifetimes = recording.lifetimes
        programs = [self._program(x.program) if x.program is not None else -1 for x in lifetimes]
        return {
            "name": name,
            "capacity": recording.capacity,
            "most": max([recording.high_before, *used]),
            "bound": max(used),
            "forgotten": recording.forgotten,
            "since": at(first) if recording.forgotten else 0,
            "top": max((x.offset + x.nbytes for x in lifetimes), default=0),
            "resets": [at(moment) for moment in recording.resets if moment > first],
            "used": {"at": [at(i + first) for i in changes], "bytes": [used[i] for i in changes]},
            "blocks": {
                "name": [self._string(x.path or x.op) for x in lifetimes],
                "kind": [self._string(x.op) for x in lifetimes],
                "type": [self._string(str(x.type)) for x in lifetimes],
                "offset": [x.offset for x in lifetimes],
                "nbytes": [x.nbytes for x in lifetimes],
                "start": [at(max(x.start, first)) for x in lifetimes],
                "end": [at(x.end) for x in lifetimes],
                "line": [self._line(x.line) for x in lifetimes],
                "program": programs,
                "pc": [
                    self._first_call(program) if x.pc is None else x.pc
                    for x, program in zip(lifetimes, programs, strict=True)
                ],
            },
        }

    def _first_call(self, program: int) -> int:
        calls: list[int] = self._programs[program]["calls"] if program >= 0 else []
        return calls[0] if calls else -1

    def _vm_lanes(
        self, traces: Sequence[VMTrace], alike: str, session: ScriptSession
    ) -> list[dict[str, Any]]:
        """Return a lane for each thread that made calls.

        The calls are on one VM, or on several VMs that are shown as one.
        """
        lanes: dict[int, _Spans] = {}
        began, spans = session.began, [span for trace in traces for span in trace.spans]
        rows = {thread: name for trace in traces for thread, name in trace.rows.items()}
        for span in sorted(spans, key=lambda span: (span.began, -span.ended)):
            program = self._program(span.program) if span.program is not None else -1
            pc = span.pc
            if pc is None and program >= 0:  # a call of a program with jumps
                pc = self._only[program].get(span.name)
            name = self._labels[program].get(pc, "") if pc is not None else ""
            name = name or label_of(span.name, span.about.get("attributes"))
            if name == "launch" and program >= 0:
                name = f"launch: {self._programs[program]['name']}"
                pc = self._first_call(program)
            line = 0 if pc is None else self._programs[program]["lines"].get(str(pc), 0)
            if not line and span.place is not None:
                line = self._line(line_of(span.place))
            lanes.setdefault(span.thread, _Spans()).add(
                _us(span.began - began), _us(span.ended - began), name=self._string(name),
                about=self._string(_about(span.about)), bytes=span.about.get("bytes", 0),
                line=line, program=program, pc=-1 if pc is None else pc,
            )  # fmt: skip
        same = len(set(rows.values())) < len(rows)
        forgotten = sum(trace.spans.forgotten for trace in traces)
        since = _us(min((span.began for span in spans), default=began) - began)
        return [
            track.lane(
                f"VM {rows[thread]}{f', thread {number}' if same else ''}{alike}", forgotten, since
            )
            for number, (thread, track) in enumerate(lanes.items(), 1)
        ]

    def _wait_lanes(self, session: ScriptSession) -> list[dict[str, Any]]:
        """Return a lane for each side of a queue that was waited on."""
        lanes: dict[str, _Spans] = {}
        waits = sorted(session.waits, key=lambda each: each.began)
        for wait in waits:
            began, ended = _us(wait.began - session.began), _us(wait.ended - session.began)
            lanes.setdefault(f"queue {wait.queue}: waits for {wait.what}", _Spans()).add(
                began, ended, name=self._string(f"waits for {wait.what}"),
                about=self._string(f"thread {wait.thread}"), bytes=0, line=0, program=-1, pc=-1,
            )  # fmt: skip
        forgotten = session.waits.forgotten
        since = _us(waits[0].began - session.began) if waits else 0
        return [spans.lane(name, forgotten, since) for name, spans in lanes.items()]

    def _program(
        self,
        program: Program,
        name: str | None = None,
        lines: Mapping[tuple[str, int], str] | None = None,
        arguments: Sequence[str] = (),
    ) -> int:
        """Return the program's number; list the program at the first use."""
        number = self._number_of_id.get(id(program))
        if number is None:  # avoid comparing whole programs
            number = self._numbers.get(program)
        if number is not None:
            self._number_of_id[id(program)] = number
            return number
        rows = [f".const {name} {_brief_constant(x)}" for name, x in program.constants.items()]
        notes, at, quoted = {}, [], {}
        for function in program.functions.values():
            pc = 0
            for row in format_function(function):
                if row.startswith("    "):
                    instruction = function.code[pc]
                    line = (lines or {}).get((function.name, pc))
                    if line:
                        quoted[len(rows)] = self._line(line)
                    index = argument_of(instruction)
                    if isinstance(index, int) and 0 <= index < len(arguments):
                        notes[len(rows)] = arguments[index]
                    if function.name == program.main.name:
                        at.append(len(rows))
                    pc += 1
                rows.append(row)
        code, called = program.main.code, calls_in(program)
        calls = {pc: label_of(op, (*code[pc].immediates, {})[2]) for pc, op in called}
        times = Counter(op for _, op in called)
        only = {op: pc for pc, op in called if times[op] == 1}
        number = self._number_of_id[id(program)] = self._numbers[program] = len(self._programs)
        self._labels.append(calls)
        self._only.append(only)
        self._programs.append(
            {
                "name": name or name_of(calls.values()),
                "rows": rows,
                "notes": notes,
                "at": at,
                "quoted": quoted,
                "calls": list(calls),
                "lines": {
                    str(pc): self._line(line)
                    for (function, pc), line in (lines or {}).items()
                    if function == program.main.name
                },
            }
        )
        return number

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _line(self, line: str) -> int:
        """Return the number of a `file:line`. The text of the line is quoted if it can be read."""
        number = self._string(short(line))
        if line and number not in self._sources:
            self._sources[number] = _source(line, self._before)
        return number


def _first(session: ScriptSession) -> int:
    """Return the time of the first event."""
    times = [span.began for trace in session.traces for span in trace.spans]
    times += [wait.began for wait in session.waits]
    times += [round(each.times[0] * 1e9) for each in session.recordings if each.times]
    return min(times, default=session.began)


def _name_of_pane(recording: Recording) -> str:
    count = f": {recording.arenas:,} arenas" if recording.arenas > 1 else ""
    return f"{recording.arena} on {recording.vm}{count}"


def _by_name(traces: Sequence[VMTrace]) -> list[tuple[list[VMTrace], str]]:
    """Group the traces to show as one, each group with a text about the size.

    Many VMs with the same name are one group.
    """
    groups: dict[str, list[VMTrace]] = {}
    for trace in traces:
        groups.setdefault(trace.vm, []).append(trace)
    shown: list[tuple[list[VMTrace], str]] = []
    for group in groups.values():
        if len(group) > MOST_ALIKE:
            shown.append((group, f": {len(group):,} VMs"))
        else:
            shown += [([trace], "") for trace in group]
    return shown


@dataclass
class _Spans:
    """Spans of a lane, in the order of start times.

    A span that starts within others is drawn below them.
    """

    columns: Columns = field(default_factory=dict)
    _ends: list[float] = field(default_factory=list)

    def add(self, start: float, end: float, **values: int) -> None:
        row = next((i for i, busy in enumerate(self._ends) if busy <= start), len(self._ends))
        self._ends[row : row + 1] = [end]
        for name, value in {"start": start, "end": end, "row": row, **values}.items():
            self.columns.setdefault(name, []).append(value)

    def lane(self, name: str, forgotten: int = 0, since: float = 0) -> dict[str, Any]:
        """Return the lane; `forgotten` spans of the VM or queue before `since` are missing."""
        history = {"forgotten": forgotten, "since": since if forgotten else 0}
        return {"name": name, "rows": len(self._ends), "spans": self.columns, **history}


def in_script(data: object) -> str:
    """Return the data as JSON for a script element; no text in it can close the element."""
    text = json.dumps(data, separators=(",", ":"), default=repr)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def plain_page(title: str, body: str, *, policy: str = "img-src data:") -> str:
    """Return a page with this HTML text as the body.

    `policy` extends the content security policy, which forbids everything but inline styles.
    """
    parts = {"TITLE": escape(title), "STYLE": _file("page.css"), "BODY": body, "POLICY": policy}
    return filled("plain.html", parts)


def filled(name: str, parts: Mapping[str, str]) -> str:
    """Return a template of this folder, with the parts between pairs of `@@` replaced."""
    pieces = enumerate(_file(name).split("@@"))  # odd pieces are names of parts
    return "".join([parts[piece] if i % 2 else piece for i, piece in pieces])


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _us(nanoseconds: float) -> float:
    """Convert nanoseconds to microseconds, rounded to a tenth."""
    return round(nanoseconds / 1000, 1)


def _about(about: Mapping[str, Any]) -> str:
    """Return the text of a span: operands and attributes."""
    attributes = {k: v for k, v in about.get("attributes", {}).items() if v is not None}
    text = about.get("params", "") + (f" {attributes}" if attributes else "")
    return shortened(text, 300)


def _brief_constant(value: Array) -> str:
    if value.size <= 16:  # maximum number of elements of a listed constant
        return format_constant(value)
    return f"{TensorType.of(value)} ... ; {value.size:,} elements"


def _source(line: str, before: float | None) -> str:
    """Return the text of a `file:line` of Python, or "" if it cannot be read or changed since."""
    file, _, number = line.rpartition(":")
    lines = _lines_of(file, before)
    n = parse_count(number) or 0
    return lines[n - 1].strip() if 0 < n <= len(lines) else ""


@cache
def _lines_of(file: str, before: float | None) -> list[str]:
    path = Path(file)
    try:
        if path.suffix != ".py" or not path.is_file():  # a saved step may contain any path
            return []
        about = path.stat()
        if about.st_size > 4 << 20 or (before is not None and about.st_mtime > before):
            return []
        return path.read_text("utf-8").splitlines()
    except (OSError, ValueError):  # ValueError: the file is not text
        return []
