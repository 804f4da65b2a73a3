"""Readers of published and trained weights of the Mixer and the Vision Transformer.

Supported files are google-research's `.npz` (github.com/google-research/vision_transformer), timm's
safetensors (github.com/huggingface/pytorch-image-models), files of `ml.save` with one of these
models, and checkpoints of `python -m models.train`. Names and shapes determine the model and the
size.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.lib import format
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from mlvm.eager.files.safetensors import WeightsFile
from mlvm.machines.terminal import escaped
from models import mlp_mixer, vit
from models.data.dataset import DataError
from models.data.files import MOST_UNPACKED, opened, parsing
from models.training import checkpoint
from models.training.checkpoint import CheckpointError

WeightsError: Final = ml.errors.WeightsError
Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = dict[str, Array]
Shape: TypeAlias = tuple[int, int, int]

DESCRIPTION: Final = "mlvm.model"
"""Metadata key of a JSON text with properties that names and shapes lack: see `described`."""

KINDS: Final[dict[str, Callable[..., nn.Module]]] = {
    "mlp_mixer": mlp_mixer.MlpMixer,
    "vit": vit.VisionTransformer,
}
_VARIANTS: Final = {"mlp_mixer": mlp_mixer.VARIANTS, "vit": vit.VARIANTS}
_KNOWN: Final = {
    "mlp_mixer": r"(stem|pre_head_layer_norm|head|MixerBlock_[0-9]{1,4}/.*)/(kernel|scale|bias)",
    "vit": r"cls|(embedding|pre_logits|head|Transformer/.*)/(kernel|scale|bias|pos_embedding)",
}
"""Names of official checkpoints of any size."""
_POSITIONS: Final = "Transformer/posembed_input/pos_embedding"
_ATTENTION: Final = "MultiHeadDotProductAttention_1"
_LATER: Final = [
    (r"^(opt/target|params)/", ""),
    (r"^pos_embedding$", _POSITIONS),
    (r"(/encoderblock_[0-9]+/)LayerNorm_1/", r"\1LayerNorm_2/"),
    (r"(/encoderblock_[0-9]+/)MultiHeadDotProductAttention_0/", rf"\1{_ATTENTION}/"),
    (r"(/encoderblock_[0-9]+/)MlpBlock_0/", r"\1MlpBlock_3/"),
]
"""Patterns of the names of later flax versions, which number each kind of layer separately, and of
big_vision, and the names in the published files."""
_MOST_NAMED: Final = 8  # names per error
_BF16: Final = np.dtype("V2")  # numpy's name of the dtype
Named: TypeAlias = tuple[str, str, Array]
"""The name in a file, the official one, and the array."""


@dataclass(frozen=True)
class Pretrained:
    """Weights in the official names and layouts, and a description of the model.

    `layout`: layout of the file.
    `model`: name of the model in `models.train`.
    `options`: arguments of the model.
    `variant`: the name in the paper, or None.
    `classes`: names of the classes, None if the file lacks them.
    `heads_guessed`: True if neither the file nor a published variant defines the number of heads.
    """

    file: Path
    layout: Literal["official", "timm", "mlvm"]
    model: str
    image_shape: Shape
    num_classes: int
    options: dict[str, Any]
    variant: str | None
    classes: list[str] | None
    heads_guessed: bool
    arrays: Arrays = field(repr=False)

    def __str__(self) -> str:
        name = f"{self.model} {self.variant or ''}".strip()
        height, width, channels = self.image_shape
        guess = f"; {self.options['num_heads']} heads are a guess" if self.heads_guessed else ""
        return (
            f"{name} for images of {height} x {width} x {channels} and {self.num_classes} classes, "
            f"in the {self.layout} layout{guess}"
        )

    def changes(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        classes: Sequence[str] | None = None,
    ) -> list[str]:
        """Describe the changes that `build` makes for the given images and classes.

        If a head stays but the class names change, the new names are described. Raises the errors
        of `build` for images of an unsuitable shape.
        """
        _require_fitting(self, image_shape)
        texts = []
        if num_classes != self.num_classes:
            before = self.num_classes or "none"
            texts.append(f"the head is new: {num_classes} classes instead of {before}")
        elif classes is not None and [*classes] != self.classes:
            before = _listed(self.classes) if self.classes else "classes without a name"
            texts.append(f"the head is kept, and is for {_listed(classes)} instead of {before}")
        old, new = self._grid(self.image_shape), self._grid(image_shape)
        if self.model == "vit" and old != new:
            texts.append(
                f"the position embeddings are interpolated: {new[0]} x {new[1]} patches instead of "
                f"{old[0]} x {old[1]}"
            )
        return texts

    def build(
        self,
        image_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        *,
        key: Tensor | None = None,
    ) -> nn.Module:
        """Build the model with these weights in the current arena, optionally for other images.

        A head for a different number of classes is new; position embeddings of a ViT for a
        different size are interpolated as in the official code.

        Raises `WeightsError`, which lists missing and unknown names and wrong shapes, and
        `ShapeError` for an image shape that is invalid or not a multiple of the patch size.
        """
        image_shape = self.image_shape if image_shape is None else image_shape
        height, width, channels = _require_fitting(self, image_shape)
        num_classes = num_classes or self.num_classes
        if not num_classes:
            raise WeightsError(f"{self.file} contains no head, so it cannot classify")
        make = partial(KINDS[self.model], (height, width, channels), num_classes, **self.options)
        try:
            with ml.Arena(ml.DryVM(), "types").allocating():  # the file determines the sizes
                shapes = {name: x.shape for name, x in make(key=ml.random.key(0)).state().items()}
        except ml.errors.OpError as error:
            raise WeightsError(f"{self.file} does not match any supported model: {error}") from None
        arrays = dict(self.arrays)
        if num_classes != self.num_classes:
            for name in ("head/kernel", "head/bias"):
                arrays[name] = np.zeros(shapes[name], np.float32)  # as in the official code
        old, new = self._grid(self.image_shape), self._grid((height, width))
        if self.model == "vit" and old != new:
            arrays[_POSITIONS] = interpolated(arrays[_POSITIONS], old, new)
        _require_all(self.file, shapes, arrays)
        model = make(key=key)
        model.load_state(arrays)
        return model

    def _grid(self, image_shape: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of patches down and across."""
        patch = self.options["patch_size"]
        return image_shape[0] // patch, image_shape[1] // patch


