"""Optimizers, which update parameters in place, learning-rate schedules, and clipping.

    optimizer = Adam(model, cosine(1e-3, total_steps=1000))
    loss, grads = value_and_grad(loss_of)(model, x, y)
    optimizer.update(clip_by_global_norm(grads, 1.0))

A schedule is a function from the number of updates done, f32[], to the learning rate, f32[]. It is
written with ops, so that it can be captured. A float is a rate, until another is assigned.

Groups give some parameters hyperparameters of their own; a parameter is in the first that fits it:

    AdamW(model, 1e-3, groups=[("*/bias", {"weight_decay": 0.0}), ("head/*", {"eps": 1e-6})])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias

from mlvm.core.errors import AttributeRefused, DTypeError, GradientError, HandleError, brief
from mlvm.core.types import DType, TensorType, f32
from mlvm.eager.control.branches import cond
from mlvm.eager.functions import creation, elements
from mlvm.eager.functions.halves import rounded, widened
from mlvm.eager.parallel import shards
from mlvm.eager.parallel.collectives import all_reduce
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import one_op
from mlvm.eager.tensor.constants import constant as scalar
from mlvm.eager.tensor.context import current_arena, current_tape
from mlvm.eager.tensor.number import compute
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.wrapper import require_arguments
from mlvm.eager.tree import (
    Tree,
    all_leaves,
    leaves,
    load,
    named_tensors,
    require_live,
    require_types,
    substitute,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Group",
    "Groups",
    "Lion",
    "LossScale",
    "Optimizer",
    "RMSProp",
    "Schedule",
    "all_finite",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "global_norm",
    "one_cycle",
]

Schedule: TypeAlias = Callable[[Tensor], Tensor]
Groups: TypeAlias = Sequence[tuple[str | Callable[[str, Tensor], bool], Mapping[str, Any]]]
"""Pairs of which parameters are meant, and the hyperparameters that these have of their own. The
first is a pattern of paths, in which `*` matches "/" too, or a function of path and parameter."""

_SCALAR = TensorType(f32)
_MULTIPLY_ADD = one_op("multiply_add")
_COPY = one_op("copy")
_MOST_SCALE: Final = 2.0**126
_MOST_INTERVAL: Final = 2**24  # up to which f32 counts
_Ranges: TypeAlias = Mapping[str, tuple[float, float]]

_FRACTION: Final = (0, 1)
_POSITIVE: Final = (0, math.inf)


class Group(SimpleNamespace):
    """Parameters of these `paths`, and as fields the hyperparameters that they have of their own.
    Another may be assigned later.

        >>> params, slowly = {"w": ml.ones(2), "b": ml.ones(1)}, {"learning_rate": 0.25}
        >>> first, rest = ml.optim.SGD(params, 0.5, groups=[("b", slowly)]).groups
        >>> first.paths, first.learning_rate, rest.paths
        (('b',), 0.25, ('w',))
    """

    paths: tuple[str, ...]
    _known: tuple[str, ...]

    if not TYPE_CHECKING:  # else a type checker would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self._known:
                raise _unknown("a group", name, self._known)
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        options = {name: x for name, x in vars(self).items() if name in self._known}
        return f"<group of {len(self.paths)} tensors: {_listed(options)}>"


class Optimizer:
    """Updates a tree of parameters in place; base of the optimizers.

    `params` is a Module or another tree of f32 or f64 tensors. `count`, f32[], is the number of
    updates done. All state is allocated at construction, in the arena of the parameter that it
    belongs to. An update leaves nothing behind in the current arena.

    `groups` are those that were given, and a last one with all other parameters, if there are any.
    Hyperparameters may be assigned, to the optimizer or to a group; from the second time on, a
    captured function needs no other program. To assign an unknown one raises `AttributeRefused`.

    Made by a step of `ml.parallel.data_parallel(..., shard=...)`, each member's optimizer keeps the
    state of its part of the parameters, and with "all" leaves it no more of these.

    `groups` are given as pairs of which parameters are meant, and the hyperparameters that these
    have of their own: `groups=[("*/bias", {"weight_decay": 0.0})]`. The first is a pattern of the
    paths of `named_parameters`, in which `*` matches "/" too, or a function of path and parameter.

    Raises `AttributeRefused` for a hyperparameter that is unknown or out of range and for a group
    without parameters, `DTypeError` for parameters that are not f32 or f64 or none at all,
    `HandleError` for parameters on several VMs.

        >>> w = ml.ones(2)
        >>> params, slowly = {"w": w, "b": ml.ones(1)}, {"learning_rate": 0.25}
        >>> optimizer = ml.optim.SGD(params, 0.5, groups=[("b", slowly)])
        >>> optimizer.update({"w": ml.ones(2), "b": ml.ones(1)})
        >>> w, params["b"], int(optimizer.count)
        (Tensor([0.5, 0.5], f32[2]), Tensor([0.75], f32[1]), 1)
    """

    count: Tensor
    learning_rate: float | Schedule
    groups: tuple[Group, ...]

    _ranges: ClassVar[_Ranges] = {}
    """The hyperparameters that are numbers, and in which range."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        require_arguments(cls, args, given)
        return super().__new__(cls)

    def __init__(self, params: Tree, groups: Groups, **options: Any) -> None:
        """`options` are the hyperparameters of all that is in no group with others."""
        try:
            vars(self).update(self._checked_options(options))
        except AttributeRefused as error:
            error.__traceback__ = None  # it ends at the caller's line, nearly
            raise
        self._options = tuple(options)
        self._tree = params
        self._leaves = dict(leaves(params))
        self._params = named_tensors(params)
        self._types = {path: x.type for path, x in self._leaves.items()}
        for path, x in self._params.items():
            if not x.dtype.is_float:
                raise DTypeError(f"{self._name}: parameter {path!r} must be a float, not {x.type}")
            if x.dtype.is_half:
                raise DTypeError(
                    f"{self._name}: parameter {path!r} is {x.type}, where small updates get lost; "
                    f"keep it in f32, and compute with model.astype({x.dtype.name!r})"
                )
        if not self._params:
            raise DTypeError(f"{self._name}: there are no parameters to update")
        arenas = [x.arena for x in self._params.values()]
        if len({id(arena.vm) for arena in arenas}) > 1:
            names = ", ".join(sorted({arena.vm.name for arena in arenas}))
            raise HandleError(f"{self._name}: all parameters must live on one VM, not on {names}")
        self.groups = self._grouped(groups, options)
        with arenas[0].hosting():
            self._share(params)
        with arenas[0].hosting():
            self.count = creation.zeros((), dtype=f32)
        self._state: dict[str, dict[str, Tensor]] = {}
        for group in self.groups:
            for name in self._state_of(self._hyper(group)):
                beside = [(path, self._params[path]) for path in group.paths]
                state = [(path, self._zeros_beside(x)) for path, x in beside]
                self._state.setdefault(name, {}).update(state)

    def _share(self, params: Tree) -> None:
        """Keep in parts what `shards` wants so. `_wholes` are the types of the whole tensors, of
        parameters of which this member has a piece of the state."""
        self._shard = shards.wanted()
        self._wholes: dict[str, TensorType] = {}
        if self._shard is not None:
            self._wholes = {path: x.type for path, x in self._params.items()}
        if self._shard == "all":
            wholes = shards.keep_parts(params)
            self._leaves = dict(leaves(params))
            self._params = named_tensors(params)
            self._types = {path: x.type for path, x in self._leaves.items()}
            self._wholes = {path: wholes[path] for path in self._params}

    def _zeros_beside(self, x: Tensor) -> Tensor:
        with x.arena.hosting():
            type = shards.piece_type(x.type) if self._shard == "optimizer" else x.type
            return creation.zeros(type.shape, dtype=type.dtype)

    def _grouped(self, given: Groups, known: Mapping[str, Any]) -> tuple[Group, ...]:
        """The given groups, and one with all parameters that are in none of them."""
        rest, groups = dict(self._params), []
        for which, options in given:
            unknown = [name for name in options if name not in known]
            if unknown:
                raise _unknown(f"{self._name}: the group {which!r}", unknown[0], known)
            paths = tuple([path for path, x in rest.items() if _is_in(which, path, x)])
            if not paths:
                raise AttributeRefused(
                    f"{self._name}: no parameter is in the group {which!r}; "
                    f"left to be in one are: {', '.join(rest) or 'none'}"
                )
            for path in paths:
                del rest[path]
            groups.append(
                Group(
                    paths=paths,
                    _known=tuple(known),
                    **self._checked_options({**known, **options}, options),
                )
            )
        if rest:
            groups.append(Group(paths=tuple(rest), _known=tuple(known)))
        return tuple(groups)

    def _checked_options(
        self, options: Mapping[str, Any], wanted: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The hyperparameters, or the `wanted` ones of them, if they may be together."""
        checked = dict(options)
        for name, value in options.items():
            if name == "learning_rate":
                if not callable(value):
                    checked[name] = _require(self._name, name, value, 0)
            elif name == "betas":
                if not isinstance(value, (tuple, list)) or len(value) != 2:
                    raise AttributeRefused(
                        f"{self._name}: betas must be two numbers, given {value!r}"
                    )
                pair = enumerate(value)
                checked[name] = tuple(
                    [_require(self._name, f"betas[{i}]", x, *_FRACTION) for i, x in pair]
                )
            elif name in self._ranges:
                checked[name] = _require(self._name, name, value, *self._ranges[name])
            elif not isinstance(value, bool):
                raise AttributeRefused(
                    f"{self._name}: {name} must be True or False, given {value!r}"
                )
        return checked if wanted is None else {name: checked[name] for name in wanted}

    if not TYPE_CHECKING:  # else a type checker would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            made = hasattr(self, name) or "_state" not in vars(self)
            if not made and not name.startswith("_"):
                raise _unknown(self._name, name, self._options)
            super().__setattr__(name, value)

    def update(self, grads: Tree) -> None:
        """Update every parameter from its gradient; `grads` is a tree like that of the parameters.

        Everything is checked before the first write. Raises `PathError` for gradients of another
        structure, `DTypeError` for another dtype or when a parameter was replaced in the tree,
        `ShapeError`, `StaleTensor`, `HandleError` when the current arena is on another VM,
        `GradientError` inside a differentiated function,
        `AttributeRefused` for a hyperparameter that takes state which was not made.
        `ArenaOverflow` in the middle leaves the later parameters as they were.
        """
        gradients = self._checked(grads)
        params = self._params
        if self._shard == "optimizer":
            params = {path: shards.cut(x) for path, x in params.items()}
            if not isinstance(grads, shards.Parts):
                gradients = {path: shards.cut(gradients[path]) for path in params}
        scalars: dict[tuple[int, DType], Sequence[Tensor]] = {}
        hypers = [self._hyper(group) for group in self.groups]
        rates = [self._rate(hyper) for hyper in hypers]
        for i, group in enumerate(self.groups):
            for dtype in dict.fromkeys(self._params[path].dtype for path in group.paths):
                scalars[i, dtype] = self._scalars(hypers[i], _in_dtype(rates[i], dtype))
        self.count += 1
        for i, group in enumerate(self.groups):
            names = self._state_of(hypers[i])
            for path in group.paths:
                param = params[path]
                state = [self._state[name][path] for name in names]
                self._step(hypers[i], param, gradients[path], state, scalars[i, param.dtype])
        if self._shard == "optimizer":
            shards.gather_into(list(self._params.values()), list(params.values()))

    def _hyper(self, group: Group) -> Any:
        """All hyperparameters of a group, as fields."""
        options = {name: vars(self)[name] for name in self._options}
        own = {name: x for name, x in vars(group).items() if name in options}
        return SimpleNamespace(**{**options, **own})

    def state(self) -> dict[str, Tensor]:
        """The tensors of state by path: `count`, `momentum/Dense_0/kernel`. What is in parts is
        gathered: then all members call this."""
        return shards.gathered_by_path(self._own_state(), self._whole_state())

    def _own_state(self) -> dict[str, Tensor]:
        return dict(leaves({"count": self.count, **self._state}))

    def _whole_state(self) -> dict[str, TensorType]:
        """The types of the whole tensors of state that is in parts."""
        paths = [(name, path) for name, each in self._state.items() for path in each]
        wholes = self._wholes
        return {f"{name}/{path}": wholes[path] for name, path in paths if path in wholes}

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays over the state, in place, by the paths of `state`.

        Nothing is written unless all fit: raises `PathError` for paths that are missing or
        unknown, `DTypeError` for a wrong dtype, `ShapeError` for a wrong shape.
        """
        shards.load_parts(self._own_state(), self._whole_state(), arrays, "state")

    def _rate(self, hyper: Any) -> float | Tensor:
        """The learning rate of this update: the float, or what the schedule returns."""
        given = hyper.learning_rate
        if not callable(given):
            return given  # type: ignore[no-any-return]
        rate: object = given(self.count)
        if not isinstance(rate, Tensor) or rate.type is not _SCALAR:
            found = rate.type if isinstance(rate, Tensor) else type(rate).__name__
            raise DTypeError(
                f"{self._name}: a schedule must return a {_SCALAR}, not {found}; where the rate "
                f"depends on the number n of updates: where(n < 1000, 1e-3, 1e-4)"
            )
        return rate

    def _state_of(self, hyper: Any) -> Sequence[str]:
        """The names of the state, zero at first, that a parameter has for these."""
        raise NotImplementedError

    def _scalars(self, hyper: Any, rate: Tensor) -> Sequence[Tensor]:
        """The scalars that this update needs for the parameters of rate's dtype with these
        hyperparameters, in that dtype."""
        raise NotImplementedError

    def _step(
        self,
        hyper: Any,
        param: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        scalars: Sequence[Tensor],
    ) -> None:
        """Update one parameter and its state in place."""
        raise NotImplementedError

    def _checked(self, grads: Tree) -> dict[str, Tensor]:
        """The gradients by path, after every check that may refuse the update."""
        self._require_same_tensors()
        for group in self.groups:
            for name in self._state_of(self._hyper(group)):
                if group.paths[0] not in self._state.get(name, ()):
                    raise AttributeRefused(
                        f"{self._name}: there is no {name!r} for {group.paths[0]!r}, as its "
                        f"hyperparameters took none when the optimizer was made; make another one"
                    )
        gradients = dict(leaves(grads))
        types = self._types
        if self._shard == "optimizer" and isinstance(grads, shards.Parts):
            types = {path: shards.piece_type(type) for path, type in types.items()}
        require_types(types, {path: g.type for path, g in gradients.items()}, "gradient")
        require_live(gradients.values())
        if current_tape.get() is not None:
            raise GradientError(
                f"{self._name}: an update in place has no gradient; "
                f"call update outside of the differentiated function"
            )
        written = [self.count, *self._params.values()]
        for tensors in self._state.values():
            written += tensors.values()
        require_live(written)
        vm = self.count.arena.vm
        for arena in (current_arena(), *[g.arena for g in gradients.values()]):
            if not arena.vm.is_same(vm):
                raise HandleError(
                    f"{self._name}: arena {arena.name!r} is on {arena.vm.name}, the parameters "
                    f"are on {vm.name}; update inside `with` an arena of theirs"
                )
        return gradients

    def _require_same_tensors(self) -> None:
        """Raise `DTypeError` unless the tree holds the tensors it held at construction."""
        current = dict(leaves(self._tree))
        for path in self._leaves | current:
            if current.get(path) is not self._leaves.get(path):
                raise DTypeError(
                    f"{self._name}: parameter {path!r} is not the tensor it was when the optimizer "
                    f"was made; change it in place, as p *= 2 does, or make another optimizer"
                )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        public = {name: vars(self)[name] for name in self._options}
        groups = f", {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return f"<{self._name} of {len(self._params)} tensors{groups}: {_listed(public)}>"


def _unknown(where: str, name: str, known: Iterable[str]) -> AttributeRefused:
    return AttributeRefused(
        f"{where} has no hyperparameter {name!r}; there are: {', '.join(known)}"
    )


def _is_in(which: object, path: str, x: Tensor) -> bool:
    """Whether a group that is for `which` is for this parameter."""
    if callable(which):
        return bool(which(path, x))
    if not isinstance(which, str):
        raise AttributeRefused(
            f"a group is for a pattern of paths, or a function of path and parameter, not {which!r}"
        )
    return fnmatchcase(path, which)


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={getattr(x, '__name__', x)}" for k, x in options.items())


class SGD(Optimizer):
    """Stochastic gradient descent: p -= rate * d, where

    d = g + weight_decay p                            without momentum
    v = momentum v + g + weight_decay p;  d = v       with it (Polyak, 1964)
    d = g + weight_decay p + momentum v               and with `nesterov` (Sutskever et al., 2013)

    Parameters and gradients: f32 or f64, of any shapes. Raises what `optim.Optimizer` raises.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.SGD({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])
    """

    momentum: float
    nesterov: bool
    weight_decay: float

    _ranges: ClassVar[_Ranges] = {"momentum": _FRACTION, "weight_decay": _POSITIVE}

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        groups: Groups = (),
    ) -> None:
        super().__init__(
            params,
            groups,
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )

    def _checked_options(
        self, options: Mapping[str, Any], wanted: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        checked = super()._checked_options(options, wanted)
        if options["nesterov"] and not options["momentum"]:
            raise AttributeRefused("SGD: nesterov needs a momentum > 0, given 0")
        return checked

    def _state_of(self, hyper: Any) -> Sequence[str]:
        return ["momentum"] if hyper.momentum else []

    def _scalars(self, hyper: Any, rate: Tensor) -> Sequence[Tensor]:
        dtype = rate.dtype
        return -rate, scalar(hyper.momentum, dtype), scalar(hyper.weight_decay, dtype)

    def _step(
        self,
        hyper: Any,
        param: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        scalars: Sequence[Tensor],
    ) -> None:
        minus_rate, momentum, weight_decay = scalars
        if hyper.weight_decay:
            g = op.multiply_add(param, weight_decay, g)
        if hyper.momentum:
            [v] = state
            _multiply_add_into(v, v, momentum, g)
            g = op.multiply_add(v, momentum, g) if hyper.nesterov else v
        _multiply_add_into(param, g, minus_rate, param)


class RMSProp(Optimizer):
    """p -= rate * d, with a mean v of g^2 that forgets (Hinton, 2012; as PyTorch has it), where

    v = alpha v + (1 - alpha) g^2
    d = g / (sqrt(v) + eps)
    d = g / (sqrt(v - m^2) + eps)                     with `centered` (Graves, arXiv 1308.0850),
                                                      m = alpha m + (1 - alpha) g
    b = momentum b + d;  d = b                        with momentum

    `weight_decay` p is added to g before all that.

    Parameters and gradients: f32 or f64, of any shapes. Raises what `optim.Optimizer` raises.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.RMSProp({"w": w}, 0.05)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])
    """

    alpha: float
    eps: float
    momentum: float
    centered: bool
    weight_decay: float

    _ranges: ClassVar[_Ranges] = {
        "alpha": _FRACTION,
        "eps": _POSITIVE,
        "momentum": _FRACTION,
        "weight_decay": _POSITIVE,
    }

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        centered: bool = False,
        weight_decay: float = 0.0,
        groups: Groups = (),
    ) -> None:
        super().__init__(
            params,
            groups,
            learning_rate=learning_rate,
            alpha=alpha,
            eps=eps,
            momentum=momentum,
            centered=centered,
            weight_decay=weight_decay,
        )

    def _state_of(self, hyper: Any) -> Sequence[str]:
        names = ["square_mean"]
        if hyper.centered:
            names.append("gradient_mean")
        if hyper.momentum:
            names.append("momentum")
        return names

    def _scalars(self, hyper: Any, rate: Tensor) -> Sequence[Tensor]:
        numbers = hyper.alpha, 1 - hyper.alpha, hyper.eps, hyper.momentum, hyper.weight_decay
        return -rate, *[scalar(each, rate.dtype) for each in numbers]

    def _step(
        self,
        hyper: Any,
        param: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        scalars: Sequence[Tensor],
    ) -> None:
        minus_rate, alpha, rest, eps, momentum, weight_decay = scalars
        square_mean, *others = state
        if hyper.weight_decay:
            g = op.multiply_add(param, weight_decay, g)
        part = rest * g
        square_mean *= alpha
        _multiply_add_into(square_mean, part, g, square_mean)
        variance = square_mean
        if hyper.centered:
            mean = others[0]
            _multiply_add_into(mean, mean, alpha, part)
            variance = op.multiply_add(-mean, mean, square_mean)
        root = op.sqrt(variance)
        root += eps
        step = op.divide(g, root, out=root)
        if hyper.momentum:
            buffer = others[-1]
            _multiply_add_into(buffer, buffer, momentum, step)
            step = buffer
        _multiply_add_into(param, step, minus_rate, param)


