"""A training begins with weights of a file: a different training, or published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from models import weights
from models.mlp_mixer import MlpMixer
from models.training.checkpoint import CheckpointError, load
from models.training.progress import Progress
from models.training.train import OptionError, main, train
from models.vit import VisionTransformer
from tests.brief import Capsys


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    """Weights of a ViT for 8 x 8 x 1 and 3 classes."""
    model = VisionTransformer((8, 8, 1), 3, 4, 8, 1, 12, 2, approximate=False, key=ml.random.key(0))
    metadata = weights.described((8, 8, 1), ["a", "b", "c"], approximate=False)
    ml.save(tmp_path / "vit", model, metadata)
    return tmp_path / "vit"


def test_finetuning_says_what_it_changes_and_keeps_the_rest(
    mnist: Path, vit: Path, tmp_path: Path, capsys: Capsys
) -> None:
    save = tmp_path / "save"
    data = f"mnist:{mnist}"  # 4 x 8 x 1, of 10 classes
    options: dict[str, Any] = {"data": data, "epochs": 1, "batch_size": 5, "learning_rate": 1e-9}
    result = train(init=vit, save=save, progress=Progress(), **options)
    assert result["model"] == "vit"
    assert capsys.readouterr().err.splitlines() == [
        f"{vit}: vit for images of 8 x 8 x 1 and 3 classes, in the mlvm layout",
        "the head is new: 10 classes instead of 3",
        "the position embeddings are interpolated: 1 x 2 patches instead of 2 x 2",
    ]
    before, after = ml.load(vit), load(save).tensors
    assert after["model/head/kernel"].shape == (8, 10)
    for name, x in before.items():
        if "head" not in name and "pos_embedding" not in name:
            np.testing.assert_allclose(after[f"model/{name}"], x.numpy(), atol=1e-7)
    read = weights.read(save)
    assert (read.image_shape, read.num_classes) == ((4, 8, 1), 10)
    assert not read.options["approximate"]  # which GELU it was goes on from file to file

    train(resume=save, init=vit, **options)
    with pytest.raises(
        CheckpointError, match=rf"with init {vit}, expected init None \(init starts a new"
    ):
        train(model="vit", resume=save, **options)


def test_members_begin_alike(mnist: Path, vit: Path) -> None:
    options: dict[str, Any] = {"data": f"mnist:{mnist}", "epochs": 2, "batch_size": 4, "init": vit}
    alone, together = train(**options), train(group="threads:2", **options)
    assert together["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)


def test_weights_that_are_for_something_else(
    mnist: Path, vit: Path, tmp_path: Path, capsys: Capsys
) -> None:
    data = f"mnist:{mnist}"
    mixer = tmp_path / "mixer"
    ml.save(mixer, MlpMixer((8, 8, 1), 3, key=ml.random.key(0)))
    with pytest.raises(ml.errors.WeightsError, match="expects images of 8 x 8, got 4 x 8: a Mixer"):
        train(data=data, init=mixer, batch_size=2)
    with pytest.raises(OptionError, match="contains weights of mlp_mixer, expected vit"):
        train(model="vit", data=data, init=mixer)
    with pytest.raises(ml.errors.WeightsError, match="expected a safetensors or"):
        train(data=data, init=mnist / "train-images-idx3-ubyte")
    assert main(["--init", str(tmp_path / "none"), "--data", data]) == 1
    assert "none" in capsys.readouterr().err


def test_images_of_folders_get_the_shape_of_the_weights_and_give_their_names(
    images: Path, tmp_path: Path, capsys: Capsys
) -> None:
    options: dict[str, Any] = {"data": f"images:{images}", "epochs": 1, "batch_size": 2}
    start, save = tmp_path / "start", tmp_path / "save"
    ml.save(start, MlpMixer((16, 16, 3), 5, 8, 6, 1, 2, 6, key=ml.random.key(0)))
    train(init=start, save=save, **options)
    read = weights.read(save)
    assert (read.image_shape, read.classes) == ((16, 16, 3), ["blue", "red"])

    grey = MlpMixer((8, 8, 1), 2, 4, 6, 1, 2, 6, key=ml.random.key(0))
    ml.save(start, grey, weights.described((8, 8, 1), ["red", "blue"]))
    train(init=start, save=save, progress=Progress(), **options)
    assert weights.read(save).image_shape == (8, 8, 1)
    assert "the head is kept, and is for blue, red instead of red, blue" in capsys.readouterr().err


def test_images_that_do_not_fit_are_refused_before_the_head_is_told_of(
    mnist: Path, tmp_path: Path, capsys: Capsys
) -> None:
    ml.save(tmp_path / "x", MlpMixer((16, 16, 3), 5, 4, 6, 1, 2, 6, key=ml.random.key(0)))
    with pytest.raises(ml.errors.WeightsError, match="3 channels, got 1"):
        train(data=f"mnist:{mnist}", init=tmp_path / "x", batch_size=2, progress=Progress())
    assert "the head is new" not in capsys.readouterr().err
