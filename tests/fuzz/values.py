"""Random programs of views and updates, beside numpy with copies.

    python -m tests.fuzz values --programs 10000

Of a tensor all that counts is its value: an update changes the tensor that it names, and no other.
numpy does the same where every result is a copy. So each program runs on tensors and on numpy's
copies, and all variables must be equal after it. The imaginary parts of the copies are tangents:
their sum tells what gradients must be.
"""

from __future__ import annotations

import math
import operator
import traceback
from collections.abc import Callable
from typing import Any, Final

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from tests.fuzz.command import Outcomes

SHAPES: Final = ((6,), (2, 3), (3, 2))
_KEYS: Final[dict[int, list[Any]]] = {
    1: [1, slice(1, 4), slice(None, None, -2), ..., np.array([0, 2, 2]), "mask"],
    2: [0, (slice(None), 1), (..., -1), (slice(0, 2), None, slice(0, 1)), np.array([1, 0]), "mask"],
}

Instruction = tuple[Any, ...]
Program = list[Instruction]


class Copies:
    """Operations of programs on arrays of numpy, all results of which are copies."""

    add, multiply = np.add, np.multiply
    view = staticmethod(lambda x, shape: x.reshape(shape).copy())
    get = staticmethod(lambda x, key: x[key].copy())
    index = staticmethod(lambda key: key)

    @staticmethod
    def again(body: Callable[..., Any], state: Any) -> Any:
        return tuple([x.copy() for x in body([x.copy() for x in state])])

    def loop(self, n: int, body: Callable[..., Any], state: Any) -> Any:
        for fn in (tuple, *[body] * n):
            state = self.again(fn, state)
        return state

    def branch(self, x: Any, branches: Any, state: Any) -> Any:
        return self.again(branches[int(x.real.sum() <= 0)], state)


class Tensors:
    """Operations of programs on tensors."""

    add, multiply, view = staticmethod(ml.add), staticmethod(ml.multiply), staticmethod(ml.reshape)
    get = staticmethod(lambda x, key: x[key])

    def __init__(self) -> None:
        self._indices = {(a.tobytes(), a.shape): ml.asarray(a) for a in _arrays()}

    def loop(self, n: int, body: Callable[..., Any], state: Any) -> Any:
        return ml.fori_loop(0, n, lambda _, now: body(now), tuple(state))

    def branch(self, x: Any, branches: Any, state: Any) -> Any:
        return ml.cond(ml.sum(x) > 0.0, *branches, tuple(state))

    def again(self, body: Callable[..., Any], state: Any) -> Any:
        return ml.checkpoint(body)(tuple(state))

    def index(self, key: Any) -> Any:
        return self._indices[key.tobytes(), key.shape] if isinstance(key, np.ndarray) else key


def _mask(shape: tuple[int, ...]) -> Any:
    return (np.arange(math.prod(shape)) % 3 != 1).reshape(shape)


def _arrays() -> list[Any]:
    indices = [key for keys in _KEYS.values() for key in keys if isinstance(key, np.ndarray)]
    return [*indices, *map(_mask, SHAPES)]


def run(lib: Any, program: Program, variables: list[Any]) -> list[Any]:
    """Run a program, and return the variables after it, new ones too."""
    xs = list(variables)

    def fitted(i: int, shape: Any) -> Any:
        y = xs[i % len(xs)]
        return y if y.shape == shape else lib.view(y, shape)

    def state_after(body: Program) -> Callable[[Any], Any]:
        return lambda state: tuple(run(lib, body, list(state))[:2])

    for name, a, b, k, *bodies in program:
        i, j = a % len(xs), b % len(xs)
        x = xs[i]
        key = _KEYS[len(x.shape)][k % 6]
        shape = (np.zeros(x.shape)[_mask(x.shape) if isinstance(key, str) else key]).shape
        key = lib.index(_mask(x.shape) if isinstance(key, str) else key)
        if name == "view":
            xs.append(lib.view(x, SHAPES[k % 3]))
        elif name == "same":
            xs.append(x)
        elif name in ("add", "multiply"):
            xs.append(getattr(lib, name)(x, fitted(b, x.shape)))
        elif name in ("+=", "*="):
            update: Any = operator.iadd if name == "+=" else operator.imul
            xs[i] = update(x, fitted(b, x.shape))
        elif name == "out":
            y = fitted(b, x.shape)
            (lib.add if k % 2 else lib.multiply)(y, y, out=x)
        elif name == "number":
            x[key] = 0.5
        elif name == "put":
            n = math.prod(shape)
            part = lib.get(fitted(b, (6,)), slice(0, n))
            x[key] = lib.view(part, shape)
        elif name == "put +=" and k % 6 != 5:  # what a mask selects has no type in a capture
            x[key] = lib.add(lib.get(x, key), lib.get(x, key))
        elif name == "loop":
            xs[i], xs[j] = lib.loop(k % 3, state_after(bodies[0]), (x, xs[j]))
        elif name == "branch":
            xs[i], xs[j] = lib.branch(x, [state_after(each) for each in bodies], (x, xs[j]))
        elif name == "again":
            xs[i], xs[j] = lib.again(state_after(bodies[0]), (x, xs[j]))
    return xs


