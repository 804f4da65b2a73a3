"""Optimizers: one update rule per class, as defined in the cited paper.

The fields of a class are the hyperparameters, with defaults. `_state_names` are the names of
the state of a parameter p, `_scalars` returns the values that all parameters share, and `_step`
updates one parameter from the gradient g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from mlvm.core.errors import ArgumentError
from mlvm.core.types import f64
from mlvm.eager.functions import elements
from mlvm.eager.optim.optimizer import Optimizer, Tensors
from mlvm.eager.optim.ranges import AtLeastOne, Fraction, Positive
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY, one_op
from mlvm.eager.tensor.constants import constant as scalar
from mlvm.eager.tensor.dtypes import finfo
from mlvm.eager.tensor.number import compute
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into

_MULTIPLY_ADD: Final = one_op("multiply_add")


class SGD(Optimizer):
    """Stochastic gradient descent: p -= rate * d.

    d = g + weight_decay p                            without momentum
    v = momentum v + g + weight_decay p;  d = v       with it (Polyak, 1964)
    d = g + weight_decay p + momentum v               and with `nesterov` (Sutskever et al., 2013)

    `dampening` multiplies the gradient in v by 1 - dampening, from the second update on, as in
    PyTorch.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.SGD({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.SGD(v, -1.0)  # ArgumentError
    """

    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: Positive = 0.0
    dampening: Fraction = 0.0

    _couples_decay = True

    def _require(self, hyper: Any) -> None:
        if hyper.nesterov and not hyper.momentum:
            raise ArgumentError(
                "SGD: expected a momentum > 0 with nesterov=True, got 0; pass momentum=0.9"
            )
        if hyper.nesterov and hyper.dampening:
            raise ArgumentError(
                f"SGD: expected dampening=0 with nesterov=True, got {hyper.dampening}"
            )

    def _state_of(self, hyper: Any) -> Sequence[str]:
        return ["momentum"] if hyper.momentum else []

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        if not hyper.dampening:
            return super()._scalars(hyper, rate)
        one, share = scalars_like(rate, 1.0, 1 - hyper.dampening)
        return -rate, op.where(op.equal(self.count, 0.0), one, share)

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_rate, *share = scalars
        if hyper.momentum:
            [v], [momentum] = state, scalars_like(p, hyper.momentum)
            multiply_add_into(v, v, momentum, g * share[0] if share else g)
            g = op.multiply_add(v, momentum, g) if hyper.nesterov else v
        multiply_add_into(p, g, minus_rate, p)


class RMSProp(Optimizer):
    """RMSProp: p -= rate * d, where d is g divided by the root of an exponential mean v of g^2.

    Hinton, 2012; as in PyTorch:

    v = alpha v + (1 - alpha) g^2
    d = g / (sqrt(v) + eps)
    d = g / (sqrt(v - m^2) + eps)                     with `centered` (Graves, arXiv 1308.0850),
                                                      m = alpha m + (1 - alpha) g
    b = momentum b + d;  d = b                        with momentum

    `weight_decay` p is first added to g.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.RMSProp({"w": w}, 0.05)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.RMSProp(v, -1.0)  # ArgumentError
    """

    alpha: Fraction = 0.99
    eps: Positive = 1e-8
    momentum: Fraction = 0.0
    centered: bool = False
    weight_decay: Positive = 0.0

    _couples_decay = True

    def _state_of(self, hyper: Any) -> Sequence[str]:
        maybe = {"gradient_mean": hyper.centered, "momentum": hyper.momentum}
        return ["square_mean", *[name for name, is_kept in maybe.items() if is_kept]]

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        [minus_rate] = scalars
        numbers = hyper.alpha, 1 - hyper.alpha, hyper.eps, hyper.momentum
        alpha, rest, eps, momentum = scalars_like(p, *numbers)
        v, *others = state
        part = rest * g
        v *= alpha
        multiply_add_into(v, part, g, v)
        variance = v
        if hyper.centered:
            m = others[0]
            multiply_add_into(m, m, alpha, part)
            variance = op.maximum(op.multiply_add(-m, m, v), 0.0)  # rounding may make it negative
            variance = op.where(op.isfinite(v), variance, v)  # if v overflows, so may m^2
        d = over_root(g, variance, eps)
        if hyper.momentum:
            b = others[-1]
            multiply_add_into(b, b, momentum, d)
            d = b
        multiply_add_into(p, d, minus_rate, p)


class Adagrad(Optimizer):
    """Adagrad: p -= rate * g / (sqrt(v) + eps), with v the sum of all g^2.

    Duchi et al., JMLR 12, 2011; `eps` as in PyTorch. `weight_decay` p is first added to g.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Adagrad({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.Adagrad(v, -1.0)  # ArgumentError
    """

    eps: Positive = 1e-10
    weight_decay: Positive = 0.0

    _couples_decay = True
    _state_names = ("square_sum",)

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        [minus_rate], [eps] = scalars, scalars_like(p, hyper.eps)
        [v] = state
        multiply_add_into(v, g, g, v)
        multiply_add_into(p, over_root(g, v, eps), minus_rate, p)


class Adadelta(Optimizer):
    """Adadelta: p -= rate * d, where d has the units of p (Zeiler, arXiv 1212.5701, with rate 1).

    v = rho v + (1 - rho) g^2
    d = sqrt(u + eps) / sqrt(v + eps) g
    u = rho u + (1 - rho) d^2

    `weight_decay` p is first added to g.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Adadelta({"w": w}, 1.0, rho=0.0, eps=1.0)
        >>> optimizer.update({"w": ml.full(2, 3**0.5)})
        >>> w.round()
        Tensor([0., 0.], f32[2])

    Invalid calls:
        ml.optim.Adadelta(v, -1.0)  # ArgumentError
    """

    rho: Fraction = 0.9
    eps: Positive = 1e-6
    weight_decay: Positive = 0.0

    _couples_decay = True
    _state_names = ("square_mean", "step_square_mean")

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        [minus_rate] = scalars
        rho, rest, eps = scalars_like(p, hyper.rho, 1 - hyper.rho, hyper.eps)
        v, u = state
        v *= rho
        multiply_add_into(v, rest * g, g, v)
        d = op.sqrt(u + eps) / op.sqrt(v + eps) * g
        u *= rho
        multiply_add_into(u, rest * d, d, u)
        multiply_add_into(p, d, minus_rate, p)


class Lion(Optimizer):
    """Lion: updates by the sign of a mean of gradients (Chen et al., arXiv 2302.06675).

    Algorithm 2 of the paper:

    p -= rate * (sign(beta1 m + (1 - beta1) g) + weight_decay p)
    m = beta2 m + (1 - beta2) g

    The paper recommends a rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the
    same factor.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Lion({"w": w}, 0.5, weight_decay=0.0)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.Lion(v, -1.0)  # ArgumentError
    """

    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    weight_decay: Positive = 0.0

    _state_names = ("gradient_mean",)

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        return -rate, 1 - hyper.weight_decay * rate

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_rate, decay_factor = scalars
        beta1, beta2 = hyper.betas
        beta1, rest1, beta2, rest2 = scalars_like(p, beta1, 1 - beta1, beta2, 1 - beta2)
        [m] = state
        if hyper.weight_decay:
            p *= decay_factor
        step = op.sign(op.multiply_add(m, beta1, rest1 * g))
        multiply_add_into(p, step, minus_rate, p)
        m *= beta2
        multiply_add_into(m, g, rest2, m)


class Adam(Optimizer):
    """Adam: p -= rate * m / (sqrt(v) + eps), with m and v exponential means of g and g^2.

    Kingma and Ba, arXiv 1412.6980. The state stores them as sums: gradient_sum = beta1 gradient_sum
    + g, and square_sum = beta2 square_sum + g^2. Divided by the sum of the weights, (1 - beta^t) /
    (1 - beta), they are the paper's bias-corrected moments. This needs two launches less than the
    paper's formulas.

    `weight_decay` p is first added to g; `AdamW` decouples it. With `amsgrad`, v is the largest
    exponential mean so far (Reddi et al., arXiv 1904.09237; corrected as in PyTorch).

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Adam({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.Adam(v, -1.0)  # ArgumentError
    """

    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Positive = 0.0
    amsgrad: bool = False

    _couples_decay = True

    def _state_of(self, hyper: Any) -> Sequence[str]:
        return ["gradient_sum", "square_sum", *["largest_square_sum"] * hyper.amsgrad]

    def _corrections(self, hyper: Any, rate: Tensor) -> tuple[Tensor, float, Tensor]:
        """Return the number of the step, beta1, and the root of the sum of v's weights."""
        t = elements.astype(self.count, rate.dtype) + 1
        beta1, beta2 = hyper.betas
        return t, beta1, op.sqrt(sum_of_weights(beta2, t))

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        t, beta1, root = self._corrections(hyper, rate)
        minus_rate = -rate * root / sum_of_weights(beta1, t)
        return minus_rate, hyper.eps * root

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_rate, eps = scalars
        gradient_sum, square_sum = moments(g, state, hyper.betas)
        multiply_add_into(p, over_root(gradient_sum, square_sum, eps), minus_rate, p)


class AdamW(Adam):
    """Adam with decoupled weight decay: before each update p -= rate * weight_decay * p.

    Loshchilov and Hutter, arXiv 1711.05101.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.AdamW({"w": w}, 0.5, weight_decay=0.0)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.AdamW(v, -1.0)  # ArgumentError
    """

    weight_decay: Positive = 0.01

    _couples_decay = False

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        return (*super()._scalars(hyper, rate), 1 - hyper.weight_decay * rate)

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        *scalars, decay_factor = scalars
        p *= decay_factor
        super()._step(hyper, p, g, state, scalars)


class Adamax(Optimizer):
    """Adamax: p -= rate * m / u, with u = max(beta2 u, |g| + eps).

    m is the unbiased exponential mean of gradients (Kingma and Ba, arXiv 1412.6980, algorithm 2;
    `eps` as in PyTorch). `weight_decay` p is first added to g.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Adamax({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.Adamax(v, -1.0)  # ArgumentError
    """

    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Positive = 0.0

    _couples_decay = True
    _state_names = ("gradient_sum", "largest")

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        t = elements.astype(self.count, rate.dtype) + 1
        return [-rate / sum_of_weights(hyper.betas[0], t)]

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        [minus_rate] = scalars
        beta1, beta2, eps = scalars_like(p, *hyper.betas, hyper.eps)
        gradient_sum, largest = state
        multiply_add_into(gradient_sum, gradient_sum, beta1, g)
        largest *= beta2
        op.maximum(largest, op.abs(g) + eps, out=largest)
        multiply_add_into(p, gradient_sum / largest, minus_rate, p)


class NAdam(Adam):
    """Adam with Nesterov's momentum (Dozat, "Incorporating Nesterov momentum into Adam", 2016).

    m is replaced by beta1 times the m that the next step would have without a gradient, plus (1 -
    beta1) g / (1 - beta1^t). As in optax, beta1 is constant; in PyTorch it grows.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.NAdam({"w": w}, 0.5, betas=(0.0, 0.999))
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.NAdam(v, -1.0)  # ArgumentError
    """

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        t, beta1, root = self._corrections(hyper, rate)
        of_sum = -beta1 * rate * root / sum_of_weights(beta1, t + 1)
        of_gradient = -rate * root / sum_of_weights(beta1, t)
        return of_sum, of_gradient, hyper.eps * root

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        of_sum, of_gradient, eps = scalars
        gradient_sum, square_sum = moments(g, state, hyper.betas)
        p += op.multiply_add(gradient_sum, of_sum, of_gradient * g) / (op.sqrt(square_sum) + eps)


class RAdam(Adam):
    """Adam with a rectified adaptive step, and only the mean of gradients in the first steps.

    Liu et al., arXiv 1908.03265, algorithm 2:

    p -= rate * r * m / (sqrt(v) + eps)               where n > 5, else p -= rate * m

    Here n_max = 2 / (1 - beta2) - 1 and n = n_max - 2 t beta2^t / (1 - beta2^t). The factor is r^2
    = (n - 4) (n - 2) n_max / ((n_max - 4) (n_max - 2) n). PyTorch and optax also use the threshold
    5.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.RAdam({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.RAdam(v, -1.0)  # ArgumentError
    """

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        beta1, beta2 = hyper.betas
        t = elements.astype(self.count, rate.dtype) + 1
        minus_mean = -rate / sum_of_weights(beta1, t)
        root, most = op.sqrt(sum_of_weights(beta2, t)), 2 / (1 - beta2) - 1
        one, zero = scalars_like(rate, 1.0, 0.0)
        if most <= 5:
            return [minus_mean]
        t = elements.astype(self.count, f64) + 1  # in f32 the difference would lose digits
        power = op.exp(compute(math.log, beta2) * t)
        n = most - 2 * t * power / (1 - power)
        adapts, n = n > 5.0, op.maximum(n, 5.0)
        square = (n - 4) * (n - 2) / n * (most / ((most - 4) * (most - 2)))
        minus_rate = minus_mean * elements.astype(op.sqrt(square), rate.dtype) * root
        return (
            op.where(adapts, minus_rate, minus_mean),
            op.where(adapts, one, zero),
            op.where(adapts, hyper.eps * root, one),
        )

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_rate, of_root, rest = (*scalars, *scalars_like(p, 0.0, 1.0))[:3]
        gradient_sum, square_sum = moments(g, state, hyper.betas)
        root = op.minimum(op.sqrt(square_sum), float(finfo(g.dtype).max))  # of_root may be 0
        divisor = op.multiply_add(root, of_root, rest)
        multiply_add_into(p, gradient_sum / divisor, minus_rate, p)


class Rprop(Optimizer):
    """Resilient propagation, for gradients of the full data set.

    Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning", 1993; as
    in PyTorch:

    step = clip(step * etas[1 or 0], *step_sizes) where g has the same sign as the previous g or not
    p -= step * sign(g) but 0 where the sign has changed

    The initial step is the learning rate.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Rprop({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.optim.Rprop(v, -1.0)  # ArgumentError
    """

    etas: tuple[Fraction, AtLeastOne] = (0.5, 1.2)
    step_sizes: tuple[Positive, Positive] = (1e-6, 50.0)

    _state_names = ("gradient", "step")

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        return op.equal(self.count, 0.0), rate

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        is_first, rate = scalars
        less, more, least, most = scalars_like(p, *hyper.etas, *hyper.step_sizes)
        before, step = state
        agreement = op.sign(g) * op.sign(before)
        one, zero = scalars_like(p, 1.0, 0.0)
        turned = op.less(agreement, 0.0)
        factor = op.where(turned, less, op.where(op.greater(agreement, 0.0), more, one))
        size = op.clip(op.where(is_first, rate, step) * factor, least, most)
        g = op.where(turned, zero, g)
        apply_into(step, COPY, size)
        apply_into(before, COPY, g)
        p -= op.sign(g) * size


class ASGD(Optimizer):
    """Stochastic gradient descent that also averages the parameters.

    Polyak and Juditsky, SIAM J. Control Optim. 30, 1992; as in PyTorch. In update t = 1, 2, ...:

    eta = rate / (1 + lambd rate (t - 1))^alpha
    p = (1 - lambd eta) p - eta g
    average += (p - average) / max(1, t - 1 - t0)

    `weight_decay` p is first added to g. `state()` contains each average under the path `average/`
    and the path of the parameter.

    Parameters and gradients: f32 or f64, of any shapes. Raises the errors of `optim.Optimizer`.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.ASGD({"w": w}, 0.5, lambd=0.0)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w, optimizer.state()["average/w"]
        (Tensor([0.5, 0.5], f32[2]), Tensor([0.5, 0.5], f32[2]))

    Invalid calls:
        ml.optim.ASGD(v, -1.0)  # ArgumentError
    """

    lambd: Positive = 1e-4
    alpha: Positive = 0.75
    t0: Positive = 1e6
    weight_decay: Positive = 0.0

    _couples_decay = True
    _state_names = ("average",)

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        before = elements.astype(self.count, rate.dtype)
        eta = rate / op.pow(1 + hyper.lambd * rate * before, hyper.alpha)
        share = 1 / op.maximum(before - hyper.t0, 1.0)
        return -eta, 1 - hyper.lambd * eta, share

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        minus_eta, factor, share = scalars
        [average] = state
        p *= factor
        multiply_add_into(p, g, minus_eta, p)
        multiply_add_into(average, p - average, share, average)


def moments(g: Tensor, state: Tensors, betas: tuple[float, float]) -> Tensors:
    """Update Adam's moments m and v with this gradient, and return them.

    v is the largest value so far if the state contains that."""
    gradient_sum, square_sum, *largest = state
    beta1, beta2 = scalars_like(gradient_sum, *betas)
    multiply_add_into(gradient_sum, gradient_sum, beta1, g)
    square_sum *= beta2
    multiply_add_into(square_sum, g, g, square_sum)
    if largest:
        square_sum = op.maximum(largest[0], square_sum, out=largest[0])
    return gradient_sum, square_sum


def over_root(x: Tensor, v: Tensor, eps: Tensor) -> Tensor:
    """Compute x / (sqrt(v) + eps)."""
    root = op.sqrt(v)
    root += eps
    return op.divide(x, root, out=root)


def scalars_like(rate: Tensor, *numbers: float) -> Tensors:
    return [scalar(each, rate.dtype) for each in numbers]


def multiply_add_into(out: Tensor, x: Tensor, y: Tensor, z: Tensor) -> None:
    """Compute out = x y + z; `out` may be x, y or z."""
    apply_into(out, _MULTIPLY_ADD, x, y, z)


def sum_of_weights(beta: float, t: Tensor) -> Tensor:
    """Return 1 + beta + ... + beta^(t-1), which is (1 - beta^t) / (1 - beta).

    The result is accurate also for beta near 1, where the digits of 1 - beta^t would cancel."""
    log = compute(math.log, beta) if beta else -math.inf
    return op.expm1(log * t) / (beta - 1)