def read(
    file: str | os.PathLike[str],
    *,
    num_heads: int | None = None,
    approximate: bool | None = None,
    image_size: tuple[int, int] | None = None,
) -> Pretrained:
    """Read the weights of a file.

    timm's ViT files do not contain the number of heads. The default is the published number for the
    width, or one head per 64 features. The GELU is by tanh in the official code and here, and exact
    in timm's; `approximate` overrides it. Images are square unless the file or `image_size`,
    (height, width), states a different size.

    Raises `OSError` for a file that cannot be read; `WeightsError` for a damaged file, a file of a
    different model, and invalid heads and sizes. Building the model raises errors for wrong names.
    """
    file = Path(file)
    recognise = partial(
        _recognised, file, num_heads=num_heads, approximate=approximate, image_size=image_size
    )
    try:
        pretrained = recognise(*_arrays(file, recognise))
        arrays = {name: _f32(name, x) for name, x in pretrained.arrays.items()}
    except WeightsError as error:
        raise WeightsError(escaped(f"{file}: {error}")) from None
    return replace(pretrained, arrays=arrays)


def _recognised(
    file: Path,
    arrays: Arrays,
    metadata: Mapping[str, str],
    *,
    num_heads: int | None,
    approximate: bool | None,
    image_size: tuple[int, int] | None,
) -> Pretrained:
    """Infer the model from names, shapes and texts."""
    layout: Literal["official", "timm", "mlvm"]
    layout = "mlvm" if metadata.keys() & {DESCRIPTION, checkpoint.TRAINING} else "official"
    if num_heads is not None and ("patch_embed.proj.weight" not in arrays or num_heads < 1):
        raise WeightsError(
            f"num_heads must be >= 1 and requires a ViT in timm's layout; got {num_heads}"
        )
    if "stem.proj.weight" in arrays or "patch_embed.proj.weight" in arrays:
        layout, arrays = "timm", _unique(_from_timm(arrays, num_heads))
    description = _description(metadata)
    if "stem/kernel" in arrays:
        model, guess = "mlp_mixer", _mixer
    elif "embedding/kernel" in arrays:
        model, guess = "vit", _vit
    else:
        raise WeightsError(f"expected names of a Mixer or ViT, got {_listed([*arrays])}")
    _require_known(model, arrays)
    options, tokens, channels = guess(arrays)
    image_shape = description.get("image_shape")
    if image_size is not None:
        image_shape = (*image_size, channels)
    if image_shape is None:
        image_shape = _square(model, tokens, options["patch_size"], channels)
    _require_patches(image_shape, tokens, options["patch_size"], channels)
    classes = description.get("classes")
    num_classes = _shape(arrays, "head/bias", 1)[0] if "head/bias" in arrays else 0
    if classes is not None and len(classes) != num_classes:
        raise WeightsError(f"it contains {len(classes)} names for {num_classes} classes")
    if approximate is None:
        approximate = description.get("approximate", layout != "timm")
    sizes = tuple(options.values())
    variants = [name for name, each in _VARIANTS[model].items() if each == sizes[: len(each)]]
    return Pretrained(
        file,
        layout,
        model,
        image_shape,
        num_classes,
        {**options, "approximate": approximate},
        variants[0] if variants else None,
        classes,
        layout == "timm" and model == "vit" and num_heads is None and not variants,
        arrays,
    )