class Lion(Optimizer):
    """The sign of a mean of gradients (Chen et al., arXiv 2302.06675, algorithm 2):

    p -= rate * (sign(beta1 m + (1 - beta1) g) + weight_decay p)
    m = beta2 m + (1 - beta2) g

    The paper takes a rate 3 to 10 times smaller than AdamW's, and as much more weight decay.

    Parameters and gradients: f32 or f64, of any shapes. Raises what `optim.Optimizer` raises.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Lion({"w": w}, 0.5, weight_decay=0.0)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])
    """

    betas: tuple[float, float]
    weight_decay: float

    _ranges: ClassVar[_Ranges] = {"weight_decay": _POSITIVE}

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        groups: Groups = (),
    ) -> None:
        super().__init__(
            params, groups, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay
        )

    def _state_of(self, hyper: Any) -> Sequence[str]:
        return ["gradient_mean"]

    def _scalars(self, hyper: Any, rate: Tensor) -> Sequence[Tensor]:
        beta1, beta2 = hyper.betas
        numbers = beta1, 1 - beta1, beta2, 1 - beta2
        kept = 1 - hyper.weight_decay * rate
        return -rate, kept, *[scalar(each, rate.dtype) for each in numbers]

    def _step(
        self,
        hyper: Any,
        param: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        scalars: Sequence[Tensor],
    ) -> None:
        minus_rate, kept, beta1, rest1, beta2, rest2 = scalars
        [mean] = state
        if hyper.weight_decay:
            param *= kept
        step = op.sign(op.multiply_add(mean, beta1, rest1 * g))
        _multiply_add_into(param, step, minus_rate, param)
        mean *= beta2
        _multiply_add_into(mean, g, rest2, mean)


