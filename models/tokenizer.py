"""Tokenizers of GGUF files of the kinds `llama` and `gpt2`.

`llama` merges by scores, as SentencePiece does. `gpt2` is byte-pair encoding by ranks (Sennrich et
al., arXiv 1508.07909).

The tokens equal the tokens of the original encoders, except for scripts with letters that Python's
`re` and Unicode classify differently.
"""

from __future__ import annotations

import codecs
import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import mlvm.eager as ml

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # kinds of tokens
_BYTE: Final = re.compile("<0x[0-9A-Fa-f]{2}>")
_KEY: Final = "tokenizer.ggml."
_SPACE: Final = "\u2581"
_LETTER, _OTHER = r"[^\W\d_]", r"(?:[^\s\w]|_)"
_GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?\d+| ?{_OTHER}+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:(?![\r\n]){_OTHER}|(?![\r\n])\s)?{_LETTER}+|\d{{1,3}}|"
    rf" ?{_OTHER}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\d{1,3}", r"\d")
_WORDS: Final = {
    **dict.fromkeys(("", "gpt-2", "phi-2", "mpt", "olmo"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}
"""Patterns of the pieces in which byte-pair encoding merges, by split name (a subset of
llama.cpp)."""
_LISTS: Final[Mapping[str, set[type]]] = {
    "tokens": {str},
    "token_type": {int},
    "merges": {str},
    "scores": {float, int},
}
"""Element types of the lists in the metadata."""


def _letters_of_bytes() -> dict[int, str]:
    """Return the letter that represents each byte in GPT-2's vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    return letters | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


class Tokenizer:
    """Tokenizer of a GGUF file: `encode` converts text to tokens, `Decoder` tokens to text.

    Raises `WeightsError` for unsupported or inconsistent metadata.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        def value(name: str, default: Any = None) -> Any:
            return metadata.get(_KEY + name, default)

        self.kind = value("model")
        self.tokens: Sequence[str] = value("tokens")
        if self.kind not in ("llama", "gpt2") or not isinstance(self.tokens, list):
            raise ml.errors.WeightsError(
                f"the tokenizer kind must be llama or gpt2, got {self.kind!r}"
            )
        count = len(self.tokens)
        for name, kinds in _LISTS.items():
            entries = value(name, [])
            if type(entries) is not list or not {*map(type, entries)} <= kinds:
                expected = " or ".join(sorted(kind.__name__ for kind in kinds))
                raise ml.errors.WeightsError(f"the tokenizer's {name} must be a list of {expected}")
        if any(math.isnan(score) for score in value("scores", [])):
            raise ml.errors.WeightsError("the tokenizer's scores must not be nan")
        self.kinds: Sequence[int] = value("token_type", [_NORMAL] * count)
        self.bos, self.eos = value("bos_token_id"), value("eos_token_id")
        for token in (self.bos, self.eos):
            if token is not None and not (type(token) is int and 0 <= token < count):
                raise ml.errors.WeightsError(f"the vocabulary of {count} tokens lacks {token!r}")
        split = value("pre", "") if self.kind == "gpt2" else ""
        if not isinstance(split, str) or split not in _WORDS:
            supported = ", ".join(filter(None, _WORDS))
            raise ml.errors.WeightsError(
                f"the tokenizer's split of texts must be one of {supported}, got {split!r}"
            )
        self._words = re.compile(_WORDS[split])
        self._takes_words = _WORDS[split] is _LLAMA3
        """Whether a word of the vocabulary is always a single token, regardless of the merges."""
        for name in ("add_bos_token", "add_space_prefix", "add_eos_token"):
            flag = value(name)
            if type(flag) not in (bool, type(None)) or (flag and name == "add_eos_token"):
                raise ml.errors.WeightsError(f"{_KEY}{name} {flag!r} is not supported")
        adds_bos = self.kind == "llama" or self._takes_words
        self.adds_bos = value("add_bos_token", adds_bos) and self.bos is not None
        self._adds_space = value("add_space_prefix", True)
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        if self.kind == "llama":
            self._ranks = dict(zip(self.tokens, value("scores", [0.0] * count), strict=False))
            named = [(i, x) for i, x in enumerate(self.tokens) if _BYTE.fullmatch(x)]
            self._bytes = {i: bytes([int(x[3:5], 16)]) for i, x in named}
            self._of_byte = {data[0]: i for i, data in self._bytes.items()}
        else:
            merges = [tuple(pair.split(" ", 1)) for pair in value("merges", [])]
            self._merges = {pair: i for i, pair in enumerate(merges)}
            self._letters = _letters_of_bytes()
            self._of_letter = {letter: byte for byte, letter in self._letters.items()}
        rest = len(self._ids) if self.kind == "gpt2" else len(value("scores", self.tokens))
        sizes = len(self.kinds), rest
        if not count or set(sizes) != {count}:
            raise ml.errors.WeightsError(f"the tokenizer's lists have inconsistent sizes: {sizes}")
        defined = [i for i, kind in enumerate(self.kinds) if kind == _USER_DEFINED]
        self._user_defined = sorted(defined, key=lambda i: -len(self.tokens[i]))

    def encode(self, text: str) -> list[int]:
        """Encode a text, preceded by the begin-of-text token if the file requests it.

        User-defined tokens are matched first, the longest token first.
        """
        encode = self._of_text if self.kind == "llama" else self._of_words
        ids = [self.bos] if self.adds_bos else []
        for part in self._parts(text):
            ids += encode(part) if isinstance(part, str) else [part]
        return ids

    def _parts(self, text: str) -> list[str | int]:
        """Split a text at user-defined tokens."""
        parts: list[str | int] = [text]
        for token in self._user_defined:
            before, parts = parts, []
            for part in before:
                first, *rest = part.split(self.tokens[token]) if isinstance(part, str) else [part]
                parts += [first, *(x for piece in rest for x in (token, piece))]
        return [part for part in parts if part != ""]

    def _of_text(self, text: str) -> Iterator[int]:
        prefix = _SPACE if self._adds_space and text else ""
        for piece in self._merged([*(prefix + text.replace(" ", _SPACE))]):
            yield from self._of_piece(piece)

    def _of_words(self, text: str) -> Iterator[int]:
        for word in self._words.findall(text):
            letters = [self._letters[byte] for byte in word.encode("utf-8", "surrogatepass")]
            if self._takes_words and "".join(letters) in self._ids:
                yield self._ids["".join(letters)]
                continue
            for piece in self._merged(letters):
                parts = [piece] if piece in self._ids else piece
                yield from (self._ids[part] for part in parts if part in self._ids)

    def data(self, token: int) -> bytes:
        """Return the bytes of a token; control tokens have no bytes."""
        if not 0 <= token < len(self.tokens) or self.kinds[token] == _CONTROL:
            return b""
        text = self.tokens[token]
        if self.kind == "llama" and token in self._bytes:
            return self._bytes[token]
        if self.kind == "llama":
            return text.replace(_SPACE, " ").encode("utf-8", "surrogatepass")
        is_raw = self.kinds[token] == _USER_DEFINED
        if not is_raw and all(letter in self._of_letter for letter in text):
            return bytes([self._of_letter[letter] for letter in text])
        return text.encode("utf-8", "surrogatepass")

    def _rank(self, left: str, right: str) -> float | None:
        """Return the rank of a pair, or None if it is never merged; low ranks are merged first."""
        if self.kind == "llama":
            score = self._ranks.get(left + right)
            return None if score is None else -score
        return self._merges.get((left, right))

    def _merged(self, pieces: list[str]) -> Iterator[str]:
        """Merge adjacent pieces, the best pair first; return the pieces.

        Of several equal pairs, the leftmost pair is merged first.
        """
        before = [*range(-1, len(pieces) - 1)]
        after = [*range(1, len(pieces)), -1]
        heap: list[tuple[float, int, str, str]] = []

        def offer(i: int) -> None:
            if i >= 0 and after[i] >= 0:
                left, right = pieces[i], pieces[after[i]]
                rank = self._rank(left, right)
                if rank is not None:
                    heapq.heappush(heap, (rank, i, left, right))

        for i in range(len(pieces)):
            offer(i)
        while heap:
            _, i, left, right = heapq.heappop(heap)
            j = after[i]
            if j < 0 or pieces[i] != left or pieces[j] != right:
                continue  # an earlier merge has changed one of the two pieces
            pieces[i], pieces[j] = left + right, ""
            after[i] = after[j]
            if after[j] >= 0:
                before[after[j]] = i
            after[j] = -1
            offer(before[i])
            offer(i)
        return (piece for piece in pieces if piece)

    def _of_piece(self, piece: str) -> list[int]:
        """Return the token of a piece, or the tokens of the bytes."""
        if piece in self._ids:
            return [self._ids[piece]]
        unknown = self.kinds.index(_UNKNOWN) if _UNKNOWN in self.kinds else 0
        return [self._of_byte.get(byte, unknown) for byte in piece.encode("utf-8", "surrogatepass")]


class Decoder:
    """Incremental decoder: a letter that spans several tokens is returned when it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def __call__(self, token: int) -> str:
        return self._decode(self._tokenizer.data(token))

    def end(self) -> str:
        """Return the text of incomplete letters at the end."""
        return self._decode(b"", True)
