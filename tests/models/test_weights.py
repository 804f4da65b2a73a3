"""Published weights: files in each layout load whole, give the published models' numbers, or say
which names do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager import nn
from models import weights
from models.mlp_mixer import MlpMixer
from models.training import checkpoint
from models.vit import VisionTransformer
from tests.models.in_torch import FULL, SMALL, data, drawn, largest_errors, ours, shapes, theirs

Array = NDArray[Any]
MODELS = ["mlp_mixer", "vit"]


def small(model: str, **options: Any) -> nn.Module:
    """A model for 8 x 8 x 1 and 3 classes, with a head that says something."""
    key = ml.random.key(0)
    made: nn.Module
    if model == "vit":
        made = VisionTransformer((8, 8, 1), 3, 2, 12, 2, 20, 3, key=key, **options)
    else:
        made = MlpMixer((8, 8, 1), 3, 2, 12, 2, 5, 20, key=key, **options)
    random = np.random.default_rng(0)
    made.load_state(
        {name: random.standard_normal(x.shape).astype("f4") for name, x in made.state().items()}
    )
    return made


def arrays_of(model: nn.Module) -> dict[str, Array]:
    return {name: x.numpy() for name, x in model.state().items()}


def npz(file: Path, arrays: dict[str, Any]) -> None:
    np.savez(file, **arrays)


def same(one: nn.Module, two: nn.Module, images: Array) -> bool:
    given = ml.asarray(images)
    return bool((one(given).numpy() == two(given).numpy()).all())


IMAGES = np.random.default_rng(3).standard_normal((2, 8, 8, 1)).astype("f4")


# --- what they compute ---------------------------------------------------------------


@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "exact"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_gradients_are_those_of_pytorch(
    tmp_path: Path, model: str, approximate: bool
) -> None:
    """At full size: python -m tests.models.in_torch."""
    pytest.importorskip("torch")
    size, file = SMALL[model], tmp_path / "weights"
    arrays, (images, labels) = drawn(model, size), data(size, 3)
    ml.save(file, arrays)
    read = weights.read(file, num_heads=size.heads or None, approximate=approximate)
    assert (read.layout, read.model) == ("timm", model)
    net = read.build()
    expected = theirs(model, size, arrays, images, labels, tmp_path, approximate=approximate)
    for captured in (False, True):
        at, gradient = largest_errors(ours(net, images, labels, captured=captured), expected)
        assert at < 2e-5
        assert gradient < 3e-5
    other = weights.read(file, num_heads=size.heads or None, approximate=not approximate).build()
    outcome = ours(other, images, labels, captured=False)
    assert largest_errors(outcome, expected)[0] > 2e-5  # the two GELUs can be told apart


# --- the published layouts -----------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_timms_file_of_a_published_size_is_recognised_whole(tmp_path: Path, model: str) -> None:
    file, header, end = tmp_path / "weights", {}, 0
    for name, shape in shapes(model, FULL[model]).items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        stream.truncate(8 + len(head) + end)  # zeros, which take no room
    read = weights.read(file)
    assert (read.layout, read.variant) == ("timm", "S/16")
    assert (read.image_shape, read.num_classes) == ((224, 224, 3), 1000)
    assert not read.options["approximate"]
    assert str(read) == (
        f"{model} S/16 for images of 224 x 224 x 3 and 1000 classes, in the timm layout"
    )
    with ml.Arena(ml.DryVM(), "types").allocating():
        net = read.build()
    assert {name: x.shape for name, x in net.state().items()} == {
        name: x.shape for name, x in read.arrays.items()
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_the_official_npz_loads_whole(tmp_path: Path, model: str, prefix: str) -> None:
    file = tmp_path / "weights.npz"
    net = small(model)
    npz(file, {prefix + name: x for name, x in arrays_of(net).items()})
    read = weights.read(file)
    assert (read.layout, read.model, read.variant) == ("official", model, None)
    assert (read.image_shape, read.num_classes, read.classes) == ((8, 8, 1), 3, None)
    assert same(read.build(), net, IMAGES)


def test_later_versions_of_flax_count_layers_otherwise(tmp_path: Path) -> None:
    file, net = tmp_path / "weights.npz", small("vit")
    later = {
        "LayerNorm_2": "LayerNorm_1",
        "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
        "MlpBlock_3": "MlpBlock_0",
        "Transformer/posembed_input/pos_embedding": "pos_embedding",  # big_vision's
    }
    named = {}
    for name, x in arrays_of(net).items():
        for old, new in later.items():
            name = name.replace(old, new)
        named[f"params/{name}"] = x
    npz(file, named)
    assert same(weights.read(file).build(), net, IMAGES)


def test_the_official_vit_of_imagenet_21k_has_a_layer_before_its_head(tmp_path: Path) -> None:
    file = tmp_path / "weights.npz"
    net = small("vit", representation_size=7)
    npz(file, arrays_of(net))
    read = weights.read(file)
    assert read.options["representation_size"] == 7
    assert same(read.build(), net, IMAGES)


def test_an_npz_of_bf16_is_read_as_f32(tmp_path: Path) -> None:
    net, plain = small("vit"), tmp_path / "plain.npz"
    rounded = {name: ((x.view("u4") >> 16) << 16).view("f4") for name, x in arrays_of(net).items()}
    upper = {name: (x.view("u4") >> 16).astype("<u2") for name, x in rounded.items()}
    npz(plain, {name: x.view("V2") for name, x in upper.items()})  # as numpy writes a bf16
    built = weights.read(plain).build()
    assert all((rounded[name] == x).all() for name, x in arrays_of(built).items())


# --- our own files -------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_what_was_saved_with_a_description_is_built_again(tmp_path: Path, model: str) -> None:
    file, shape = tmp_path / "weights", (4, 16, 1)
    net: nn.Module
    if model == "vit":
        net = VisionTransformer(shape, 2, approximate=False, key=ml.random.key(0))
    else:
        net = MlpMixer(shape, 2, approximate=False, key=ml.random.key(0))
    ml.save(file, net, weights.described(shape, ["cat", "dog"], approximate=False))
    read = weights.read(file)
    assert (read.layout, read.image_shape, read.classes) == ("mlvm", shape, ["cat", "dog"])
    assert not read.options["approximate"]
    assert same(read.build(), net, IMAGES.reshape(2, *shape))


def test_a_checkpoint_is_read_by_the_names_below_model(tmp_path: Path) -> None:
    file, net = tmp_path / "weights", small("mlp_mixer")
    tensors = {f"model/{name}": x for name, x in arrays_of(net).items()}
    checkpoint.save(file, {**tensors, "optimizer/count": np.array(3)}, {"training": "{}"})
    assert same(weights.read(file).build(), net, IMAGES)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ml.errors.WeightsError, match="its data is not what was written"):
        weights.read(file)


# --- other images and classes --------------------------------------------------------


def test_a_head_for_other_classes_is_new_and_the_rest_is_kept(tmp_path: Path) -> None:
    file, net = tmp_path / "weights", small("mlp_mixer")
    ml.save(file, net)
    read = weights.read(file)
    assert read.changes((8, 8, 1), 3) == []
    assert read.changes((8, 8, 1), 5) == ["the head is new: 5 classes instead of 3"]
    found, before = arrays_of(read.build(num_classes=5)), arrays_of(net)
    assert found["head/kernel"].shape == (12, 5)
    assert not found["head/kernel"].any()
    assert all((x == before[name]).all() for name, x in found.items() if "head/" not in name)
    for shape, reason in (
        ((8, 10, 1), "not of 8 x 10: a Mixer"),
        ((8, 8, 3), "1 channels, not of 3"),
    ):
        with pytest.raises(ml.errors.WeightsError, match=reason):
            read.build(shape)


def test_a_backbone_without_a_head_is_for_finetuning(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    state = arrays_of(small("vit"))
    ml.save(file, {name: x for name, x in state.items() if not name.startswith("head/")})
    read = weights.read(file)
    assert read.changes((8, 8, 1), 5) == ["the head is new: 5 classes instead of none"]
    assert read.build(num_classes=5).state()["head/bias"].shape == (5,)
    with pytest.raises(ml.errors.WeightsError, match="has no head, and tells no classes apart"):
        read.build()


def test_position_embeddings_are_interpolated(tmp_path: Path) -> None:
    file, net = tmp_path / "weights", small("vit")
    ml.save(file, net)
    read = weights.read(file)
    [change] = read.changes((14, 2, 1), 3)
    assert change.endswith("interpolated: 7 x 1 patches instead of 4 x 4")
    state, name = read.build((14, 2, 1)).state(), "Transformer/posembed_input/pos_embedding"
    before, after = net.state()[name].numpy(), state[name].numpy()
    assert after.shape == (1, 8, 12)
    np.testing.assert_array_equal(after[:, 0], before[:, 0])  # the class token's
    column = before[0, 1:].reshape(4, 4, 12)[:, 0]
    expected = [np.interp(np.arange(7) / 2, np.arange(4), column[:, i]) for i in range(12)]
    np.testing.assert_allclose(after[0, 1:], np.transpose(expected), rtol=1e-5, atol=1e-6)


def test_interpolation_is_that_of_the_official_code() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    positions = np.random.default_rng(0).standard_normal((1, 50, 3))
    for side in (1, 4, 7, 12):
        found = weights.interpolated(positions, (7, 7), (side, side))[0, 1:]
        grid = positions[0, 1:].reshape(7, 7, 3)
        zoomed = ndimage.zoom(grid, (side / 7, side / 7, 1), order=1).reshape(-1, 3)
        np.testing.assert_allclose(found, zoomed, atol=1e-6)


# --- what is refused -----------------------------------------------------------------


def spoilt(name: str, array: Array | None) -> dict[str, Array]:
    """The Mixer's tensors with another one, or without it."""
    state = {**arrays_of(small("mlp_mixer")), name: array}
    return {name: x for name, x in state.items() if x is not None}


