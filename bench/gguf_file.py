"""GGUF files as tests and benchmarks need them: written by a few lines, read by others."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
CODES: Final = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
}  # fmt: skip
BLOCKS: Final = {
    "F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
"""Elements and bytes of a block."""
_ALIGNMENT: Final = 32


class Blocks(NamedTuple):
    """A tensor: its format, shape and bytes."""

    format: str
    shape: tuple[int, ...]
    data: Array

    @classmethod
    def of(cls, x: Array, format: str) -> Blocks:
        """Return numbers in F32, F16, Q4_0 or Q8_0."""
        x = np.ascontiguousarray(x, np.float32)
        if format in ("F32", "F16"):
            data = x.astype(np.float32 if format == "F32" else np.float16).reshape(-1)
            return cls(format, x.shape, data.view(np.uint8))
        groups = x.reshape(-1, 32)
        if format == "Q4_0":  # as ggml has it: the largest becomes -8
            largest = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, np.newaxis], 1)
            scale = largest / -8
        else:
            scale = np.abs(groups).max(1, keepdims=True) / 127
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        if format == "Q4_0":
            codes = np.minimum(groups * inverse + 8.5, 15).astype(np.uint8)
            bytes_ = codes[:, :16] | codes[:, 16:] << 4
        else:
            bytes_ = np.round(groups * inverse).astype(np.int8).view(np.uint8)
        return cls(
            format, x.shape, np.hstack([scale.astype("<f2").view(np.uint8), bytes_]).reshape(-1)
        )


def write(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Blocks]) -> None:
    """Ints, floats, bools, texts, and lists of each; and tensors by name."""
    with file.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for name, value in metadata.items():
            _write_text(stream, name)
            _write_value(stream, value)
        at = 0
        for name, (form, shape, data) in tensors.items():
            _write_text(stream, name)
            stream.write(struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]))
            stream.write(struct.pack("<IQ", CODES[form], at))
            at += -(-len(data) // _ALIGNMENT) * _ALIGNMENT
        for _, _, data in tensors.values():
            stream.write(bytes(-stream.tell() % _ALIGNMENT))
            stream.write(data.data)


def _write_text(stream: BinaryIO, text: str) -> None:
    data = text.encode()
    stream.write(struct.pack("<Q", len(data)) + data)


_KINDS: Final = {bool: (7, "<?"), int: (5, "<i"), float: (6, "<f")}
"""Kinds of numbers, and their formats. Sizes are unsigned, and lists of kinds are not."""


def _write_value(stream: BinaryIO, value: Any, is_item: bool = False) -> None:
    if isinstance(value, list):
        stream.write(struct.pack("<IIQ", 9, _kind(value[0]), len(value)))
        for each in value:
            _write_value(stream, each, True)
        return
    if type(value) is int and not is_item:
        stream.write(struct.pack("<II", 4, value))
        return
    if not is_item:
        stream.write(struct.pack("<I", _kind(value)))
    if isinstance(value, str):
        _write_text(stream, value)
    else:
        stream.write(struct.pack(_KINDS[type(value)][1], value))


def _kind(value: Any) -> int:
    return 8 if isinstance(value, str) else _KINDS[type(value)][0]


class LlamaSize(NamedTuple):
    """A Llama that a test or a benchmark makes."""

    width: int
    blocks: int
    heads: int
    kv_heads: int
    mlp_dim: int
    tokens: int


def llama(size: LlamaSize, format: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Return the metadata and the tensors of a Llama with random weights, in blocks of that
    format."""
    rng = np.random.default_rng(seed)
    narrow = size.width // size.heads * size.kv_heads

    def dense(outputs: int, inputs: int) -> Blocks:
        return Blocks.of(rng.standard_normal((outputs, inputs), np.float32) / inputs**0.5, format)

    tensors = {"token_embd.weight": dense(size.tokens, size.width)}
    for i in range(size.blocks):
        name = f"blk.{i}"
        for norm in ("attn_norm", "ffn_norm"):
            scale = 1 + 0.1 * rng.standard_normal(size.width, np.float32)
            tensors[f"{name}.{norm}.weight"] = Blocks.of(scale, "F32")
        tensors |= {
            f"{name}.attn_q.weight": dense(size.width, size.width),
            f"{name}.attn_k.weight": dense(narrow, size.width),
            f"{name}.attn_v.weight": dense(narrow, size.width),
            f"{name}.attn_output.weight": dense(size.width, size.width),
            f"{name}.ffn_gate.weight": dense(size.mlp_dim, size.width),
            f"{name}.ffn_up.weight": dense(size.mlp_dim, size.width),
            f"{name}.ffn_down.weight": dense(size.width, size.mlp_dim),
        }
    tensors["output_norm.weight"] = Blocks.of(np.ones(size.width, np.float32), "F32")
    tensors["output.weight"] = dense(size.tokens, size.width)
    plain = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*plain, *(f"\u2581w{i}" for i in range(size.tokens - len(plain)))]
    return {
        "general.architecture": "llama",
        "llama.context_length": 2048,
        "llama.embedding_length": size.width,
        "llama.block_count": size.blocks,
        "llama.feed_forward_length": size.mlp_dim,
        "llama.attention.head_count": size.heads,
        "llama.attention.head_count_kv": size.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": size.width // size.heads,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [-float(i) for i in range(size.tokens)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (size.tokens - len(plain))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }, tensors
