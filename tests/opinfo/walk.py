"""One sample of an operator: computed by PyTorch and by mlvm, and compared."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import gradcheck_wrapper_hermitian_input
from torch.utils._pytree import tree_leaves, tree_map

import mlvm.eager as ml
from mlvm.eager.tree import replace
from tests.opinfo.adapters import COMPARED
from tests.opinfo.names import Entry, Refusals

DTYPES: Final[dict[str, Any]] = {
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "i64": torch.int64,
    "bool": torch.bool,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Those that are walked."""

_ALL: Final[dict[Any, str]] = {
    **{value: name for name, value in DTYPES.items()},
    torch.complex128: "c128",
    **{getattr(torch, f"int{n}"): f"i{n}" for n in (8, 16, 32)},
    **{getattr(torch, f"uint{n}"): f"u{n}" for n in (8, 16, 32, 64)},
}
_TOLERANCE: Final = {"f64": 1e-9, "c128": 1e-9, "f16": 4e-3, "bf16": 3e-2}
_CHOSEN: Final = ("chosen", "first")
"""Results of which equal elements may be chosen. There are many in the dtypes of `_FEW`."""

_FEW: Final = (torch.bool, torch.float16, torch.bfloat16)

_PACKAGE: Final = str(Path(ml.__file__).parents[1])

_NOT_OURS: Final = {"device", "layout", "memory_format", "pin_memory", "requires_grad"}


@dataclass
class Outcome:
    """Outcome of a sample. `what` is "value", "gradient", "captured", or "error" of input that
    PyTorch refuses; `verdict` is "right", "refused", "wrong", "raw" or "skipped"."""

    name: str
    variant: str
    dtype: str
    number: int
    what: str
    verdict: str
    text: str = ""
    sample: str = ""

    @classmethod
    def of(
        cls, op: Any, dtype: str, number: int, what: str, verdict: str, text: str, *, sample: Any
    ) -> Outcome:
        shown = "" if verdict in ("right", "refused") else sample.summary()
        return cls(op.name, op.variant_test_name, dtype, number, what, verdict, text, shown)