class Adam(Optimizer):
    """p -= rate * m / (sqrt(v) + eps), with m and v the exponentially weighted means of g and g^2
    (Kingma and Ba, arXiv 1412.6980).

    The state holds them as sums: gradient_sum = beta1 gradient_sum + g, and square_sum =
    beta2 square_sum + g^2. Divided by the sum of the weights, (1 - beta^t) / (1 - beta), these are
    the paper's bias-corrected moments. This takes two launches less than the paper's formulas.

    Parameters and gradients: f32 or f64, of any shapes. Raises what `optim.Optimizer` raises.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.Adam({"w": w}, 0.5)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])
    """

    betas: tuple[float, float]
    eps: float

    _ranges: ClassVar[_Ranges] = {"eps": _POSITIVE}

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        groups: Groups = (),
    ) -> None:
        super().__init__(params, groups, learning_rate=learning_rate, betas=betas, eps=eps)

    def _state_of(self, hyper: Any) -> Sequence[str]:
        return ["gradient_sum", "square_sum"]

    def _scalars(self, hyper: Any, rate: Tensor) -> Sequence[Tensor]:
        t = elements.astype(self.count, rate.dtype) + 1
        beta1, beta2 = hyper.betas
        root = op.sqrt(_sum_of_weights(beta2, t))
        minus_rate = -rate * root / _sum_of_weights(beta1, t)
        return minus_rate, hyper.eps * root, *[scalar(beta, rate.dtype) for beta in hyper.betas]

    def _step(
        self,
        hyper: Any,
        param: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        scalars: Sequence[Tensor],
    ) -> None:
        gradient_sum, square_sum = state
        minus_rate, eps, beta1, beta2 = scalars
        _multiply_add_into(gradient_sum, gradient_sum, beta1, g)
        square_sum *= beta2
        _multiply_add_into(square_sum, g, g, square_sum)
        step = op.sqrt(square_sum)
        step += eps
        op.divide(gradient_sum, step, out=step)
        _multiply_add_into(param, step, minus_rate, param)


