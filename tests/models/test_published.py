"""The Mixer and the Vision Transformer have the published parameters; what they compute is in
`test_mlp_mixer.py` and `test_weights.py`."""

from __future__ import annotations

from typing import Any

import mlvm.eager as ml
from models import mlp_mixer, vit
from tests.brief import cases, output_of

Shapes = dict[str, tuple[int, ...]]

MIXERS = {
    "S/32": 19_104_624,
    "S/16": 18_528_264,
    "B/32": 60_293_428,
    "B/16": 59_880_472,
    "L/32": 206_939_264,
    "L/16": 208_196_168,
    "H/14": 432_350_952,
}
"""As the paper counts them."""

VITS = {
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


@cases(
    "module, fields, counts",
    (mlp_mixer, "patch_size hidden_dim num_blocks tokens_mlp_dim channels_mlp_dim", MIXERS),
    (vit, "patch_size hidden_size num_layers mlp_dim num_heads", VITS),
    ids=["mlp_mixer", "vit"],
)
def test_the_command_prints_the_variants_with_their_number_of_parameters(
    module: Any, fields: str, counts: dict[str, int]
) -> None:
    header, *rows = output_of("-m", module.__name__).splitlines()
    assert header.split()[1:-1] == fields.split()
    assert [row.split() for row in rows] == [
        [name, *map(str, module.VARIANTS[name]), f"{count:,}"] for name, count in counts.items()
    ]


def dense(path: str, *kernel: int, bias: tuple[int, ...] = ()) -> Shapes:
    return {f"{path}/kernel": kernel, f"{path}/bias": bias or kernel[-1:]}


def norm(path: str, width: int) -> Shapes:
    return {f"{path}/scale": (width,), f"{path}/bias": (width,)}


def blocks(path: str, count: int, block: Shapes) -> Shapes:
    return {f"{path}_{i}/{name}": shape for i in range(count) for name, shape in block.items()}


MIXER_BLOCK = {
    **norm("LayerNorm_0", 512),
    **norm("LayerNorm_1", 512),
    **dense("token_mixing/Dense_0", 196, 256),
    **dense("token_mixing/Dense_1", 256, 196),
    **dense("channel_mixing/Dense_0", 512, 2048),
    **dense("channel_mixing/Dense_1", 2048, 512),
}
MIXER_S16 = {
    **dense("stem", 16, 16, 3, 512),
    **norm("pre_head_layer_norm", 512),
    **dense("head", 512, 1000),
    **blocks("MixerBlock", 8, MIXER_BLOCK),
}
ATTENTION = "MultiHeadDotProductAttention_1"
VIT_BLOCK = {
    **norm("LayerNorm_0", 768),
    **dense(f"{ATTENTION}/query", 768, 12, 64, bias=(12, 64)),
    **dense(f"{ATTENTION}/key", 768, 12, 64, bias=(12, 64)),
    **dense(f"{ATTENTION}/value", 768, 12, 64, bias=(12, 64)),
    **dense(f"{ATTENTION}/out", 12, 64, 768),
    **norm("LayerNorm_2", 768),
    **dense("MlpBlock_3/Dense_0", 768, 3072),
    **dense("MlpBlock_3/Dense_1", 3072, 768),
}
VIT_B16 = {
    "cls": (1, 1, 768),
    **dense("embedding", 16, 16, 3, 768),
    "Transformer/posembed_input/pos_embedding": (1, 197, 768),
    **norm("Transformer/encoder_norm", 768),
    **dense("pre_logits", 768, 768),
    **dense("head", 768, 21843),
    **blocks("Transformer/encoderblock", 12, VIT_BLOCK),
}


@cases(
    "model, expected",
    (lambda: mlp_mixer.MlpMixer((224, 224, 3), 1000, *mlp_mixer.VARIANTS["S/16"]), MIXER_S16),
    (
        lambda: vit.VisionTransformer(
            (224, 224, 3), 21843, *vit.VARIANTS["B/16"], representation_size=768
        ),
        VIT_B16,
    ),
)
def test_the_parameters_are_those_of_the_official_checkpoint(model: Any, expected: Shapes) -> None:
    with ml.Arena(ml.DryVM(), "types").allocating():
        parameters = model().named_parameters()
    assert {name: x.shape for name, x in parameters.items()} == expected
