"""Fourier transforms: types and flops."""

from __future__ import annotations

from typing import Any

from mlvm.core.op import OPS
from mlvm.core.types import TensorType
from tests.brief import cases


def inferred(name: str, type: str, **attributes: Any) -> str:
    op = OPS[name]
    return str(op.infer([TensorType.parse(type)], op.bind(attributes)))


def test_types() -> None:
    assert inferred("fft", "f32[2,3]", axes=(0, 1)) == "c64[2,3]"
    assert inferred("ifft", "c128[2]") == "c128[2]"
    assert inferred("rfft", "f64[5,2]", axis=0) == "c128[3,2]"
    assert inferred("irfft", "c64[3,2]", n=5, axis=0) == "f32[5,2]"
    assert inferred("irfft", "f64[3]", n=4) == "f64[4]"


@cases(
    "name, type, attributes, flops",
    ("fft", "c64[3,8]", {}, 5 * 24 * 3),
    ("ifft", "c64[4,8]", {"axes": (0, 1)}, 5 * 32 * 5),
    ("rfft", "f32[3,8]", {}, 180),
    ("irfft", "c64[3,5]", {"n": 8}, 180),
)
def test_flops(name: str, type: str, attributes: dict[str, Any], flops: int) -> None:
    op, operand = OPS[name], TensorType.parse(type)
    bound = op.bind(attributes)
    out = op.infer([operand], bound)
    assert out is not None
    assert op.flops([operand], out, bound) == flops
