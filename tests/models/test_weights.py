"""Published weights: files in each layout load whole, give the published models' numbers, or say
which names do not fit."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
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
from tests.brief import Patch, cases, refuses
from tests.models.in_torch import (
    FULL,
    SMALL,
    Size,
    data,
    drawn,
    largest_errors,
    ours,
    shapes,
    theirs,
)

Array = NDArray[Any]
MODELS = ["mlp_mixer", "vit"]


def small(model: str, **options: Any) -> nn.Module:
    """A model for 8 x 8 x 1 and 3 classes, with a head that says something."""
    key = ml.random.key(0)
    net: nn.Module
    if model == "vit":
        net = VisionTransformer((8, 8, 1), 3, 2, 12, 2, 20, 3, key=key, **options)
    else:
        net = MlpMixer((8, 8, 1), 3, 2, 12, 2, 5, 20, key=key, **options)
    random = np.random.default_rng(0)
    net.load_state(
        {name: random.standard_normal(x.shape).astype("f4") for name, x in net.state().items()}
    )
    return net


def arrays_of(model: nn.Module) -> dict[str, Array]:
    return {name: x.numpy() for name, x in model.state().items()}


def npz(file: Path, arrays: dict[str, Any], save: Callable[..., None] = np.savez) -> None:
    save(file, **arrays)


def same(one: nn.Module, two: nn.Module, images: Array) -> bool:
    batch = ml.asarray(images)
    return bool((one(batch).numpy() == two(batch).numpy()).all())


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


LATER = {
    "LayerNorm_2": "LayerNorm_1",
    "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
    "MlpBlock_3": "MlpBlock_0",
    "Transformer/posembed_input/pos_embedding": "pos_embedding",  # big_vision's
}


def as_later(name: str) -> str:
    """Rename as later versions of flax count layers."""
    for old, new in LATER.items():
        name = name.replace(old, new)
    return f"params/{name}"


@cases(
    "model, options, rename",
    *((model, {}, lambda name: name) for model in MODELS),
    *((model, {}, lambda name: f"opt/target/{name}") for model in MODELS),
    ("vit", {}, as_later),
    ("vit", {"representation_size": 7}, lambda name: name),  # as of ImageNet-21k
)
def test_the_official_npz_loads_whole(
    tmp_path: Path, model: str, options: Any, rename: Callable[[str], str]
) -> None:
    file, net = tmp_path / "weights.npz", small(model, **options)
    npz(file, {rename(name): x for name, x in arrays_of(net).items()})
    read = weights.read(file)
    assert (read.layout, read.model, read.variant) == ("official", model, None)
    assert (read.image_shape, read.num_classes, read.classes) == ((8, 8, 1), 3, None)
    assert read.options.items() >= options.items()
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
    assert read.changes(shape, 2, ["cat", "dog"]) == []
    assert read.changes(shape, 2, ["dog", "cat"]) == [
        "the head is kept, and is for dog, cat instead of cat, dog"
    ]


def test_a_checkpoint_is_read_by_the_names_below_model(tmp_path: Path) -> None:
    file, net = tmp_path / "weights", small("mlp_mixer")
    tensors = {f"model/{name}": x for name, x in arrays_of(net).items()}
    checkpoint.save(file, {**tensors, "optimizer/count": np.array(3)}, {"mlvm.training": "{}"})
    assert same(weights.read(file).build(), net, IMAGES)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refuses(ml.errors.WeightsError, "CRC-32 of the tensor data does not match", weights.read, file)


# --- other images and classes --------------------------------------------------------


def test_a_head_for_other_classes_is_new_and_the_rest_is_kept(tmp_path: Path) -> None:
    file, net = tmp_path / "weights", small("mlp_mixer")
    ml.save(file, net)
    read = weights.read(file)
    assert read.changes((8, 8, 1), 3) == []
    assert read.changes((8, 8, 1), 5) == ["the head is new: 5 classes instead of 3"]
    assert read.changes((8, 8, 1), 3, ["a", "b", "c"]) == [
        "the head is kept, and is for a, b, c instead of classes without a name"
    ]
    refuses(ml.errors.WeightsError, "1 channels, got 3", read.changes, (8, 8, 3), 3)
    arrays, before = arrays_of(read.build(num_classes=5)), arrays_of(net)
    assert arrays["head/kernel"].shape == (12, 5)
    assert not arrays["head/kernel"].any()
    assert all((x == before[name]).all() for name, x in arrays.items() if "head/" not in name)
    for shape, reason in (
        ((8, 10, 1), "got 8 x 10: a Mixer"),
        ((8, 8, 3), "1 channels, got 3"),
    ):
        refuses(ml.errors.WeightsError, reason, read.build, shape)


def test_a_backbone_without_a_head_is_for_finetuning(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    state = arrays_of(small("vit"))
    ml.save(file, {name: x for name, x in state.items() if not name.startswith("head/")})
    read = weights.read(file)
    assert read.changes((8, 8, 1), 5) == ["the head is new: 5 classes instead of none"]
    assert read.build(num_classes=5).state()["head/bias"].shape == (5,)
    refuses(ml.errors.WeightsError, "contains no head, so it cannot classify", read.build)


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
        result = weights.interpolated(positions, (7, 7), (side, side))[0, 1:]
        grid = positions[0, 1:].reshape(7, 7, 3)
        zoomed = ndimage.zoom(grid, (side / 7, side / 7, 1), order=1).reshape(-1, 3)
        np.testing.assert_allclose(result, zoomed, atol=1e-6)


# --- what is refused -----------------------------------------------------------------


def spoilt(name: str, array: Array | None) -> dict[str, Array]:
    """The Mixer's tensors with another one, or without it."""
    state = {**arrays_of(small("mlp_mixer")), name: array}
    return {name: x for name, x in state.items() if x is not None}


