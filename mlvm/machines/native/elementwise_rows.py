"""Elementwise ops of compiled kernels: one row per op and kind of dtypes.

`python -m mlvm.machines.native.elementwise_rows` writes `src/plan/kernels/elementwise_ops.def`, a
file that the native kernels include. The GPU's kernels use the rows directly (`gpu_expressions`).
In a result, `{name}` is a function for the dtype, or the C library's function if `_LIBRARY` has it.
`{W}` casts to the type in which the native kernels compute: for integers an unsigned type of at
least 32 bits, so that overflow wraps around.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from mlvm.core.op import OPS
from mlvm.machines.files import write_file

KINDS = BOOL, UNSIGNED, SIGNED, FLOAT = "bool", "unsigned", "signed", "float"
_INTEGERS: Final = UNSIGNED, SIGNED
_NUMBERS: Final = UNSIGNED, SIGNED, FLOAT

FILE: Final = Path(__file__).parent / "src/plan/kernels/elementwise_ops.def"

_LIBRARY: Final = {"fabs": "fabs", "copysign": "copysign"} | {
    name: f"__builtin_{name}" for name in ("floor", "ceil", "rint", "trunc", "sqrt")
}
"""Functions of the C library, by the names in native kernels."""

_OF_SOURCE: Final = frozenset({"greatest", "least", "quotient", "modulus", "log_of_sum"})
"""Functions per dtype that gpu/source/elementwise.h also defines."""


class Row(NamedTuple):
    """Elementwise op for a kind of dtypes.

    `form`: macro of the native kernels; "" for an op that only GPU kernels compute.
    `name`: the op.
    `cost`: approximate nanoseconds per byte of the result, with data in the cache.
    `result`: an expression of x, x and y, or x, y and z.
    `on_gpu`: the expression in GPU kernels, if different.
    """

    form: str
    name: str
    cost: str = ""
    result: str = ""
    on_gpu: str | None = None


def _of(form: str, cost: str, **results: str) -> list[Row]:
    """Return the rows of ops with one form and cost."""
    return [Row(form, name, cost, result) for name, result in results.items()]


def _functions(cost: str, *names: str) -> list[Row]:
    """Return the rows of ops that call a function per dtype."""
    return [Row("UNARY", name, cost, f"{{{name}}}(x)") for name in names]


def _only_on_gpu(**results: str) -> list[Row]:
    return [Row("", name, on_gpu=result) for name, result in results.items()]


SECTIONS: Final[list[tuple[tuple[str, ...], list[Row]]]] = [
    (
        (FLOAT,),
        [
            *_of("STEPPED", "SIMPLE", add="x + y", subtract="x - y", multiply="x * y"),
            *_of("STEPPED", "0.15", divide="x / y"),
        ],
    ),
    (
        _INTEGERS,
        _of("BINARY", "SIMPLE", add="{W}x + {W}y", subtract="{W}x - {W}y", multiply="{W}x * {W}y"),
    ),
    (
        _NUMBERS,
        [
            Row("UNARY", "square", "SIMPLE", "{W}x * {W}x"),
            *_of("BINARY", "SIMPLE", maximum="{greatest}(x, y)", minimum="{least}(x, y)"),
            Row("TERNARY", "clip", "SIMPLE", "{least}({greatest}(x, y), z)"),
            *_only_on_gpu(real="x", conj="x", imag="0"),
        ],
    ),
    (
        _INTEGERS,
        [
            Row("UNARY", "negative", "SIMPLE", "0 - {W}x"),
            *_of("BINARY", "0.4", floor_divide="{quotient}(x, y)", remainder="{modulus}(x, y)"),
            Row("UNARY", "bitwise_invert", "SIMPLE", "~x"),
            Row(
                "BINARY",
                "bitwise_left_shift",
                "SIMPLE",
                "SHORT_SHIFT ? {W}x << y : 0",
                on_gpu="(u64)y < 8 * sizeof(T) ? (u64)x << y : 0",
            ),
            *[Row("SAME", name, result="x") for name in ("floor", "ceil", "round", "trunc")],
            *_only_on_gpu(
                bitwise_right_shift="(u64)y < 8 * sizeof(T) ? x >> y : x < 0 ? -1 : 0",
                pow="power_T(x, y)",
            ),
        ],
    ),
    (
        (UNSIGNED,),
        [
            Row("SAME", "abs", result="x"),
            Row("UNARY", "sign", "SIMPLE", "x > 0"),
            Row("BINARY", "bitwise_right_shift", "SIMPLE", "SHORT_SHIFT ? x >> y : 0"),
        ],
    ),
    (
        (SIGNED,),
        [
            Row("UNARY", "abs", "SIMPLE", "x < 0 ? 0 - {W}x : {W}x"),
            Row("UNARY", "sign", "SIMPLE", "(x > 0) - (x < 0)"),
            Row(
                "BINARY",
                "bitwise_right_shift",
                "SIMPLE",
                "x >> (SHORT_SHIFT ? y : (T)(8 * sizeof x - 1))",
            ),
        ],
    ),
    (
        (FLOAT,),
        [
            *_of("UNARY", "SIMPLE", negative="-x", abs="{fabs}(x)"),
            Row("UNARY", "sign", "SIMPLE", "x > 0 ? 1 : x < 0 ? -1 : x == 0 ? 0 : x", "sign_T(x)"),
            Row("UNARY", "relu", "SIMPLE", "x <= 0 ? 0 : x", "x <= 0 ? (T)0 : x"),
            *_of("UNARY", "SIMPLE", floor="{floor}(x)", ceil="{ceil}(x)", round="{rint}(x)"),
            Row("UNARY", "trunc", "SIMPLE", "{trunc}(x)"),
            Row("TERNARY", "multiply_add", "SIMPLE", "x * y + z"),
            Row("BINARY", "copysign", "SIMPLE", "{copysign}(x, y)"),
            *_of("PREDICATE", "SIMPLE", signbit="__builtin_signbit(x) != 0", isnan="x != x"),
            *_of("PREDICATE", "SIMPLE", isinf="{fabs}(x) == (T)INFINITY"),
            *_of("PREDICATE", "SIMPLE", isfinite="{fabs}(x) < (T)INFINITY"),
            *_of("UNARY", "0.15", reciprocal="1 / x", sqrt="{sqrt}(x)", rsqrt="1 / {sqrt}(x)"),
            *_functions("0.15", "log", "log1p", "log2", "log10"),
            *_functions("0.2", "exp", "expm1", "tanh"),
            Row("UNARY", "sigmoid", "0.2", "{sigmoid}(x)", "1 / (1 + exp(-x))"),
            *_functions("0.2", "erf", "gelu_tanh", "gelu_erf", "gelu_tanh_slope", "gelu_erf_slope"),
            Row("PAIR", "gelu_tanh", "0.2", "{gelu_tanh}(x), {gelu_tanh_slope}(x)"),
            Row("PAIR", "gelu_erf", "0.2", "{gelu_erf}(x), {gelu_erf_slope}(x)"),
            Row("BINARY", "logaddexp", "0.35", "{log_of_sum}(x, y)"),
            Row("OWN_LOOP", "sin", "0.3", on_gpu="sin(x)"),
            Row("OWN_LOOP", "cos", "0.3", on_gpu="cos(x)"),
            Row("OWN_LOOP", "tan", "0.4", on_gpu="tan(x)"),
            Row("OWN_LOOP", "floor_divide", "0.4", on_gpu="quotient_T(x, y)"),
            Row("OWN_LOOP", "remainder", "0.4", on_gpu="modulus_T(x, y)"),
            Row("BINARY", "pow", "1.5", "{power}(x, y)", "pow(x, y)"),
            *_only_on_gpu(asin="asin(x)", acos="acos(x)", atan="atan(x)", sinh="sinh(x)"),
            *_only_on_gpu(cosh="cosh(x)", asinh="asinh(x)", acosh="acosh(x)", atanh="atanh(x)"),
            *_only_on_gpu(atan2="atan2(x, y)", hypot="hypot(x, y)", nextafter="nextafter(x, y)"),
        ],
    ),
    (
        (BOOL,),
        [
            Row("COMPARISON", "logical_and", "SIMPLE", "(x != 0) & (y != 0)"),
            Row("COMPARISON", "logical_or", "SIMPLE", "(x | y) != 0"),
            Row("COMPARISON", "logical_xor", "SIMPLE", "(x != 0) ^ (y != 0)"),
            *_of("PREDICATE", "SIMPLE", logical_not="x == 0", bitwise_invert="x == 0"),
        ],
    ),
    (
        (BOOL, UNSIGNED, SIGNED),
        _of("BINARY", "SIMPLE", bitwise_and="x & y", bitwise_or="x | y", bitwise_xor="x ^ y"),
    ),
    (
        KINDS,
        [
            *_of("COMPARISON", "SIMPLE", equal="x == y", not_equal="x != y", less="x < y"),
            *_of("COMPARISON", "SIMPLE", less_equal="x <= y", greater="x > y"),
            *_of("COMPARISON", "SIMPLE", greater_equal="x >= y"),
        ],
    ),
]
"""The rows in file order; each group has a tuple of kinds of dtypes."""


class _Native(dict[str, str]):
    """Function names in native kernels."""

    def __missing__(self, name: str) -> str:
        return f"MATH({_LIBRARY[name]})" if name in _LIBRARY else f"OF({name})"


class _Gpu(dict[str, str]):
    """Function names in GPU kernels."""

    def __missing__(self, name: str) -> str:
        return f"{name}_T" if name in _OF_SOURCE else name


def gpu_expressions() -> dict[str, dict[str, str]]:
    """Return the expressions of ops in GPU kernels, for each kind of dtypes."""
    own: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    others: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for kinds, rows in SECTIONS:
        for row in rows:
            for kind in kinds if row.name in OPS else ():
                if row.on_gpu is not None:
                    own[kind][row.name] = row.on_gpu
                else:
                    others[kind][row.name] = row.result.format_map(_Gpu(W=""))
    return {kind: others[kind] | own[kind] for kind in KINDS}


_HEAD: Final = """\
/* Generated by `python -m mlvm.machines.native.elementwise_rows`: edit the rows there.
 *
 * A row for each elementwise op: UNARY(op, cost, result) with a result computed from x, BINARY from
 * x and y (STEPPED if it is a row function with steps), TERNARY from x, y and z. A PREDICATE of x
 * and a COMPARISON of x and y have bool results. SAME is x itself, and a PAIR writes two results.
 * The loop of an OWN_LOOP(op, cost) is in elementwise.c.
 *
 * The file is included for each dtype. DT is the name, T the C type, W the type of the computation,
 * SIZE the number of bytes, KIND one of BOOL, UNSIGNED, SIGNED, FLOAT. OF(f) is the function f for
 * the dtype, MATH(f) the function of the C library. */