@dataclass
class Walk:
    """A walk over samples: what is to be tried of each."""

    refusals: Refusals = field(default_factory=Refusals)
    samples: int | None = None
    gradients: bool = True
    captured: bool = False

    def of(self, op: Any, entry: Entry, dtype: str) -> Iterator[Outcome]:
        """The outcomes of an operator's samples in a dtype, if it has that."""
        if DTYPES[dtype] not in op.supported_dtypes("cpu"):
            return
        differentiable = (
            self.gradients
            and op.supports_autograd
            and DTYPES[dtype] in op.supported_backward_dtypes("cpu")
        )
        _seed()
        try:
            with warnings.catch_warnings(action="ignore"):
                inputs = op.sample_inputs("cpu", DTYPES[dtype], requires_grad=differentiable)
                samples = list(islice(inputs, self.samples))
        except Exception as error:
            text = f"PyTorch makes no samples: {_message(error)}"
            yield Outcome(op.name, op.variant_test_name, dtype, 0, "value", "skipped", text)
            return
        for number, sample in enumerate(samples):
            for verdict in self._one(op, entry, dtype, sample, differentiable):
                yield Outcome.of(op, dtype, number, *verdict, sample=sample)

    def errors(self, op: Any, entry: Entry) -> Iterator[Outcome]:
        """The outcomes of what PyTorch refuses: a value, or an error of ours."""
        if op.error_inputs_func is None:
            return
        _seed()
        for number, each in enumerate(op.error_inputs("cpu")):
            sample = each.sample_input
            verdict = _refused(entry, (sample.input, sample.args, sample.kwargs))
            yield Outcome.of(op, "", number, "error", *verdict, sample=sample)

    def _one(
        self, op: Any, entry: Entry, dtype: str, sample: Any, differentiable: bool
    ) -> Iterator[tuple[str, str, str]]:
        value = sample.input
        if _reads_half(op):
            value = (value + value.mH).detach().requires_grad_(value.requires_grad)
        arguments = (value, sample.args, sample.kwargs)
        expected, refused = _by_torch(op, entry, arguments)
        if refused:
            yield "value", "skipped", refused
            return
        try:
            call = _Call(entry, arguments)
        except _NoSuchType as error:
            yield "value", "skipped", str(error)
            return
        verdict, text, values = self._tried(op, entry, lambda: call(call.tensors))
        if verdict:
            yield "value", verdict, text
            return
        missing = [x.dtype for x in _flat(expected) if _is_unknown(x)]
        if missing:
            yield "value", "skipped", _no_such(missing[0])
            return
        is_narrow = DTYPES[dtype] in _FEW
        difference = _difference(values, expected, entry, narrow=is_narrow)
        if difference:
            wide = _by_torch(op, entry, _wide(arguments))[0]
            if wide is None or _difference(values, wide, entry, like=expected, narrow=is_narrow):
                other = self.refusals.differs.get(f"{op.name} {dtype}")
                yield "value", *(("skipped", other) if other else ("wrong", difference))
                return
        yield "value", "right", ""
        if self.captured:
            yield "captured", *self._as_captured(op, entry, call, values)
        if differentiable and entry.compared != "type":
            yield from self._gradient(op, entry, dtype, call, arguments)

    def _tried(self, op: Any, entry: Entry, run: Callable[[], Any]) -> tuple[str, str, Any]:
        """The verdict and its reason if the call raises; else the result."""
        try:
            with warnings.catch_warnings(action="ignore"):
                return "", "", run()
        except Exception as error:
            reason = self.refusals.reason(op.name, error)
            if reason is not None:
                return "refused", reason, None
            if isinstance(error, ml.errors.MlvmError):
                return "wrong", f"refused without a reason in refused.toml: {_message(error)}", None
            return "raw", _message(error), None

    def _as_captured(self, op: Any, entry: Entry, call: _Call, values: list[Any]) -> Any:
        """Compare the captured call's bits with the eager ones, twice."""
        if entry.compared == "type":
            return "skipped", "random"
        captured = call.captured()
        for _ in range(2):
            verdict, text, again = self._tried(op, entry, lambda: captured(call.tensors))
            if verdict:
                return verdict, text
            again = _flat(again)
            tensors = [x for x in _flat(values) if isinstance(x, ml.Tensor)]
            if not all(map(_same_bits, tensors, again)):
                return "wrong", "captured is not eager, to the bit"
        return "right", ""

    def _gradient(
        self, op: Any, entry: Entry, dtype: str, call: _Call, arguments: Any
    ) -> Iterator[tuple[str, str, str]]:
        expected = _gradients_by_torch(op, entry, arguments)
        if not expected or not call.variables:
            return
        other = self.refusals.gradients.get(op.name)
        if other is None and expected[0].dtype in _FEW:
            other = self.refusals.gradients_of_halves.get(op.name)
        if entry.compared in _CHOSEN and expected[0].dtype in _FEW:
            other = "which of equal elements it is may differ"
        if other is not None:
            yield "gradient", "skipped", other
            return
        weights = _weights(entry, call(call.tensors))
        verdict, text, gradients = self._tried(op, entry, lambda: call.gradients(weights, entry))
        if not verdict:
            least = self.refusals.tolerance.get(f"{op.name} {dtype}", 0.0)
            part = "hermitian_gradient" if _reads_half(op) else None
            if op.name == "cholesky_solve":  # which reads a half of the second operand
                part = "of_upper" if arguments[2].get("upper") else "of_lower"
            text = _difference(gradients, expected, part, rounded=True, least=least)
            if text:
                wide = _gradients_by_torch(op, entry, _wide(arguments))
                if wide and not _difference(
                    gradients, wide, part, like=expected, rounded=True, least=least
                ):
                    text = ""
            verdict = "wrong" if text else "right"
        yield "gradient", verdict, text


def _refused(entry: Entry, arguments: Any) -> tuple[str, str]:
    """The verdict on arguments that PyTorch refuses, and its reason. What adapters and expressions
    raise themselves is none of ours."""
    try:
        call = _Call(entry, arguments)
    except Exception as error:
        return "skipped", f"no arguments of ours: {type(error).__name__}"
    try:
        with warnings.catch_warnings(action="ignore"):
            call(call.tensors)
    except ml.errors.MlvmError:
        return "refused", "PyTorch refuses it, too"
    except Exception as error:
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
        if any(file.startswith(_PACKAGE) for file in files):
            return "raw", _message(error)
        return "skipped", "the adapter refuses it"
    return "right", ""


class _NoSuchType(Exception):
    """A dtype that is not here."""