def described(
    image_shape: Sequence[int],
    classes: Sequence[str] | None = None,
    *,
    approximate: bool | None = None,
) -> dict[str, str]:
    """Return metadata for `ml.save(file, model, metadata)` of a Mixer or ViT.

    The metadata contains the shape (height, width, channels), the names of the classes, and the
    form of the GELU.
    """
    description: dict[str, Any] = {"image_shape": [*image_shape], "classes": classes and [*classes]}
    description |= {} if approximate is None else {"approximate": approximate}
    return {DESCRIPTION: json.dumps(description)}


def interpolated(positions: Array, old: tuple[int, int], new: tuple[int, int]) -> Array:
    """Interpolate position embeddings f32[1, 1 + h w, D] linearly to a different grid.

    The first embedding belongs to a class token. Corners stay in place, as in
    `interpolate_posembed` of the official code.
    """
    token, grid = positions[:, :1], positions[0, 1:].reshape(*old, -1)
    down, across = (_weights(*sizes) for sizes in zip(old, new, strict=True))
    grid = np.einsum("ih,jw,hwd->ijd", down, across, grid)
    resized = np.concatenate([token, grid.reshape(1, new[0] * new[1], -1)], axis=1)
    return resized.astype(np.float32)


def _weights(old: int, new: int) -> Array:
    """Return f64[new, old]: the weight of each old point in each new point."""
    places = np.linspace(0, old - 1, new)
    weights: Array = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))
    return weights


# --- files ---------------------------------------------------------------------------


def _arrays(
    file: Path, recognise: Callable[[Arrays, dict[str, str]], object]
) -> tuple[Arrays, dict[str, str]]:
    """Read arrays and texts by name; from a checkpoint, read only the arrays of the model.

    Packed arrays are unpacked only after `recognise` accepts their names and shapes.
    """
    with opened(file) as stream:
        start = stream.read(4)
    if start == b"PK\3\4":
        return _of_npz(file, recognise), {}
    try:
        weights = WeightsFile(file)
        if checkpoint.TRAINING not in weights.metadata:
            return {name: weights.read(name) for name in weights.entries}, weights.metadata
        tensors, metadata = checkpoint.load(file)
    except CheckpointError as error:
        raise WeightsError(str(error).removeprefix(f"{file} ")) from None
    except WeightsError as error:
        raise WeightsError(f"expected a safetensors or .npz file: {error}") from None
    prefix = "model/"
    own = {name: array for name, array in tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): array for name, array in own.items()}, metadata


def _of_npz(file: Path, recognise: Callable[[Arrays, dict[str, str]], object]) -> Arrays:
    announced = _unique(_members(file, _announced))
    recognise(announced, {})
    unpacked = sum(x.nbytes for x in announced.values())
    if unpacked > max(file.stat().st_size, MOST_UNPACKED):
        raise WeightsError(
            f"it unpacks to {unpacked} bytes, limit {MOST_UNPACKED}; write it with np.savez"
        )
    return _unique(_members(file, _read))


def _members(
    file: Path, read: Callable[[str, zipfile.ZipInfo, IO[bytes]], Array]
) -> Iterator[Named]:
    try:
        with parsing(file) as stream, zipfile.ZipFile(stream) as archive:
            for member in archive.infolist():
                own = name = member.filename.removesuffix(".npy")
                for pattern, replacement in _LATER:
                    name = re.sub(pattern, replacement, name)
                with archive.open(member) as content:
                    array = read(own, member, content)
                yield own, name, array
    except DataError as error:
        raise WeightsError(str(error).removeprefix(f"{file} ")) from None


