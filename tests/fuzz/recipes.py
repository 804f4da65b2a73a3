"""Run the recipes of interop/hints.txt beside the functions that they replace:

    python -m tests.fuzz recipes

`tests/cases/recipes.txt` has the references, of PyTorch and numpy. Values are compared at
infinities, nan, zeros and ordinary numbers; gradients with PyTorch's at all of these, and with
differences of numpy's functions at ordinary numbers. A recipe of a function of elements, vectors or
matrices without a reference is reported, unless `UNCOMPARED` has the reason.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.eager.interop.hints import rows
from tests.brief import ROOT
from tests.fuzz.command import parser_of

SPECIAL: Final = [math.nan, -math.inf, -2.0, -1.0, -0.5, -0.0, 0.0, 0.25, 1.0, 3.0, math.inf]
NUMBERS: Final[dict[str, Any]] = {
    "value": 1.5, "high": 1.0, "low": -1.0, "k": 2, "margin": 1.0, "t": -0.5, "n": 4, "start": 1.0,
    "stop": 3.0, "num": 5, "p": [2.0, -1.0, 0.0], "i": -1, "number": 7.0,
}  # fmt: skip

_WITHOUT: Final = """
moves elements, as another recipe does: addmv baddbmm block collapse dynamic_index_in_dim
    dynamic_slice_in_dim append narrow slice_in_dim index_in_dim gather_nd
    embedding r_ t place copyto put index_put index_copy index_fill fill_diagonal extract
    masked_select boolean_mask l2_normalize sort_key_val ma masked mgrid indices ogrid
of layers, trees or shapes: batch_norm group_norm instance_norm rms_norm affine_grid standardize
    accuracy metrics associative_scan clip_by_value clip_grad_value_ block_diag
    ravel_multi_index tril_indices_from triu_indices_from
draws: bernoulli multinomial normal rand_like randn_like dropout1d dropout2d dropout3d
    gumbel_softmax
no function of values: is_tensor is_array isscalar NINF
numpy's own: frombuffer fromfile fromiter loadtxt savetxt gcd lcm polyfit roots unwrap frexp
    trim_zeros histogram2d
"""
UNCOMPARED: Final = {
    name: reason
    for row in _WITHOUT.replace("\n    ", " ").strip().splitlines()
    for reason, names in [row.split(": ")]
    for name in names.split()
}
"""Recipes without a reference, with the reason."""


class Recipe(NamedTuple):
    """A recipe, its reference, the kind of operands, and words."""

    name: str
    code: str
    before: str
    reference: str
    kind: str
    words: set[str]


def written() -> dict[str, tuple[str, str]]:
    """Return the code of the recipes by the names that they replace, and what comes before it."""
    recipes = {}
    for owner, name, text in rows():
        if owner == "mlvm.eager" and "write `" in text:
            code, *more = re.findall("`(.+?)`", text)
            recipes[name] = code, more[0] if ", with `" in text else ""
    return recipes


def recipes() -> Iterator[Recipe]:
    """Yield the rows of `recipes.txt`, with the recipes of today."""
    code = written()
    for line in (ROOT / "tests" / "cases" / "recipes.txt").read_text("utf-8").splitlines():
        if line and line[0] != "#":
            name, _, rest = line.partition(": ")
            reference, _, words = rest.rpartition("  # ")
            kind, *others = words.split(", ")
            yield Recipe(name, *code[name], reference, kind, {*others})


def operands(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield arrays by name: special values, then ordinary ones."""
    rng = np.random.default_rng(0)
    if recipe.kind == "elements":
        names = sorted({"x", "y", "z", "r", "angle"} & {*re.findall(r"\w+", recipe.code)})
        grid = np.meshgrid(*[np.array(SPECIAL)] * len(names))
        yield {**dict(zip(names, map(np.ravel, grid), strict=True)), "mask": grid[0].ravel() > 0}
        plain = {name: rng.uniform(0.3, 2.7, 7) * rng.choice([-1, 1], 7) for name in names}
        yield {**plain, "mask": plain[names[0]] > 0}
        return
    shape = (6,) if recipe.kind == "vectors" else (3, 3)
    mixed = [("ordinary", 0), ("nan", 1), ("zeros", 2), ("infinity", 3)]
    for text, _ in mixed:
        names = ["x", "y", "c", "weight", "major", "minor"]
        arrays = {name: rng.normal(size=shape) for name in names}
        arrays["bias"] = rng.normal(size=shape[-1])
        if text == "zeros":
            arrays["x"] = np.zeros(shape)
            arrays["y"] = np.zeros(shape)
        if text in ("nan", "infinity"):
            arrays["x"].flat[1] = math.nan if text == "nan" else math.inf
            arrays["x"].flat[4] = -0.0
        yield {**arrays, "mask": arrays["x"] > 0, "at": np.array([2, 0])}