"""
_TAIL: Final = "\n#undef DT\n#undef T\n#undef W\n#undef SIZE\n"


def _require_single_rows() -> None:
    """Raise `ValueError` if two rows define the same native function."""
    keys: set[tuple[str, str, bool]] = set()
    for kinds, rows in SECTIONS:
        for row in rows:
            for kind in kinds if row.form else ():
                key = row.name, kind, row.form == "PAIR"
                if key in keys:
                    raise ValueError(
                        f"expected one row of {row.name} for {kind} dtypes, got several; "
                        "remove one from SECTIONS"
                    )
                keys.add(key)


def native_rows() -> str:
    """Return the text of the file that the native kernels include.

    Raises `ValueError` if an op has two rows for the same kind of dtypes.
    """
    _require_single_rows()
    parts = [_HEAD]
    for kinds, rows in SECTIONS:
        lines = []
        for form, name, cost, result, _ in rows:
            value = "" if form == "SAME" else result.format_map(_Native(W="(W)"))
            lines += [f"{form}({', '.join(filter(None, (name, cost, value)))})"] if form else []
        if kinds != KINDS:
            lines.insert(0, "#if " + " || ".join(f"KIND == {kind.upper()}" for kind in kinds))
            lines.append("#endif")
        parts.append("\n".join(["", *lines, ""]))
    return "".join([*parts, _TAIL])


if __name__ == "__main__":
    write_file(FILE, native_rows())