def _announced(name: str, member: zipfile.ZipInfo, stream: IO[bytes]) -> Array:
    """Return zeros without memory, with the shape in the header of a `.npy` file."""
    if stream.read(len(format.MAGIC_PREFIX)) != format.MAGIC_PREFIX:
        raise DataError(
            f"expected a .npz of arrays, got {name!r}; save PyTorch's pickles as safetensors"
        )
    version = stream.read(2)
    read = format.read_array_header_1_0 if version == b"\1\0" else format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.kind != "f" and dtype != _BF16:
        raise DataError(f"weights must be floats, {name} is {dtype}")
    nbytes = member.file_size - stream.tell()
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(shape) != nbytes:
        raise DataError(f"it is corrupt: {name} is not {dtype} of shape {shape}")
    return np.broadcast_to(np.zeros((), dtype), shape)


def _read(name: str, member: zipfile.ZipInfo, stream: IO[bytes]) -> Array:
    array: Array = format.read_array(stream, allow_pickle=False)
    stream.read()  # read to the end, where zip checks the CRC
    if array.dtype != _BF16:
        return array
    return (array.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _unique(named: Iterable[Named]) -> Arrays:
    """Collect arrays by name. Raises `WeightsError` if a name occurs twice."""
    arrays: Arrays = {}
    owns: dict[str, str] = {}
    for own, name, array in named:
        if name in arrays:
            raise WeightsError(f"{own!r} and {owns[name]!r} both have the official name {name!r}")
        arrays[name], owns[name] = array, own
    return arrays


def _f32(name: str, array: Array) -> Array:
    """Convert an array to f32.

    Raises `WeightsError` for a dtype that is not a float, and for numbers outside the f32 range.
    """
    if array.dtype.kind != "f":
        raise WeightsError(f"weights must be floats, {name} is {array.dtype}")
    if array.dtype == np.float32:
        return np.asarray(array, np.float32)
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32)
    if (np.isinf(converted) & np.isfinite(array)).any():
        raise WeightsError(f"{name} ({array.dtype}) contains numbers that are too large for f32")
    return converted