def _multiply_add_into(out: Tensor, x: Tensor, y: Tensor, z: Tensor) -> None:
    """out = x y + z; `out` may be x, y or z."""
    apply_into(out, _MULTIPLY_ADD, x, y, z)


def _sum_of_weights(beta: float, t: Tensor) -> Tensor:
    """1 + beta + ... + beta^(t-1) = (1 - beta^t) / (1 - beta). It is accurate for beta near 1,
    too, where the digits of 1 - beta^t would cancel."""
    log = compute(math.log, beta) if beta else -math.inf
    return op.expm1(log * t) / (beta - 1)


class AdamW(Adam):
    """Adam with decoupled weight decay: before each update p -= rate * weight_decay * p (Loshchilov
    and Hutter, arXiv 1711.05101).

    Parameters and gradients: f32 or f64, of any shapes. Raises what `optim.Optimizer` raises.

        >>> w = ml.ones(2)
        >>> optimizer = ml.optim.AdamW({"w": w}, 0.5, weight_decay=0.0)
        >>> optimizer.update({"w": ml.ones(2)})
        >>> w
        Tensor([0.5, 0.5], f32[2])
    """

    weight_decay: float

    _ranges: ClassVar[_Ranges] = {**Adam._ranges, "weight_decay": _POSITIVE}

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        groups: Groups = (),
    ) -> None:
        Optimizer.__init__(
            self,
            params,
            groups,
            learning_rate=learning_rate,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )

    def _scalars(self, hyper: Any, rate: Tensor) -> Sequence[Tensor]:
        return (*super()._scalars(hyper, rate), 1 - hyper.weight_decay * rate)

    def _step(
        self,
        hyper: Any,
        param: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        scalars: Sequence[Tensor],
    ) -> None:
        *scalars, kept = scalars
        param *= kept
        super()._step(hyper, param, g, state, scalars)


