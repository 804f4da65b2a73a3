"""Warnings about updates without effect: of parts of tensors, where NumPy would write to the whole.

In: the frame of an update, `a[i] = v` or `a += v`, of a part, such as a row.
Out: a `NoEffectWarning` if the updated part is never read, or its whole is read later. The bytecode
of an update is analysed once.
"""

from __future__ import annotations

import dis
import gc
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, GeneratorType
from typing import Any, Final, NamedTuple

from mlvm.core.memo import Memo, memoized
from mlvm.eager.tensor.warn import NoEffectWarning, warn_at

_VIEWS: Final = frozenset(
    ("T", "mT", "real", "imag", "reshape", "ravel", "permute_dims", "transpose", "swapaxes"),
).union(
    ("moveaxis", "matrix_transpose", "squeeze", "expand_dims", "broadcast_to", "diagonal", "flip")
)
"""Attributes and functions with a result that shares elements with the operand in NumPy."""

_TYPES: Final = frozenset({"shape", "ndim", "dtype", "size", "type", "device"})
"""Attributes of a tensor that do not depend on its values."""

_INSPECTING: Final = frozenset({"locals", "vars", "eval", "exec", "__qualname__"})
"""Names in code that may read variables without loading them; the last is set by class bodies."""

_TARGETS: Final = frozenset({"STORE_SUBSCR", "STORE_SLICE"})
_UNPACKS: Final = frozenset({"UNPACK_SEQUENCE", "UNPACK_EX"})
_JUMPS: Final = frozenset([dis.opname[each] for each in (*dis.hasjrel, *dis.hasjabs)])
_FINAL: Final = re.compile("RETURN_(VALUE|CONST)|RAISE|RERAISE|JUMP_(FORWARD|BACKWARD|ABSOLUTE)")
"""Instructions after which the next one does not run."""
_HALF: Final = re.compile("(?:LOAD|STORE)_FAST")
_ATTRIBUTE: Final = re.compile("LOAD_(ATTR|METHOD|GLOBAL|NAME)")
_VARIABLE: Final = re.compile("(LOAD|STORE|DELETE)_(FAST|NAME)")


class _Bytecode(NamedTuple):
    """Instruction.

    value: the name or number that it uses.
    text: the same in readable form, such as `+=`.
    grows: change of the number of values on the interpreter's stack.
    """

    opname: str
    offset: int
    value: Any
    text: str
    grows: int

    @property
    def variable(self) -> str | None:
        """The variable that the instruction loads, stores or deletes, which must not be a cell."""
        return self.value if _VARIABLE.match(self.opname) else None

    @property
    def attribute(self) -> str | None:
        """The attribute or the global that the instruction loads."""
        return self.value if _ATTRIBUTE.match(self.opname) else None

    @property
    def loads(self) -> bool:
        return self.opname.startswith("LOAD_")

    @property
    def stores(self) -> bool:
        return self.opname.startswith("STORE_")


class _Update(NamedTuple):
    """Update of a tensor that a variable refers to, or an item of the variable, as in `d[0] += y`.

    The steps from `first` to `end` evaluate the operands and store the result.
    """

    name: str
    first: int
    end: int
    is_item: bool


class _Site(NamedTuple):
    """Result of the analysis of an update.

    Attributes:
        reason: description of the part without effect; None if the update has an effect.
        container: number of references to the container of which the part is an item, or 0.
        from_unread: whether the part is computed from variables that are not read later. One of
            them may be a container that refers to the part.
        argument: position of the part among the arguments of the call.
        scans: number of further searches for references, which are slow.
    """

    reason: str | None = None
    container: int = 0
    from_unread: bool = False
    argument: int | None = None
    scans: int = 3


_NOTHING: Final = _Site()
_sites: Final = Memo[tuple[int, int], tuple[CodeType, _Site]](4096, "eager.tensor.parts sites")
"""The code, which keeps the id valid, and the site, by code id and instruction offset."""


def warn_of_part(frame: FrameType, x: Any, holders: int) -> None:
    """Warn if the update of the part x at the frame's instruction has no effect.

    holders: number of references to x in addition to a variable and the interpreter's stack.
    """
    x.is_part = False  # later updates are meant for x itself
    key = id(frame.f_code), frame.f_lasti
    entry = _sites.entries.get(key) or _sites.get(key, lambda: (frame.f_code, _site_of(frame)))
    site = entry[1]
    if site.reason is None:
        return
    holders -= len(x.views())  # with the value before the update
    is_alone = holders == site.container == 0
    if is_alone or _is_unreachable(frame, x, site, holders):
        _warn(frame, x, site.reason)


