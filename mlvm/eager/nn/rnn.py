"""Recurrent layers: cells for one step, and layers that run cells over sequences.

Formulas and the order of gates follow PyTorch's documentation of `torch.nn.LSTM`, `GRU` and
`RNN`. Kernels are transposed, [in, gates * hidden], and PyTorch's two biases are combined into one.

Sequences are time-major, f[time, batch, features]: the rows of a step are contiguous, so they are
neither copied nor gathered. The inputs of all steps are projected before the loop, by one matrix
product, or block by block up to the longest of `lengths`. Each step then needs one matrix product,
of the state with the kernel of all gates. With a batch of 1, reading that kernel dominates the time
of a step.

All steps are one call, `recurrence`, and the gradient is a second call. Under other
transformations, on a device, in ONNX files, and for other cells, a loop runs step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.arena.context import current
from mlvm.core.errors import DTypeError, ShapeError, brief
from mlvm.core.ops.recurrent import CELLS, Cell
from mlvm.core.types import TensorType, f32, i64
from mlvm.eager import tree
from mlvm.eager.autodiff.grad import vjp
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.control.loops import scan
from mlvm.eager.functions import creation, elements, random, shapes
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.nn.dropout import Dropout
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import Init, bias_of, kernel_of, matched, require_float, sizes
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.number import is_open
from mlvm.eager.tensor.operands import as_operand
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.wrapper import public
from mlvm.eager.transform.custom import CustomRule
from mlvm.eager.transform.trace import Tracer

step_by_step: Final = ContextVar("step_by_step", default=False)
"""True while loops replace the op `recurrence`."""

_BLOCK: Final = 8
"""Number of steps for which inputs are projected together if `lengths` is given."""


class _Cell(Module):
    """Base class of cells, with the kernels of all gates and one bias.

    By default, both kernels are uniform in +-1 / sqrt(hidden_size), as in PyTorch, and the bias is
    zero. `kernel_init`, `hidden_kernel_init` and `bias_init` replace them.
    """

    GATES: int
    STATES = 1  # number of tensors in the state

    input_kernel: Tensor  # [input_size, gates * hidden_size]
    hidden_kernel: Tensor  # [hidden_size, gates * hidden_size]
    bias: Tensor  # [gates * hidden_size]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        kernel_init: Init | None = None,
        hidden_kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        name = type(self).__name__
        inputs, hidden = sizes(name, input_size=input_size, hidden_size=hidden_size)
        kind = require_float(name, dtype)
        self.input_size, self.hidden_size = inputs, hidden
        bound = 1 / math.sqrt(hidden)
        keys = shapes.unstack(random.split(random.next_key() if key is None else key))
        width, even = self.GATES * hidden, partial(random.uniform, low=-bound, high=bound)
        init, hidden_init = kernel_init or even, hidden_kernel_init or even
        self.input_kernel = kernel_of(name, init, (inputs, width), inputs, keys[0], kind)
        options = hidden, keys[1], kind
        self.hidden_kernel = kernel_of(
            name, hidden_init, (hidden, width), *options, name="hidden_kernel_init"
        )
        self.bias = bias_of(name, bias_init, width, key, kind)
        self._begin()

    def _begin(self) -> None:
        """Create parameters that only some cells need."""

    @public
    def __call__(self, x: Tensor, state: Any = None) -> Any:
        """Return the next state, from f[batch, input_size] and the previous state; None is zeros.

        Raises `ShapeError` or `DTypeError` if x or the state has the wrong type.
        """
        name = type(self).__name__
        x = matched(name, x, self.bias)
        _require_sizes(name, x, ("batch",), self.input_size)
        if state is None:
            state = self.initial_state(x.shape[0])
        return self.step(self.project(x), self.required_state(name, state, x.shape[0]))

    def initial_state(self, *batch: int) -> Any:
        """Return the initial state: zeros, f[*batch, hidden_size]."""
        shape, dtype = (*batch, self.hidden_size), self.bias.dtype
        zeros = [creation.zeros(shape, dtype=dtype) for _ in range(self.STATES)]
        return zeros[0] if self.STATES == 1 else tuple(zeros)

    def required_state(self, layer: str, state: Any, *batch: int) -> Any:
        """Return the state as tensors.

        Raises `ShapeError` or `DTypeError` unless it has the types of `initial_state(*batch)`.

        Invalid calls:
            cell.required_state("GRUCell", ml.ones((1, 2), dtype="i64"), 1)  # DTypeError
            cell.required_state("GRUCell", ml.ones((3, 2)), 1)  # ShapeError
        """
        type = TensorType(self.bias.dtype, (*batch, self.hidden_size))
        parts = [state] if self.STATES == 1 else state
        if isinstance(parts, (list, tuple)):
            parts = [as_operand(x, self.bias) if isinstance(x, np.ndarray) else x for x in parts]
        if not isinstance(parts, (list, tuple)) or not all(isinstance(x, Tensor) for x in parts):
            parts = ()
        if [x.type for x in parts] != [type] * self.STATES:
            wrong = parts and all(x.shape == type.shape for x in parts)
            expected = ", ".join([str(type)] * self.STATES)
            actual = ", ".join(str(x.type) for x in parts) or brief(state)
            error = DTypeError if wrong or not parts else ShapeError
            raise error(f"{layer}: expected the state as {expected}, got {actual}")
        return parts[0] if self.STATES == 1 else tuple(parts)

    def project(self, x: Tensor) -> Tensor:
        """Project inputs for all gates: f[..., input_size] -> f[..., gates * hidden_size]."""
        return self.product(x) + self.bias

    def product(self, x: Tensor) -> Tensor:
        """Project inputs without the bias."""
        return op.matmul(x, self.input_kernel)

    def step(self, projected: Tensor, state: Any) -> Any:
        """Return the next state, from a projected input f[batch, gates * hidden_size]."""
        raise NotImplementedError

    @staticmethod
    def output(state: Any) -> Tensor:
        """Return the output in a state: h, f[batch, hidden_size]."""
        h: Tensor = state[0] if isinstance(state, tuple) else state
        return h


class RNNCell(_Cell):
    """Elman cell: h' = activation(x input_kernel + h hidden_kernel + bias), with the state h.

    Elman, Finding Structure in Time, Cognitive Science 14, 1990.

    f[batch, input_size] and a state of f[batch, hidden_size] -> the next state. Raises `ShapeError`
    or `DTypeError` if x or the state has the wrong type, `ArgumentError` for a size below 1.

        >>> ml.nn.RNNCell(4, 8)(ml.ones((2, 4)), ml.zeros((2, 8))).type
        f32[2,8]

    Invalid calls:
        ml.nn.RNNCell(0, 8)  # ArgumentError
        ml.nn.RNNCell(4, 8)(x, ml.ones((4, 8), dtype="i64"))  # DTypeError
    """

    GATES = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        activation: Callable[[Tensor], Tensor] = op.tanh,
        kernel_init: Init | None = None,
        hidden_kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            kernel_init=kernel_init,
            hidden_kernel_init=hidden_kernel_init,
            bias_init=bias_init,
            key=key,
            dtype=dtype,
        )
        self.activation = activation

    def step(self, projected: Tensor, state: Tensor) -> Tensor:
        return self.activation(projected + op.matmul(state, self.hidden_kernel))


class LSTMCell(_Cell):
    """Long short-term memory cell, with the state (h, c).

    Hochreiter and Schmidhuber, Neural Computation 9, 1997; with the forget gate of Gers et al.,
    2000. The gates i, f, g, o are the parts of x input_kernel + h hidden_kernel + bias:

        c' = sigmoid(f) c + sigmoid(i) tanh(g)
        h' = sigmoid(o) tanh(c')

    f[batch, input_size] and a state of f[batch, hidden_size] -> the next state. Raises `ShapeError`
    or `DTypeError` if x or the state has the wrong type, `ArgumentError` for a size below 1.

        >>> h, c = ml.nn.LSTMCell(4, 8)(ml.ones((2, 4)), (ml.zeros((2, 8)), ml.zeros((2, 8))))
        >>> h.type
        f32[2,8]

    Invalid calls:
        ml.nn.LSTMCell(0, 8)  # ArgumentError
    """

    GATES = 4
    STATES = 2

    def step(self, projected: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        return _lstm_state(projected + op.matmul(h, self.hidden_kernel), c)


class GRUCell(_Cell):
    """Gated recurrent unit, with the state h (Cho et al., arXiv 1406.1078).

    The gates r, z, n use the parts of p = x input_kernel + bias and q = h hidden_kernel:

        r, z = sigmoid(p_r + q_r), sigmoid(p_z + q_z)
        n = tanh(p_n + r (q_n + hidden_bias))
        h' = (1 - z) n + z h

    f[batch, input_size] and a state of f[batch, hidden_size] -> the next state. Raises `ShapeError`
    or `DTypeError` if x or the state has the wrong type, `ArgumentError` for a size below 1.

        >>> ml.nn.GRUCell(4, 8)(ml.ones((2, 4)), ml.zeros((2, 8))).type
        f32[2,8]

    Invalid calls:
        ml.nn.GRUCell(0, 8)  # ArgumentError
    """

    GATES = 3

    hidden_bias: Tensor  # [hidden_size]

    def _begin(self) -> None:
        self.hidden_bias = creation.zeros(self.hidden_size, dtype=self.bias.dtype)

    def step(self, projected: Tensor, state: Tensor) -> Tensor:
        recurrent = op.matmul(state, self.hidden_kernel)
        return _gru_state(projected, recurrent, state, self.hidden_bias)


def _lstm_state(sums: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = shapes.split(sums, 4, axis=-1)
    c = _sum_of_products(op.sigmoid(f), c, op.sigmoid(i), op.tanh(g))
    return op.sigmoid(o) * op.tanh(c), c


@through_f32
def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a * b + c * d


@through_f32
def _gru_state(projected: Tensor, recurrent: Tensor, state: Tensor, hidden_bias: Tensor) -> Tensor:
    r, z, n = shapes.split(projected, 3, axis=-1)
    r_h, z_h, n_h = shapes.split(recurrent, 3, axis=-1)
    n = op.tanh(n + op.sigmoid(r + r_h) * (n_h + hidden_bias))
    return n + op.sigmoid(z + z_h) * (state - n)


class _Recurrent(Module):
    """Base class of layers of cells.

    Each of the `num_layers` layers reads the outputs of the previous layer. With `bidirectional`, a
    layer has a forward and a backward cell, and concatenates the outputs of both. `dropout` is the
    rate between layers while `training`.
    """

    CELL: Callable[..., Any]

    forward: list[Any]  # one cell per layer
    backward: list[Any]  # one cell per layer; empty unless bidirectional

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        kernel_init: Init | None = None,
        hidden_kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        name = type(self).__name__
        inputs, hidden, layers = sizes(
            name, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers
        )
        directions = 2 if bidirectional else 1
        self.input_size = inputs
        self.dropout = Dropout(dropout)
        widths = [inputs, *[directions * hidden] * (layers - 1)]
        key = random.next_key() if key is None else key
        keys = iter(shapes.unstack(random.split(key, layers * directions)))
        options: dict[str, Any] = {"bias_init": bias_init, "dtype": dtype}
        options |= {"kernel_init": kernel_init, "hidden_kernel_init": hidden_kernel_init}
        self.forward, self.backward = (
            [self.CELL(width, hidden, key=next(keys), **options) for width in each]
            for each in (widths, widths if bidirectional else [])
        )

    @public
    def __call__(
        self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Run the layers over f[time, batch, input_size]; return the outputs and the last state.

        The outputs are the last layer's outputs, f[time, batch, directions * hidden_size]. A tensor
        of the state is f[num_layers * directions, batch, hidden_size], with the directions of a
        layer next to each other, as in PyTorch; None is zeros. `lengths`, i[batch], is the number
        of valid steps of each sequence. After these steps the outputs are zero, and the state does
        not change. The backward cell starts at the last valid step.

        Raises `ShapeError` or `DTypeError` if x, the state or the lengths have the wrong type.
        """
        name = type(self).__name__
        x = matched(name, x, self.forward[0].bias)
        _require_sizes(name, x, ("time", "batch"), self.input_size)
        time, batch = x.shape[:2]
        valid = longest = ends = None
        is_padded = lengths is not None and (is_open(time) or time % _BLOCK)
        if lengths is not None:
            if is_padded:
                x = op.pad(x, widths=((0, -time % _BLOCK), (0, 0), (0, 0)))
            valid = _valid(name, lengths, x.shape[0], batch)
            longest = _longest(lengths, time)
            ends = elements.clip(elements.astype(lengths, i64), 0, time)
        layers = list(zip(self.forward, self.backward or [None] * len(self.forward), strict=True))
        cells = [cell for layer in layers for cell in layer if cell is not None]
        if state is None:
            state = cells[0].initial_state(len(cells), batch)
        begin = _unstacked(cells[0].required_state(name, state, len(cells), batch))
        end: list[Any] = []
        for layer in layers:
            if end:
                x = self.dropout(x)
            outputs = []
            for cell, reverse in zip(layer, (False, True), strict=True):
                if cell is not None:
                    at = begin[len(end)]
                    y, last = _passed(cell, x, at, ends, valid, longest, reverse=reverse)
                    outputs.append(y)
                    end.append(last)
            x = shapes.concat(outputs, axis=-1)
        if is_padded:
            x = op.slice(x, start=(0, 0, 0), length=(time, *x.shape[1:]), step=(1, 1, 1))
        return x, tree.map(lambda *each: shapes.stack(each), *end)


