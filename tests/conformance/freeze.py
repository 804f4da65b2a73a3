"""Writes `standard.json`: what of the standard our own tests check without a checkout of its tests.

- `signatures`: the names of the standard, each with its parameters as it writes them;
- `promotions`: two dtypes, and the one that they promote to;
- `special`: for each special value that the standard speaks of, arguments that meet the condition
  and a result that the standard's own tests accept. They are asked here, when it is written.

    python -m tests.conformance.freeze ../array-api-tests
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mlvm.eager as ml

FROZEN: Final = Path(__file__).with_name("standard.json")

_REALS: Final = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -3.0, 4.0)
_PER_CASE: Final = 3
"""Arguments for each condition."""


def main() -> None:
    """Write the file. Raises `SystemExit` if ours gives a result that is not accepted."""
    parser = argparse.ArgumentParser("python -m tests.conformance.freeze", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=Path, help="a checkout of array-api-tests")
    sys.path.insert(0, str(parser.parse_args().checkout.resolve()))
    importlib.import_module("tests.suites.with_array_api")
    with warnings.catch_warnings(action="ignore"):
        stubs = importlib.import_module("array_api_tests.stubs")
        dtypes = importlib.import_module("array_api_tests.dtype_helpers")
        tests = importlib.import_module("array_api_tests.test_special_cases")
    frozen = {
        "version": os.environ["ARRAY_API_TESTS_VERSION"],
        "signatures": _signatures(stubs),
        "promotions": sorted([*pair, z] for pair, z in dtypes._promotion_table.items()),
        "special": _special(tests),
    }
    lines = [f'"version": {json.dumps(frozen["version"])}']
    for part in ("signatures", "promotions", "special"):
        entries: Any = frozen[part]
        if isinstance(entries, dict):
            body = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in entries.items()]
            lines.append(f'"{part}": {{\n' + ",\n".join(body) + "\n}")
        else:
            lines.append(f'"{part}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]")
    FROZEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{FROZEN}: {len(lines)} parts, {len(entries)} special values")


def _signatures(stubs: Any) -> dict[str, list[list[str]]]:
    """By name, such as `add`, `linalg.det` or `Tensor.__add__`: names and kinds of parameters."""
    categories = stubs.category_to_funcs.items()
    named = {f.__name__: f for _, functions in categories for f in functions}
    named |= {f"Tensor.{f.__name__}": f for f in stubs.array_methods}
    for extension, functions in stubs.extension_to_funcs.items():
        named |= {f"{extension}.{f.__name__}": f for f in functions}
    return {
        name: [[p.name, p.kind.name] for p in inspect.signature(named[name]).parameters.values()]
        for name in sorted(named)
    }


def _special(tests: Any) -> list[list[Any]]:
    """Function, arguments, result; a complex number is a list of two."""
    entries: dict[str, list[Any]] = {}
    refused = []
    for name, arguments, accepts in itertools.chain(_unary(tests), _binary(tests)):
        operands = [ml.asarray(x, dtype=_dtype(x)) for x in arguments]
        result = getattr(ml, name)(*operands).item()
        if not accepts(*arguments, result):
            refused.append(f"{name}{arguments} = {result}")
        entry = [name, [_plain(x) for x in arguments], _plain(result)]
        entries.setdefault(json.dumps(entry), entry)
    if refused:
        raise SystemExit("the standard does not accept\n    " + "\n    ".join(refused))
    return list(entries.values())


def _unary(tests: Any) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    complexes = [complex(x, y) for x in _REALS for y in _REALS]
    for parameters in tests.unary_params:
        name, _, case = parameters.values
        if not name.startswith("__"):
            pool: Any = complexes if case.is_complex else _REALS
            for x in [x for x in pool if case.cond(x)][:_PER_CASE]:
                yield name, (x,), case.check_result


def _binary(tests: Any) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    pairs = list(itertools.product(_REALS, _REALS))
    for parameters in tests.binary_params:
        name, _, case = parameters.values
        if not name.startswith("__"):
            for pair in [pair for pair in pairs if case.cond(*pair)][:_PER_CASE]:
                yield name, pair, case.check_result


def _dtype(x: Any) -> Any:
    return ml.complex128 if isinstance(x, complex) else ml.float64


def _plain(x: Any) -> Any:
    return [x.real, x.imag] if isinstance(x, complex) else x


if __name__ == "__main__":
    main()
