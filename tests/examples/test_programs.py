"""Every program in Python of `examples/`, at a small size: it shows what it says."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib import import_module
from math import cos, sin
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from tests.brief import ROOT, output_of

PROGRAMS = sorted(file.stem for file in (ROOT / "examples").glob("*.py"))


def program(name: str) -> Any:
    return import_module(f"examples.{name}")


# --- all of them ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_how_it_is_run_and_is_listed(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
    assert f"\n    python examples/{name}.py" in str(program(name).__doc__)
    assert f"[{name}.py]({name}.py)" in (ROOT / "examples" / "README.md").read_text("utf-8")
    assert text.count("\n") <= 130
    assert re.search(r'\nif __name__ == "__main__":.*\n    main\(.*\)\n$', text)


def test_a_program_runs_as_a_script(tmp_path: Path) -> None:
    file = ROOT / "examples" / "foreign_weights.py"
    assert "the same logits: True" in output_of(file, cwd=tmp_path)
    assert not [*tmp_path.iterdir()]


# --- one by one ----------------------------------------------------------------------


def test_gpt() -> None:
    module = program("gpt")
    model, losses = module.main(steps=30, length=40)
    assert losses[-1] < 0.75 * losses[0]
    letters = np.random.default_rng(0).integers(0, 90, (2, 9))
    whole, cache = model(letters).numpy(), model.init_cache(2, 9)
    for i in range(9):
        logits, cache = model.step(letters[:, i : i + 1], cache, i)
        np.testing.assert_allclose(logits.numpy()[:, 0], whole[:, i], rtol=1e-4, atol=1e-4)
    written = module.write(model, letters[0], 30, temperature=1e-4).numpy()
    np.testing.assert_array_equal(written[:9], letters[0])
    for i in range(9, 30):  # the likeliest letters, found without a cache
        written_so_far = model(written[None, :i])[0, -1]
        assert int(ml.argmax(written_so_far)) == written[i]


def test_diffusion() -> None:
    module = program("diffusion")
    losses, images, drawn = module.main(steps=60, batch=32)
    assert abs(losses[0] - 1) < 0.2  # its first guess is 0
    assert np.mean(losses[-20:]) < 0.5
    assert drawn.shape == (8, 8, 8)
    assert abs(drawn.mean() - images.mean()) < 0.25
    np.testing.assert_allclose(module.ALPHA[-1], np.prod(1 - module.BETA), rtol=1e-4)
    assert module.ALPHA[-1] < 0.01


def test_diffusion_of_a_perfect_guess() -> None:
    """If all images are one, its noise is known, and the sample drawn is the image."""
    module = program("diffusion")
    image = ml.random.normal((1, 8, 8, 1), key=ml.random.key(0))

    def guess(x: ml.Tensor, t: ml.Tensor) -> ml.Tensor:
        alpha = ml.asarray(module.ALPHA)[t][:, None, None, None]
        return (x - ml.sqrt(alpha) * image) / ml.sqrt(1 - alpha)

    drawn = module.draw(guess, ml.random.normal((3, 8, 8, 1), key=ml.random.key(1)))
    np.testing.assert_allclose(drawn.numpy(), np.repeat(image.numpy(), 3, axis=0), atol=0.1)


def test_graph_network() -> None:
    module = program("graph_network")
    assert module.main(steps=40) > 0.85


def test_a_graph_convolution_is_a_product_of_matrices() -> None:
    rng = np.random.default_rng(0)
    layer = program("graph_network").GraphConvolution(3, 2)
    links = np.triu(rng.random((6, 6)) < 0.5, 1)
    adjacency = (links | links.T | np.eye(6, dtype=bool)).astype("f")
    x, degree = rng.standard_normal((6, 3)).astype("f"), adjacency.sum(axis=1)
    expected = adjacency / np.sqrt(np.outer(degree, degree))
    expected = expected @ (x @ layer.linear.kernel.numpy() + layer.linear.bias.numpy())
    sender, receiver = np.nonzero(adjacency)
    result = layer(ml.asarray(x), ml.asarray(sender), ml.asarray(receiver))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_ppo() -> None:
    lengths = program("ppo").main(rounds=6)
    assert lengths[0] < 40
    assert lengths[-1] > 2 * lengths[0]


def test_a_cart_and_its_pole() -> None:
    """Against the equations of one cart, as Barto, Sutton and Anderson have them."""
    poles = program("ppo").CartPoles(3, np.random.default_rng(0))
    for actions in np.random.default_rng(1).integers(0, 2, (20, 3)):
        each = zip(poles.state, actions, strict=True)
        expected = [moved(state, action) for state, action in each]
        result, done, _ = poles.step(actions)
        assert not done.any()
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_advantages_are_sums_of_what_surprises() -> None:
    module = program("ppo")
    rng = np.random.default_rng(0)
    values, last, done = rng.random((7, 3)), rng.random(3), rng.random((7, 3)) < 0.3
    advantages = module.advantages_of(values, last, done)
    after = [*values[1:], last]
    for cart in range(3):
        for t in range(7):
            expected, weight = 0.0, 1.0
            for later in range(t, 7):
                goes_on = not done[later, cart]
                following = module.GAMMA * after[later][cart] * goes_on
                expected += weight * (1 + following - values[later, cart])
                weight *= module.GAMMA * module.LAMBDA * goes_on
            np.testing.assert_allclose(advantages[t, cart], expected)


def moved(state: Any, push: int) -> list[float]:
    x, v, angle, w = state
    g, cart, pole, half = 9.8, 1.0, 0.1, 0.5
    force = 10.0 if push else -10.0
    inner = (-force - pole * half * w**2 * sin(angle)) / (cart + pole)
    turn = g * sin(angle) + cos(angle) * inner
    turn /= half * (4 / 3 - pole * cos(angle) ** 2 / (cart + pole))
    pull = force + pole * half * (w**2 * sin(angle) - turn * cos(angle))
    rates = v, pull / (cart + pole), w, turn
    return [value + 0.02 * rate for value, rate in zip((x, v, angle, w), rates, strict=True)]


def test_gaussian_process() -> None:
    module = program("gaussian_process")
    process, losses, results = module.main(steps=25)
    x, y, at, mean, deviation = (each.numpy() for each in results)
    assert losses[-1] < losses[0] - 0.3
    observed = at < 10
    np.testing.assert_allclose(mean[observed], np.sin(at[observed]), atol=0.25)
    assert deviation[-1] > 5 * deviation[3]  # where there are no points

    length, height, noise = (
        float(ml.exp(each)) for each in (process.log_length, process.log_height, process.log_noise)
    )

    def kernel(a: Array, b: Array) -> Any:
        return height**2 * np.exp(-((a[:, None] - b) ** 2) / (2 * length**2))

    covariance = kernel(x, x) + noise**2 * np.eye(len(x))
    expected = kernel(at, x) @ np.linalg.solve(covariance, y)
    np.testing.assert_allclose(mean, expected, atol=1e-9)
    spread = kernel(at, at) - kernel(at, x) @ np.linalg.solve(covariance, kernel(x, at))
    np.testing.assert_allclose(deviation, np.sqrt(np.diag(spread)), atol=1e-7)
    density = y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(2 * np.pi * covariance)[1]
    loss = module.loss_of(process, results[0], results[1])
    np.testing.assert_allclose(float(loss), density / 2 / len(x), rtol=1e-10)


def test_neural_ode() -> None:
    losses, guess, path = program("neural_ode").main(steps=150)
    assert np.mean(losses[-20:]) < 0.1 * losses[0]
    assert guess.shape == path.shape == (200, 2)


def test_the_way_of_a_differential_equation() -> None:
    """A circle, of which the way is known; and its gradient."""
    module = program("neural_ode")
    start = ml.asarray(np.array([1.0, 0.0]))
    turn = ml.asarray(np.array([[0.0, 1.0], [-1.0, 0.0]]))
    path = module.integrate(lambda x: x @ turn, start, 40).numpy()
    t = module.STEP * np.arange(1, 41)
    np.testing.assert_allclose(path, np.stack([np.cos(t), np.sin(t)], axis=1), atol=1e-6)

    def end(matrix: ml.Tensor, start: ml.Tensor) -> ml.Tensor:
        return ml.sum(module.integrate(lambda x: ml.tanh(x @ matrix), start, 5)[-1])

    ml.testing.check_gradients(end, turn, start)


def test_lora() -> None:
    (before, rotated), after, difference = program("lora").main(steps=150)
    assert before > 0.7
    assert rotated < 0.3
    assert after > rotated + 0.3
    assert difference < 1e-4


def test_accumulate_and_resume() -> None:
    whole, again = program("accumulate_and_resume").main(steps=60, stop=50)
    assert int(whole.optimizer.optimizer.count) == 15
    for name in ("model", "optimizer"):
        expected = whole.parts()[name].state()
        state = again.parts()[name].state()
        assert {path: x.tolist() for path, x in state.items()} == {
            path: x.tolist() for path, x in expected.items()
        }
    assert again.losses == whole.losses
    assert np.mean(whole.losses[-5:]) < 0.95 * whole.losses[0]


def test_mixed_precision() -> None:
    results = program("mixed_precision").main(steps=60)
    assert [*results] == ["float32", "bfloat16", "float16"]
    for name, (losses, accuracy, skipped, model) in results.items():
        assert accuracy > 0.6
        assert (skipped > 0) == (name == "float16")
        assert losses[0] == pytest.approx(results["float32"][0][0], rel=1e-2)
        assert {x.dtype for x in model.state().values()} == {ml.float32}


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and limits addresses")
def test_memory_budget() -> None:
    lines = output_of(ROOT / "examples" / "memory_budget.py").splitlines()
    found = re.match(r"within 100,663,296 bytes: a plan of ([\d,]+), losses", lines[0])
    assert found is not None
    assert int(found[1].replace(",", "")) <= 96 << 20
    assert lines[1].startswith("without a budget: cannot allocate ")
    module = program("memory_budget")
    sizes = {"layers": 6, "rows": 64, "steps": 3}
    whole, nbytes = module.train(**sizes)
    assert module.train(**sizes, memory=nbytes * 2 // 3)[0] == whole


def test_foreign_weights() -> None:
    theirs, x, logits = program("foreign_weights").main()
    w = {name: tensor.numpy() for name, tensor in theirs.items()}
    padded = np.pad(x.numpy()[..., 0], ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    y = np.einsum("nhwij,oij->nohw", windows, w["0.weight"][:, 0])
    y += w["0.bias"][:, None, None]
    mean, var, scale, shift = (
        w[f"1.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
    )
    y = np.maximum((y - mean) / np.sqrt(var + 1e-5) * scale + shift, 0)
    y = y.reshape(2, 4, 4, 2, 4, 2).max(axis=(3, 5)).reshape(2, 64)
    np.testing.assert_allclose(logits.numpy(), y @ w["5.weight"].T + w["5.bias"], rtol=1e-4)


def test_foreign_weights_of_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    files = pytest.importorskip("safetensors.torch")
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 10),
    )
    theirs(torch.randn(8, 1, 8, 8))  # moves the running mean
    files.save_file(theirs.state_dict(), tmp_path / "theirs")
    _, x, logits = program("foreign_weights").main(tmp_path / "theirs", tmp_path / "mine")
    expected = theirs.eval()(torch.tensor(np.moveaxis(x.numpy(), -1, 1))).detach()
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert files.load_file(tmp_path / "mine")["head/kernel"].shape == (64, 10)


def test_tables_and_memmaps() -> None:
    losses, (mean, expected) = program("tables_and_memmaps").main(steps=60, rows=2000)
    assert losses[-1] < 0.1 * losses[0]
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-5)


def test_two_processes() -> None:
    pytest.importorskip("threadpoolctl")
    one, two = program("two_processes").main(steps=12)
    assert one[-1] < one[0]
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_ray_actors() -> None:
    pytest.importorskip("threadpoolctl")
    there, here = program("ray_actors").main(steps=20, actors="processes:1", threads="threads:1")
    assert there == here
    assert there[-1] < 0.5 * there[0]


def test_ray_cluster(tmp_path: Path) -> None:
    """Its task resumes from the checkpoint: without Ray, as members that start twice."""
    task = partial(program("ray_cluster").train, str(tmp_path))
    with ml.parallel.Group(2) as members:
        members.run(partial(task, 3, 0.0))
        resumed = members.run(partial(task, 6, 0.0))[0]
        (tmp_path / "checkpoint.npz").unlink()
        whole = members.run(partial(task, 6, 0.0))[0]
    assert [x.tobytes() for x in resumed.values()] == [x.tobytes() for x in whole.values()]


def test_remote_vm() -> None:
    there, here, same = program("remote_vm").main(steps=30)
    assert same
    assert there == here
    assert there[-1] < there[0]
