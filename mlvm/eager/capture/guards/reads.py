"""What code may read: the globals and attributes that it names.

Code that finds fields without naming them, as `vars(x)` does, reads `ALL` of them. Code that may
reach any variable at all, as `eval` does, is called `unbounded`.
"""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

ALL: Final = "*"
"""Stands for every name."""

CONSTRUCTORS: Final = frozenset({"__new__", "__init__", "__post_init__"})
COMPARISONS: Final = frozenset({"__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"})
TEXTS: Final = frozenset({"__repr__", "__str__", "__format__"})

_READ_BY_BUILTIN: Final[dict[str, Iterable[str]]] = {
    "vars": {ALL},
    "dir": {ALL},
    **dict.fromkeys(("repr", "str", "format", "ascii"), TEXTS),
    "type": {"__class__"},
    "hash": {"__hash__"},
    "__getattribute__": {ALL},
    **dict.fromkeys(("__repr__", "__str__", "__format__"), TEXTS),
}
"""The fields that calls of these builtin functions read."""

_READ_ALL: Final = frozenset(
    {"__dict__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__"}
    | {"__copy__", "__deepcopy__", "__replace__"}
)
_FORMATTERS: Final = frozenset({"format", "format_map"})  # methods of strings
_UNBOUNDED: Final = frozenset({"eval", "exec", "globals", "__import__", "import_module"})
_UNBOUNDED_ATTRIBUTES: Final = frozenset(
    {"__globals__", "f_globals", "__builtins__", "__subclasses__", "import_module"}
)

_NEVER_IMPLICIT_NAMES: Final = """
__module__ __qualname__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __annotate__
__annotate_func__ __annotations_cache__ __firstlineno__ __static_attributes__ __orig_bases__
__parameters__ __type_params__ __abstractmethods__ __dataclass_fields__ __dataclass_params__
__reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__ __replace__ __getnewargs__
"""
"""Special names that are read in a running step only by code that names them."""

_NEVER_IMPLICIT: Final = frozenset(_NEVER_IMPLICIT_NAMES.split())

_GETTERS: Final = frozenset({"getattr", "hasattr"})
_CONSTANT_GETTER: Final = re.compile("Gva*s[sv]?c")
"""The instructions of `getattr(x.y, "name", default)`, as `_shape` writes them."""


class Reads(NamedTuple):
    """What code may read.

    `globals` are in order. `names` are those of attributes, and all strings that may be one.
    `imports` are modules as (level, name). `unbounded` are the names that make the code so.
    """

    globals: tuple[str, ...]
    names: frozenset[str]
    imports: tuple[tuple[int, str], ...]
    unbounded: tuple[str, ...]


_known: dict[int, tuple[types.CodeType, Reads]] = {}


def reads_of(code: types.CodeType) -> Reads:
    """What the code may read, and the code inside of it."""
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= 4096:
            _known.clear()
        known = _known[id(code)] = code, _reads(code)
    return known[1]


def reads_of_builtin(name: str) -> Reads:
    """What a builtin function of that name may read, of whatever it is given."""
    names = frozenset({ALL}) if name in _GETTERS else frozenset(_READ_BY_BUILTIN.get(name, ()))
    return Reads((), names, (), (name,) if name in _UNBOUNDED else ())


def is_special(name: str) -> bool:
    """Whether Python may read this field of a class by itself."""
    return name[:2] == "__" and name[-2:] == "__" and name not in _NEVER_IMPLICIT


def _reads(code: types.CodeType) -> Reads:
    globals: dict[str, None] = {}
    names = set(_strings(code.co_consts))
    imports: list[tuple[int, str]] = []
    instructions = list(dis.get_instructions(code))
    for i, each in enumerate(instructions):
        if each.opname == "IMPORT_NAME":
            imports.append((instructions[i - 2].argval, each.argval))
        elif each.opname in _OF_GLOBALS:
            if each.argval.isidentifier():  # some names in code that pytest rewrites are not
                globals[each.argval] = None
        elif each.opname == "MATCH_CLASS":
            names.add(ALL)
        elif each.opname.startswith("FORMAT_") or each.argrepr == "%":
            if not _is_raised(instructions[i + 1 :]):
                names |= TEXTS
        elif each.opcode in dis.hasname and not each.opname.startswith(("STORE_", "DELETE_")):
            names.add(each.argval)
    unbounded = sorted((_UNBOUNDED & globals.keys()) | (_UNBOUNDED_ATTRIBUTES & names))
    if names & _READ_ALL:
        names.add(ALL)
    if names & _FORMATTERS:
        names |= TEXTS
    shape = "".join(map(_shape, instructions))
    if shape.count("G") > len(_CONSTANT_GETTER.findall(shape)):
        names.add(ALL)
    for name in globals:
        names.update(_READ_BY_BUILTIN.get(name, ()))
    reads = Reads(tuple(globals), frozenset(names), tuple(imports), tuple(unbounded))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            reads = Reads(*[_union(*pair) for pair in zip(reads, reads_of(inner), strict=True)])
    return reads


_JUMPS: Final = frozenset({*dis.hasjrel, *dis.hasjabs})
_OF_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def _is_raised(after: Iterable[dis.Instruction]) -> bool:
    """Whether these instructions raise an error, for which the value before them was computed."""
    for each in after:
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opcode in _JUMPS or each.opname.startswith(("STORE_", "POP_", "RETURN_")):
            return False
    return False


def _union(ours: Any, theirs: Any) -> Any:
    return ours | theirs if isinstance(ours, frozenset) else tuple(dict.fromkeys((*ours, *theirs)))


def _strings(constants: Iterable[object]) -> Iterator[str]:
    """The names that strings in the code may be, or may contain, as the format `{0.name}` does."""
    for each in constants:
        if isinstance(each, str):
            yield from re.findall(r"\w+", each) if "{" in each else [each]
        elif isinstance(each, (tuple, frozenset)):
            yield from _strings(each)


def _shape(instruction: dis.Instruction) -> str:
    """One letter: G the function `getattr`, v a value, a of an attribute, s a string, c a call."""
    name = instruction.opname
    if name in _OF_GLOBALS and instruction.argval in _GETTERS:
        return "G"
    if name in ("PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG"):
        return ""
    if name == "LOAD_ATTR":
        return "." if "NULL" in instruction.argrepr else "a"  # with NULL, of a method to call
    if name == "LOAD_CONST" and isinstance(instruction.argval, str):
        return "s"
    if name in ("CALL", "CALL_KW"):
        return "c"
    return "v" if name.startswith("LOAD_") and "_LOAD_" not in name else "."
