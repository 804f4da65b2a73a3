"""Path of the running layer, determined from the call stack, for error messages."""

from __future__ import annotations

import os
import sys
import weakref
from inspect import CO_OPTIMIZED
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

from mlvm.core.errors import OURS, MlvmError, user_line
from mlvm.eager.nn.module import Module
from mlvm.eager.recording import lines
from mlvm.eager.recording.recorder import current_recorder
from mlvm.eager.tree import named_nodes, noting_flattened

Paths: TypeAlias = dict[
    tuple[int, int], tuple[tuple[weakref.ref[Any], weakref.ref[Any]], str | None]
]
"""Paths of Modules within other Modules, by the ids of both, with references to both."""

_OTHERS: Final[dict[int, weakref.ref[CodeType]]] = {}
"""Code objects that are not methods of Modules, by id.

Reading the variables of a frame and hashing a code object are slow."""


def layer_here() -> str | None:
    """Return the path of the innermost running Module in the outermost Module that contains it.

    Return None if the innermost Module is itself the outermost. If it is not a submodule of the
    calling Module, for example a copy in a different dtype, the path begins with the class."""
    frame: FrameType | None = sys._getframe(1)
    at_work: list[Module] = []
    while frame is not None:
        if id(frame.f_code) not in _OTHERS:
            owner = _owner_of(frame)
            if isinstance(owner, Module) and (not at_work or owner is not at_work[-1]):
                at_work.append(owner)
        frame = frame.f_back
    recorder = current_recorder()
    paths: Paths = {} if recorder is None else recorder.scopes.layer_paths
    names: list[str] = []
    for outer, inner in pairwise(reversed(at_work)):
        path = _path_of(inner, outer, paths)
        names = [type(inner).__name__] if path is None else [*names, path]
    return "/".join(names) or None


def _path_of(inner: Module, outer: Module, paths: Paths) -> str | None:
    """Return the path of a Module within an outer Module, which is searched once per recording."""
    key = id(inner), id(outer)
    modules, path = paths.get(key, (None, None))
    if modules is None or modules[0]() is not inner or modules[1]() is not outer:
        with noting_flattened(None):  # a path does not affect the result
            nodes = [(None, inner), *named_nodes(outer)]
        for each, part in nodes:
            paths[id(part), id(outer)] = (weakref.ref(part), weakref.ref(outer)), each
        path = paths[key][1]
    return path


def _owner_of(frame: FrameType) -> Any:
    """Return the `self` of a method's frame, if the first parameter has that name."""
    code = frame.f_code
    if not (code.co_argcount and code.co_varnames[0] == "self" and code.co_flags & CO_OPTIMIZED):
        _pass_over(code)
        return None
    variables = frame.f_locals
    owner = variables.get("self")
    traced = frame.f_trace is not None or sys.gettrace() is not None
    if type(variables) is dict and not traced:
        variables.clear()  # before Python 3.13 this is a copy, which would keep all variables alive
    if not isinstance(owner, Module) and OURS.get(code.co_filename):
        _pass_over(code)
    return owner


def _pass_over(code: CodeType) -> None:
    number = id(code)
    _OTHERS[number] = weakref.ref(code, lambda _: _OTHERS.pop(number, None))


def _with_layer(error: MlvmError, *args: object) -> None:
    """Construct an error; inside a model, add a note with the path of the layer."""
    super(MlvmError, error).__init__(*args)
    layer = layer_here()
    if layer is not None:
        error.add_note(f"in {layer}, {os.path.basename(user_line() or '')}")


lines.layer_here = layer_here
MlvmError.__init__ = _with_layer  # type: ignore[method-assign,assignment]
