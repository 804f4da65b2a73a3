"""The models that can be trained, and the data sets for each model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from mlvm.eager import Tensor, nn
from models.bert import Bert
from models.convnet import ConvNet
from models.data import DataSet
from models.data.dataset import Kind
from models.lstm import LstmClassifier
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer
from models.transformer import Transformer
from models.tree_lstm import TreeClassifier
from models.vit import VisionTransformer


class Choice(NamedTuple):
    """Model to train.

    kind: kind of the data sets.
    data: default data set.
    build: function of a data set and a random key that builds the model.
    """

    kind: Kind
    data: str
    build: Callable[[DataSet, Tensor], nn.Module]


def _of_images(model: Callable[..., nn.Module]) -> Choice:
    return Choice(
        "images", "digits", lambda data, key: model(data.shape, data.num_classes, key=key)
    )


MODELS: Final[dict[str, Choice]] = {
    "mlp_mixer": _of_images(MlpMixer),
    "vit": _of_images(VisionTransformer),
    "mlp": _of_images(Mlp),
    "convnet": _of_images(ConvNet),
    "transformer": Choice(
        "text", "text", lambda data, key: Transformer(data.num_symbols, data.shape[0], key=key)
    ),
    "bert": Choice(
        "masked text", "masked", lambda data, key: Bert(data.num_symbols, data.num_classes, key=key)
    ),
    "lstm": Choice(
        "sequences",
        "lines",
        lambda data, key: LstmClassifier(data.num_symbols, data.num_classes, key=key),
    ),
    "tree_lstm": Choice(
        "trees",
        "listops",
        lambda data, key: TreeClassifier(data.num_symbols, data.num_classes, key=key),
    ),
}