def _of_mlvm(recipe: Recipe, arrays: dict[str, Any]) -> Any:
    space = {"ml": ml, "math": math, "functools": functools, "numpy": np, **NUMBERS, **arrays}
    if recipe.name == "insert":
        space["y"] = NUMBERS["number"]
    if recipe.name == "ix_":
        space |= {"i": space["at"], "j": space["at"]}
    if recipe.before:
        exec(recipe.before, space)
    return eval(recipe.code, space)


def faults_of(recipe: Recipe) -> Iterator[str]:
    """Yield a text for each difference between a recipe and its reference."""
    import torch

    for number, arrays in enumerate(operands(recipe)):
        is_ordinary = number == (1 if recipe.kind == "elements" else 0)
        if "ordinary" in recipe.words and not is_ordinary:
            continue
        names = [n for n, a in arrays.items() if a.dtype == np.float64 and n in _words(recipe)]
        uses_torch = "np." not in recipe.reference
        space: dict[str, Any] = {"np": np, "torch": torch, "math": math, **NUMBERS}
        space["F"] = torch.nn.functional
        theirs: dict[str, Any] = dict(arrays)
        if uses_torch:
            theirs = {n: torch.tensor(a, requires_grad=n in names) for n, a in arrays.items()}
        tensors = {n: ml.asarray(a) for n, a in arrays.items()}
        with np.errstate(all="ignore"):
            try:
                expected = eval(recipe.reference, {**space, **theirs})
            except (ValueError, RuntimeError):
                continue  # the function refuses these
            try:
                actual = _of_mlvm(recipe, tensors)
            except Exception as error:
                yield f"{recipe.name} {number}: raises {type(error).__name__}: {error}"
                continue
        pairs = [*zip(_listed(actual), _listed(expected), strict=False)]
        for ours, other in pairs:
            other = other.detach().numpy() if uses_torch else np.asarray(other)
            ours = np.asarray(ours)
            if ours.shape != other.shape or not np.allclose(ours, other, 1e-6, 1e-12, True):
                yield f"{recipe.name} {number}: got {ours}, expected {other}"
        if "flat" in recipe.words or not names:
            continue
        if "rough" in recipe.words and not is_ordinary:
            continue
        if uses_torch:
            total = sum(_real(torch, each).sum() for each in _listed(expected))
            slopes = torch.autograd.grad(total, [theirs[n] for n in names], allow_unused=True)
            wanted = [
                0 * arrays[n] if g is None else g.numpy()
                for n, g in zip(names, slopes, strict=True)
            ]
        elif not uses_torch and np.isfinite(arrays[names[0]]).all():
            wanted = [_differences(recipe, {**space, **theirs}, n) for n in names]
        else:
            continue

        def loss(xs: Any, tensors: Any = tensors) -> Any:
            return sum(
                ml.sum(ml.real(x)) + ml.sum(ml.imag(x))
                for x in _listed(_of_mlvm(recipe, {**tensors, **xs}))
            )

        try:
            given = ml.grad(loss)({n: tensors[n] for n in names})
        except ml.errors.MlvmError as error:
            yield f"{recipe.name} {number}: {error}"
            continue
        for name, slope in zip(names, wanted, strict=True):
            ours = np.asarray(given[name])
            if not np.allclose(ours, slope, rtol=1e-5, atol=1e-6, equal_nan=True):
                at = ~np.isclose(ours, slope, rtol=1e-5, atol=1e-6, equal_nan=True)
                yield (
                    f"{recipe.name} {number}: the gradient of {name} at {arrays[name][at][:5]} is "
                    f"{ours[at][:5]}, expected {np.asarray(slope)[at][:5]}"
                )


def _words(recipe: Recipe) -> set[str]:
    return {*re.findall(r"\w+", recipe.code + recipe.before)}


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, tuple) else [value]


def _real(torch: Any, x: Any) -> Any:
    return x.real + x.imag if x.is_complex() else x


def _differences(recipe: Recipe, space: dict[str, Any], name: str) -> Any:
    """Return central differences of the sum of the reference's results."""
    x, step = space[name], 1e-6
    slopes = np.zeros_like(x)
    for i in range(x.size):
        both = []
        for sign in (1, -1):
            moved = x.copy()
            moved.flat[i] += sign * step
            both.append(
                sum(np.sum(v) for v in _listed(eval(recipe.reference, {**space, name: moved})))
            )
        slopes.flat[i] = (both[0] - both[1]) / (2 * step)
    return slopes


def main(argv: list[str] | None = None) -> int:
    """Print the differences and the recipes without a reference; return 1 if there are any."""
    parser_of("recipes", __doc__).parse_args(argv)
    found = [text for recipe in recipes() for text in faults_of(recipe)]
    known = {recipe.name for recipe in recipes()}
    found += [f"{name}: no reference" for name in written() if name not in known | {*UNCOMPARED}]
    print("\n".join(found) or f"{len(known)} recipes are as the functions that they replace")
    return int(bool(found))