def warn_of_out(frame: FrameType, x: Any) -> None:
    """Warn if the call at the frame's instruction writes to the part x, `out=x`, without effect."""
    x.is_part = False
    code, place = frame.f_code, frame.f_lasti
    key = id(code), place
    _, site = _sites.get(key, lambda: (code, _Site(_reason_of_out(_liveness_of(code), place))))
    if site.reason is None or site.scans == 0:
        return
    _sites[key] = code, site._replace(scans=site.scans - 1)
    if all(type(each) is dict and "out" in each for each in gc.get_referrers(x)):
        _warn(frame, x, site.reason)  # only the keywords of the call refer to x


def _reason_of_out(flow: _Liveness, place: int) -> str | None:
    """Return why the result of a call is lost that writes to a part, `out=`; None if it is used."""
    at = flow.at(place)
    end = at - 1
    if flow.steps[end].opname == "PRECALL":
        end -= 1
    names = flow.steps[end].value  # of the keywords
    if type(names) is not tuple or "out" not in names or flow.steps[at + 1].opname != "POP_TOP":
        return None
    count = len(names) - names.index("out")
    first, last = flow.start(end, count), flow.start(end, count - 1) - 1
    name = flow.steps[first].variable
    if first < last:
        return "a temporary"
    if name is None or flow.is_read(name, at + 1) or not any(flow.values_of(name)):
        return None  # a caller may read an argument
    return f"{name!r}, which is not read"


def _warn(frame: FrameType, x: Any, reason: str) -> None:
    warn_at(
        f"{frame.f_code.co_filename}:{frame.f_lineno}",
        f"this {x.type} is {reason}: its update changes no other tensor. Update the whole, as "
        f"in x[k, i] = v, or return the part and assign it, as in x[k] = f(x[k])",
        NoEffectWarning,
    )


def _is_unreachable(frame: FrameType, x: Any, site: _Site, holders: int) -> bool:
    """Return whether only variables that are not read later, and temporary objects, refer to x."""
    if site.scans == 0:
        return False
    _sites[id(frame.f_code), frame.f_lasti] = frame.f_code, site._replace(scans=site.scans - 1)
    containers = [each for each in gc.get_referrers(x) if type(each) in (list, tuple, dict)]
    containers = [each for each in containers if each is not frame.f_globals]
    if site.container:  # the list `containers` and the call refer to it in addition
        is_only = holders == 0 and len(containers) == 1
        return is_only and sys.getrefcount(containers[0]) == 2 + site.container
    module = None if frame.f_code.co_flags & CO_OPTIMIZED else frame.f_globals
    count = len(containers)
    if not all(_is_temporary(containers, i, module, site.from_unread, 2) for i in range(count)):
        return False
    holders -= count
    caller = frame.f_back
    if holders == 1 and site.argument is not None and caller is not None:
        return _is_argument_unread(caller.f_code, caller.f_lasti, site.argument)
    return holders == 0


def _is_temporary(containers: list[Any], i: int, module: Any, variables: int, depth: int) -> bool:
    """Return whether only iterators, and this number of variables, refer to a container.

    module: the variables of the module if its code runs; None in a function.
    depth: depth of temporary tuples, such as results of `zip` within results of `enumerate`."""
    users = [x for x in gc.get_referrers(containers[i]) if x is not containers and x is not module]
    for j in range(len(users)):  # without further references to the users
        if type(users[j]) is tuple and depth:
            if not _is_temporary(users, j, module, 0, depth - 1):
                return False
        elif not isinstance(users[j], Iterator) or type(users[j]) is GeneratorType:
            return False
    # the list `containers` and the call also refer to the container
    return sys.getrefcount(containers[i]) - 2 - len(users) <= variables


