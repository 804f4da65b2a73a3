"""What CuPy has, as the fake needs it: printed by a Python that has CuPy installed (no GPU needed).

    pip install cupy-cuda12x==14.2.0
    python tests/machines/make_cupy_api.py > tests/machines/cupy_api.json

`ufuncs`: how many operands and results, the types of each loop in CuPy's order, which of the
methods `reduce accumulate reduceat at` compute, and the loops for a given `dtype` where they are
others. What has methods was read from the sources (`cupy/_core/_kernel.pyx`, `class ufunc`).
`functions`, `methods`: the parameters, where `=` marks those that may be left out; of `ndarray`
they are read from the first lines of docstrings, where Cython writes them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import Any

from numpy import dtype

MODULES = ("", "linalg", "fft", "lib.stride_tricks")
REDUCE = {"add": ["reduce", "accumulate", "reduceat"], "multiply": ["reduce", "accumulate"]}


def of_signature(signature: inspect.Signature) -> str:
    """`a, axis=, *, dtype=`"""
    words, star = [], False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        mark = "*" if each.kind is each.VAR_POSITIONAL else ""
        mark = "**" if each.kind is each.VAR_KEYWORD else mark
        words.append(mark + each.name + ("=" if each.default is not each.empty else ""))
    return ", ".join(words)


def of_docstring(text: str) -> str | None:
    """The same of `_ndarray_base.sort(self, int axis=-1, kind=None)`."""
    match = re.match(r"_ndarray_base\.\w+\(self,? ?(.*?)\)( ->|$)", text.split("\n")[0])
    if match is None:
        return None
    words = []
    for each in filter(None, match[1].split(", ")):
        name, equals, _ = each.partition("=")
        words.append(name.split()[-1] + equals)
    return ", ".join(words)


def loop(op: Any) -> str:
    """`ff->f`, from how a loop prints itself."""
    given, made = re.findall(r"\(((?:dtype\('\w+'\)(?:, |,)?)+)\)", repr(op))[:2]
    chars = [[dtype(n).char for n in re.findall(r"'(\w+)'", part)] for part in (given, made)]
    return "->".join("".join(each) for each in chars)


def table(cupy: Any) -> dict[str, Any]:
    ufuncs, functions, methods = {}, {}, {}
    for name in dir(cupy):
        found = getattr(cupy, name)
        if isinstance(found, cupy.ufunc):
            own = found.name.removeprefix("cupy_")
            able = REDUCE.get(own, []) + ["at"] * (found._scatter_op is not None)
            with_dtype = found._out_ops
            ufuncs[name] = [
                *(found.nin, found.nout, " ".join(found.types), " ".join(able)),
                "" if with_dtype is None else " ".join(map(loop, with_dtype.ops)),
            ]
    special = importlib.import_module("cupyx.scipy.special")
    ufuncs["special.erf"] = [1, 1, " ".join(special.erf.types), "", ""]
    for module in MODULES:
        room = importlib.import_module(f"cupy.{module}") if module else cupy
        for name in dir(room):
            found = getattr(room, name)
            if inspect.isfunction(found) and not name.startswith("_"):
                full = f"{module}.{name}" if module else name
                functions[full] = of_signature(inspect.signature(found))
    functions["matmul"] = "*args, " + of_signature(
        inspect.signature(type(cupy.matmul).__call__)
    ).removeprefix("self, *args, ")
    for name in dir(cupy.ndarray):
        found = getattr(cupy.ndarray, name)
        if callable(found) and not name.startswith("_"):
            written = of_docstring(found.__doc__ or "")
            if written is None:
                written = of_signature(inspect.signature(found)).removeprefix("self, ")
            methods[name] = written
    attributes = [name for name in dir(cupy.ndarray) if not name.startswith("_")]
    return {
        "version": cupy.__version__,
        "ufuncs": ufuncs,
        "functions": functions,
        "methods": methods,
        "attributes": " ".join(sorted(set(attributes) - set(methods))),
    }


def text(table: dict[str, Any]) -> str:
    """One entry a line."""
    parts = []
    for name, value in table.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f"{json.dumps(name)}: {{\n{lines}\n }}")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{" + ",\n ".join(parts) + "}"


if __name__ == "__main__":
    print(text(table(importlib.import_module("cupy"))))