_NUMBER = st.integers(0, 11)


def _simple() -> st.SearchStrategy[Instruction]:
    names = ["view", "view", "same", "add", "multiply", "+=", "+=", "*=", "out", "number"]
    return st.tuples(st.sampled_from([*names, "put", "put", "put +="]), _NUMBER, _NUMBER, _NUMBER)


def _nested() -> st.SearchStrategy[Instruction]:
    body = st.lists(_simple(), min_size=1, max_size=5)
    control = st.sampled_from(["loop", "branch", "again"])
    return st.tuples(control, _NUMBER, _NUMBER, _NUMBER, body, body)


def drawn_programs() -> st.SearchStrategy[Program]:
    """Programs of two variables, with loops, branches and checkpoints."""
    return st.lists(st.one_of(_simple(), _simple(), _simple(), _nested()), min_size=1, max_size=8)


_RNG: Final = np.random.default_rng(0)
_STARTS: Final = [_RNG.uniform(-0.9, 0.9, shape) for shape in SHAPES[:2]]
_TANGENTS: Final = [_RNG.uniform(-0.9, 0.9, shape) for shape in SHAPES[:2]]
_H: Final = 1e-150
"""Size of tangents: products of two vanish."""


def expected(program: Program) -> tuple[list[Any], list[Any], Any]:
    """The variables after the program, the arguments after it, and the loss. Imaginary parts are
    tangents times `_H`."""
    operands = [x + _H * 1j * t for x, t in zip(_STARTS, _TANGENTS, strict=True)]
    after = run(Copies(), program, operands)
    return after, operands, sum(math.cos(i) * x.sum() for i, x in enumerate(after))


def function(program: Program) -> Callable[..., Any]:
    """The program, as a function of two tensors that returns all variables."""
    lib = Tensors()

    def body(x: Any, y: Any) -> Any:
        return [ml.copy(each) for each in run(lib, program, [x, y])]

    return body


def loss(program: Program) -> Callable[..., Any]:
    """Return the sum of all variables, each times a different number."""
    lib = Tensors()

    def body(x: Any, y: Any) -> Any:
        total = ml.zeros((), dtype="f64")
        for i, each in enumerate(run(lib, program, [x, y])):
            total += ml.sum(each) * math.cos(i)
        return total

    return body


def _require_equal(actual: Any, reference: Any, what: str) -> None:
    scale = 1.0 + float(np.max(np.abs(reference), initial=0.0))
    np.testing.assert_allclose(np.asarray(actual), reference, atol=1e-9 * scale, err_msg=what)


def try_program(program: Program, *, captured: bool, gradients: bool = True) -> None:
    """Run a program on tensors, eagerly or captured, and require what numpy has found."""
    with np.errstate(all="ignore"):
        after, operands, total = expected(program)
    if not np.isfinite(total) or abs(total.imag) > 1e100 * _H:
        return
    wrap: Callable[..., Any] = ml.capture if captured else (lambda fn: fn)
    step = wrap(function(program))
    for _ in range(2 if captured else 1):
        x, y = [ml.asarray(each) for each in _STARTS]
        flat = ml.reshape(x, (2, 3))
        for actual, reference in zip(step(x, y), after, strict=True):
            _require_equal(actual, reference.real, "a variable")
        for actual, reference in zip((x, y), operands, strict=True):
            _require_equal(actual, reference.real, "an argument")
        _require_equal(flat, _STARTS[0].reshape(2, 3), "a view of an argument")
        assert x.shape == (6,)
    if not gradients:
        return
    x, y = [ml.asarray(each) for each in _STARTS]
    value, pulled = wrap(ml.value_and_grad(loss(program), argnums=(0, 1)))(x, y)
    _require_equal(value, total.real, "the value")
    slope = sum((np.asarray(g) * t).sum() for g, t in zip(pulled, _TANGENTS, strict=True))
    _require_equal(slope, total.imag / _H, "the gradient")
    for actual, start in zip((x, y), _STARTS, strict=True):
        _require_equal(actual, start, "an argument of a gradient")


def fuzz(programs: int, seed: int, first: int) -> tuple[Outcomes, str | None]:
    """Try the given number of programs. Returns what was tried, and the smallest that fails, if one
    does."""
    outcomes = Outcomes()

    @hypothesis.seed(seed + first)
    @settings(
        max_examples=programs,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_programs())
    def each(program: Program) -> None:
        outcomes["programs, eagerly and captured"] += 1
        for captured in (False, True):
            try_program(program, captured=captured)

    try:
        each()
    except Exception:
        return outcomes, traceback.format_exc()
    return outcomes, None