def _site_of(frame: FrameType) -> _Site:
    """Analyse the update at the frame's instruction."""
    code = frame.f_code
    is_module = not code.co_flags & CO_OPTIMIZED
    flow = _liveness_of(code)
    at = flow.at(frame.f_lasti)
    update = flow.updates.get(at)
    if update is None or flow.is_inspected:
        return _NOTHING
    name, end, is_item = update.name, update.end, update.is_item
    # `d[0] += y` also keeps d on the interpreter's stack
    container = is_item * (2 if flow.steps[at].opname == "BINARY_OP" else 1)
    is_unread = not flow.is_read(name, end)
    tensors = frame.f_globals if is_module and is_unread else {}
    whole = None if is_item else flow.whole_read_later(name, end, tensors)
    in_loop, sources = flow.sources_of(name)
    if is_module and (name in flow.inner_names or (whole is None and not in_loop)):
        return _NOTHING  # a different module, or a later cell of a notebook, may read the variable
    if not is_unread:
        return _NOTHING if whole is None else _Site(f"a part of {whole!r}")
    reason = "a part of " + ("another tensor" if whole is None else repr(whole))
    reason += f", and {name!r} is not read later"
    arguments = code.co_varnames[: code.co_argcount]
    if name in arguments and not is_item and next(flow.values_of(name), None) is None:
        is_method = arguments[0] in ("self", "cls")
        position = arguments.index(name) - is_method
        return _Site(f"a temporary, the argument {name!r}", argument=position)
    from_unread = bool(sources) and not any(flow.is_read(each, end) for each in sources)
    return _Site(reason, container, from_unread)


@memoized(256)
def _is_argument_unread(code: CodeType, place: int, position: int) -> bool:
    """Return whether an argument of the call at this offset is a variable that is not read later.

    Arguments by keyword and unpacked arguments count as read."""
    flow = _liveness_of(code)
    at = flow.at(place)
    step = flow.steps[at]
    end = at - 1 if flow.steps[at - 1].opname == "PRECALL" else at
    before = step.value - position if step.opname == "CALL" else 0  # arguments from this one on
    if before <= 0 or flow.steps[end - 1].opname == "KW_NAMES":
        return False
    first = flow.start(end, before)
    name = flow.steps[first].variable
    is_variable = name is not None and flow.start(end, before - 1) == first + 1
    return is_variable and not flow.is_read(name or "", at + 1)


