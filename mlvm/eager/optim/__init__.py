"""Optimizers, which update parameters in place, learning-rate schedules, and clipping.

    optimizer = Adam(model, cosine(1e-3, total_steps=1000))
    loss, grads = value_and_grad(loss_of)(model, x, y)
    optimizer.update(clip_by_global_norm(grads, 1.0))

A schedule is a function from the number of updates done, f32[], to the learning rate, f32[]. It is
written with ops, so that it can be captured. A float is a rate, until another is assigned.

Groups give some parameters hyperparameters of their own; a parameter is in the first that fits it:

    AdamW(model, 1e-3, groups=[("*/bias", {"weight_decay": 0.0}), ("head/*", {"eps": 1e-6})])
"""

from mlvm.eager.optim.averages import EMA, MultiSteps
from mlvm.eager.optim.gradients import LossScale, all_finite, clip_by_global_norm, global_norm
from mlvm.eager.optim.layerwise import LBFGS, Adafactor, Lamb, Muon
from mlvm.eager.optim.optimizer import Group, Groups, Optimizer
from mlvm.eager.optim.rules import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    NAdam,
    RAdam,
    RMSProp,
)
from mlvm.eager.optim.schedules import (
    Plateau,
    Schedule,
    constant,
    cosine,
    cosine_restarts,
    exponential,
    one_cycle,
    step,
    warmup,
)

__all__ = [
    "EMA",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Group",
    "Groups",
    "Lamb",
    "Lion",
    "LossScale",
    "MultiSteps",
    "Muon",
    "NAdam",
    "Optimizer",
    "Plateau",
    "RAdam",
    "RMSProp",
    "Schedule",
    "all_finite",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "global_norm",
    "one_cycle",
    "step",
    "warmup",
]