class RNN(_Recurrent):
    """Layers of `RNNCell`s over sequences, with an elementwise `activation`; the state is h.

    `nn.RNNCell` documents the equations (Elman, Cognitive Science 14, 1990).

    Each of the `num_layers` layers reads the outputs of the previous layer. With `bidirectional`, a
    layer has a forward and a backward cell, and concatenates the outputs of both: directions is 2,
    else 1. `dropout` is the rate between layers while `training`.

    f[time, batch, input_size] -> f[time, batch, directions * hidden_size], and the last state,
    f[num_layers * directions, batch, hidden_size]. Raises `ShapeError` if an operand has the wrong
    type; `DTypeError` if an operand is complex; `ArgumentError` if a size or number is below 1, or
    the rate is not in [0, 1).

        >>> outputs, h = ml.nn.RNN(4, 8)(ml.ones((5, 2, 4)))
        >>> outputs.type, h.type
        (f32[5,2,8], f32[1,2,8])

    Invalid calls:
        ml.nn.RNN(2, 8, num_layers=0)  # ArgumentError
    """

    CELL = RNNCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        activation: Callable[[Tensor], Tensor] = op.tanh,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        kernel_init: Init | None = None,
        hidden_kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers=num_layers,
            bidirectional=bidirectional,
            dropout=dropout,
            kernel_init=kernel_init,
            hidden_kernel_init=hidden_kernel_init,
            bias_init=bias_init,
            key=key,
            dtype=dtype,
        )
        for cell in (*self.forward, *self.backward):
            cell.activation = activation


