"""Names of tensors: the variables that refer to them while a function is traced.

Python reports each line of the user's functions to a `Variables`. It compares the variables with
the values of the recorder, and notes each change as a call `NAMED` of the flow.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

from mlvm.arena.arena import Allocation
from mlvm.core.errors import is_ours
from mlvm.eager.capture.guards.readable import is_library
from mlvm.eager.capture.trace import TracedCall
from mlvm.eager.recording.recorder import Recorder, current_recorder
from mlvm.eager.runs.names import tensors_of_frame
from mlvm.eager.runs.source import line_at
from mlvm.step.blocks import free_variables
from mlvm.step.compile import NAMED
from mlvm.step.flow import Call, Home, Use, Value


class _Note(NamedTuple):
    """A name of a value, before call number `at` of `calls`; "" at the start of a frame.

    code: the code of the frame. source: the value; a tensor that the function has not used yet; or
    None for no value.
    """

    calls: list[Call]
    at: int
    code: CodeType
    function: str
    name: str = ""
    source: Use | Allocation | None = None


class Variables:
    """Collector of the names that variables give to tensors."""

    def __init__(self) -> None:
        self._notes: list[_Note] = []
        self._frames: set[object] = set()
        # by function and name: the frame with the variable, and the id of the value or tensor
        self._latest: dict[str, dict[str, tuple[object, int]]] = defaultdict(dict)

    @contextmanager
    def collected(self) -> Iterator[Variables]:
        """Collect names in functions that this thread calls in the block."""
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            yield self
        finally:
            sys.settrace(before)

    def _entered(self, frame: FrameType, event: str, argument: object) -> Any:
        """Return the function to which Python reports the lines of a user's function."""
        code, owner = frame.f_code, object()
        has_variables = code.co_name[:1] != "<" or code.co_name == "<lambda>"
        module = str(frame.f_globals.get("__name__", ""))
        is_user = not (is_ours(code.co_filename) or is_library(module))
        if not has_variables or not is_user or module.startswith("namedtuple_"):
            return None

        def reported(frame: FrameType, event: str, argument: object) -> Any:
            if event != "exception" and (recorder := current_recorder()) is not None:
                self._note(frame, owner, recorder.recorders[-1])  # the captured function's recorder
            return reported

        return reported

    def _note(self, frame: FrameType, owner: object, recorder: Recorder) -> None:
        """Note the variables of a frame that have changed."""
        code = frame.f_code
        function = line_at(f"{code.co_filename}:{frame.f_lineno}").function
        latest, calls = self._latest[function], recorder.calls
        note = _Note(calls, len(calls), code, function)
        present = set[str]()
        if owner not in self._frames:
            self._frames.add(owner)
            self._notes.append(note)
        for name, x in tensors_of_frame(frame):
            present.add(name)
            source: Use | Allocation | None = recorder.present_use(x)
            is_new = isinstance(x.root.arena.vm, Recorder)
            source = x.root if source is None and not is_new else source
            of = owner, id(source.value if isinstance(source, Use) else source)
            if latest.get(name) != of:
                latest[name] = of
                self._notes.append(note._replace(name=name, source=source))
        for name in [name for name, of in latest.items() if of[0] is owner]:
            if name not in present:
                del latest[name]
                self._notes.append(note._replace(name=name))

    def insert(self, call: TracedCall, names: Mapping[tuple[str, int], str]) -> tuple[str, ...]:
        """Insert calls `NAMED` into the flow of a traced call.

        Return the names by number, each with the function: `function name`.

        names: the names of the inputs and states, by role and number. A path with such a name is
        not inserted."""
        states = {id(x): i for i, x in enumerate(call.record.outside.states)}
        variables: dict[CodeType, dict[tuple[str, str], None]] = defaultdict(dict)
        for note in self._notes:
            root = re.split(r"\W", note.name)[0]
            if root in (*note.code.co_varnames, *note.code.co_cellvars):
                variables[note.code][note.function, note.name] = None
        by_list: dict[int, list[tuple[int, Call]]] = defaultdict(list)
        numbers: dict[tuple[str, str], int] = {}
        for calls, at, code, function, name, source in self._notes:
            if isinstance(source, Allocation):
                i, type = states.get(id(source), -1), source.type
                source = None if i < 0 else Use(Value(type.nbytes, Home("state", i, type)), type)
            home = None if source is None else source.value.home
            is_first = not name.isidentifier() and (function, name) not in numbers
            if is_first and home is not None and names.get((home.role, home.index)) == name:
                continue
            ins = [] if source is None else [source]
            for key in [(function, name)] if name else [x for x in variables[code] if x in numbers]:
                attributes = {"number": numbers.setdefault(key, len(numbers))}
                named = Call(NAMED, None, attributes, [], ins, orderly=True)
                by_list[id(calls)].append((at, named))

        def visit(calls: list[Call]) -> None:
            for each in calls:
                for block in each.blocks:
                    visit(block.calls)
                if each.blocks:
                    each.ins = list(dict.fromkeys([*each.ins, *free_variables(each.blocks)]))
            for at, named in reversed(by_list.pop(id(calls), [])):
                calls.insert(at, named)

        visit(call.flow.calls)
        return tuple(map(" ".join, numbers))
