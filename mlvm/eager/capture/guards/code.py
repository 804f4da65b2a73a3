"""Names that code may read, determined from instructions: globals and attributes.

Code that reads fields without naming them, such as `vars(x)`, gets the name `ALL`. Code that may
read any variable, such as `eval`, is `unbounded`.
"""

from __future__ import annotations

import dis
import re
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from mlvm.eager.recording.reads import TEXTS

ALL: Final = "*"
"""Represents every name."""

CONSTRUCTORS: Final = frozenset({"__new__", "__init__", "__post_init__"})
COMPARISONS: Final = frozenset({"__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"})

_GETTERS: Final = frozenset({"getattr", "hasattr"})
_OF_BUILTIN: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(("vars", "dir", "__getattribute__"), frozenset({ALL})),
    **dict.fromkeys(("repr", "str", "format", "ascii", *TEXTS), TEXTS),
    "type": frozenset({"__class__"}),
    "hash": frozenset({"__hash__"}),
}
"""The fields that calls of these builtin functions read."""

_ALL_FIELDS: Final = frozenset(
    {"__dict__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__"}
    | {"__copy__", "__deepcopy__", "__replace__"}
)
FORMATTERS: Final = frozenset({"format", "format_map"})
"""String methods that read the fields which the string names."""

_UNBOUNDED: Final = frozenset({"eval", "exec", "globals", "__import__", "import_module"})
_UNBOUNDED_ATTRIBUTES: Final = frozenset(
    {"__globals__", "f_globals", "__builtins__", "__subclasses__", "import_module"}
)

_NEVER_IMPLICIT_NAMES: Final = """
__module__ __qualname__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __annotate__
__annotate_func__ __annotations_cache__ __firstlineno__ __static_attributes__ __orig_bases__
__parameters__ __type_params__ __abstractmethods__ __dataclass_fields__ __dataclass_params__
__reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__ __replace__ __getnewargs__
__slotnames__
"""
"""Special names that a running step reads only if the code names them."""

_NEVER_IMPLICIT: Final = frozenset(_NEVER_IMPLICIT_NAMES.split())

_NO_STEPS: Final = ("PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG")
_CONSTANT_GETTER: Final = re.compile("Gva*s[sv]?c")
"""The instructions of `getattr(x.y, "name", default)`, encoded by `_letter`."""

_LETTERS: Final = {"CALL": "c", "CALL_KW": "c", **dict.fromkeys(_NO_STEPS, "")}
_JUMPS: Final = frozenset({*dis.hasjrel, *dis.hasjabs})
_OF_GLOBALS: Final = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL"}
)
"""Instructions with the name of a global.

A global or field that code only assigns counts as read: a trace does not show an assignment of the
value that it has already."""


class CodeNames(NamedTuple):
    """Names that code may read.

    `globals`: names of globals, in order.
    `fields`: names of attributes, and all strings that may be an attribute's name.
    `imports`: modules as (level, name).
    `unbounded`: the names that make the code unbounded.
    `formats`: variables on which the code calls `format`; it reads the fields that the text names.
    """

    globals: tuple[str, ...]
    fields: frozenset[str]
    imports: tuple[tuple[int, str], ...]
    unbounded: frozenset[str]
    formats: frozenset[str] = frozenset()


_names: weakref.WeakKeyDictionary[types.CodeType, CodeNames] = weakref.WeakKeyDictionary()


def names_in(code: types.CodeType) -> CodeNames:
    """Return the names that the code, including nested code, may read."""
    names = _names.get(code)
    if names is None:
        names = _names[code] = _names_in(code)
    return names


def names_in_builtin(name: str) -> CodeNames:
    """Return the names that the builtin function with this name may read from the arguments."""
    fields = frozenset({ALL}) if name in _GETTERS else _OF_BUILTIN.get(name, frozenset())
    return CodeNames((), fields, (), _UNBOUNDED & {name})


