"""The LSTM, the Tree-LSTM and BERT: shapes, what they depend on, and that they learn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mlvm.eager as ml
from bench.dynamic_sizes import TreeSize, inputs_of, reference
from bench.mlvm_dynamic import tree_lstm_of
from mlvm.eager import Tensor, nn
from models.bert import Bert
from models.data import listops
from models.data.batches import evaluation_batches
from models.data.dataset import NO_LABEL, Array
from models.lstm import LstmClassifier
from models.tree_lstm import TreeClassifier


def learning(model: nn.Module, samples: Array, labels: Array, steps: int, rate: float) -> float:
    """Return the loss after `steps` steps of Adam, over the loss at first."""
    optimizer = ml.optim.Adam(model, rate)

    @ml.value_and_grad
    def loss_and_grads(model: nn.Module, samples: Tensor, labels: Tensor) -> Tensor:
        return ml.mean(ml.softmax_cross_entropy(model(samples), labels))

    losses = []
    for _ in range(steps):
        loss, grads = loss_and_grads(model, ml.asarray(samples), ml.asarray(labels))
        optimizer.update(grads)
        losses.append(float(loss))
    return losses[-1] / losses[0]


def captured_alike(fn: Callable[..., Tensor], *arguments: Array) -> bool:
    """Return whether a captured call gives the bits of an eager one."""
    operands = [ml.asarray(each) for each in arguments]
    eager, captured = fn(*operands), ml.capture(fn, fuse=False)(*operands)
    return eager.numpy().tobytes() == captured.numpy().tobytes()


# --- LSTM ------------------------------------------------------------------------------


def test_the_lstm_ends_where_a_sequence_does() -> None:
    model = LstmClassifier(20, 3, 4, 5, key=ml.random.key(0))
    sequences = np.random.default_rng(0).integers(1, 20, (4, 9))
    sequences[1, 4:] = sequences[2, 1:] = 0
    logits = model(ml.asarray(sequences)).numpy()
    assert logits.shape == (4, 3)
    shorter = model(ml.asarray(sequences[1:2, :4])).numpy()
    assert logits[1] == pytest.approx(shorter[0], abs=1e-6)
    assert captured_alike(lambda x: model(x), sequences)


def test_the_lstm_learns_an_order() -> None:
    """The order of two symbols decides: counts say nothing about it."""
    first = np.arange(16) % 2
    sequences = np.stack([1 + first, np.full(16, 3), 2 - first, np.zeros(16, int)], axis=1)
    model = LstmClassifier(4, 2, 4, 8, key=ml.random.key(0))
    assert learning(model, sequences, first, 25, 0.03) < 0.3


# --- Tree-LSTM -------------------------------------------------------------------------

SIZE = TreeSize(6, 5, (5, 2, 9))


def test_the_tree_lstm_computes_the_papers_equations() -> None:
    model = tree_lstm_of(SIZE)
    for tree, expected in zip(inputs_of(SIZE), reference(SIZE), strict=True):
        h, c = model(ml.asarray(tree.words), ml.asarray(tree.nodes))
        assert h.shape == c.shape == (5,)
        assert h.numpy() == pytest.approx(expected, abs=1e-6)


def test_a_tree_of_one_leaf_is_its_word() -> None:
    model = tree_lstm_of(SIZE)
    words = ml.random.normal((3, 6), key=ml.random.key(1))
    h, c = model(words, ml.asarray([[2, -1, -1], [0, -1, -1]]))
    expected = model.at_leaf(words)
    assert h.numpy() == pytest.approx(expected[0].numpy()[2], abs=1e-6)
    assert c.numpy() == pytest.approx(expected[1].numpy()[2], abs=1e-6)


def test_rows_that_nobody_refers_to_change_nothing() -> None:
    model = TreeClassifier(15, 10, 6, 5, key=ml.random.key(0))
    trees, _ = listops.load(0, 20, 5).test[np.arange(2)]
    changed = trees.copy()
    unused = trees[0, :, 1:].max() + 1
    changed[0, unused:] = (7, 1, 2)
    assert np.array_equal(model(ml.asarray(trees)).numpy(), model(ml.asarray(changed)).numpy())


def test_a_batch_of_trees_that_is_filled_up_has_trees_only() -> None:
    model = TreeClassifier(15, 10, 6, 5, key=ml.random.key(0))
    *_, (trees, labels) = evaluation_batches(listops.load(0, 20, 3).test, 2)
    first, second = model(ml.asarray(trees)).tolist()
    assert first == second
    assert labels[1] == NO_LABEL


def test_the_tree_lstm_learns() -> None:
    trees, values = listops.load(0, 60, 20).train[np.arange(3)]
    model = TreeClassifier(15, 10, 8, 8, key=ml.random.key(0))
    assert learning(model, trees, values, 10, 0.05) < 0.5


# --- BERT ------------------------------------------------------------------------------


def test_every_place_of_bert_sees_all() -> None:
    model = Bert(11, 11, 16, 2, 2, key=ml.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8))
    logits = model(ml.asarray(tokens)).numpy()
    assert logits.shape == (2, 8, 11)
    for place in (0, 7):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % 11
        differs = (model(ml.asarray(changed)).numpy() != logits).any(axis=-1)
        assert differs[0].all()
        assert not differs[1].any()
    assert captured_alike(lambda x: model(x), tokens)


def test_bert_learns() -> None:
    random = np.random.default_rng(0)
    labels = np.tile(random.integers(0, 5, 8), (4, 1))
    shown = np.where(random.random((4, 8)) < 0.5, 5, labels)
    model = Bert(6, 5, 16, 1, 2, key=ml.random.key(0))
    assert learning(model, shown, labels, 25, 0.01) < 0.5
