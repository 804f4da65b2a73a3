"""The Llama beside its formula in numpy, its tokenizer, and the text of a GGUF file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.gguf_file import LlamaSize, llama, write
from models import generate
from models.llama import LlamaConfig
from models.llama_text import LlamaText
from models.tokenizer import Decoder, Tokenizer
from tests.brief import Capsys, cases, refuses
from tests.models.llama import dequantized, logits

SIZE = LlamaSize(64, 2, 4, 2, 96, 300)
PROMPT = [1, 270, 260, 282]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama") / "small.gguf"
    write(path, *llama(SIZE, "Q4_0"))
    return path


@pytest.fixture(scope="module")
def text(file: Path) -> LlamaText:
    return LlamaText(file)


def test_logits_are_those_of_the_formula(text: LlamaText, file: Path) -> None:
    expected = logits(SIZE, dequantized(file), PROMPT)[-1]
    with text.batch:
        cache = text.model.init_cache(8)
        text.model(ml.asarray(PROMPT[:1]), cache, ml.asarray(0))
        result = text.model(ml.asarray(PROMPT[1:]), cache, ml.asarray(1)).numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_logits_at_all_places_are_those_of_the_formula(text: LlamaText, file: Path) -> None:
    expected = logits(SIZE, dequantized(file), PROMPT)
    with text.batch:
        computed = text.model.all_logits(ml.asarray(PROMPT)).numpy()
    np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-5)


def test_tokens_are_those_of_the_dequantised_weights(text: LlamaText, file: Path) -> None:
    """Over the first room of the cache, too. `python -m tests.models.llama` does it with 100 M."""
    before = text.step.signatures
    generated = [*text.generate(PROMPT, length=262, until_end=False)]
    expected = logits(SIZE, dequantized(file), [*PROMPT, *generated[:-1]])[len(PROMPT) - 1 :]
    assert generated == expected.argmax(-1).tolist()
    assert text.step.signatures - before <= 4  # a prompt and a token, with room for 256 and for 512


def test_the_same_seed_draws_the_same(text: LlamaText) -> None:
    drawn = [
        [*text.generate(PROMPT, seed=seed, temperature=2.0, top_k=50, length=12, until_end=False)]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_command(file: Path, capsys: Capsys) -> None:
    assert not generate.main(["--weights", str(file), "--prompt", "w1 w2", "--length", "5"])
    out, err = capsys.readouterr()
    assert out
    assert "tokens" in err
    refuses(SystemExit, "2", lambda: generate.main([str(file), "--weights", str(file)]))
    (file.parent / "cut.gguf").write_bytes(file.read_bytes()[:1000])
    assert generate.main(["--weights", str(file.parent / "cut.gguf")]) == 1
    assert "cut.gguf" in capsys.readouterr().err


@cases(
    "change, reason",
    ({"tokens": ["a", 1]}, "tokens must be a list of str"),
    ({"tokens": []}, "inconsistent sizes"),
    ({"merges": [3]}, "merges must be a list of str"),
    ({"scores": None}, "scores must be a list of float or int"),
    ({"scores": ["x", "y"]}, "scores must be"),
    ({"scores": [0.0, math.nan]}, "scores must not be nan"),
    ({"scores": [1.0], "token_type": [1]}, "inconsistent sizes"),
    ({"token_type": 3}, "token_type must be a list of int"),
    ({"bos_token_id": 2}, "of 2 tokens lacks 2"),
    ({"eos_token_id": "x"}, "lacks 'x'"),
    ({"add_bos_token": math.nan}, "add_bos_token nan is not supported"),
    ({"add_eos_token": True}, "add_eos_token True is not supported"),
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tokenizers_that_contradict_themselves_are_refused(
    kind: str, change: dict[str, Any], reason: str
) -> None:
    fields = {"model": kind, "tokens": ["a", "b"]} | change
    metadata = {f"tokenizer.ggml.{name}": x for name, x in fields.items()}
    refuses(ml.errors.WeightsError, reason, Tokenizer, metadata)


@cases("pre", "tekken", "default", [], 3)
def test_a_split_of_another_kind_is_refused(pre: Any) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    Tokenizer(metadata)
    other = {**metadata, "tokenizer.ggml.pre": pre}
    refuses(ml.errors.WeightsError, "split of texts must be one of", Tokenizer, other)


def _with_defined(kind: str, pre: str, **more: Any) -> Tokenizer:
    """A tokenizer of single letters, digits, a word without merges, and three tokens of a user."""
    letters = [chr(i) for i in range(33, 127)] + ["\u0120", "\u2581"]
    tokens = ["<unk>", *letters, "12", "\u0120zebra", "<|a|>", "<|a|>b", "\u2581q"]
    return Tokenizer(
        {
            "tokenizer.ggml.model": kind,
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-9.0] * len(tokens),
            "tokenizer.ggml.merges": ["1 2"],
            "tokenizer.ggml.token_type": [2] + [1] * (len(tokens) - 4) + [4, 4, 1],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.add_bos_token": False,
            **{f"tokenizer.ggml.{name}": x for name, x in more.items()},
        }
    )


@cases(
    "kind, pre, text, pieces",
    ("gpt2", "gpt-2", "x<|a|>12", ["x", "<|a|>", "12"]),
    ("gpt2", "gpt-2", "<|a|>b<|a|>", ["<|a|>b", "<|a|>"]),
    ("gpt2", "gpt-2", " zebra", ["\u0120", *"zebra"]),
    ("gpt2", "llama-bpe", " zebra", ["\u0120zebra"]),
    ("gpt2", "qwen2", "12", ["1", "2"]),
    ("llama", "", "q<|a|>q", ["\u2581q", "<|a|>", "\u2581q"]),
    ("llama", "", "<|a|>", ["<|a|>"]),
)
def test_tokens_as_in_llama_cpp(kind: str, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = _with_defined(kind, pre)
    assert [tokenizer.tokens[i] for i in tokenizer.encode(text)] == pieces


def test_a_defined_token_stands_for_its_own_text() -> None:
    tokens = ["a", "\u00e9", "\u0120"]
    metadata = {"model": "gpt2", "tokens": tokens, "token_type": [1, 4, 1]}
    tokenizer = Tokenizer({f"tokenizer.ggml.{name}": x for name, x in metadata.items()})
    assert tokenizer.encode("a\u00e9 ") == [0, 1, 2]
    assert b"".join(map(tokenizer.data, range(3))) == "a\u00e9 ".encode()


def test_a_text_of_llama_bpe_begins_with_a_token() -> None:
    begins = [_with_defined("gpt2", pre, add_bos_token=None) for pre in ("llama-bpe", "gpt-2")]
    assert [bool(each.adds_bos) for each in begins] == [False, False]
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    metadata |= {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 0}
    assert Tokenizer(metadata).adds_bos


@cases(
    "key, value",
    ("rope.scaling.type", "yarn"),
    ("rope.scale_linear", 4.0),
    ("rope.scaling.factor", 4.0),
    ("rope.freq_base", math.nan),
    ("rope.freq_base", "x"),
    ("attention.layer_norm_rms_epsilon", math.inf),
    ("attention.layer_norm_rms_epsilon", 0.0),
)
def test_a_configuration_that_is_not_read_is_refused(file: Path, key: str, value: Any) -> None:
    plain = ml.load(file).plain
    LlamaConfig.of(plain | {"llama.rope.scaling.factor": 1.0})
    refuses(ml.errors.WeightsError, "", LlamaConfig.of, {**plain, f"llama.{key}": value})


def _spm() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces = ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello", "lo"]
    scores = [0.0] * len(words) + [-9.0, -9, -9, -9, -9, -1, -2, -3, -4, -5, -1.5]
    return Tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": words + pieces,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
            "tokenizer.ggml.bos_token_id": 1,
        }
    )


def _bpe() -> Tokenizer:
    letters = [chr(i) for i in range(33, 127)] + ["\u0120", "\u00c3", "\u00a9"]
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 hello", "1 2"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    return Tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
        }
    )


@cases(
    "tokenizer, original, pieces",
    (
        _spm(),
        "hello",
        ["<s>", "\u2581", "he", "l", "lo"],
    ),  # the best pair first, not the longest
    (_spm(), "h\u00e9", ["<s>", "\u2581", "h", "<0xC3>", "<0xA9>"]),
    (_spm(), "", ["<s>"]),
    (_bpe(), "hello hello", ["hello", "\u0120hello"]),
    (_bpe(), "h\u00e9 1212", ["h", "\u00c3", "\u00a9", "\u0120", "12", "1", "2"]),
)
def test_texts_become_tokens_and_texts_again(
    tokenizer: Tokenizer, original: str, pieces: list[str]
) -> None:
    tokens = tokenizer.encode(original)
    assert [tokenizer.tokens[token] for token in tokens] == pieces
    decode = Decoder(tokenizer)
    text = "".join(decode(token) for token in tokens) + decode.end()
    assert text.removeprefix(" ") == original
