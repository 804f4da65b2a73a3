"""Which layer of a model is at work, for errors: its path, told of the calls that led here."""

from __future__ import annotations

import sys
from collections import deque
from inspect import CO_OPTIMIZED
from itertools import pairwise
from types import FrameType
from typing import Any

from mlvm.core import errors
from mlvm.eager.nn.module import Module
from mlvm.eager.tree import Node, fields, holds_tensors


def layer_here() -> str | None:
    """The path of the innermost Module that is at work, from the outermost one that it is a part
    of; None where it is that one. Of one that is no part of what called it, such as a copy that is
    made of another dtype, the path begins with its class."""
    frame: FrameType | None = sys._getframe(1)
    at_work: list[Module] = []
    while frame is not None:
        owner = _owner_of(frame)
        if isinstance(owner, Module) and (not at_work or owner is not at_work[-1]):
            at_work.append(owner)
        frame = frame.f_back
    names: list[str] = []
    for outer, inner in pairwise(reversed(at_work)):
        path = _path_to(outer, inner)
        names = [type(inner).__name__] if path is None else [*names, path]
    return "/".join(names) or None


def _owner_of(frame: FrameType) -> Any:
    """The object whose method this is, if its first parameter is called self."""
    code = frame.f_code
    if not (code.co_argcount and code.co_varnames[0] == "self" and code.co_flags & CO_OPTIMIZED):
        return None
    variables = frame.f_locals
    owner = variables.get("self")
    traced = frame.f_trace is not None or sys.gettrace() is not None
    if type(variables) is dict and not traced:
        variables.clear()  # a copy, until Python 3.12, which would keep all variables alive
    return owner


def _path_to(outer: Module, inner: Module) -> str | None:
    """The shortest path from a Module to a part of it; None if it is no part."""
    left: deque[tuple[str, Any]] = deque([("", outer)])
    seen = {id(outer)}
    while left:
        path, part = left.popleft()
        if isinstance(part, Node):
            named: Any = fields(part, buffers=True)
        else:
            named = part.items() if isinstance(part, dict) else enumerate(part)
        for name, child in named:
            here = f"{path}/{name}" if path else str(name)
            if child is inner:
                return here
            if id(child) not in seen and _may_hold_layers(child):
                seen.add(id(child))
                left.append((here, child))
    return None


def _may_hold_layers(part: object) -> bool:
    return isinstance(part, (dict, list, tuple, Node)) and holds_tensors(part)


errors.layer_here = layer_here