def _description(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Parse the text of `described`. Raises `WeightsError` for any other text."""
    try:
        description = dict(json.loads(metadata.get(DESCRIPTION, "{}")))
        shape, classes = description.get("image_shape"), description.get("classes")
        if shape is not None:
            height, width, channels = shape
            if not all(type(n) is int and n > 0 for n in shape):
                raise ValueError
            description["image_shape"] = height, width, channels
        if classes is not None and not all(isinstance(each, str) for each in [*classes]):
            raise ValueError
        if not isinstance(description.get("approximate", True), bool):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise WeightsError(f"the metadata {DESCRIPTION!r} does not describe a model") from None
    return description


# --- timm's names --------------------------------------------------------------------

_TIMM: Final = [
    *[
        (pattern, r"MixerBlock_\1/" + name)
        for pattern, name in (
            (r"blocks\.([0-9]+)\.norm1", "LayerNorm_0"),
            (r"blocks\.([0-9]+)\.norm2", "LayerNorm_1"),
            (r"blocks\.([0-9]+)\.mlp_tokens\.fc1", "token_mixing/Dense_0"),
            (r"blocks\.([0-9]+)\.mlp_tokens\.fc2", "token_mixing/Dense_1"),
            (r"blocks\.([0-9]+)\.mlp_channels\.fc1", "channel_mixing/Dense_0"),
            (r"blocks\.([0-9]+)\.mlp_channels\.fc2", "channel_mixing/Dense_1"),
        )
    ],
    (r"stem\.proj", "stem"),
    (r"norm", "pre_head_layer_norm"),
    (r"head", "head"),
]
_TIMM_VIT: Final = [
    *[
        (pattern, r"Transformer/encoderblock_\1/" + name)
        for pattern, name in (
            (r"blocks\.([0-9]+)\.norm1", "LayerNorm_0"),
            (r"blocks\.([0-9]+)\.attn\.qkv", f"{_ATTENTION}/qkv"),
            (r"blocks\.([0-9]+)\.attn\.proj", f"{_ATTENTION}/out"),
            (r"blocks\.([0-9]+)\.norm2", "LayerNorm_2"),
            (r"blocks\.([0-9]+)\.mlp\.fc1", "MlpBlock_3/Dense_0"),
            (r"blocks\.([0-9]+)\.mlp\.fc2", "MlpBlock_3/Dense_1"),
        )
    ],
    (r"patch_embed\.proj", "embedding"),
    (r"norm", "Transformer/encoder_norm"),
    (r"pre_logits\.fc", "pre_logits"),
    (r"head", "head"),
]
"""Patterns of timm's module names, and the official names."""


def _from_timm(arrays: Arrays, num_heads: int | None) -> Iterator[Named]:
    """Convert timm's arrays to the official names and layouts; keep other arrays unchanged."""
    is_vit = "patch_embed.proj.weight" in arrays
    if is_vit:
        heads = num_heads or _heads(_shape(arrays, "patch_embed.proj.weight", 4)[0])
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        path = _official(_TIMM_VIT if is_vit else _TIMM, module)
        if is_vit and name in ("cls_token", "pos_embed"):
            official_arrays = {"cls" if name == "cls_token" else _POSITIONS: array}
        elif path is None or kind not in ("weight", "bias"):
            official_arrays = {name: array}
        elif is_vit and path.endswith(("/qkv", "/out")):
            official_arrays = _of_heads(path, kind, array, heads)
        else:
            official_arrays = _plain(path, kind, array)
        yield from ((name, official, x) for official, x in official_arrays.items())


def _official(rules: list[tuple[str, str]], module: str) -> str | None:
    for pattern, path in rules:
        match = re.fullmatch(pattern, module)
        if match is not None:
            return match.expand(path)
    return None


def _plain(path: str, kind: str, array: Array) -> Arrays:
    """Convert a layer's array from PyTorch's layout.

    PyTorch uses [out, in] and [out, in, height, width], and calls the scale of a norm `weight`.
    """
    if kind == "bias":
        return {f"{path}/bias": array}
    if array.ndim < 2:
        return {f"{path}/scale": array}
    return {f"{path}/kernel": array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T}


def _of_heads(path: str, kind: str, array: Array, heads: int) -> Arrays:
    """Split query, key and value, with the heads as a separate axis."""
    block, _, name = path.rpartition("/")
    wrong = WeightsError(f"{path} of shape {array.shape} does not match {heads} heads")
    if array.ndim != (2 if kind == "weight" else 1) or 0 in array.shape:
        raise wrong
    if name == "out":
        if kind == "bias":
            return {f"{path}/bias": array}
        if array.shape[1] % heads:
            raise wrong
        return {f"{path}/kernel": array.T.reshape(heads, -1, array.shape[0])}
    width = array.shape[1] if kind == "weight" else len(array) // 3
    if len(array) != 3 * width or width % heads:
        raise wrong
    parts = dict(zip(("query", "key", "value"), np.split(array, 3), strict=True))
    if kind == "weight":
        return {f"{block}/{n}/kernel": x.T.reshape(width, heads, -1) for n, x in parts.items()}
    return {f"{block}/{n}/bias": x.reshape(heads, -1) for n, x in parts.items()}


def _heads(width: int) -> int:
    """Return the number of heads of published models with this width."""
    for _, hidden_size, _, _, num_heads in vit.VARIANTS.values():
        if hidden_size == width:
            return num_heads
    if width % 64:
        raise WeightsError(f"it does not define the number of heads of width {width}")
    return width // 64


# --- inference from names and shapes --------------------------------------------------

Guess: TypeAlias = tuple[dict[str, Any], int, int]
"""Arguments of a model, number of patches, and channels of the images."""


def _mixer(arrays: Arrays) -> Guess:
    patch, _, channels, hidden_dim = _shape(arrays, "stem/kernel", 4)
    tokens, tokens_dim = _shape(arrays, "MixerBlock_0/token_mixing/Dense_0/kernel", 2)
    _, channels_dim = _shape(arrays, "MixerBlock_0/channel_mixing/Dense_0/kernel", 2)
    options = {
        "patch_size": patch,
        "hidden_dim": hidden_dim,
        "num_blocks": _count(arrays, r"MixerBlock_([0-9]{1,4})/.*"),
        "tokens_mlp_dim": tokens_dim,
        "channels_mlp_dim": channels_dim,
    }
    return options, tokens, channels


def _vit(arrays: Arrays) -> Guess:
    patch, _, channels, hidden_size = _shape(arrays, "embedding/kernel", 4)
    block = "Transformer/encoderblock_0"
    options = {
        "patch_size": patch,
        "hidden_size": hidden_size,
        "num_layers": _count(arrays, r"Transformer/encoderblock_([0-9]{1,4})/.*"),
        "mlp_dim": _shape(arrays, f"{block}/MlpBlock_3/Dense_0/kernel", 2)[1],
        "num_heads": _shape(arrays, f"{block}/{_ATTENTION}/query/kernel", 3)[1],
    }
    if "pre_logits/kernel" in arrays:
        options["representation_size"] = _shape(arrays, "pre_logits/kernel", 2)[1]
    return options, _shape(arrays, _POSITIONS, 3)[1] - 1, channels


def _shape(arrays: Arrays, name: str, ndim: int) -> tuple[int, ...]:
    if name not in arrays:
        raise WeightsError(f"it lacks {name}")
    shape = arrays[name].shape
    if len(shape) != ndim or 0 in shape:
        raise WeightsError(f"{name} must have {ndim} dimensions, got the shape {shape}")
    return shape


def _count(arrays: Arrays, pattern: str) -> int:
    """Return the number of blocks: the highest block number plus one."""
    matches = (re.fullmatch(pattern, name) for name in arrays)
    numbers = {int(match[1]) for match in matches if match is not None}
    if not numbers:
        raise WeightsError("it contains no blocks")
    if max(numbers) >= len(numbers):
        raise WeightsError(f"some of the blocks 0 .. {max(numbers)} are missing")
    return len(numbers)


def _square(model: str, tokens: int, patch: int, channels: int) -> Shape:
    side = math.isqrt(max(tokens, 0))
    if side < 1 or side**2 != tokens:
        class_token = " (without the class token)" if model == "vit" else ""
        raise WeightsError(
            f"{tokens} patches{class_token} do not form a square image; give the image size"
        )
    return patch * side, patch * side, channels


def _require_patches(image_shape: Shape, tokens: int, patch: int, channels: int) -> None:
    """Raise for images with a different number of patches than the weights."""
    height, width, image_channels = image_shape
    fits = height > 0 and width > 0 and not height % patch and not width % patch
    if not fits or height // patch * (width // patch) != tokens or image_channels != channels:
        raise WeightsError(
            f"its {tokens} patches of {patch} x {patch} x {channels} do not match an image of "
            f"{height} x {width} x {image_channels}"
        )


def _require_known(model: str, arrays: Arrays) -> None:
    """Raise for names that do not occur in a model of this kind of any size."""
    unknown = [name for name in arrays if not re.fullmatch(_KNOWN[model], name)]
    if unknown:
        raise WeightsError(f"it contains names that are unknown in a {model}: {_listed(unknown)}")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _require_fitting(weights: Pretrained, image_shape: Sequence[int]) -> Shape:
    """Check an image's shape and return it, (height, width, channels).

    Raises if the shape does not match the weights.
    """
    (height, width, channels), shape = weights.image_shape, tuple(image_shape)
    patch = weights.options["patch_size"]
    if len(shape) != 3 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ml.errors.ShapeError(f"an image shape must be (height, width, channels), got {shape}")
    if shape[0] % patch or shape[1] % patch:
        raise ml.errors.ShapeError(f"patch size {patch} must divide {shape[0]} x {shape[1]}")
    if shape[2] != channels:
        raise WeightsError(
            f"{weights.file} expects images with {channels} channels, got {shape[2]}"
        )
    if weights.model == "mlp_mixer" and shape != weights.image_shape:
        raise WeightsError(
            f"{weights.file} expects images of {height} x {width}, got {shape[0]} x {shape[1]}: "
            f"a Mixer has weights for each patch"
        )
    return shape


def _require_all(
    file: Path, expected: Mapping[str, tuple[int, ...]], arrays: Mapping[str, Array]
) -> None:
    """Raise unless names and shapes are exactly the expected ones."""
    wrong = [
        f"{name} must be {shape}, got {arrays[name].shape}"
        for name, shape in expected.items()
        if name in arrays and arrays[name].shape != shape
    ]
    differences = {
        "missing": [name for name in expected if name not in arrays],
        "unknown": [name for name in arrays if name not in expected],
        "with a wrong shape": wrong,
    }
    texts = [f"{what}: {_listed(names)}" for what, names in differences.items() if names]
    if texts:
        raise WeightsError(escaped(f"{file} does not match the model; {'; '.join(texts)}"))