class _Liveness:
    """Instructions of a function or module, with the order in which they run."""

    def __init__(self, code: CodeType) -> None:
        self.steps = list(_steps(code))
        self.positions = {self.steps[i].offset: i for i in reversed(range(len(self.steps)))}
        bytecode: Any = dis.Bytecode(code)
        self.handlers = bytecode.exception_entries  # disjoint, in the order of the offsets
        self.handled = [each.start for each in self.handlers]
        self.inner_names = frozenset(_inner_names(code))
        variables = {x.value for x in self.steps if x.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
        names = {*code.co_names} - ({"eval"} - variables)  # `model.eval()` reads no variables
        self.is_inspected = not _INSPECTING.isdisjoint(names)
        updates = {i: self._update_at(i) for i in range(len(self.steps))}
        self.updates = {i: each for i, each in updates.items() if each is not None}
        # Reads within an update of the same variable, as in `a[i] = a[i] + 1`, are ignored.
        self.own = {(x.name, i) for x in self.updates.values() for i in range(x.first, x.end)}

    def at(self, offset: int) -> int:
        """Return the step at an offset, which may be within the cache of the instruction."""
        while offset not in self.positions:
            offset -= 2
        return self.positions[offset]

    def start(self, end: int, values: int) -> int:
        """Return the first of the steps before `end` that push this number of values."""
        while values > 0 and end > 0:
            end -= 1
            values -= self.steps[end].grows
        return end

    def _update_at(self, at: int) -> _Update | None:
        """Return the update by an instruction, if it updates a variable or an item of one."""
        step, end = self.steps[at], at
        if step.opname == "BINARY_OP" and step.text.endswith("="):
            end += 1
            name = self.steps[end].variable
            if name is not None:  # x += y
                return _Update(name, self.start(at, 2), end + 1, False)
            while self.steps[end].opname == "SWAP":
                end += 1
        if self.steps[end].opname not in _TARGETS:
            return None
        values = -self.steps[end].grows  # the value, the container, and one or two numbers
        first = self.start(end, values)
        if self.steps[end - 1].opname == "SWAP":  # d[0] += y
            container = first
            keys = next((i for i in range(first, end) if self.steps[i].opname == "COPY"), end)
        else:
            container, keys = self.start(end, values - 1), end
        last = self.start(keys, values - 2) - 1
        is_item = end > at
        if not is_item and self.steps[last].opname == "BINARY_SUBSCR":  # d[0][i] = v
            is_item, last = True, self.start(last, 1) - 1
        name = self.steps[container].variable if self.steps[container].loads else None
        return None if name is None or last > container else _Update(name, first, end + 1, is_item)

    def is_read(self, name: str, first: int) -> bool:
        """Return whether some path from a step reads the variable before assigning it."""
        visited: set[int] = set()
        following = [first]
        while following:
            i = following.pop()
            if i in visited:
                continue
            visited.add(i)
            step = self.steps[i]
            if step.variable == name and (name, i) not in self.own:
                if not step.loads:
                    continue
                if self.steps[i + 1].attribute not in _TYPES:
                    return True
            following += self._after(i)
        return False

    def _after(self, i: int) -> Iterator[int]:
        """Yield the steps that may run after a step."""
        step = self.steps[i]
        if step.opname in _JUMPS:
            yield self.positions[step.value]
        if not _FINAL.match(step.opname):
            yield i + 1
        last = bisect_right(self.handled, step.offset) - 1
        if last >= 0 and step.offset < self.handlers[last].end:
            yield self.positions[self.handlers[last].target]

    def values_of(self, name: str) -> Iterator[range]:
        """Yield the steps that compute each value that is assigned to the variable."""
        for i, step in enumerate(self.steps):
            if step.variable == name and step.stores and (name, i) not in self.own:
                end = i
                while end and self.steps[end - 1].stores:
                    end -= 1
                end -= self.steps[end - 1].opname in _UNPACKS
                yield range(self.start(end, 1), end)

    def sources_of(self, name: str) -> tuple[bool, set[str]]:
        """Return whether a loop assigns the variable, and the variables in its expressions."""
        in_loop, sources = False, set()
        for each in self.values_of(name):
            first, end = each.start, each.stop
            if self.steps[first].opname == "FOR_ITER":
                in_loop, end = True, first - 1  # GET_ITER
                first = self.start(end, 1)
            steps = self.steps[first:end]
            sources |= {x.variable for x in steps if x.loads and x.variable is not None}
        return in_loop, sources

    def whole_read_later(self, name: str, first: int, tensors: dict[str, Any]) -> str | None:
        """Return the variable of which this variable is a part, if it is read after a step.

        tensors: variables of which the variable is a part if they occur in its value."""
        for each in self.values_of(name):
            is_unpacked = len(each) == 1 and self.steps[each.stop].opname in _UNPACKS
            for i in each:
                whole = self.steps[i].variable
                if whole is None or whole == name or not self.steps[i].loads:
                    continue
                near = {self.steps[i - 1].attribute, self.steps[i + 1].attribute}
                is_part = is_unpacked or not _VIEWS.isdisjoint(near)
                is_part = is_part or hasattr(tensors.get(whole), "is_part")
                if is_part and self.is_read(whole, first):
                    return whole
        return None


_liveness_of: Final = memoized(64)(_Liveness)


def _steps(code: CodeType) -> Iterator[_Bytecode]:
    """Yield the instructions; those that load or store two variables are split.

    An instruction with a large argument begins at the first EXTENDED_ARG before it."""
    start: int | None = None
    for each in dis.get_instructions(code):
        start = each.offset if start is None else start
        if each.opname == "EXTENDED_ARG":
            continue
        offset, start = start, None
        halves = _HALF.findall(each.opname)
        if len(halves) == 2:
            for half, variable in zip(halves, each.argval, strict=True):
                yield _Bytecode(half, offset, variable, "", 1 if half.startswith("LOAD") else -1)
        else:
            grows = dis.stack_effect(each.opcode, each.arg, jump=False)
            value = each.argval
            if each.opname == "KW_NAMES" and each.arg is not None:
                value = code.co_consts[each.arg]  # `dis` of Python 3.11 does not look it up
            yield _Bytecode(each.opname, offset, value, each.argrepr, grows)


def _inner_names(code: CodeType) -> Iterator[str]:
    """Yield the names that the functions of a module use."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from each.co_names
            yield from _inner_names(each)
