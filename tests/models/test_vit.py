"""The Vision Transformer has the official parameters; what it computes is in `test_weights.py`."""

from __future__ import annotations

import mlvm.eager as ml
from models.vit import VARIANTS, VisionTransformer
from tests.brief import output_of

COUNTS = {
    "Ti/16": 5_717_416,
    "S/32": 22_878_952,
    "S/16": 22_050_664,
    "B/32": 88_224_232,
    "B/16": 86_567_656,
    "B/8": 86_576_872,
    "L/32": 306_535_400,
    "L/16": 304_326_632,
    "H/14": 632_045_800,
    "g/14": 1_012_611_432,
    "G/14": 1_844_440_680,
}
"""As timm counts them."""


def test_the_command_prints_the_variants_with_their_number_of_parameters() -> None:
    header, *rows = output_of("-m", "models.vit").splitlines()
    assert header.split()[1:-1] == [
        "patch_size",
        "hidden_size",
        "num_layers",
        "mlp_dim",
        "num_heads",
    ]
    assert [row.split() for row in rows] == [
        [name, *map(str, VARIANTS[name]), f"{count:,}"] for name, count in COUNTS.items()
    ]


def test_the_parameters_are_those_of_the_official_checkpoint() -> None:
    block = {
        "LayerNorm_0/scale": (768,),
        "LayerNorm_0/bias": (768,),
        "MultiHeadDotProductAttention_1/query/kernel": (768, 12, 64),
        "MultiHeadDotProductAttention_1/query/bias": (12, 64),
        "MultiHeadDotProductAttention_1/key/kernel": (768, 12, 64),
        "MultiHeadDotProductAttention_1/key/bias": (12, 64),
        "MultiHeadDotProductAttention_1/value/kernel": (768, 12, 64),
        "MultiHeadDotProductAttention_1/value/bias": (12, 64),
        "MultiHeadDotProductAttention_1/out/kernel": (12, 64, 768),
        "MultiHeadDotProductAttention_1/out/bias": (768,),
        "LayerNorm_2/scale": (768,),
        "LayerNorm_2/bias": (768,),
        "MlpBlock_3/Dense_0/kernel": (768, 3072),
        "MlpBlock_3/Dense_0/bias": (3072,),
        "MlpBlock_3/Dense_1/kernel": (3072, 768),
        "MlpBlock_3/Dense_1/bias": (768,),
    }
    expected = {
        "cls": (1, 1, 768),
        "embedding/kernel": (16, 16, 3, 768),
        "embedding/bias": (768,),
        "Transformer/posembed_input/pos_embedding": (1, 197, 768),
        "Transformer/encoder_norm/scale": (768,),
        "Transformer/encoder_norm/bias": (768,),
        "pre_logits/kernel": (768, 768),
        "pre_logits/bias": (768,),
        "head/kernel": (768, 21843),
        "head/bias": (21843,),
        **{
            f"Transformer/encoderblock_{i}/{name}": shape
            for i in range(12)
            for name, shape in block.items()
        },
    }
    with ml.Arena(ml.DryVM(), "types").allocating():
        model = VisionTransformer((224, 224, 3), 21843, *VARIANTS["B/16"], representation_size=768)
    assert {name: x.shape for name, x in model.named_parameters().items()} == expected