class LSTM(_Recurrent):
    """Layers of `LSTMCell`s over sequences; the state is (h, c).

    `nn.LSTMCell` documents the equations (Hochreiter and Schmidhuber, Neural Computation 9, 1997).

    Each of the `num_layers` layers reads the outputs of the previous layer. With `bidirectional`, a
    layer has a forward and a backward cell, and concatenates the outputs of both: directions is 2,
    else 1. `dropout` is the rate between layers while `training`.

    f[time, batch, input_size] -> f[time, batch, directions * hidden_size], and the last state,
    f[num_layers * directions, batch, hidden_size]. Raises `ShapeError` if an operand has the wrong
    type; `DTypeError` if an operand is complex; `ArgumentError` if a size or number is below 1, or
    the rate is not in [0, 1).

        >>> outputs, (h, c) = ml.nn.LSTM(4, 8)(ml.ones((5, 2, 4)))
        >>> outputs.type, h.type
        (f32[5,2,8], f32[1,2,8])

    Invalid calls:
        ml.nn.LSTM(2, 8, dropout=1.0)  # ArgumentError
    """

    CELL = LSTMCell


class GRU(_Recurrent):
    """Layers of `GRUCell`s over sequences; the state is h.

    `nn.GRUCell` documents the equations (Cho et al., arXiv 1406.1078).

    Each of the `num_layers` layers reads the outputs of the previous layer. With `bidirectional`, a
    layer has a forward and a backward cell, and concatenates the outputs of both: directions is 2,
    else 1. `dropout` is the rate between layers while `training`.

    f[time, batch, input_size] -> f[time, batch, directions * hidden_size], and the last state,
    f[num_layers * directions, batch, hidden_size]. Raises `ShapeError` if an operand has the wrong
    type; `DTypeError` if an operand is complex; `ArgumentError` if a size or number is below 1, or
    the rate is not in [0, 1).

        >>> outputs, h = ml.nn.GRU(4, 8)(ml.ones((5, 2, 4)))
        >>> outputs.type, h.type
        (f32[5,2,8], f32[1,2,8])

    Invalid calls:
        ml.nn.GRU(2, 0)  # ArgumentError
    """

    CELL = GRUCell