class _Call:
    """A call of ours, with the arguments of a sample of PyTorch's: the tensors among them, and
    which of these are variables."""

    def __init__(self, entry: Entry, arguments: Any) -> None:
        self.entry = entry
        self.tensors: list[Any] = []
        self.variables: list[int] = []
        value, args, keywords = arguments
        known_here = {name: each for name, each in keywords.items() if name not in _NOT_OURS}
        self.pattern = tree_map(self._as_ours, (value, args, known_here))

    def _as_ours(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                self.variables.append(len(self.tensors))
            self.tensors.append(ours(value))
            return _Place(len(self.tensors) - 1)
        return _dtype(value) if isinstance(value, torch.dtype) else value

    def __call__(self, tensors: list[Any]) -> Any:
        value, args, keywords = _filled(self.pattern, tensors)
        return self.entry.call(value, *args, **keywords)

    def captured(self) -> Any:
        """The call, captured: a function of the tensors to those of the result."""
        function, pattern = self.entry.call, self.pattern

        def call(tensors: list[Any]) -> Any:
            value, args, keywords = _filled(pattern, tensors)
            results = ml.tree.leaves(function(value, *args, **keywords))
            return [x for x in results if type(x) is ml.Tensor]

        return ml.capture(call)

    def gradients(self, weights: list[Any], entry: Entry) -> list[Any]:
        """Those of the weighted sum of all results."""

        def loss(variables: list[Any]) -> Any:
            tensors = [*self.tensors]
            for place, x in zip(self.variables, variables, strict=True):
                tensors[place] = x
            total: Any = 0.0
            for x, weight in zip(_inexact(entry, self(tensors)), weights, strict=True):
                wide = x.astype(ml.float32) if x.dtype.is_half else x
                product = wide * ml.conj(ml.asarray(weight)) if _complex(x) else wide * weight
                total = total + ml.sum(ml.real(product) if _complex(x) else product)
            return total

        gradients = ml.grad(loss)([self.tensors[i] for i in self.variables])
        return list(gradients)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor of the arguments."""

    number: int


def _filled(pattern: Any, tensors: list[Any]) -> Any:
    return replace(lambda place: tensors[place.number], pattern, _Place)


def _dtype(value: Any) -> Any:
    if value not in _ALL:
        raise _NoSuchType(_no_such(value))
    return ml.result_type(_ALL[value])


def _reads_half(op: Any) -> bool:
    """Return whether the operator reads one triangle of a Hermitian matrix. Its samples are made
    so, and where the gradient stands, above or below, is no matter."""
    return (
        op.gradcheck_wrapper is gradcheck_wrapper_hermitian_input
        or op.name in ("linalg.eigh", "linalg.eigvalsh")
        or "hermitian" in op.variant_test_name
    )


def _is_unknown(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype not in _ALL


def _no_such(dtype: Any) -> str:
    return f"there is no {str(dtype).removeprefix('torch.')} here"


def ours(x: Any) -> Any:
    """The tensor of ours with the elements of PyTorch's."""
    return ml.asarray(_numpy(x), dtype=_dtype(x.dtype))


def _numpy(x: Any) -> Any:
    x = x.detach().resolve_conj().resolve_neg()
    return (x.float() if x.dtype is torch.bfloat16 else x).contiguous().numpy()


# --- PyTorch's side ----------------------------------------------------------------------


def operators(name: str | None = None) -> list[Any]:
    """OpInfo's operators, of that name or all."""
    return [op for op in op_db if name in (None, op.name)]


def _by_torch(op: Any, entry: Entry, arguments: Any) -> tuple[Any, str]:
    """The results, or why there are none."""
    value, args, keywords = arguments
    _seed()
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            return op(_fresh(value), *_fresh(args), **_fresh(keywords)), ""
    except Exception as error:
        return None, f"PyTorch refuses it: {_message(error)}"


def _fresh(arguments: Any) -> Any:
    """The arguments again: some operators write to theirs."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, arguments)


def _wide(arguments: Any) -> Any:
    """The arguments in f64 and c128."""

    def widened(x: Any) -> Any:
        if not _is_inexact(x):
            return x
        wide = torch.complex128 if x.is_complex() else torch.float64
        return x.detach().to(wide).requires_grad_(x.requires_grad)

    return tree_map(widened, arguments)


def _gradients_by_torch(op: Any, entry: Entry, arguments: Any) -> list[Any]:
    """The gradients of the weighted sum of all results; nothing if there are none."""
    value, args, keywords = arguments
    _seed()
    try:
        with warnings.catch_warnings(action="ignore"):
            results = op(value, *args, **keywords)
            inexact = _inexact(entry, results)
            weights = [
                torch.as_tensor(w).to(x.dtype)
                for w, x in zip(_weights(entry, results), inexact, strict=True)
            ]
            chosen = [(x, w) for x, w in zip(inexact, weights, strict=True) if x.requires_grad]
            tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
            variables = [x for x in tensors if x.requires_grad]
            if not chosen or not variables:
                return []
            gs = torch.autograd.grad(
                [x for x, _ in chosen], variables, [w for _, w in chosen], allow_unused=True
            )
    except Exception:
        return []
    return [torch.zeros_like(x) if g is None else g for x, g in zip(variables, gs, strict=True)]


# --- both --------------------------------------------------------------------------------


def _inexact(entry: Entry, results: Any) -> list[Any]:
    """The floats and complex numbers among the results that are compared."""
    return [x for x in _compared(entry, results) if _is_inexact(x)]


def _is_inexact(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return bool(x.is_floating_point() or x.is_complex())
    return isinstance(x, ml.Tensor) and bool(x.dtype.is_inexact)


def _complex(x: Any) -> bool:
    return bool(x.is_complex()) if isinstance(x, torch.Tensor) else x.dtype.kind == "complex"


def _weights(entry: Entry, results: Any) -> list[Any]:
    """A number for each element of the results, the same in both libraries."""
    ws = []
    for number, x in enumerate(_inexact(entry, results)):
        generator = np.random.default_rng(number)
        weight = generator.uniform(0.5, 1.5, tuple(x.shape))
        narrow = (
            np.float64
            if _ALL.get(x.dtype, getattr(x.dtype, "name", "")) in ("f64", "c128")
            else np.float32
        )
        if _complex(x):
            weight = weight + 1j * generator.uniform(0.5, 1.5, tuple(x.shape))
            ws.append(np.asarray(weight, np.complex128 if narrow is np.float64 else np.complex64))
        else:
            ws.append(np.asarray(weight, narrow))
    return ws


def _compared(entry: Entry | str | None, results: Any) -> list[Any]:
    """Return the parts of the results that are compared."""
    name = entry.compared if isinstance(entry, Entry) else entry
    return _flat(results if name in (None, "type") else COMPARED[name](results))


_flat: Final[Callable[[Any], list[Any]]] = tree_leaves


def _difference(
    results: Any,
    expected: Any,
    entry: Entry | str | None,
    like: Any = None,
    *,
    rounded: bool = False,
    narrow: bool = False,
    least: float = 0.0,
) -> str:
    """The first difference, or nothing. `like` are narrower results, whose types are expected.
    Halves that were `rounded` on the way differ by more; `least` is the least tolerance."""
    actual, reference = _compared(entry, results), _compared(entry, expected)
    kinds = reference if like is None else _compared(entry, like)
    if len(actual) != len(reference):
        return f"{len(actual)} results, not {len(reference)}"
    for number, (x, y, kind) in enumerate(zip(actual, reference, kinds, strict=True)):
        chosen = isinstance(entry, Entry) and entry.compared == "chosen"
        types_alone = (chosen and narrow) or (isinstance(entry, Entry) and entry.compared == "type")
        text = _one_difference(x, y, kind, types_alone, rounded, least)
        if text:
            return f"result {number}: {text}" if len(actual) > 1 else text
    return ""


def _one_difference(
    x: Any, y: Any, like: Any, types_alone: bool, rounded: bool, least: float
) -> str:
    if not isinstance(y, torch.Tensor):
        if isinstance(y, float):
            return "" if _close(np.float64(x), np.float64(y), 1e-6) else f"{x}, not {y}"
        return "" if x == y and type(x) is type(y) else f"{x!r}, not {y!r}"
    if not isinstance(x, ml.Tensor):
        return f"{type(x).__name__}, not a tensor"
    dtype = _ALL.get(like.dtype, str(like.dtype))
    if tuple(x.shape) != tuple(y.shape) or x.dtype.name != dtype:
        return f"{x.type}, not {dtype}{list(y.shape)}"
    if types_alone:
        return ""
    a, b = x.numpy(), _numpy(y.to(like.dtype))
    tolerance = max(least, _TOLERANCE.get(dtype, 2e-5))
    right = _close(a, b, 4 * tolerance if rounded and dtype in ("f16", "bf16") else tolerance)
    if right.all():
        return ""
    place = tuple(int(i[0]) for i in np.nonzero(~right)) if right.ndim else ()
    count = int((~right).sum())
    return f"at {list(place)} {a[place]}, not {b[place]}; {count} of {right.size} differ"


def _close(a: Any, b: Any, tolerance: float) -> Any:
    """Return which elements agree. Integers and bools are equal; nan and infinities stand in the
    same places; numbers differ by no more than the tolerance, of themselves or of the largest
    beside them."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind not in "fc":
        return np.asarray(a == b)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(all="ignore"):
        finite = np.isfinite(b)
        scale = max(1.0, float(np.abs(b[finite]).max(initial=0.0)))
        near = np.abs(a - b) <= tolerance * np.minimum(scale, 10 + 10 * np.abs(b))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(np.where(finite, near, same))


def _same_bits(x: Any, y: Any) -> bool:
    if x.type != y.type:
        return False
    a, b = x.numpy(), y.numpy()
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")) and bool(
        a.dtype.kind not in "f" or np.array_equal(np.signbit(a), np.signbit(b)) or np.isnan(a).any()
    )


def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _message(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