def _in_dtype(value: float | Tensor, dtype: DType) -> Tensor:
    return elements.astype(value, dtype) if isinstance(value, Tensor) else scalar(value, dtype)


def _require(where: str, name: str, value: float, low: float, below: float = math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number < below:
        raise AttributeRefused(f"{where}: {name} must be in [{low}, {below}), given {value!r}")
    return number


# --- clipping ------------------------------------------------------------------------


def global_norm(tree: Tree) -> Tensor:
    """The square root of the sum of all squares in a tree of float tensors: f[]; of halves in f32.

    A tensor that occurs twice counts once, such as the gradient of a shared parameter. Of what
    members have in parts (`ml.parallel.Parts`) it is the norm of the whole: they all call this.

    Raises `DTypeError` for a leaf that is no tensor.

        >>> ml.optim.global_norm({"w": ml.asarray([3.0, 4.0])})
        Tensor(5., f32[])
    """
    whole, pieces = shards.parted(tree)
    parts = [op.sum(op.square(widened(x))) for x in whole]
    if pieces:
        of_pieces = reduce(op.add, [op.sum(op.square(widened(x))) for x in pieces])
        all_reduce(of_pieces)
        parts.append(of_pieces)
    return op.sqrt(reduce(op.add, parts)) if parts else creation.zeros((), dtype=f32)


def clip_by_global_norm(grads: Tree, max_norm: float) -> Tree:
    """The same tree, times max_norm / global_norm(grads) if that is below 1 (Pascanu et al., arXiv
    1211.5063).

    The gradients: float tensors of any shapes, and so is the result. Raises `AttributeRefused`
    unless max_norm > 0.

        >>> ml.optim.clip_by_global_norm({"w": ml.asarray([3.0, 4.0])}, 1.0)["w"]
        Tensor([0.6, 0.8], f32[2])
    """
    if not _require("clip_by_global_norm", "max_norm", max_norm, 0):
        raise AttributeRefused("clip_by_global_norm: max_norm must be positive, given 0")
    norm = global_norm(grads)
    factor = max_norm / op.maximum(norm, max_norm)

    def clipped(g: Tensor) -> Tensor:
        wide = widened(g)
        return rounded(wide * elements.astype(factor, wide.dtype), g.dtype)

    return substitute(clipped, grads)


# --- loss scaling --------------------------------------------------------------------


class LossScale:
    """A factor for the loss, so that gradients in f16 neither vanish nor overflow: the least f16 is
    6e-8, and the largest 65504. It halves where a gradient is not finite, and that update is
    skipped; after `growth_interval` updates it doubles (Micikevicius et al., "Mixed Precision
    Training", arXiv 1710.03740; names and defaults are those of PyTorch's `GradScaler`). bf16 has
    the range of f32, and needs none of this.

        scale = ml.optim.LossScale()
        loss, grads = ml.value_and_grad(lambda model: scale.scale(loss_of(model)))(model)
        scale.update(optimizer, scale.unscale(grads))

    `value` and `good_steps`, f32[], are the factor and the updates since it last changed. They are
    tensors in the current arena, so all of it can be captured. The factor is a power of two, as
    long as what it begins with and changes by are, and so it rounds nothing; it stays within 1 and
    2**126.

    Raises `AttributeRefused` unless init_scale >= 1, growth_factor > 1, 0 < backoff_factor < 1 and
    growth_interval is an int from 1 to 2**24.

        >>> scale, w = ml.optim.LossScale(8.0), ml.asarray([3.0])
        >>> optimizer = ml.optim.SGD({"w": w}, 0.5)
        >>> scale.update(optimizer, scale.unscale({"w": ml.asarray([16.0])})), w, scale.value
        (Tensor(True, bool[]), Tensor([2.], f32[1]), Tensor(8., f32[]))
        >>> scale.update(optimizer, {"w": ml.asarray([ml.inf])}), w, scale.value
        (Tensor(False, bool[]), Tensor([2.], f32[1]), Tensor(4., f32[]))
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.growth_factor = _require("LossScale", "growth_factor", growth_factor, 1)
        self.backoff_factor = _require("LossScale", "backoff_factor", backoff_factor, *_FRACTION)
        if type(growth_interval) is not int or not 1 <= growth_interval <= _MOST_INTERVAL:
            raise AttributeRefused(
                f"LossScale: growth_interval must be an int from 1 to {_MOST_INTERVAL}, "
                f"given {growth_interval!r}"
            )
        self.growth_interval = growth_interval
        if self.growth_factor == 1 or not self.backoff_factor:
            raise AttributeRefused(
                f"LossScale: growth_factor must be above 1, and backoff_factor above 0, "
                f"given {growth_factor} and {backoff_factor}"
            )
        first = _require("LossScale", "init_scale", init_scale, 1, _MOST_SCALE)
        self.value = creation.full((), first, dtype=f32)
        self.good_steps = creation.zeros((), dtype=f32)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor; f32 of a loss that is a half, as f16 would overflow. Raises
        `DTypeError` for other than a tensor of floats."""
        if not isinstance(loss, Tensor) or not loss.dtype.is_float:
            given = loss.type if isinstance(loss, Tensor) else brief(loss)
            raise DTypeError(f"LossScale.scale: a loss is a tensor of floats, not {given}")
        loss = widened(loss)
        return loss * elements.astype(self.value, loss.dtype)

    def unscale(self, grads: Tree) -> Tree:
        """The same tree, each gradient divided by the factor; in f32 those that are halves, as they
        would vanish. Raises `DTypeError` for a leaf that is no tensor."""
        for leaf in all_leaves(grads):
            if not isinstance(leaf, Tensor):
                raise DTypeError(f"LossScale.unscale: gradients are tensors, not {brief(leaf)}")

        def divided(g: Tensor) -> Tensor:
            g = widened(g)
            return g / elements.astype(self.value, g.dtype)

        return substitute(divided, grads)

    def update(self, optimizer: Optimizer, grads: Tree) -> Tensor:
        """Update the parameters from these gradients, which are not scaled any more, if all are
        finite; adapt the factor; and return whether they were: bool[]. Otherwise parameters and the
        optimizer's state stay as they are, `count` too. Raises what `Optimizer.update` does."""
        finite = all_finite(grads)

        def improve() -> None:
            optimizer.update(grads)

        cond(finite, improve, lambda: None)
        good = op.where(finite, self.good_steps + 1.0, 0.0)
        grows = good >= self.growth_interval
        larger = op.where(grows, self.value * self.growth_factor, self.value)
        value = op.where(finite, larger, self.value * self.backoff_factor)
        _copy_into(self.value, op.clip(value, 1.0, _MOST_SCALE))
        _copy_into(self.good_steps, op.where(grows, 0.0, good))
        return finite

    def state(self) -> dict[str, Tensor]:
        """The tensors of state by name: `value` and `good_steps`."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays over the state, in place, by the names of `state`. Raises as
        `Optimizer.load_state` does."""
        load(self.state(), arrays, "state")

    def __repr__(self) -> str:
        return f"<LossScale: {self.value}>"


def all_finite(tree: Tree) -> Tensor:
    """Whether no element of a tree of float tensors is infinite or nan: bool[]. Of what members
    have in parts (`ml.parallel.Parts`) it tells of the whole: they all call this.

    Raises `DTypeError` for a leaf that is no tensor.

        >>> ml.optim.all_finite({"w": ml.ones(2), "b": ml.asarray([ml.nan])})
        Tensor(False, bool[])
    """
    whole, pieces = shards.parted(tree)
    parts = [op.all(op.isfinite(x)) for x in whole]
    if pieces:
        of_pieces = reduce(op.logical_and, [op.all(op.isfinite(x)) for x in pieces])
        here = elements.astype(of_pieces, f32)
        all_reduce(here, "min")
        parts.append(here > 0.0)
    return reduce(op.logical_and, parts) if parts else creation.full((), True)


def _copy_into(out: Tensor, x: Tensor) -> None:
    apply_into(out, _COPY, x)


# --- learning-rate schedules ---------------------------------------------------------


def constant(rate: float) -> Schedule:
    """The same rate for every update.

    It takes the count of updates, f32[], and gives f32[]. Raises `AttributeRefused` for a negative
    rate.

        >>> float(ml.optim.constant(0.1)(ml.asarray(5.0))) == float(ml.asarray(0.1))
        True
    """
    rate = _require("constant", "rate", rate, 0)
    return lambda count: creation.full((), rate, dtype=f32)


def cosine(peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """From 0 to `peak` in a line over `warmup_steps`, then to `final` in half a cosine wave that
    ends at `total_steps` (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    It takes the count of updates, f32[], and gives f32[]. Raises `AttributeRefused` for a negative
    rate, or unless 0 <= warmup_steps < total_steps.

        >>> rate = ml.optim.cosine(1.0, total_steps=100)
        >>> float(rate(ml.asarray(0.0))), float(rate(ml.asarray(100.0)))
        (1.0, 0.0)
    """
    peak = _require("cosine", "peak", peak, 0)
    final = _require("cosine", "final", final, 0)
    _require("cosine", "total_steps", total_steps, 1)
    _require("cosine", "warmup_steps", warmup_steps, 0, total_steps)

    def schedule(count: Tensor) -> Tensor:
        rate = _anneal(peak, final, (count - warmup_steps) / (total_steps - warmup_steps))
        if not warmup_steps:
            return rate
        return op.where(count < warmup_steps, count * (peak / warmup_steps), rate)

    return schedule


def one_cycle(
    peak: float,
    total_steps: int,
    *,
    warmup_fraction: float = 0.3,
    initial_divisor: float = 25.0,
    final_divisor: float = 1e4,
) -> Schedule:
    """From initial = peak / initial_divisor up to `peak`, and down to initial / final_divisor, in
    half a cosine wave each (Smith and Topin, arXiv 1708.07120). `warmup_fraction` of `total_steps`
    go up. The end is reached after `total_steps` updates, as in optax's `cosine_onecycle_schedule`;
    in PyTorch's `OneCycleLR` the last update reaches it. The defaults are those of both.

    It takes the count of updates, f32[], and gives f32[]. Raises `AttributeRefused` for a negative
    peak, total_steps < 1, a divisor below 1, or unless 0 <= warmup_fraction < 1.

        >>> rate = ml.optim.one_cycle(1.0, total_steps=100)
        >>> float(rate(ml.asarray(0.0))) < float(rate(ml.asarray(30.0)))
        True
    """
    peak = _require("one_cycle", "peak", peak, 0)
    _require("one_cycle", "total_steps", total_steps, 1)
    initial = peak / _require("one_cycle", "initial_divisor", initial_divisor, 1)
    final = initial / _require("one_cycle", "final_divisor", final_divisor, 1)
    turn = _require("one_cycle", "warmup_fraction", warmup_fraction, 0, 1) * total_steps

    def schedule(count: Tensor) -> Tensor:
        down = _anneal(peak, final, (count - turn) / (total_steps - turn))
        if not turn:
            return down
        return op.where(count < turn, _anneal(initial, peak, count / turn), down)

    return schedule


def _anneal(start: float, end: float, progress: Tensor) -> Tensor:
    """From `start` at progress 0 to `end` at 1 in half a cosine wave; `end` beyond 1."""
    wave = op.cos(math.pi * op.minimum(progress, 1.0))
    return (start - end) / 2 * (1 + wave) + end
