"""Which layer of a model is at work, for errors: its path, told of the calls that led here."""

from __future__ import annotations

import os
import sys
from inspect import CO_OPTIMIZED
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, Final

from mlvm.core.errors import OURS, MlvmError, user_line
from mlvm.eager.nn.module import Module
from mlvm.eager.recording import lines
from mlvm.eager.tree import named_nodes

_OTHERS: Final[dict[int, CodeType]] = {}
"""Functions of mlvm that are no methods of Modules, by id: to look at a frame's variables takes
long, and to hash a code object, too."""


def layer_here() -> str | None:
    """The path of the innermost Module that is at work, from the outermost one that it is a part
    of; None where it is that one. Of one that is no part of what called it, such as a copy that is
    made of another dtype, the path begins with its class."""
    frame: FrameType | None = sys._getframe(1)
    at_work: list[Module] = []
    while frame is not None:
        if id(frame.f_code) not in _OTHERS:
            owner = _owner_of(frame)
            if isinstance(owner, Module) and (not at_work or owner is not at_work[-1]):
                at_work.append(owner)
        frame = frame.f_back
    names: list[str] = []
    for outer, inner in pairwise(reversed(at_work)):
        path = next((path for path, part in named_nodes(outer) if part is inner), None)
        names = [type(inner).__name__] if path is None else [*names, path]
    return "/".join(names) or None


def _owner_of(frame: FrameType) -> Any:
    """The object whose method this is, if its first parameter is called self."""
    code = frame.f_code
    if not (code.co_argcount and code.co_varnames[0] == "self" and code.co_flags & CO_OPTIMIZED):
        _pass_over(code)
        return None
    variables = frame.f_locals
    owner = variables.get("self")
    traced = frame.f_trace is not None or sys.gettrace() is not None
    if type(variables) is dict and not traced:
        variables.clear()  # a copy, until Python 3.12, which would keep all variables alive
    if not isinstance(owner, Module):
        _pass_over(code)
    return owner


def _pass_over(code: CodeType) -> None:
    if OURS.get(code.co_filename):  # which is a file's, and stays
        _OTHERS[id(code)] = code


def _with_layer(error: MlvmError, *args: object) -> None:
    """The constructor of errors: one from inside a model has a note with the path of the layer."""
    super(MlvmError, error).__init__(*args)
    layer = layer_here()
    if layer is not None:
        error.add_note(f"in {layer}, {os.path.basename(user_line() or '')}")


lines.layer_here = layer_here
MlvmError.__init__ = _with_layer  # type: ignore[method-assign,assignment]