def is_implicit(
    name: str, field: object, of_class: Mapping[str, Any], *, may_construct: bool
) -> bool:
    """Return whether Python may read a field of a class without code that names it.

    Python never calls `__repr__` implicitly. It calls constructors if the code `may_construct` an
    object. In that case it also calls comparison methods that `dataclass` generated; they compare
    objects of exactly this class."""
    generated = name in COMPARISONS and "__dataclass_params__" in of_class
    code = field.__code__ if generated and isinstance(field, types.FunctionType) else None
    if name in CONSTRUCTORS or (code is not None and code.co_filename == "<string>"):
        return may_construct
    special = name[:2] == "__" and name[-2:] == "__"
    return special and name not in _NEVER_IMPLICIT and name not in TEXTS


def _names_in(code: types.CodeType) -> CodeNames:
    globals: dict[str, None] = {}
    fields = set(_strings(code.co_consts))
    imports: dict[tuple[int, str], None] = {}
    formats: set[str] = set()
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _NO_STEPS]
    for i, each in enumerate(instructions):
        if each.opname == "IMPORT_NAME":
            imports[instructions[i - 2].argval, each.argval] = None
        elif each.opname in _OF_GLOBALS:
            # code rewritten by pytest contains names that are not identifiers
            if each.argval.isidentifier():
                globals[each.argval] = None
        elif each.opname == "MATCH_CLASS":
            fields.add(ALL)
        elif each.opname.startswith("FORMAT_") or each.argrepr == "%":
            if not _is_raised(instructions[i + 1 :]):
                fields |= TEXTS
        elif each.opcode in dis.hasname and each.opname[:7] not in ("STORE_N", "DELETE_"):
            fields.add(each.argval)
            if each.argval in FORMATTERS:
                text = instructions[i - 1]
                if text.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                    formats.add(text.argval)
                elif not isinstance(text.argval, str) or text.opname != "LOAD_CONST":
                    fields.add(ALL)
    unbounded = (_UNBOUNDED & globals.keys()) | (_UNBOUNDED_ATTRIBUTES & fields)
    if fields & FORMATTERS:
        fields |= TEXTS
    letters = "".join(map(_letter, instructions))
    if fields & _ALL_FIELDS or letters.count("G") > len(_CONSTANT_GETTER.findall(letters)):
        fields.add(ALL)
    fields.update(*(_OF_BUILTIN.get(name, ()) for name in globals))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            of_inner = names_in(inner)
            globals.update(dict.fromkeys(of_inner.globals))
            fields |= of_inner.fields
            imports.update(dict.fromkeys(of_inner.imports))
            unbounded |= of_inner.unbounded
            formats |= of_inner.formats
    names = tuple(globals), frozenset(fields), tuple(imports), frozenset(unbounded)
    return CodeNames(*names, frozenset(formats))


def _is_raised(after: Iterable[dis.Instruction]) -> bool:
    """Return whether these instructions raise an error that contains the preceding value."""
    for each in after:
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opcode in _JUMPS or each.opname.startswith(("STORE_", "POP_", "RETURN_")):
            return False
    return False


def _strings(constants: Iterable[object]) -> Iterator[str]:
    """Yield the names that strings in the code are or contain, as in the format `{0.name}`."""
    for each in constants:
        if isinstance(each, str):
            yield from names_of_format(each) if "{" in each else [each]
        elif isinstance(each, (tuple, frozenset)):
            yield from _strings(each)


def names_of_format(text: object) -> Iterable[str]:
    """Return the names that a format such as `{0.name}` may read; `ALL` if it is not a str."""
    return re.findall(r"\w+", text) if isinstance(text, str) else (ALL,)


def _letter(instruction: dis.Instruction) -> str:
    """Encode an instruction as one letter for `_CONSTANT_GETTER`.

    G is the function `getattr`, v a value, a an attribute, s a string, c a call."""
    name = instruction.opname
    if name in _OF_GLOBALS and instruction.argval in _GETTERS:
        return "G"
    if name == "LOAD_ATTR":
        # NULL marks the lookup of a method to call
        return "." if "NULL" in instruction.argrepr else "a"
    if name == "LOAD_CONST" and isinstance(instruction.argval, str):
        return "s"
    loads = name.startswith("LOAD_") and "_LOAD_" not in name
    return _LETTERS.get(name, "v" if loads else ".")
