"""Sequence classifier that uses the last state of an LSTM.

It follows Hochreiter and Schmidhuber (Neural Computation 9, 1997), with the forget gate of Gers et
al. (2000).
"""

from __future__ import annotations

import mlvm.eager as ml
from mlvm.eager import Tensor, nn


class LstmClassifier(nn.Module):
    """Sequences i64[N, T], padded with zeros -> logits [N, num_classes]."""

    def __init__(
        self,
        num_symbols: int,
        num_classes: int,
        width: int = 32,
        hidden: int = 128,
        *,
        key: Tensor | None = None,
    ) -> None:
        keys = ml.random.split(ml.random.next_key() if key is None else key, 3)
        self.embedding = nn.Embedding(num_symbols, width, key=keys[0])
        self.lstm = nn.LSTM(width, hidden, key=keys[1])
        self.head = nn.Linear(hidden, num_classes, key=keys[2])

    def __call__(self, sequences: Tensor) -> Tensor:
        lengths = ml.sum(ml.astype(sequences != 0, ml.int64), axis=1)
        _, (h, _) = self.lstm(self.embedding(ml.matrix_transpose(sequences)), lengths=lengths)
        return self.head(h[-1])
