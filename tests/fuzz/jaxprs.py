"""A function by JAX, computed with NumPy: JAX traces and transforms it, and compiles none.

A random program is as large as no other, and runs once: to compile it takes a hundred times as long
as to compute it. So its jaxpr is gone through here, primitive by primitive. One without a rule here
is called in JAX, as are those of gathering.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Fn = Callable[..., Any]
Arrays = list[Any]


def computed(fn: Fn, args: Sequence[Any]) -> list[Any]:
    """The leaves of `fn(*args)`, a function of JAX's."""
    jax: Any = importlib.import_module("jax")
    closed = jax.make_jaxpr(fn)(*args)
    with np.errstate(all="ignore"):
        return _run(closed, [np.asarray(x) for x in args])


def _run(closed: Any, args: Arrays) -> Arrays:
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(np.asarray, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> Any:
        return np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else env[x]

    for eqn in jaxpr.eqns:
        name, params, operands = eqn.primitive.name, eqn.params, [read(x) for x in eqn.invars]
        if name in _SEVERAL:
            out = _SEVERAL[name](params, *operands)
        elif name in _ONE:
            out = [_ONE[name](params, *operands)]
        elif name == "empty2":
            out = [np.zeros(x.aval.shape, x.aval.dtype) for x in eqn.outvars]
        else:
            out = eqn.primitive.bind(*operands, **params)
            out = [np.asarray(y) for y in (out if eqn.primitive.multiple_results else [out])]
        for x, y in zip(eqn.outvars, out, strict=True):
            env[x] = np.asarray(y, x.aval.dtype)
            if env[x].shape != x.aval.shape:
                raise ValueError(f"{name} made {env[x].shape}, not {x.aval.shape}")
    return [read(x) for x in jaxpr.outvars]


# --- control flow ------------------------------------------------------------------------


def _cond(params: Any, index: Any, *operands: Any) -> Arrays:
    branches = params["branches"]
    return _run(branches[min(max(int(index), 0), len(branches) - 1)], [*operands])


def _while(params: Any, *operands: Any) -> Arrays:
    ntest, nbody = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body = operands[:ntest], operands[ntest : ntest + nbody]
    state = [*operands[ntest + nbody :]]
    while (goes_on := _run(params["cond_jaxpr"], [*of_test, *state])[0]).any():  # one for each lane
        after = _run(params["body_jaxpr"], [*of_body, *state])
        state = [np.where(_led(goes_on, y), y, x) for x, y in zip(state, after, strict=True)]
    return state


def _led(x: Any, y: Any) -> Any:
    """x with as many axes as y has, of which its own are the first."""
    return x.reshape(x.shape + (1,) * (y.ndim - x.ndim))


def _scan(params: Any, *operands: Any) -> Arrays:
    closed, nconsts, ncarry = params["jaxpr"], params["num_consts"], params["num_carry"]
    consts, xs = operands[:nconsts], operands[nconsts + ncarry :]
    carry = [*operands[nconsts : nconsts + ncarry]]
    turns = range(params["length"])
    rows: list[Arrays] = []
    for i in reversed(turns) if params["reverse"] else turns:
        results = _run(closed, [*consts, *carry, *[x[i] for x in xs]])
        carry = results[:ncarry]
        rows.append(results[ncarry:])
    if params["reverse"]:
        rows.reverse()
    if rows:
        return [*carry, *[np.stack(column) for column in zip(*rows, strict=True)]]
    types = [x.aval for x in closed.jaxpr.outvars[ncarry:]]
    return [*carry, *[np.zeros((0, *t.shape), t.dtype) for t in types]]


def _sort(params: Any, *operands: Any) -> Arrays:
    axis, keys = params["dimension"], operands[: params["num_keys"]]
    order = np.lexsort(keys[::-1], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in operands]


def _split(params: Any, x: Any) -> Arrays:
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


_SEVERAL: dict[str, Callable[..., Arrays]] = {
    "cond": _cond, "while": _while, "scan": _scan,
    "jit": lambda params, *xs: _run(params["jaxpr"], [*xs]),
    "pjit": lambda params, *xs: _run(params["jaxpr"], [*xs]),
    "custom_jvp_call": lambda params, *xs: _run(params["call_jaxpr"], [*xs]),
    "custom_vjp_call": lambda params, *xs: _run(params["call_jaxpr"], [*xs]), "sort": _sort,
    "split": _split,
}  # fmt: skip


# --- one result --------------------------------------------------------------------------


def _broadcast_in_dim(params: Any, x: Any) -> Any:
    shape, axes = params["shape"], params["broadcast_dimensions"]
    aligned = [1] * len(shape)
    for length, axis in zip(x.shape, axes, strict=True):
        aligned[axis] = length
    return np.broadcast_to(x.reshape(aligned), shape)


def _dot_general(params: Any, x: Any, y: Any) -> Any:
    (of_x, of_y), (batch_x, batch_y) = params["dimension_numbers"]
    names_x, names_y = [*range(x.ndim)], [*range(x.ndim, x.ndim + y.ndim)]
    for i, j in zip([*of_x, *batch_x], [*of_y, *batch_y], strict=True):
        names_y[j] = i
    free_x = [i for i in names_x if i not in (*of_x, *batch_x)]
    free_y = [n for n in names_y if n >= x.ndim]
    return np.einsum(x, names_x, y, names_y, [*batch_x, *free_x, *free_y])


def _pad(params: Any, x: Any, value: Any) -> Any:
    """Elements between others and at both ends; fewer than none are cut off there."""
    config = [*zip(x.shape, params["padding_config"], strict=True)]
    spread = np.full([n + max(n - 1, 0) * inner for n, (_, _, inner) in config], value)
    spread[tuple(slice(None, None, inner + 1) for _, (_, _, inner) in config)] = x
    ends = [(max(low, 0), max(high, 0)) for _, (low, high, _) in config]
    padded = np.pad(spread, ends, constant_values=value)
    cut = zip(padded.shape, config, strict=True)
    return padded[tuple(slice(max(-low, 0), m - max(-high, 0)) for m, (_, (low, high, _)) in cut)]


def _slice(params: Any, x: Any) -> Any:
    strides = params["strides"] or [1] * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _window(x: Any, lengths: Sequence[int], starts: Any) -> tuple[slice, ...]:
    """Return the slices of `lengths` elements of every axis from `starts` on, moved to fit
    inside."""
    firsts = [min(max(int(i), 0), n - m) for i, n, m in zip(starts, x.shape, lengths, strict=True)]
    return tuple(slice(i, i + m) for i, m in zip(firsts, lengths, strict=True))


def _dynamic_update_slice(_: Any, x: Any, update: Any, *starts: Any) -> Any:
    result = x.copy()
    result[_window(x, update.shape, starts)] = update
    return result


def _select_n(_: Any, which: Any, *cases: Any) -> Any:
    result = cases[0]
    for k, case in enumerate(cases[1:], 1):
        result = np.where(which == k, case, result)
    return result


def _cumsum(params: Any, x: Any) -> Any:
    if params["reverse"]:
        return np.flip(np.cumsum(np.flip(x, params["axis"]), params["axis"]), params["axis"])
    return np.cumsum(x, params["axis"])


def _iota(params: Any, *_: Any) -> Any:
    shape, axis = params["shape"], params["dimension"]
    along = [-1 if k == axis else 1 for k in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(along), shape)


def _rules() -> dict[str, Fn]:
    """Read the primitives of one result, and what they compute, in `jaxprs.txt`."""
    rules: dict[str, Fn] = {}
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        names, is_rule, body = line.partition(" | ")
        if is_rule and line[0] != "#":
            rules |= {name: eval(body.replace("NAME", name), globals()) for name in names.split()}
    return rules


_ONE = _rules()