ZERO = np.zeros(3, "f4")
POOLED = np.zeros((1, 16, 12), "f4")  # position embeddings of 4 x 4 patches and no class token


@cases(
    "tensors, reason",
    ({"a": ZERO, "b": ZERO}, "expected names of a Mixer or ViT, got a, b"),
    ({}, "expected names of a Mixer or ViT"),
    (spoilt("dist_token", ZERO), "unknown in a mlp_mixer: dist_token"),
    (spoilt("MixerBlock_1/LayerNorm_0/scale", None), "missing: MixerBlock_1/LayerNorm_0/scale"),
    (spoilt("MixerBlock_0/more/bias", ZERO), "unknown: MixerBlock_0/more/bias"),
    (spoilt("MixerBlock_7/more/bias", ZERO), r"some of the blocks 0 \.\. 7 are missing"),
    (spoilt("stem/bias", ZERO), r"with a wrong shape: stem/bias must be \(12,\), got \(3,\)"),
    (spoilt("stem/kernel", ZERO), r"stem/kernel must have 4 dimensions, got the shape \(3,\)"),
    (
        spoilt("MixerBlock_0/token_mixing/Dense_0/kernel", np.zeros((15, 5), "f4")),
        "15 patches do not form a square image",
    ),
    (
        {**arrays_of(small("vit")), "Transformer/posembed_input/pos_embedding": POOLED},
        r"15 patches \(without the class token\) do not form a square image",
    ),
    ({"patch_embed.proj.weight": np.zeros((10, 3, 2, 2), "f4")}, "number of heads of width 10"),
    (
        {
            "patch_embed.proj.weight": np.zeros((64, 3, 2, 2), "f4"),
            "blocks.0.attn.qkv.weight": np.zeros((100, 64), "f4"),
        },
        r"qkv of shape \(100, 64\) does not match 1 heads",
    ),
)
def test_what_does_not_fit_is_named(tmp_path: Path, tensors: dict[str, Array], reason: str) -> None:
    file = tmp_path / "weights"
    ml.save(file, tensors)
    refuses(ml.errors.WeightsError, f"{file}.*{reason}", lambda: weights.read(file).build())