def _passed(
    cell: Any,
    x: Tensor,
    state: Any,
    lengths: Tensor | None,
    valid: Tensor | None,
    longest: Tensor | None,
    *,
    reverse: bool,
) -> tuple[Tensor, Any]:
    """Run one cell over a sequence; return the outputs and the last state.

    Steps after the `longest` sequence are skipped."""

    def turn(state: Any, row: tuple[Tensor, Tensor | None]) -> tuple[Any, Tensor]:
        projected, counts = row
        after = cell.step(projected, state)
        if counts is not None:
            after = tree.map(lambda new, old: op.where(counts, new, old), after, state)
        return after, cell.output(after)

    kind = _kind_of(cell)
    if kind is None or _goes_step_by_step():
        projected = _projected(cell.project, x, longest)
        last, y = scan(turn, state, (projected, valid), longest, reverse=reverse)
    else:
        project: Callable[..., Tensor] = cell.product
        bias = cell.bias
        if kind == "gru":  # the bias of the last gate is added next to the product, inside the gate
            project = cell.project
            bias = shapes.concat([creation.zeros_like(bias[cell.hidden_size :]), cell.hidden_bias])
        projected = _projected(project, x, longest)
        y, parts = recurrence(
            kind, projected, tree.leaves(state), cell.hidden_kernel, bias, lengths, reverse=reverse
        )
        last = parts[0] if cell.STATES == 1 else tuple(parts)
    return (y if valid is None else elements.where(valid, y, 0.0)), last


