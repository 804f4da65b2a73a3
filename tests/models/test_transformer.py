"""The transformer beside its formula, its steps beside passes, and generation as one program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.dynamic_sizes import GenerationSize, inputs_of, reference
from bench.mlvm_dynamic import transformer_of
from mlvm.eager import Tensor
from models import generate as command
from models.data.text import LENGTH, NUM_BYTES
from models.generate import Generator
from models.training.checkpoint import CheckpointError, save
from models.training.train import OptionError
from models.transformer import Transformer, generate, sample
from tests.brief import Capsys, cases, refuses

SIZE = GenerationSize(2, 16, 2, 11, 3, 9)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """With the weights of the benchmark, whose reference is written in numpy."""
    return transformer_of(SIZE)


def go_on(
    model: Transformer, prompt: list[int], *, captured: bool = False, **options: Any
) -> list[int]:
    """The prompt and what follows."""
    padded = np.zeros(model.length, np.int64)
    padded[: len(prompt)] = prompt
    chosen = {"temperature": 1.0, "end": -1, "seed": 0, "top_k": None} | options
    replayed = ml.capture(generate, fuse=False)
    tokens, count = (replayed if captured else generate)(
        model,
        ml.asarray(padded),
        ml.asarray(len(prompt)),
        ml.random.key(chosen["seed"]),
        temperature=ml.asarray(np.float32(chosen["temperature"])),
        end=ml.asarray(chosen["end"]),
        top_k=chosen["top_k"],
    )
    assert replayed.signatures == captured
    return tokens.numpy()[: int(count)].tolist()


def test_the_likeliest_symbols_are_those_of_the_formula(model: Transformer) -> None:
    [prompt], [expected] = inputs_of(SIZE), reference(SIZE)
    result = go_on(model, prompt.tolist(), top_k=1)
    assert result == [*prompt, *expected]


def test_a_symbol_sees_only_those_before_it(model: Transformer) -> None:
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8))
    logits = model(ml.asarray(tokens)).numpy()
    assert logits.shape == (2, 8, 11)
    tokens[:, 5:] = 3
    changed = model(ml.asarray(tokens)).numpy()
    assert (changed[:, :5] == logits[:, :5]).all()
    assert (changed[:, 5:] != logits[:, 5:]).any()


def test_steps_with_a_cache_are_a_pass(model: Transformer) -> None:
    tokens = np.random.default_rng(1).integers(0, 11, (2, 7))
    whole = model(ml.asarray(tokens)).numpy()
    cache = model.init_cache(2)
    for i in range(7):
        logits, cache = model.step(ml.asarray(tokens[:, i]), cache, ml.asarray(i))
        assert logits.numpy() == pytest.approx(whole[:, i], abs=2e-6)


def test_too_many_symbols_are_refused(model: Transformer) -> None:
    with pytest.raises(ml.errors.ShapeError, match=r"built for 12 symbols, got i64\[1,13\]"):
        model(ml.zeros((1, 13), dtype=ml.int64))


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_captured_generation_makes_what_an_eager_one_makes(
    model: Transformer, top_k: int | None
) -> None:
    options: dict[str, Any] = {"top_k": top_k, "seed": 7}
    eager = go_on(model, [1, 2], **options)
    assert len(eager) == 12
    assert go_on(model, [1, 2], captured=True, **options) == eager
    assert go_on(model, [1, 2], **options | {"seed": 8}) != eager


def test_it_stops_after_the_end(model: Transformer) -> None:
    result = go_on(model, [1, 2], seed=7)
    last = next(i for i in range(3, len(result)) if result[i] not in result[2:i])
    end = result[last]
    assert go_on(model, [1, 2], seed=7, end=end) == result[: last + 1]
    assert go_on(model, [1, end], seed=7, end=end)[:2] == [1, end]  # a prompt may contain it


def test_symbols_are_drawn_with_their_probabilities() -> None:
    logits = ml.asarray(np.log(np.array([0.1, 0.6, 0.05, 0.25], np.float32)))

    def shares(top_k: int | None) -> Any:
        def draw(key: Tensor) -> Tensor:
            return sample(logits, top_k, key)

        keys = ml.random.split(ml.random.key(0), 3000)
        drawn = ml.capture(lambda keys: ml.map(draw, keys))(keys).numpy()
        return np.bincount(drawn, minlength=4) / 3000

    assert shares(None) == pytest.approx([0.1, 0.6, 0.05, 0.25], abs=0.03)
    assert shares(2) == pytest.approx([0, 0.6 / 0.85, 0, 0.25 / 0.85], abs=0.03)
    assert shares(1).tolist() == [0, 1, 0, 0]


# --- the command -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the file of a trained transformer."""
    file = tmp_path_factory.mktemp("trained") / "lm.safetensors"
    model = Transformer(NUM_BYTES, LENGTH, key=ml.random.key(0))
    tensors = {f"model/{name}": x.numpy() for name, x in model.state().items()}
    save(
        file,
        tensors | {"optimizer/count": np.array(1)},
        {"mlvm.training": '{"model": "transformer"}'},
    )
    return file


def test_the_command_goes_on_with_a_prompt(file: Path, capsys: Capsys) -> None:
    arguments = [str(file), "--prompt", "import ", "--seed", "3", "--top-k", "5"]
    outputs = []
    for _ in range(2):
        assert command.main(arguments) == 0
        out, err = capsys.readouterr()
        assert out.startswith("import ")
        assert err.startswith(f"{LENGTH - 7} bytes; ")
        outputs.append(out)
    assert outputs[0] == outputs[1]


def test_a_generator_keeps_one_program(file: Path) -> None:
    generator = Generator(file)
    texts = {generator(b"def f", seed=seed, temperature=t) for seed, t in ((0, 1.0), (1, 0.5))}
    assert len(texts) == 2
    assert {len(text) for text in texts} == {LENGTH}
    one = generator(b"x", end=texts.pop()[5:6])
    assert len(one) <= LENGTH
    assert generator.generate.signatures == 1


@cases(
    "options, reason",
    ({"prompt": b""}, "a prompt has 1 to 127 bytes, got 0"),
    ({"prompt": bytes(128)}, "a prompt has 1 to 127 bytes, got 128"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"temperature": float("nan")}, "temperature must be positive"),
    ({"top_k": 0}, r"top_k must be 1 .. 256, got 0"),
    ({"top_k": 257}, r"top_k must be 1 .. 256, got 257"),
    ({"end": b"ab"}, "end must be a single byte"),
    ({"seed": -1}, "seed must be in 0"),
)
def test_options_out_of_range_are_refused(file: Path, options: Any, reason: str) -> None:
    refuses(OptionError, reason, Generator(file), **{"prompt": b"x"} | options)


def test_other_files_are_refused(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "x"
    for training, reason in (
        ("{", "was not written by models.train"),
        ('{"model": "mlp"}', "contains a mlp; expected a transformer"),
        ('{"model": "transformer"}', "contains a different transformer: load_state: missing"),
    ):
        save(file, {}, {"mlvm.training": training})
        refuses(CheckpointError, reason, Generator, file)
    assert command.main([str(tmp_path / "nowhere")]) == 1
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    caught = refuses(SystemExit, "", command.main, ["x", "--top-k", "many"])
    assert caught.code == 2