ZERO = np.zeros(3, "f4")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a": ZERO, "b": ZERO}, "it is of no Mixer and no ViT; its names: a, b"),
        ({}, "it is of no Mixer and no ViT"),
        (spoilt("dist_token", ZERO), "it has what no mlp_mixer has: dist_token"),
        (spoilt("MixerBlock_1/LayerNorm_0/scale", None), "missing: MixerBlock_1/LayerNorm_0/scale"),
        (spoilt("MixerBlock_0/more/bias", ZERO), "unknown: MixerBlock_0/more/bias"),
        (spoilt("MixerBlock_7/more/bias", ZERO), r"of its blocks 0 \.\. 7 some are missing"),
        (spoilt("stem/bias", ZERO), r"of another shape: stem/bias is \(3,\), not \(12,\)"),
        (spoilt("stem/kernel", ZERO), r"stem/kernel has 4 dimensions, not the shape \(3,\)"),
        (
            spoilt("MixerBlock_0/token_mixing/Dense_0/kernel", np.zeros((15, 5), "f4")),
            "its 15 patches are those of no square image",
        ),
        (
            {"patch_embed.proj.weight": np.zeros((10, 3, 2, 2), "f4")},
            "how many heads of 10 features",
        ),
        (
            {
                "patch_embed.proj.weight": np.zeros((64, 3, 2, 2), "f4"),
                "blocks.0.attn.qkv.weight": np.zeros((100, 64), "f4"),
            },
            r"qkv of \(100, 64\) is not that of 1 heads",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, tensors: dict[str, Array], reason: str) -> None:
    file = tmp_path / "weights"
    ml.save(file, tensors)
    with pytest.raises(ml.errors.WeightsError, match=f"{file}.*{reason}"):
        weights.read(file).build()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"image_shape": [8, 8]}',
        '{"image_shape": [8, 8, 0]}',
        '{"approximate": 1}',
        '{"classes": [1, 2, 3]}',
        '{"classes": 3}',
    ],
)
def test_descriptions_that_are_none(tmp_path: Path, text: str) -> None:
    ml.save(tmp_path / "weights", small("mlp_mixer"), {"model": text})
    with pytest.raises(ml.errors.WeightsError, match="no description of a model"):
        weights.read(tmp_path / "weights")


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    for content, reason in (
        (b"", "is neither safetensors nor .npz"),
        (b"PK\3\4 and nothing", "is corrupt"),
        (b"\x80\2}q\0.", "is neither safetensors nor .npz"),
    ):
        file.write_bytes(content)
        with pytest.raises(ml.errors.WeightsError, match=f"{file} {reason}"):
            weights.read(file)
    np.savez(file, x=np.array([object()], object))
    with pytest.raises(ml.errors.WeightsError, match="is corrupt"):
        weights.read(file.with_suffix(".npz"))
    np.savez(file, x=np.arange(3))
    with pytest.raises(ml.errors.WeightsError, match="x is int64, and weights are floats"):
        weights.read(file.with_suffix(".npz"))
    with pytest.raises(FileNotFoundError):
        weights.read(tmp_path / "nowhere")
    ml.save(file, small("mlp_mixer"), weights.described((8, 8, 1), ["only one"]))
    with pytest.raises(ml.errors.WeightsError, match="it names 1 classes and tells 3 apart"):
        weights.read(file)
