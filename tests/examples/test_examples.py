"""Every program of `examples/`, run from the command line, against numpy."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from mlvm.__main__ import main
from mlvm.core.types import Array
from tests.brief import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.mlasm"))


def run(name: str, folder: Path, *args: Array) -> list[Array]:
    """Return the output files of `python -m mlvm run` for these arguments."""
    command = ["run", str(ROOT / "examples" / f"{name}.mlasm"), "--max-steps", "1000000"]
    for number, array in enumerate(args):
        np.save(folder / f"arg{number}.npy", array)
        command += ["--arg", str(folder / f"arg{number}.npy")]
    out = folder / "out"
    assert main([*command, "--out", str(out)]) == 0
    return [np.load(out / f"{number}.npy") for number in range(len(list(out.iterdir())))]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 15])
def test_fibonacci(n: int, tmp_path: Path) -> None:
    [result] = run("fibonacci", tmp_path, np.array(n))
    values = [0, 1]
    while len(values) <= n:
        values.append(values[-1] + values[-2])
    assert result == values[n]
    assert result.dtype == np.int64
    assert result.shape == ()


@pytest.mark.parametrize("a", [2.0, [0.25, 1, 3], [[1e-12], [1e12]], [0.0], []])
def test_newton(a: object, tmp_path: Path) -> None:
    array = np.array(a, np.float64)
    [result] = run("newton", tmp_path, array)
    assert result.shape == array.shape
    np.testing.assert_allclose(result, np.sqrt(array), rtol=1e-13, atol=1e-150)


@pytest.mark.parametrize("sign", [1, -1])
def test_power_iteration(sign: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    half = generator.standard_normal((8, 5))
    matrix = sign * half.T @ half
    value, vector = run("power_iteration", tmp_path, matrix, np.ones((5, 1)))
    values, vectors = np.linalg.eigh(matrix)
    largest = np.argmax(np.abs(values))
    np.testing.assert_allclose(value, [[values[largest]]], rtol=1e-11)
    np.testing.assert_allclose(np.abs(vector[:, 0]), np.abs(vectors[:, largest]), atol=1e-9)
    np.testing.assert_allclose(matrix @ vector, value * vector, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("s", [1.5, 2.0])
def test_sigma_clip(seed: int, s: float, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(50)
    x[generator.integers(0, 50, 5)] = [40, -200, np.nan, np.inf, 7]
    values, places = run("sigma_clip", tmp_path, x, np.array(s))
    left = [i for i in range(50) if np.isfinite(x[i])]
    while True:
        inliers = [i for i in left if abs(x[i] - np.mean(x[left])) <= s * np.std(x[left])]
        if inliers == left:
            break
        left = inliers
    assert 0 < len(left) < 48
    np.testing.assert_array_equal(places[:, 0], left)
    np.testing.assert_array_equal(values, x[left])


def test_sigma_clip_of_nothing(tmp_path: Path) -> None:
    values, places = run("sigma_clip", tmp_path, np.full(3, np.nan), np.array(2.0))
    assert (values.shape, places.shape) == ((0,), (0, 1))


def tree(generator: np.random.Generator, leaves: int) -> Array:
    """Return the children of a random binary tree with the given number of leaves; node 0 is the
    root."""
    children: list[list[int]] = [[-1, -1]]
    open_leaves = [0]
    while len(open_leaves) < leaves:
        node = open_leaves.pop(generator.integers(len(open_leaves)))
        children[node] = [len(children), len(children) + 1]
        open_leaves += children[node]
        children += [[-1, -1], [-1, -1]]
    return np.array(children, np.int64)


@pytest.mark.parametrize("leaves", [1, 2, 3, 12, 40])
def test_tree_network(leaves: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(leaves)
    children = tree(generator, leaves)
    vectors = generator.standard_normal((len(children), 4)).astype(np.float32)
    w = generator.standard_normal((8, 4)).astype(np.float32)
    b = generator.standard_normal(4).astype(np.float32)

    def vector(node: int) -> Array:
        left, right = children[node]
        if left < 0:
            result: Array = vectors[node]
        else:
            result = np.tanh(np.concatenate([vector(left), vector(right)]) @ w + b)
        return result

    [result] = run("tree_network", tmp_path, children, vectors, w, b)
    np.testing.assert_allclose(result, [vector(0)], rtol=1e-3, atol=1e-5)


def test_tree_network_of_a_deep_tree(tmp_path: Path) -> None:
    """Deeper than Python's own recursion limit."""
    depth = 3000
    children = np.full((2 * depth + 1, 2), -1)
    children[:depth, 0] = np.arange(1, depth + 1)
    children[:depth, 1] = np.arange(depth + 1, 2 * depth + 1)
    vectors = np.ones((2 * depth + 1, 1), np.float32)
    w, b = np.array([[0.5], [0.25]], np.float32), np.zeros(1, np.float32)
    [result] = run("tree_network", tmp_path, children, vectors, w, b)
    expected = np.float32(1)
    for _ in range(depth):
        expected = np.tanh(0.5 * expected + 0.25)
    np.testing.assert_allclose(result, [[expected]], rtol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_greedy_decoding(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    tokens, d, enough = 5, 4, 12
    # Small integers: logits that are nearly equal would make the choice the rounding's.
    embedding, u, v = (
        generator.integers(-2, 3, shape).astype(np.float32)
        for shape in ((tokens, d), (d, d), (d, tokens))
    )
    first = generator.standard_normal(d).astype(np.float32)
    expected: list[int] = []
    h, token = first, 0
    while len(expected) < enough and (not expected or token != 1):
        h = np.tanh(embedding[token] + h @ u)
        token = int(np.argmax(h @ v))
        expected.append(token)
    [result] = run("greedy_decoding", tmp_path, embedding, u, v, first[None], np.array(enough))
    assert result.tolist() == expected
    assert result.dtype == np.int64


def head(path: Path) -> str:
    """The comment that a program begins with."""
    lines = path.read_text("utf-8").splitlines()
    return "\n".join(line.removeprefix(";").strip() for line in lines[: lines.index("")])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_head_says_what_how_and_with_which_arguments(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = head(path)
    assert "\narguments   0: " in text
    assert "\noutputs     0: " in text
    [command] = re.findall(r"^python -m mlvm (run (?:.*\\\n)*.*)$", text, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[1] == f"examples/{path.name}"
    assert main([words[0], str(path), *words[2:]]) == 0
    assert capsys.readouterr().out.startswith("output 0: ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_verifier_passes_it_and_the_readme_lists_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(path)]) == 0
    listing = capsys.readouterr().out
    assert listing.startswith("ok: ")
    assert "never reached" not in listing
    assert f"({path.name})" in (ROOT / "examples" / "README.md").read_text("utf-8")
