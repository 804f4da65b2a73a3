"""The Mixer and the Vision Transformer have the published numbers of parameters; their names and
results are in `test_mlp_mixer.py` and `test_weights.py`."""

from __future__ import annotations

from runpy import run_path
from typing import Any

import pytest

from models import mlp_mixer, vit
from tests.brief import Capsys, cases

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
    module: Any, fields: str, counts: dict[str, int], capsys: Capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_path(module.__file__, run_name="__main__")
    assert not ended.value.code
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[1:-1] == fields.split()
    assert [row.split() for row in rows] == [
        [name, *map(str, module.VARIANTS[name]), f"{count:,}"] for name, count in counts.items()
    ]
