"""DyNet's side of the suite `batches`: a graph of all inputs, which DyNet batches automatically."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bench.dynamic_sizes import LstmSize, Tree, TreeSize, Weights, inputs_of, weights_of

Run = Callable[[], list[Any]]


def running(size: TreeSize | LstmSize) -> Run:
    """Return a round's function, which builds the graph each time, since its shape may differ."""
    dy = _dynet()
    params = dy.ParameterCollection()
    _keepalive.append(params)

    def parameters(weights: Weights) -> dict[str, Any]:
        """Matrices are transposed: DyNet multiplies columns."""
        return {name: params.parameters_from_numpy(w.T) for name, w in weights.items()}

    tensors, inputs = parameters(weights_of(size)), inputs_of(size)
    build = _root if isinstance(size, TreeSize) else _last_state

    def run() -> list[Any]:
        dy.renew_cg()
        outputs = [build(dy, tensors, each) for each in inputs]
        dy.forward(outputs)
        return [np.asarray(x.npvalue()) for x in outputs]

    return run


_keepalive: list[Any] = []  # the process ends with an error when a collection of parameters dies


@cache
def _dynet() -> Any:
    importlib.import_module("dynet_config").set(mem=1024, autobatch=True)
    return importlib.import_module("dynet")


def _affine(dy: Any, params: Any, name: str, x: Any) -> Any:
    return dy.affine_transform([params[f"{name}/bias"], params[f"{name}/kernel"], x])


def _parts(dy: Any, gates: Any, count: int) -> list[Any]:
    width = gates.dim()[0][0] // count
    return [dy.pick_range(gates, k * width, (k + 1) * width) for k in range(count)]


def _root(dy: Any, params: Any, tree: Tree) -> Any:
    def state(node: int) -> Any:
        word, left, right = map(int, tree.nodes[node])
        if left < 0:
            gates = _affine(dy, params, "leaf", dy.inputTensor(tree.words[word]))
            i, o, u = _parts(dy, gates, 3)
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
        else:
            (h_left, c_left), (h_right, c_right) = state(left), state(right)
            gates = _affine(dy, params, "node", dy.concatenate([h_left, h_right]))
            i, f_left, f_right, o, u = _parts(dy, gates, 5)
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
            c = c + dy.cmult(dy.logistic(f_left), c_left) + dy.cmult(dy.logistic(f_right), c_right)
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    return state(0)[0]


def _last_state(dy: Any, params: Any, words: Any) -> Any:
    w_input, w_hidden = params["lstm_0/input"], params["lstm_0/recurrent"]
    width = w_hidden.dim()[0][1]
    h = c = dy.zeros(width)
    for x in words:
        sums = [params["lstm_0/bias"], w_input, dy.inputTensor(x), w_hidden, h]
        i, f, g, o = _parts(dy, dy.affine_transform(sums), 4)
        c = dy.cmult(dy.logistic(f), c) + dy.cmult(dy.logistic(i), dy.tanh(g))
        h = dy.cmult(dy.logistic(o), dy.tanh(c))
    return h
