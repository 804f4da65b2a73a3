"""Tree-LSTM for binary trees, written as a recursion over the tree.

See Tai, Socher and Manning, arXiv 1503.00075, section 3.2.
"""

from __future__ import annotations

from typing import TypeAlias

import mlvm.eager as ml
from mlvm.eager import Tensor, nn

State: TypeAlias = tuple[Tensor, Tensor]
"""h and c, each f[hidden], or f[n, hidden] for n words."""


class TreeLstm(nn.Module):
    """Tree-LSTM layer: words f[words, features] -> state h, c f[hidden] at the root.

    `nodes` i64[n,3] has a row (word, left, right) for each node, the root first; a leaf has
    negative children. The state of a word is computed once, even if several leaves refer to it. The
    equations are 9 to 14 of the paper with N = 2. As in the paper's constituency trees, leaves have
    no children, and inner nodes have no word. The biases of the forget gates are initially one.
    """

    leaf: nn.Linear  # gates input, output; new
    node: nn.Linear  # gates input, forget left, forget right, output; new

    def __init__(self, features: int, hidden: int, *, key: Tensor | None = None) -> None:
        keys = ml.random.split(ml.random.next_key() if key is None else key)
        self.leaf = nn.Linear(features, 3 * hidden, key=keys[0])
        self.node = nn.Linear(2 * hidden, 5 * hidden, key=keys[1])
        gates = ml.concat([ml.zeros(hidden), ml.ones(2 * hidden), ml.zeros(2 * hidden)])
        self.node.bias = gates

    def __call__(self, words: Tensor, nodes: Tensor) -> State:
        return self.at_root(self.at_leaf(words), nodes)

    def at_root(self, leaves: State, nodes: Tensor) -> State:
        """Compute the state at the root from the states of all words."""

        @ml.subroutine
        def state(nodes: tuple[Tensor, ...], node: Tensor) -> State:
            word, left, right = nodes

            def at_word() -> State:
                (h, c), i = leaves, word[node]
                return h[i], c[i]

            def at_children() -> State:
                return self.at_node(state(nodes, left[node]), state(nodes, right[node]))

            root_state: State = ml.cond(left[node] < 0, at_word, at_children)
            return root_state

        return state(ml.unstack(nodes, axis=1), ml.zeros((), dtype=ml.int64))

    def at_roots(self, leaves: State, trees: Tensor) -> State:
        """Compute the states at the roots of trees i64[N,n,3]: h and c, each f[N, hidden].

        All nodes with complete children, in all trees, share one product.
        """
        roots: State = ml.auto_batch(lambda nodes: self.at_root(leaves, nodes))(trees)
        return roots

    def at_leaf(self, words: Tensor) -> State:
        """Compute the states of words: f[n, features] -> h and c, each f[n, hidden]."""
        i, o, u = ml.split(self.leaf(words), 3, axis=-1)
        c = ml.sigmoid(i) * ml.tanh(u)
        return ml.sigmoid(o) * ml.tanh(c), c

    def at_node(self, left: State, right: State) -> State:
        """Compute the state of a node from the states of the two children."""
        gates = self.node(ml.concat([left[0], right[0]]))
        i, f_left, f_right, o, u = ml.split(gates, 5)
        c = ml.sigmoid(i) * ml.tanh(u)
        c = c + ml.sigmoid(f_left) * left[1] + ml.sigmoid(f_right) * right[1]
        return ml.sigmoid(o) * ml.tanh(c), c


class TreeClassifier(nn.Module):
    """Trees i64[N,n,3] -> logits [N, num_classes]; a leaf's word is the number of a symbol."""

    embedding: nn.Embedding
    encoder: TreeLstm
    head: nn.Linear

    def __init__(
        self,
        num_symbols: int,
        num_classes: int,
        features: int = 32,
        hidden: int = 64,
        *,
        key: Tensor | None = None,
    ) -> None:
        keys = ml.random.split(ml.random.next_key() if key is None else key, 3)
        self.embedding = nn.Embedding(num_symbols, features, key=keys[0])
        self.encoder = TreeLstm(features, hidden, key=keys[1])
        self.head = nn.Linear(hidden, num_classes, key=keys[2])

    def __call__(self, trees: Tensor) -> Tensor:
        leaves = self.encoder.at_leaf(self.embedding.embedding)  # for each symbol
        return self.head(self.encoder.at_roots(leaves, trees)[0])
