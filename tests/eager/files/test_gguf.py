"""GGUF files: what is read, beside the formats' own formulas and the `gguf` package."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.gguf_file import BLOCKS, CODES, Blocks, write
from mlvm.core.errors import WeightsError
from mlvm.core.types import Array
from tests.brief import refuses

_rng = np.random.default_rng(1)
_HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
    "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""Where blocks have numbers in f16."""
_METADATA: dict[str, Any] = {"general.architecture": "test", "a.list": ["x", "yé"], "a.int": 7}


def _random(format: str, rows: int = 2, columns: int = 256) -> Blocks:
    """Any bytes, but for scales, which are no nans."""
    elements, nbytes = BLOCKS[format]
    if format in ("F32", "F16"):
        return Blocks.of(_rng.standard_normal((rows, columns)), format)
    blocks = _rng.integers(0, 256, (rows * columns // elements, nbytes), np.uint8)
    if format == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 16 + 120  # a power of two
    for at in _HALVES[format]:
        scales = _rng.standard_normal((len(blocks), 1)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return Blocks(format, (rows, columns), blocks.reshape(-1))


_IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def _half(block: Array, at: int) -> float:
    return float(block[at : at + 2].view("<f2")[0])


def _element(format: str, block: Array, i: int) -> float:
    """Element i of a block, as the format's description in ggml has it."""
    byte = [int(x) for x in block]
    if format == "Q4_0":
        return _half(block, 0) * ((byte[2 + i % 16] >> 4 * (i // 16) & 15) - 8)
    nibble = 4 * (i % 32 // 16)
    if format == "Q4_1":
        return _half(block, 0) * (byte[4 + i % 16] >> nibble & 15) + _half(block, 2)
    if format in ("Q5_0", "Q5_1"):
        at = 2 if format == "Q5_0" else 4
        code = byte[at + 4 + i % 16] >> nibble & 15 | (byte[at + i // 8] >> i % 8 & 1) << 4
        least = _half(block, 2) if format == "Q5_1" else -16 * _half(block, 0)
        return _half(block, 0) * code + least
    if format == "MXFP4":
        code = byte[1 + i % 16] >> nibble & 15
        size = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * float(np.exp2(byte[0] - 127))
        return -size if code & 8 else size
    if format == "IQ4_NL":
        return _half(block, 0) * _IQ4[byte[2 + i % 16] >> nibble & 15]
    if format == "IQ4_XS":
        group = i // 32
        low = byte[4 + group // 2] >> 4 * (group % 2) & 15
        high = (byte[2] | byte[3] << 8) >> 2 * group & 3
        code = byte[8 + 16 * group + i % 16] >> nibble & 15
        return _half(block, 0) * ((low | high << 4) - 32) * _IQ4[code]
    if format == "Q2_K":
        code = byte[16 + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3
        scale = byte[i // 16]
        return _half(block, 80) * (scale & 15) * code - _half(block, 82) * (scale >> 4)
    if format == "Q3_K":
        code = byte[32 + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3
        code -= 0 if byte[i % 32] >> (i // 32) & 1 else 4
        group = i // 16
        low = byte[96 + group % 8] >> 4 * (group // 8) & 15
        high = byte[104 + group % 4] >> 2 * (group // 4) & 3
        return _half(block, 108) * ((low | high << 4) - 32) * code
    if format == "Q8_0":
        return _half(block, 0) * int(block[2 + i : 3 + i].view(np.int8)[0])
    if format == "Q6_K":
        part, line, column = i // 128, i // 32 % 4, i % 32
        low = byte[64 * part + 32 * (line % 2) + column] >> 4 * (line // 2) & 15
        high = byte[128 + 32 * part + column] >> 2 * line & 3
        scale = int(block[192 + i // 16 : 193 + i // 16].view(np.int8)[0])
        return _half(block, 208) * scale * ((low | high << 4) - 32)
    group, column = i // 32, i % 32
    if group < 4:
        scale, least = byte[4 + group] & 63, byte[8 + group] & 63
    else:
        scale = byte[8 + group] & 15 | byte[group] >> 6 << 4
        least = byte[8 + group] >> 4 | byte[4 + group] >> 6 << 4
    start = 16 if format == "Q4_K" else 48
    code = byte[start + 32 * (group // 2) + column] >> 4 * (group % 2) & 15
    if format == "Q5_K":
        code |= (byte[16 + column] >> group & 1) << 4
    return _half(block, 0) * scale * code - _half(block, 2) * least


def _loaded(loaded: Any, name: str) -> Array:
    x = loaded[name]
    return (ml.dequantize(x, loaded[f"{name}.scale"]) if f"{name}.scale" in loaded else x).numpy()


def test_tensors_are_those_of_the_formulas(tmp_path: Path) -> None:
    tensors = {format: _random(format) for format in CODES}
    write(tmp_path / "x.gguf", _METADATA, tensors)
    loaded = ml.load(tmp_path / "x.gguf")
    assert loaded.plain == _METADATA
    for name in _HALVES:
        elements, nbytes = BLOCKS[name]
        blocks = tensors[name].data.reshape(-1, nbytes)
        expected = [[_element(name, block, i) for i in range(elements)] for block in blocks]
        np.testing.assert_allclose(
            _loaded(loaded, name).ravel(), np.ravel(expected), rtol=1e-6, atol=1e-4, err_msg=name
        )
        assert loaded[name].nbytes <= 512
    for name, dtype in (("F32", "<f4"), ("F16", "<f2")):
        assert (_loaded(loaded, name).ravel() == tensors[name].data.view(dtype)).all()


def test_tensors_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    quants, constants = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf.constants")
    tensors = {format: _random(format) for format in CODES}
    write(tmp_path / "x.gguf", {}, tensors)
    loaded = ml.load(tmp_path / "x.gguf")
    for name, (_, shape, data) in tensors.items():
        kind = constants.GGMLQuantizationType[name]
        expected = quants.dequantize(data.reshape(shape[0], -1), kind)
        assert (_loaded(loaded, name) == expected).all(), name


@pytest.mark.parametrize("byte", [0x7C, 0x7D, 0xFF])
def test_scales_that_are_no_numbers_are_read_without_a_warning(byte: int, tmp_path: Path) -> None:
    """0x7c7c and the others are nans of f16, and 0x7c00 behind zeros is infinite."""
    for high in (byte, 0):
        tensors = {}
        for name, places in _HALVES.items():
            blocks = np.full((2, BLOCKS[name][1]), high, np.uint8)
            for at in places:
                blocks[:, at : at + 2] = (0, 0x7C) if byte == 0x7C else (byte, byte)
            columns = 2 * BLOCKS[name][0]
            tensors[name] = Blocks(name, (1, columns), blocks.reshape(-1))
        write(tmp_path / "x.gguf", {}, tensors)
        loaded = ml.load(tmp_path / "x.gguf")
        for name in _HALVES:
            if _HALVES[name]:
                assert not np.isfinite(loaded[f"{name}.scale"].numpy()).all(), name


def test_scales_of_mxfp4_are_powers_of_two(tmp_path: Path) -> None:
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = range(256)
    write(tmp_path / "x.gguf", {}, {"x": Blocks("MXFP4", (256, 32), blocks.reshape(-1))})
    expected = np.ldexp(np.ones(256), np.arange(-128, 128))
    assert (ml.load(tmp_path / "x.gguf")["x.scale"].numpy().ravel() == expected).all()


def _file(shape: tuple[int, ...] = (32,), code: int = 2, at: int = 0, **changes: Any) -> bytes:
    """A file of one tensor, spelt out."""
    fields: dict[str, Any] = {
        "version": 3,
        "tensors": 1,
        "values": 0,
        "name": b"x",
        "metadata": b"",
    }
    fields |= changes
    head = b"GGUF" + struct.pack("<IQQ", fields["version"], fields["tensors"], fields["values"])
    entry = struct.pack("<Q", len(fields["name"])) + fields["name"]
    entry += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, at)
    whole: bytes = head + fields["metadata"] + entry
    return whole + bytes(-len(whole) % 32 + 18)


_KEY = struct.pack("<Q1sI", 1, b"k", 9)

_BAD = {
    "version 77": _file(version=77),
    "inside the header": _file(name=b"x" * 99)[:80],
    r"expected \d+ items": _file(tensors=2**60),
    "metadata contains k twice": _file(values=2, metadata=2 * struct.pack("<Q1sII", 1, b"k", 4, 1)),
    "format 99": _file(code=99),
    "at most 4 axes, got 9": _file(shape=(1,) * 9),
    "exceeds the file": _file(shape=(2**62, 2**62)),
    "expected rows of 32-element blocks": _file(shape=(16, 2)),
    "expected a file of at least": _file(at=32),
    "value of kind 77": _file(values=1, metadata=struct.pack("<Q1sI", 1, b"k", 77)),
    "a value of kind 9, nested 64 lists deep": _file(
        values=1, metadata=_KEY + struct.pack("<IQ", 9, 1) * 70
    ),
    r"expected \d+ items at \d+, got a file": _file(
        values=1, metadata=_KEY + struct.pack("<IQ", 0, 2**50)
    ),
    "alignment": _file(values=1, metadata=struct.pack("<Q17sII", 17, b"general.alignment", 4, 0)),
}


@pytest.mark.parametrize("reason", _BAD)
def test_damaged_files_are_refused(reason: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(_BAD[reason])
    refuses(WeightsError, rf"bad\.gguf: .*({reason})", ml.load, tmp_path / "bad.gguf")


def test_no_byte_of_a_header_leads_to_another_error(tmp_path: Path) -> None:
    whole = _file(values=1, metadata=_KEY + struct.pack("<IQ", 4, 2) + bytes(8))
    file = tmp_path / "x.gguf"
    for i in range(4, len(whole) - 18):
        file.write_bytes(whole[:i] + bytes([255 * (i % 2)]) + whole[i + 1 :])
        with suppress(ml.errors.MlvmError):
            ml.load(file)
    file.write_bytes(whole)
    assert ml.load(file)["x"].type.dtype == ml.int4


def test_a_tensor_in_another_format_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    write(file, _METADATA, {"a": _random("F32"), "b": _random("Q8_0")})
    data = bytearray(file.read_bytes())
    at = data.index(b"b", data.index(b"\x01\0\0\0\0\0\0\0b")) + 1 + 4 + 16
    assert data[at : at + 4] == struct.pack("<I", CODES["Q8_0"])
    data[at : at + 4] = struct.pack("<I", 19)
    file.write_bytes(data)
    refuses(WeightsError, "b has format 19; supported formats are F32", ml.load, file)
    assert [*ml.load(file, where="a")] == ["a"]
    named = tmp_path / "x.safetensors"
    ml.save(named, {"b\n\x1b": ml.ones(1)})
    refuses(
        ml.errors.ArgumentError, r"matches 'a'; expected: b\\n\\x1b$", ml.load, named, where="a"
    )
    assert [*ml.load(file, rename=lambda name: None if name == "b" else name)] == ["a"]


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    tensors = {"a": _random("F32")}
    write(tmp_path / "one.gguf", {"split.count": 1, "split.no": 0}, tensors)
    assert [*ml.load(tmp_path / "one.gguf")] == ["a"]
    write(tmp_path / "merged.gguf", {"split.count": 0}, tensors)  # as llama-gguf-split --merge
    assert [*ml.load(tmp_path / "merged.gguf")] == ["a"]
    write(tmp_path / "two.gguf", {"split.count": 2, "split.no": 1}, tensors)
    refuses(WeightsError, "part 2 of 2; .*--merge", ml.load, tmp_path / "two.gguf")