@cases(
    "array, reason",
    (np.zeros(12, "c8"), "weights must be floats, stem/bias is complex64"),
    (np.zeros(12, "i4"), "weights must be floats, stem/bias is int32"),
    (np.zeros(12, "?"), "weights must be floats, stem/bias is bool"),
    (np.full(12, 1e40), r"stem/bias \(float64\) contains numbers that are too large"),
)
@pytest.mark.parametrize("is_npz", [False, True])
def test_numbers_that_are_no_f32(tmp_path: Path, array: Array, reason: str, is_npz: bool) -> None:
    tensors = {**spoilt("stem/bias", array), "head/bias": np.array([1, np.inf, np.nan])}  # f64
    file = tmp_path / ("weights.npz" if is_npz else "weights.safetensors")
    (npz if is_npz else ml.save)(file, tensors)
    refuses(ml.errors.WeightsError, f"{file}: {reason}", weights.read, file)
    (npz if is_npz else ml.save)(file, {**tensors, "stem/bias": np.zeros(12)})
    assert weights.read(file).arrays["stem/bias"].dtype == np.float32


def test_two_names_for_one_array(tmp_path: Path) -> None:
    arrays = arrays_of(small("mlp_mixer"))
    npz(tmp_path / "x.npz", {**arrays, "params/head/bias": ZERO})
    refuses(
        ml.errors.WeightsError,
        "both have the official name 'head/bias'",
        weights.read,
        tmp_path / "x.npz",
    )
    timm = drawn("vit", SMALL["vit"])
    ml.save(tmp_path / "x", {**timm, "head/bias": ZERO})
    with pytest.raises(ml.errors.WeightsError, match=r"'head/bias' and 'head\.bias' both have"):
        weights.read(tmp_path / "x", num_heads=2)


def test_an_npz_is_not_unpacked_before_it_is_known(tmp_path: Path, monkeypatch: Patch) -> None:
    file, arrays = tmp_path / "x.npz", arrays_of(small("mlp_mixer"))
    monkeypatch.setattr(weights, "MOST_UNPACKED", 20_000)
    npz(file, arrays)
    weights.read(file)  # what is stored as it is may be as large as it likes
    npz(file, {**arrays, "head/kernel": np.zeros((5000, 3), "f4")}, np.savez_compressed)
    text = r"it unpacks to .* limit 20000; .* np\.savez"
    refuses(ml.errors.WeightsError, text, weights.read, file)

    def unpacked(*_: object, **__: object) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr(weights.format, "read_array", unpacked)  # type: ignore[attr-defined]
    for tensors, reason in (
        ({"x": ZERO, "y": ZERO}, f"^{file}: expected names of a Mixer"),
        ({"x": np.zeros(20_000)}, f"^{file}: expected names of a Mixer"),
        (spoilt("dist_token", ZERO), f"^{file}: .*unknown in a mlp_mixer: dist_token"),
        (spoilt("stem/kernel", ZERO), f"^{file}: stem/kernel must have 4 dimensions"),
        (arrays, "unpacked"),
    ):
        npz(file, tensors, np.savez_compressed)
        refuses(ml.errors.WeightsError, reason, weights.read, file)


def test_an_npz_that_announces_what_it_does_not_have(tmp_path: Path) -> None:
    for shape in ((2**40, 2), (-1, -8), (7,), ()):
        header = io.BytesIO()
        described = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        with zipfile.ZipFile(tmp_path / "x", "w") as archive:
            archive.writestr("stem/kernel.npy", header.getvalue() + bytes(32))
        with pytest.raises(ml.errors.WeightsError, match="it is corrupt: stem/kernel is not float"):
            weights.read(tmp_path / "x")


@pytest.mark.parametrize("model", MODELS)
def test_arrays_of_any_shape_are_weights_or_refused(tmp_path: Path, model: str) -> None:
    size = SMALL[model]._replace(blocks=1)
    file, arrays = tmp_path / "x", drawn(model, size)
    refused = set()
    for name in arrays:
        for shape in ((), (0,), (0, 0), (48, 0), (1, 1, 1), (0, 3, 4, 4)):
            ml.save(file, {**arrays, name: np.zeros(shape, "f4")})
            try:
                weights.read(file, num_heads=size.heads or None)
            except ml.errors.WeightsError:
                refused.add(name)
    assert len(refused) >= 4  # what a model's size is told by, and what heads are cut out of


