"""Optimizers, which update parameters in place, learning-rate schedules, and gradient clipping.

    optimizer = Adam(model, cosine(1e-3, total_steps=1000))
    loss, grads = value_and_grad(loss_of)(model, x, y)
    optimizer.update(clip_by_global_norm(grads, 1.0))

A schedule is a function from the number of completed updates, f32[], to the learning rate, f32[].
It consists of ops, so that it can be captured. A float is a constant learning rate, until a new
is assigned.

Groups assign different hyperparameters to some parameters; each parameter belongs to the first
group that matches it:

    AdamW(model, 1e-3, groups=[("*/bias", {"weight_decay": 0.0}), ("head/*", {"eps": 1e-6})])
"""

from mlvm.eager.optim.averages import EMA as EMA
from mlvm.eager.optim.averages import MultiSteps as MultiSteps
from mlvm.eager.optim.gradients import LossScale as LossScale
from mlvm.eager.optim.gradients import all_finite as all_finite
from mlvm.eager.optim.gradients import clip_by_global_norm as clip_by_global_norm
from mlvm.eager.optim.gradients import global_norm as global_norm
from mlvm.eager.optim.layerwise import LBFGS as LBFGS
from mlvm.eager.optim.layerwise import Adafactor as Adafactor
from mlvm.eager.optim.layerwise import Lamb as Lamb
from mlvm.eager.optim.layerwise import Muon as Muon
from mlvm.eager.optim.optimizer import Group as Group
from mlvm.eager.optim.optimizer import Groups as Groups
from mlvm.eager.optim.optimizer import Optimizer as Optimizer
from mlvm.eager.optim.schedules import Plateau as Plateau
from mlvm.eager.optim.schedules import Schedule as Schedule
from mlvm.eager.optim.schedules import constant as constant
from mlvm.eager.optim.schedules import cosine as cosine
from mlvm.eager.optim.schedules import cosine_restarts as cosine_restarts
from mlvm.eager.optim.schedules import exponential as exponential
from mlvm.eager.optim.schedules import one_cycle as one_cycle
from mlvm.eager.optim.schedules import step as step
from mlvm.eager.optim.schedules import warmup as warmup
from mlvm.eager.optim.update_rules import ASGD as ASGD
from mlvm.eager.optim.update_rules import SGD as SGD
from mlvm.eager.optim.update_rules import Adadelta as Adadelta
from mlvm.eager.optim.update_rules import Adagrad as Adagrad
from mlvm.eager.optim.update_rules import Adam as Adam
from mlvm.eager.optim.update_rules import Adamax as Adamax
from mlvm.eager.optim.update_rules import AdamW as AdamW
from mlvm.eager.optim.update_rules import Lion as Lion
from mlvm.eager.optim.update_rules import NAdam as NAdam
from mlvm.eager.optim.update_rules import RAdam as RAdam
from mlvm.eager.optim.update_rules import RMSProp as RMSProp
from mlvm.eager.optim.update_rules import Rprop as Rprop
from mlvm.eager.tensor.wrapper import names_shown as _names_shown

__all__ = _names_shown(globals())
