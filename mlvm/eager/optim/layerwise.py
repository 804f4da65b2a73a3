"""Optimizers with rules that use the norm, rows or singular values of a parameter.

They follow the interface of `rules`. They cannot be used if the members of a group store only
shards of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import inf, isfinite
from typing import Any, ClassVar, Final

from mlvm.core.errors import ArgumentError, NonFiniteError, brief
from mlvm.core.types import TensorType
from mlvm.eager.functions import creation, elements, linalg, shapes
from mlvm.eager.functions.arguments import integer
from mlvm.eager.optim.line_search import strong_wolfe
from mlvm.eager.optim.optimizer import Optimizer, Tensors, Update
from mlvm.eager.optim.ranges import AtLeastOne, Count, Fraction, Positive
from mlvm.eager.optim.update_rules import (
    Adam,
    AdamW,
    moments,
    multiply_add_into,
    scalars_like,
    sum_of_weights,
)
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY
from mlvm.eager.tensor.dtypes import result_type
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Tree
from mlvm.machines.old_keywords import old_keywords


class Lamb(Adam):
    """Adam with updates scaled to the norm of the parameter: p -= rate * |p| / |u| * u.

    You et al., arXiv 1904.00962, algorithm 2, with the identity for phi:

    u = m / (sqrt(v) + eps) + weight_decay p

    If |p| or |u| is 0, p -= rate * u. The norms are computed over all elements of the parameter.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Lamb({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.Lamb(v, -1.0)  # ArgumentError
    """

    eps: Positive = 1e-6
    weight_decay: Positive = 0.0

    _by_element: ClassVar[bool] = False
    _couples_decay: ClassVar[bool] = False

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        t, beta1, root = self._corrections(hyper, rate)
        of_sum = root / sum_of_weights(beta1, t)
        return -rate, of_sum, hyper.eps * root

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_rate, of_sum, eps = scalars
        [weight_decay] = scalars_like(p, hyper.weight_decay)
        gradient_sum, square_sum = moments(g, state, hyper.betas)
        u = of_sum * gradient_sum / (op.sqrt(square_sum) + eps)
        if hyper.weight_decay:
            multiply_add_into(u, p, weight_decay, u)
        of_p, of_u = _norm(p), _norm(u)
        both = op.logical_and(of_p > 0.0, of_u > 0.0)
        ratio = elements.where(both, of_p, 1.0) / elements.where(both, of_u, 1.0)
        multiply_add_into(p, u, minus_rate * ratio, p)


class Adafactor(Optimizer):
    """Adam without momentum and with a factored second moment.

    Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5. The mean of g^2 of a matrix f[n, m] is
    approximated by the product of f[n] and f[m]. With t the number of the update:

    v = (1 - t^-decay_rate) v + t^-decay_rate (g^2 + eps[0])
    u = g / sqrt(v);  u /= max(1, rms(u) / clipping_threshold)
    p -= max(eps[1], rms(p)) * min(rate, 1 / sqrt(t)) * u

    The paper's rate is 0.01. The last two axes are rows and columns; the second moment of a vector
    is not factored. `weight_decay` is decoupled: p -= rate * weight_decay * p is applied first.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones((3, 4))
        >>> optimizer = ml.optim.Adafactor({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones((3, 4))})
        >>> w[0], {path: x.type for path, x in optimizer.state().items() if path != "count"}
        (Tensor([0.5, 0.5, 0.5, 0.5], f32[4]), {'row_mean/w': f32[3], 'column_mean/w': f32[4]})

    Invalid calls:
        ml.optim.Adafactor(v, -1.0)  # ArgumentError
    """

    decay_rate: Positive = 0.8
    eps: tuple[Fraction, Fraction] = (1e-30, 1e-3)
    clipping_threshold: AtLeastOne = 1.0
    weight_decay: Positive = 0.0

    _by_element: ClassVar[bool] = False

    def _state_types(self, hyper: Any, type: TensorType) -> Mapping[str, TensorType]:
        if type.ndim < 2:
            return {"square_mean": type}
        *others, rows, columns = type.shape
        return {
            "row_mean": type.with_shape((*others, rows)),
            "column_mean": type.with_shape((*others, columns)),
        }

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        t = elements.astype(self.count, rate.dtype) + 1
        part = t**-hyper.decay_rate
        minus_rate = -op.minimum(rate, 1 / op.sqrt(t))
        decay_factor = 1 - hyper.weight_decay * rate
        return minus_rate, decay_factor, 1 - part, part

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_rate, decay_factor, old, part = scalars
        eps, least, threshold = scalars_like(p, *hyper.eps, hyper.clipping_threshold)
        length = op.maximum(_rms(p), least)
        if hyper.weight_decay:
            p *= decay_factor
        square = g * g + eps
        means = [square] if len(state) == 1 else [op.mean(square, axis=i) for i in (-1, -2)]
        for v, mean in zip(state, means, strict=True):
            v *= old
            multiply_add_into(v, part, mean, v)
        if len(state) == 1:
            u = g / op.sqrt(state[0])
        else:
            rows, columns = state
            rows = rows / op.mean(rows, axis=-1, keepdims=True)
            roots = op.sqrt(rows)[..., None] * op.sqrt(columns)[..., None, :]
            u = g / roots
        length = length / op.maximum(_rms(u) / threshold, 1.0)
        multiply_add_into(p, u, minus_rate * length, p)


_NEWTON_SCHULZ: Final = 3.4445, -4.7750, 2.0315
_NEWTON_SCHULZ_STEPS: Final = 5


class Muon(AdamW):
    """Momentum with nearly orthogonal updates for matrices, and AdamW for all other parameters.

    v = momentum v + g;  d = g + momentum v           with `nesterov`, else d = v
    p -= rate * (0.2 sqrt(max(n, m)) orthogonal(d) + weight_decay p)

    orthogonal(d) is about U V^T for d = U S V^T (Jordan et al., "Muon: an optimizer for hidden
    layers in neural networks", 2024). It is computed by five Newton-Schulz iterations X = a X + b X
    X^T X + c X X^T X X^T X. The factor for f[n, m] results in updates of AdamW's length, so that
    both can use the same rate and the same decay (Liu et al., arXiv 2502.16982; PyTorch's
    adjust_lr_fn="match_rms_adamw").

    Use it for the matrices of hidden layers. An embedding or a head is also a matrix; use AdamW for
    it in a group with `orthogonal` off: `groups=[("head/*", {"orthogonal": False})]`.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.zeros((2, 2))
        >>> optimizer = ml.optim.Muon({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.asarray([[3.0, 0.0], [0.0, -0.5]])})
        >>> ml.sign(w)
        Tensor([[-1.,  0.],
                [ 0.,  1.]], f32[2,2])

    Invalid calls:
        ml.optim.Muon(v, -1.0)  # ArgumentError
    """

    weight_decay: Positive = 0.1
    momentum: Fraction = 0.95
    nesterov: bool = True
    orthogonal: bool = True

    _by_element: ClassVar[bool] = False

    def _state_types(self, hyper: Any, type: TensorType) -> Mapping[str, TensorType]:
        if hyper.orthogonal and type.ndim == 2:
            return {"momentum": type}
        return super()._state_types(hyper, type)

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        return -rate, *super()._scalars(hyper, rate)

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_rate, *of_adam = scalars
        if not hyper.orthogonal or p.ndim != 2:
            super()._step(hyper, p, g, state, of_adam)
            return
        [v], [momentum] = state, scalars_like(p, hyper.momentum)
        multiply_add_into(v, v, momentum, g)
        d = _orthogonal(op.multiply_add(v, momentum, g) if hyper.nesterov else v)
        p *= of_adam[-1]
        multiply_add_into(p, d, minus_rate * (0.2 * max(p.shape) ** 0.5), p)


def _orthogonal(x: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of x, and singular values of about 0.7 to 1.2."""
    a, b, c = _NEWTON_SCHULZ
    rows, columns = x.shape
    x = x / op.maximum(_norm(x), 1e-7)
    x = x.T if rows > columns else x
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = op.multiply_add(op.multiply_add(square @ square, c, b * square) @ x, 1.0, a * x)
    return x.T if rows > columns else x


class LBFGS(Optimizer):
    """Quasi-Newton method for a loss that is the same in every update: p -= rate * H g.

    H approximates the inverse Hessian of all parameters of a group from the last `history_size`
    steps (Nocedal and Wright, "Numerical Optimization", algorithm 7.5; in matrix form by Byrd,
    Nocedal and Schnabel, 1994).

    The first step is scaled by min(1, 1 / sum |g|), and steps with a curvature below 1e-10 are
    dropped, as in PyTorch. `update` has no line search, which is PyTorch's default; `search` has
    one. PyTorch's `step(closure)` with `max_iter` iterations corresponds to

        for _ in range(max_iter):
            loss, grads = loss_and_grads(model)
            optimizer.update(grads)

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.asarray([3.0, -2.0])
        >>> optimizer = ml.optim.LBFGS({"w": w}, 1.0)
        >>> for _ in range(8):
        ...     optimizer.update({"w": w * ml.asarray([1.0, 10.0])})
        >>> ml.all(ml.abs(w) < 1e-3)
        Tensor(True, bool[])

    Invalid calls:
        ml.optim.LBFGS(v, -1.0)  # ArgumentError
    """

    history_size: Count = 10

    _by_element: ClassVar[bool] = False

    def _state_types(self, hyper: Any, type: TensorType) -> Mapping[str, TensorType]:
        history = type.with_shape((hyper.history_size, *type.shape))
        return {"gradient": type, "step": type, "steps": history, "changes": history}

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        return rate, self.count == 0.0

    def _step_all(self, hyper: Any, updates: Sequence[Update]) -> None:
        updates = [
            (p, self._effective_gradient(hyper, p, g), state, x) for p, g, state, x in updates
        ]
        wide = result_type(*[p.dtype for p, *_ in updates])
        gram: Any = None
        tables = []
        pairs = [(g - state[0], state[1]) for _, g, state, _ in updates]
        curvature = reduce(op.add, [elements.astype(op.sum(y * s), wide) for y, s in pairs])
        is_kept = curvature > 1e-10  # PyTorch's value
        for (_, g, state, _), (y, s) in zip(updates, pairs, strict=True):
            for history, new in zip(state[2:], (s, y), strict=True):
                later = shapes.concat([history[1:], new[None]])
                apply_into(history, COPY, op.where(is_kept, later, history))
            steps, changes = [shapes.reshape(each, (len(each), -1)) for each in state[2:]]
            tables.append(shapes.concat([steps, changes, shapes.reshape(g, (1, -1))]))
            part = elements.astype(tables[-1] @ tables[-1].T, wide)
            gram = part if gram is None else gram + part
        weights = _direction(gram)
        total = reduce(op.add, [elements.astype(op.sum(op.abs(g)), wide) for _, g, *_ in updates])
        for (p, g, state, (rate, is_first)), table in zip(updates, tables, strict=True):
            shortened = rate / elements.astype(op.maximum(total, 1.0), rate.dtype)
            d = shapes.reshape(elements.astype(weights, p.dtype) @ table, p.shape)
            apply_into(state[0], COPY, g)
            apply_into(state[1], COPY, elements.where(is_first, shortened, rate) * d)
            p += state[1]

    @hinted
    @old_keywords("LBFGS.search")
    def search(
        self, loss_and_grads: Callable[[], tuple[Tensor, Tree]], *, max_calls: int = 25
    ) -> Tensor:
        """Update along the direction of `update`, by a step that meets the strong Wolfe conditions.

        Nocedal and Wright, algorithms 3.5 and 3.6; PyTorch's `line_search_fn="strong_wolfe"`.
        Return the loss after the step, f[].

        `loss_and_grads` returns the loss at the current parameters, f[], and the gradients; it is
        called once, and then at most `max_calls` times. The losses are read, so this method cannot
        be captured. Raises the errors of `update`; `ArgumentError` if `max_calls` is below 1, or
        `loss_and_grads` returns a different value; `NonFiniteError` if the loss or a gradient is
        nan or infinite at the current parameters. The parameters do not change if anything is
        raised.

            >>> w = ml.asarray([3.0, -2.0])
            >>> optimizer = ml.optim.LBFGS({"w": w}, 1.0)
            >>> loss_of = lambda params: ml.sum(params["w"] ** 4)
            >>> for _ in range(20):
            ...     loss = optimizer.search(lambda: ml.value_and_grad(loss_of)({"w": w}))
            >>> float(loss) < 1e-4
            True

        Invalid calls:
            ml.optim.LBFGS(v, 1.0).search(lambda: (ml.sum(v), v), max_calls=0)  # ArgumentError
            ml.optim.LBFGS(v, 1.0).search(lambda: ml.sum(v))  # ArgumentError
            ml.optim.LBFGS(v, 1.0).search(lambda: (ml.sum(v) * ml.nan, v))  # NonFiniteError
        """
        if integer(max_calls, "max_calls") < 1:
            raise ArgumentError(f"expected max_calls >= 1, got {max_calls}")
        loss, grads = _pair(loss_and_grads())
        first = self._checked(grads)
        gradients = {f"the gradient of {path!r}": g for path, g in first.items()}
        for what, x in {"the loss": loss, **gradients}.items():
            if not op.all(op.isfinite(x)):
                raise NonFiniteError(
                    f"{what} is not finite; find the op by ml.debug.nans(): {brief(x)}"
                )
        starts = {path: op.copy(p) for path, p in self._params.items()}
        self.update(grads)
        steps = {path: op.copy(step) for path, step in self._state["step"].items()}
        losses = {0.0: loss}

        def slope(gradients: Mapping[str, Tensor]) -> float:
            return sum(float(op.sum(gradients[path] * step)) for path, step in steps.items())

        def move(t: float) -> None:
            for path, step in steps.items():
                [factor] = scalars_like(step, t)
                multiply_add_into(self._params[path], step, factor, starts[path])

        def at(t: float) -> tuple[float, float]:
            move(t)
            losses[t], gradients = _pair(loss_and_grads())
            value = sign * float(losses[t])
            return value if isfinite(value) else inf, sign * slope(self._checked(gradients))

        sign, t = -1.0 if self.maximize else 1.0, 0.0
        try:
            t = strong_wolfe(at, sign * float(loss), sign * slope(first), max_calls)
        finally:
            move(t)
            for path, step in steps.items():
                apply_into(self._state["step"][path], COPY, step * t)
        return losses[t]


def _pair(result: Any) -> tuple[Tensor, Tree]:
    """Check and return the result of `loss_and_grads` in a search.

    Raises `ArgumentError`."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        if not result[0].ndim and result[0].dtype.is_float:
            return result
        result = result[0]
    got = result.type if isinstance(result, Tensor) else brief(result)
    raise ArgumentError(
        f"expected loss_and_grads() to return (loss f[], gradients), got {got}; write "
        f"lambda: ml.value_and_grad(loss_of)(params)"
    )


def _direction(gram: Tensor) -> Tensor:
    """Return the coefficients of -H g for m steps, m gradient changes, and g.

    They are computed from the inner products f[2m + 1, 2m + 1]. Steps of zeros are unused."""
    m = len(gram) // 2
    by_change, curvatures = op.triu(gram[:m, m:-1]), linalg.diagonal(gram[:m, m:-1])
    identity = creation.eye(m, dtype=gram.dtype)
    by_change = by_change + op.where(curvatures > 0.0, 0.0, identity)
    yy = gram[-2, -2]
    scale = elements.where(yy > 0.0, curvatures[-1], 1.0) / elements.where(yy > 0.0, yy, 1.0)
    alpha = linalg.solve(by_change, gram[:m, -1])
    r = scale * (gram[m:-1, -1] - gram[m:-1, m:-1] @ alpha)
    change_coefficients = linalg.solve(by_change.T, curvatures * alpha - r)
    return shapes.concat([-change_coefficients, scale * alpha, -shapes.reshape(scale, 1)])


def _norm(x: Tensor) -> Tensor:
    return op.sqrt(op.sum(op.square(x)))


def _rms(x: Tensor) -> Tensor:
    return op.sqrt(op.mean(op.square(x)))