def test_images_that_are_not_square(tmp_path: Path) -> None:
    file, net = tmp_path / "x", small("vit")
    ml.save(file, net)
    assert weights.read(file).image_shape == (8, 8, 1)
    read = weights.read(file, image_size=(4, 16))
    assert read.image_shape == (4, 16, 1)
    assert read.build().state()["cls"].shape == (1, 1, 12)
    for size in ((4, 8), (5, 16), (-8, -8), (0, 64)):
        with pytest.raises(ml.errors.WeightsError, match="do not match an image of"):
            weights.read(file, image_size=size)
    for shape in ((8, 8, 3), (9, 9, 1), (2**40, 2**40, 1)):
        ml.save(file, net, weights.described(shape))
        refuses(ml.errors.WeightsError, "do not match an image of", weights.read, file)


def test_what_is_no_shape_of_an_image(tmp_path: Path) -> None:
    file = tmp_path / "x"
    ml.save(file, small("vit"))
    read = weights.read(file)
    for shape in ((0, 0, 1), (-8, -8, 1), (8, 8), (8.0, 8.0, 1), ()):
        refuses(ml.errors.ShapeError, "an image shape must be", read.build, shape)  # type: ignore[arg-type]
    refuses(ml.errors.ShapeError, "must divide 9 x 8", read.build, (9, 8, 1))


def test_heads_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for model in MODELS:
        ml.save(file, small(model))
        with pytest.raises(ml.errors.WeightsError, match="requires a ViT in timm's layout; got 3"):
            weights.read(file, num_heads=3)
    state = arrays_of(small("vit"))
    block = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    ml.save(file, {**state, block: np.zeros((12, 5, 2), "f4")})
    refuses(
        ml.errors.WeightsError,
        f"{file} .*num_heads must divide",
        lambda: weights.read(file).build(),
    )
    ml.save(file, drawn("vit", SMALL["vit"]))
    refuses(ml.errors.WeightsError, r">= 1 .*got 0", weights.read, file, num_heads=0)


def test_heads_are_those_of_the_published_models_or_said_to_be_a_guess(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for width, heads, variant in ((1408, 16, None), (1664, 16, None), (128, 2, None)):
        size = Size(1, 3, 1, 1, width, 1, (1,))
        ml.save(file, {name: np.zeros(x, "f4") for name, x in shapes("vit", size).items()})
        read = weights.read(file)
        assert (read.options["num_heads"], read.variant) == (heads, variant)
        assert str(read).endswith(f"in the timm layout; {heads} heads are a guess")
    assert "guess" not in str(weights.read(file, num_heads=4))


@cases(
    "text",
    "{",
    "[1]",
    '{"image_shape": [8, 8]}',
    '{"image_shape": [8, 8, 0]}',
    '{"approximate": 1}',
    '{"classes": [1, 2, 3]}',
    '{"classes": 3}',
)
def test_descriptions_that_are_none(tmp_path: Path, text: str) -> None:
    ml.save(tmp_path / "weights", small("mlp_mixer"), {"mlvm.model": text})
    refuses(ml.errors.WeightsError, "does not describe a model", weights.read, tmp_path / "weights")


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    for content, reason in (
        (b"", "expected a safetensors or .npz file"),
        (b"PK\3\4 and nothing", "is corrupt"),
        (b"\x80\2}q\0.", "expected a safetensors or .npz file"),
    ):
        file.write_bytes(content)
        refuses(ml.errors.WeightsError, f"{file}: {reason}", weights.read, str(file))
    np.savez(file, x=np.array([object()], object))
    with pytest.raises(ml.errors.WeightsError, match="weights must be floats, x is object"):
        weights.read(file.with_suffix(".npz"))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2}q\0.")
    with pytest.raises(ml.errors.WeightsError, match=r"a \.npz of arrays, .*PyTorch's pickles"):
        weights.read(file)
    np.savez(file, x=np.arange(3))
    with pytest.raises(ml.errors.WeightsError, match="weights must be floats, x is int64"):
        weights.read(file.with_suffix(".npz"))
    refuses(FileNotFoundError, "", weights.read, tmp_path / "nowhere")
    ml.save(file, small("mlp_mixer"), weights.described((8, 8, 1), ["only one"]))
    refuses(ml.errors.WeightsError, "it contains 1 names for 3 classes", weights.read, file)