def _kind_of(cell: Any) -> Cell | None:
    """Return the kind of a cell for `recurrence`; None if the op does not support the cell."""
    if type(cell) is RNNCell:
        activations: list[tuple[Any, Cell]] = [(op.tanh, "tanh"), (op.relu, "relu")]
        return next((kind for function, kind in activations if cell.activation is function), None)
    return "lstm" if type(cell) is LSTMCell else "gru" if type(cell) is GRUCell else None


def _goes_step_by_step() -> bool:
    """Return whether a loop must replace the op.

    This is necessary under other transformations, for an export, and on a device, which has no
    kernel for the op."""
    on_device = hasattr(current_arena().vm.stands_for, "counts")
    return on_device or step_by_step.get() or isinstance(current().recorder, Tracer)


def recurrence(
    kind: Cell,
    projected: Tensor,
    state: Sequence[Tensor],
    kernel: Tensor,
    bias: Tensor,
    lengths: Tensor | None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Run a cell over a sequence; return the outputs and the parts of the last state.

    See `mlvm.core.ops.recurrent`. After the end of a sequence, the last output is repeated."""
    time, batch, _ = projected.shape
    if lengths is None:
        lengths = creation.full((batch,), time, dtype=i64)
    begin = shapes.stack([elements.astype(part, bias.dtype) for part in state])
    half = autocast_dtype()
    if half is not None and bias.dtype is f32:
        kernel = op.astype(kernel, dtype=half)
    projected = projected if projected.dtype is bias.dtype else op.astype(projected, dtype=f32)
    operands = [projected, begin, kernel, bias, lengths]
    fn = partial(_run, kind, reverse, False)
    forward, back = partial(_run, kind, reverse, True), partial(_back, kind, reverse)
    rule = CustomRule("recurrence", lambda operands: fn(operands)[0], fwd=forward, bwd=back)
    y, last = _stepped(kind, reverse, *operands) if _goes_step_by_step() else rule(operands)
    return y, list(shapes.unstack(last))


def _run(
    kind: Cell, reverse: bool, keep: bool, operands: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs and the last state, and the residuals for the backward pass."""
    states = op.recurrence(*operands, cell=kind, reverse=reverse, keep=keep)
    time, parts = operands[0].shape[0], operands[1].shape[0]
    y = states[0, :time] if reverse else states[0, 1:]
    return [y, states[:parts, 0 if reverse else time]], [*operands, states]


def _back(
    kind: Cell, reverse: bool, residuals: list[Tensor], gs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the cotangents of `recurrence`'s operands, computed by the loop if differentiated."""
    *operands, lengths, states = residuals
    projected, begin, kernel, _ = operands
    g, g_last = gs
    assert g is not None  # `CustomRule` replaces None by zeros
    assert g_last is not None
    on = current().recorder
    if taping() is not None or (on is not None and on.outer):
        loop: Callable[..., Any] = partial(_stepped, kind, reverse)
        return [*vjp(lambda *xs: loop(*xs, lengths), *operands)[1]((g, g_last)), None]
    time, batch, width = projected.shape
    hidden = kernel.shape[0]
    turned = op.permute_dims(kernel, axes=(1, 0))
    flat = op.recurrence_vjp(
        g, g_last, projected, states, turned, lengths, cell=kind, reverse=reverse
    )
    of_sums, of_state = shapes.split(flat, [flat.size - begin.size])
    own = of_product = shapes.reshape(of_sums, (time, batch, CELLS[kind].cotangents * hidden))
    if kind == "gru":
        new, r_z, of_product = own[..., :hidden], own[..., hidden : 3 * hidden], own[..., hidden:]
        own = shapes.concat([r_z, new], axis=-1)
    before = states[0, 1:] if reverse else states[0, :time]
    rows = shapes.reshape(before, (time * batch, hidden))
    columns = shapes.reshape(of_product, (time * batch, width))
    of_kernel = elements.astype(op.matmul(rows, columns, transpose_x=True), kernel.dtype)
    of_state = shapes.reshape(of_state, begin.shape)
    return [own, of_state, of_kernel, op.sum(columns, axis=0), None]


def _stepped(
    kind: Cell,
    reverse: bool,
    projected: Tensor,
    state: Tensor,
    kernel: Tensor,
    bias: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `recurrence` as a loop."""

    def turn(state: tuple[Tensor, ...], row: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        p, t = row
        q = elements.astype(op.matmul(state[0], kernel), bias.dtype) + bias
        after: Any
        if kind == "lstm":
            after = _lstm_state(p + q, state[1])
        elif kind == "gru":
            after = (_gru_state(p, q, state[0], creation.zeros_like(bias[: kernel.shape[0]])),)
        else:
            after = (op.tanh(p + q) if kind == "tanh" else op.relu(p + q),)
        goes_on = shapes.expand_dims(t < lengths, axis=-1)
        after = tuple(op.where(goes_on, x, y) for x, y in zip(after, state, strict=True))
        return after, after[0]

    steps = creation.arange(projected.shape[0], dtype=lengths.dtype)
    last, y = scan(turn, tuple(shapes.unstack(state)), (projected, steps), reverse=reverse)
    return y, shapes.stack(list(last))


def _projected(project: Callable[..., Tensor], x: Tensor, longest: Tensor | None) -> Tensor:
    """Compute `project(x)` in blocks of steps, up to the end of the longest sequence."""
    if longest is None:
        return project(x)
    blocks = shapes.reshape(x, (x.shape[0] // _BLOCK, _BLOCK, *x.shape[1:]))
    count = (longest + (_BLOCK - 1)) // _BLOCK
    _, y = scan(lambda _, block: (None, project(block)), None, blocks, count)
    return shapes.reshape(y, (x.shape[0], *y.shape[2:]))


def _longest(lengths: Tensor, time: int) -> Tensor | None:
    """Return the largest length: i64[], from 0 to `time`; None if there are no sequences."""
    if not lengths.size:
        return None
    return elements.astype(elements.clip(op.max(lengths), 0, time), i64)


def _valid(name: str, lengths: Tensor, time: int, batch: int) -> Tensor:
    """Return the mask of valid steps of each sequence: bool[time, batch, 1]."""
    if not isinstance(lengths, Tensor) or not lengths.dtype.is_integer:
        expected = f"{name}: expected lengths as integers, i64[{batch}]"
        raise DTypeError(f"{expected}, got {described(lengths)}")
    if lengths.shape != (batch,):
        raise ShapeError(
            f"{name}: expected lengths [{batch}], one per sequence, got {lengths.type}"
        )
    steps = creation.arange(time, dtype=lengths.dtype)
    return shapes.reshape(steps, (time, 1, 1)) < shapes.reshape(lengths, (batch, 1))


def _unstacked(state: Any) -> list[Any]:
    """Return the state of each cell."""
    if isinstance(state, Tensor):
        return list(shapes.unstack(state))
    return list(zip(*map(shapes.unstack, state), strict=True))


def _require_sizes(name: str, x: Tensor, axes: tuple[str, ...], features: int) -> None:
    if x.ndim != len(axes) + 1 or x.shape[-1] != features:
        raise ShapeError(f"{name}: expected x as [{', '.join(axes)}, {features}], got {x.type}")
