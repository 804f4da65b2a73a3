"""Base class of optimizers: hyperparameters as fields, groups, state, and the steps of an update.

Hyperparameters are fields of a class: the constructor, the signature, the ranges and the options of
groups are derived from them. `rules` defines the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature, formatannotation, get_annotations, signature
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, get_type_hints
from weakref import WeakKeyDictionary

from typing_extensions import dataclass_transform

from mlvm.arena.arena import set_name
from mlvm.arena.context import current
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    HandleError,
    PathError,
    with_article,
)
from mlvm.core.types import DType, TensorType, f32
from mlvm.eager.functions import creation, elements
from mlvm.eager.optim.ranges import Positive, checked, checked_field
from mlvm.eager.optim.schedules import Schedule
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import one_op
from mlvm.eager.tensor.constants import constant as scalar
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.number import Number
from mlvm.eager.tensor.templates import call
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.values import module_of
from mlvm.eager.tensor.wrapper import hinted, require_arguments
from mlvm.eager.tree import (
    Snapshot,
    Tree,
    Where,
    fits,
    load,
    named_leaves,
    named_tensors,
    require_live,
    require_types,
    selected,
    warn_of_hidden,
)
from mlvm.renamed import OldAttribute
from mlvm.show import html

Groups: TypeAlias = Sequence[tuple[Where, Mapping[str, Any]]]
"""Pairs of parameters (a pattern or function) and hyperparameters."""

Tensors: TypeAlias = Sequence[Tensor]

Update: TypeAlias = tuple[Tensor, Tensor, Tensors, Tensors]
"""A parameter, with the gradient, the state and the scalars of the parameter's group."""

_SCALAR = TensorType(f32)
_ADD = one_op("add")
_AT_ONCE = 8  # parameters that one template updates


class Group(SimpleNamespace):
    """Parameters with these `paths`, and the hyperparameters that they override as fields.

    Other hyperparameters may be assigned later.

        >>> params, slowly = {"w": ml.ones(2), "b": ml.ones(1)}, {"learning_rate": 0.25}
        >>> first, rest = ml.optim.SGD(params, 0.5, groups=[("b", slowly)]).groups
        >>> first.paths, first.learning_rate, rest.paths
        (('b',), 0.25, ('w',))
    """

    paths: tuple[str, ...]
    _kinds: Mapping[str, Any]

    if not TYPE_CHECKING:  # otherwise a type checker would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self._kinds:
                raise _unknown("a group", name, self._kinds)
            super().__setattr__(name, _assigned("a group", name, value, self._kinds[name]))

    def __repr__(self) -> str:
        options = {name: x for name, x in vars(self).items() if name in self._kinds}
        return f"<group of {len(self.paths)} tensors: {_listed(options)}>"


class Whole:
    """Layout of an optimizer without sharding: parameters, states and gradients are unsharded.

    `ml.parallel` defines the sharded layouts, for members of a group.
    """

    def state_type(self, type: TensorType) -> TensorType:
        """Return the type of the state of a parameter of this type."""
        return type

    def given_types(self, grads: Tree, types: Mapping[str, TensorType]) -> Mapping[str, TensorType]:
        """Return the expected types of gradients, by path, for parameters of these types."""
        return types

    def pieces(self, tree: Tree, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return by path the tensors, or shards of tensors, that an update on this member reads."""
        return tensors

    def gather(self, tensors: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
        """Restore unsharded tensors after shards were updated."""

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the unsharded tensors of state."""
        return state

    def load_state(self, state: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
        """Write unsharded arrays to the state."""
        load(state, arrays, "state")


def _argument(**how: Any) -> Any:
    """Return a field of dataclass-like constructors, for type checkers."""


_OF_ALL: Mapping[str, Any] = {"maximize": bool}
"""Hyperparameters of all optimizers, which are last in signatures."""


class LearningRate:
    """Field that is assigned a number or a schedule, and read as the rate of the next update."""

    def __get__(self, optimizer: Optimizer | None, owner: type) -> float:
        if optimizer is None:
            return self  # type: ignore[return-value]
        rate: float | Schedule = vars(optimizer)["learning_rate"]
        if not callable(rate):
            return rate
        return float(optimizer._rate(SimpleNamespace(learning_rate=rate)))

    def __set__(self, optimizer: Optimizer, value: float | Schedule) -> None:
        vars(optimizer)["learning_rate"] = value


@dataclass_transform(kw_only_default=True, field_specifiers=(_argument,))
class _OfFields:
    """Base of classes with hyperparameters as fields.

    Each field is a keyword argument of the constructor. The annotation contains the range, which
    `ranges.checked` reads. A subclass without an update rule adds no hyperparameters."""

    count: Tensor
    groups: tuple[Group, ...]

    _kinds: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        own = [name for name in get_annotations(cls) if name in vars(cls) and name[0] != "_"]
        has_rule = "_step" in vars(cls) or "_step_all" in vars(cls)
        if own and has_rule and "__init__" not in vars(cls):
            kinds = get_type_hints(cls, include_extras=True)
            cls._kinds = {**cls._kinds, **{name: kinds[name] for name in own}}
            cls._kinds = {**{n: x for n, x in cls._kinds.items() if n != "maximize"}, **_OF_ALL}
            cls.__init__ = hinted(_constructor(cls, cls._kinds))  # type: ignore[method-assign]


def _constructor(cls: Any, fields: Iterable[str]) -> Callable[..., None]:
    """Return a constructor for a class with these fields."""

    def constructor(
        self: Any,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        groups: Groups = (),
        where: Where | None = None,
        **options: Any,
    ) -> None:
        for name in options:
            if name not in defaults:
                text = f"got an unexpected keyword argument {name!r}"
                raise TypeError(f"{constructor.__qualname__}() {text}")
        self._begin(params, groups, where, {"learning_rate": learning_rate, **defaults, **options})

    defaults = {name: getattr(cls, name) for name in fields}
    plain = get_type_hints(cls)
    of_fields = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=x, annotation=formatannotation(plain[name]))
        for name, x in defaults.items()
    ]
    *first, groups, where, _ = signature(constructor).parameters.values()
    constructor.__name__ = "__init__"
    constructor.__qualname__ = f"{cls.__qualname__}.__init__"
    vars(constructor)["__signature__"] = Signature([*first, *of_fields, groups, where])
    return constructor


class Optimizer(_OfFields):
    """Base class of optimizers, which update a tree of parameters in place.

    Arguments:

    - `params`: a Module or other tree of f32 or f64 tensors.

    - `groups`: pairs of parameters and hyperparameters, as in `groups=[("*/bias",
      {"weight_decay": 0.0})]`. The first item is a pattern for the paths of `named_parameters`, in
      which `*` also matches "/", or a function of path and parameter, as in `Module.freeze`.
      Default: none. The attribute `groups` contains these groups, and finally a group with all
      other parameters.

    - `where`: a pattern or function that selects the parameters to update; gradients of other
      parameters are ignored. Default: all parameters.

    - `maximize`: update in the direction of the gradient instead of against it. Default: False.

    `count`, f32[], is the number of completed updates. All state is allocated at construction, each
    tensor in the arena of the parameter. An update allocates no permanent memory in the current
    arena.

    Hyperparameters may be assigned, to the optimizer or to a group; a captured function retraces at
    most once for each. Assigning to an unknown hyperparameter, or an invalid value, raises
    `ArgumentError`. `optimizer.learning_rate` is assigned a number, a tensor f32[] or a schedule,
    and returns the learning rate of the next update.

    In a step of `ml.parallel.data_parallel(..., shard=...)` the optimizer of each member stores
    only the state of the member's shard of the parameters. With "all" the member also stores only
    this shard of the parameters.

    Raises `ArgumentError` if a hyperparameter is unknown or out of range, or a group has no
    parameters; `DTypeError` if there are no parameters, or some are not f32 or f64; `HandleError`
    if they are on different VMs.

        >>> w = ml.ones(2)
        >>> params, slowly = {"w": w, "b": ml.ones(1)}, {"learning_rate": 0.25}
        >>> optimizer = ml.optim.SGD(params, 0.5, groups=[("b", slowly)])
        >>> optimizer.update({"w": ml.ones(2), "b": ml.ones(1)})
        >>> w, params["b"], int(optimizer.count)
        (Tensor([0.5, 0.5], f32[2]), Tensor([0.75], f32[1]), 1)

    Invalid calls:
        ml.optim.SGD(v, 0.1, groups=[("w", {})])  # ArgumentError
        ml.optim.SGD(ints, 0.1)  # DTypeError
        ml.optim.SGD([v, ml.ones(2, device=vm)], 0.1)  # HandleError
    """

    maximize: bool = False

    if TYPE_CHECKING:
        _tree: Tree = _argument(alias="params", kw_only=False)
        learning_rate: LearningRate = _argument(kw_only=False)
        _groups: Groups = _argument(alias="groups", default=())
        _where: Where | None = _argument(alias="where", default=None)
    else:
        learning_rate = LearningRate()
        rate = OldAttribute("Optimizer", "rate")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is Optimizer:
            raise TypeError("Optimizer has no update rule; create a subclass such as ml.optim.SGD")
        if args or kwargs:  # unpickling passes no arguments
            require_arguments(cls, args, kwargs)
        return super().__new__(cls)

    def _begin(
        self, params: Tree, groups: Groups, where: Where | None, options: dict[str, Any]
    ) -> None:
        """Check all arguments, and create the state.

        `options` are the default hyperparameters of groups."""
        try:
            vars(self).update(self._checked_options(options, options))
        except ArgumentError as error:
            error.__traceback__ = None  # the innermost frame is the caller's line
            raise
        self._options = tuple(options)
        if isinstance(params, (int, float)):
            raise ArgumentError(
                f"{self._name}: expected a model or a tree of tensors as params, got {params}; "
                f"the order is (params, learning_rate)"
            )
        self._tree = params
        self._elsewhere = frozenset[str]()
        if where is not None:
            leaves = named_leaves(params)
            ids = selected(leaves, where)
            self._elsewhere = frozenset(path for path, x in leaves if id(x) not in ids)
        self._read_tree()
        for path, x in self._params.items():
            if not x.dtype.is_float:
                raise DTypeError(f"{self._name}: expected a float parameter {path!r}, got {x.type}")
            if x.dtype.is_half:
                raise DTypeError(
                    f"{self._name}: parameter {path!r} is {x.type}, too narrow for small updates; "
                    f"keep it in f32, and compute with model.astype({x.dtype.name!r})"
                )
        if not self._params:
            raise DTypeError(f"{self._name}: expected parameters to update, got none")
        arenas = [x.arena for x in self._params.values()]
        if len({id(arena.vm) for arena in arenas}) > 1:
            names = ", ".join(sorted({arena.vm.name for arena in arenas}))
            raise HandleError(f"{self._name}: expected all parameters on one VM, got {names}")
        warn_of_hidden(params)
        self.groups = self._grouped(groups, options)
        with arenas[0].hosting():
            self._layout = self._hold(params, None if self._by_element else self._name)
            self._read_tree()
            self.count = creation.zeros((), dtype=f32)
        self._state: dict[str, dict[str, Tensor]] = {}
        for group in self.groups:
            hyper = self._hyper(group)
            for path in group.paths:
                x = self._params[path]
                for name, type in self._state_types(hyper, x.type).items():
                    self._state.setdefault(name, {})[path] = zeros_beside(x, type)
        for kind, tensors in {"parameter": self._params, **self._state}.items():
            for path, tensor in tensors.items():
                set_name(tensor, kind, path)

    @staticmethod
    def _hold(params: Tree, whole_needed_by: str | None) -> Whole:
        """Return the layout of the parameters: unsharded unless `ml.parallel` replaces this method.

        The sharded layout raises `ArgumentError` if an optimizer of that name needs whole
        parameters."""
        return Whole()

    def _read_tree(self) -> None:
        self._leaves = self._own(named_leaves(self._tree))
        self._params = self._own(named_tensors(self._tree).items())
        self._types = {path: x.type for path, x in self._leaves.items()}

    def _own(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the parameters of this optimizer, by path."""
        return {path: x for path, x in tensors if path not in self._elsewhere}

    def _grouped(self, specs: Groups, kinds: Mapping[str, Any]) -> tuple[Group, ...]:
        """Return the given groups, and a group with all other parameters."""
        rest, groups = dict(self._params), []
        for which, options in specs:
            unknown = [name for name in options if name not in kinds]
            if unknown:
                raise _unknown(f"{self._name}: the group {which!r}", unknown[0], kinds)
            paths = tuple([path for path, x in rest.items() if fits(which, path, x)])
            if not paths:
                raise ArgumentError(
                    f"{self._name}: no parameter matches the group {which!r}; "
                    f"parameters without a group: {', '.join(rest) or 'none'}"
                )
            for path in paths:
                del rest[path]
            own = self._checked_options({**kinds, **options}, options)
            groups.append(Group(paths=paths, _kinds=self._all_kinds, **own))
        if rest:
            groups.append(Group(paths=tuple(rest), _kinds=self._all_kinds))
        return tuple(groups)

    def _checked_options(self, options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Return the hyperparameters of `names`, after checking that they can be combined."""
        kinds = self._all_kinds
        values = {
            name: value
            if callable(value) and name == "learning_rate"
            else checked(self._name, name, value, kinds[name])
            for name, value in options.items()
        }
        self._require(SimpleNamespace(**values))
        return {name: values[name] for name in names}

    if not TYPE_CHECKING:  # otherwise a type checker would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            is_known = name in vars(self) or name[0] == "_" or "_state" not in vars(self)
            if not is_known and not hasattr(self, name):
                raise _unknown(self._name, name, self._options)
            if name in self._all_kinds:
                value = _assigned(self._name, name, value, self._all_kinds[name])
            super().__setattr__(name, value)

    @property
    def _all_kinds(self) -> Mapping[str, Any]:
        return {"learning_rate": Positive, **self._kinds}

    @hinted
    def update(self, grads: Tree) -> None:
        """Update every parameter from the gradients; `grads` is a tree like the tree of parameters.

        Everything is checked before the first write. Raises `PathError` if the gradients have a
        different structure; `DTypeError` or `ShapeError` if a gradient has a different type, or a
        parameter was replaced in the tree; `StaleTensorError` if a tensor was freed; `HandleError`
        if the current arena is on a different VM; `GradientError` inside a differentiated function;
        `ArgumentError` if a hyperparameter needs state that was not created. If
        `ArenaOverflowError` interrupts an update, the remaining parameters are unchanged.

        Invalid calls:
            sgd.update({"w": ints})  # DTypeError
            ml.grad(lambda x: sgd.update({"w": x}))(v)  # GradientError
            sgd.update({"b": v})  # PathError
            sgd.update({"w": x})  # ShapeError
            sgd.update({"w": stale_here})  # StaleTensorError
            within(tight_here, lambda: sgd.update({"w": v}))  # ArenaOverflowError
            changed.update({"w": v})  # ArgumentError
            within(vm_arena, lambda: sgd.update({"w": v}))  # HandleError
        """
        hypers = [self._hyper(group) for group in self.groups]
        gradients = self._checked(grads)
        states = self._states(hypers)
        params = self._layout.pieces(self._tree, self._params)
        gradients = self._layout.pieces(grads, gradients)
        rates = [self._rate(hyper) for hyper in hypers]
        scalars = self._begin_update(hypers, rates)
        for i, group in enumerate(self.groups):
            updates = [
                (params[path], gradients[path], states[path], scalars[i, params[path].dtype])
                for path in group.paths
            ]
            self._step_all(hypers[i], updates)
        self._layout.gather(self._params, params)

    def _begin_update(
        self, hypers: Sequence[Any], rates: Sequence[float | Tensor]
    ) -> Mapping[tuple[int, DType], Tensors]:
        """Return the scalars of this update by group number and dtype, and increment the count."""
        types = self._types
        kinds = [
            (i, dtype)
            for i, group in enumerate(self.groups)
            for dtype in dict.fromkeys([types[path].dtype for path in group.paths])
        ]
        if self._is_cached():
            rules = [(self._values(hypers[i]), rates[i], dtype) for i, dtype in kinds]
            scalars = call(_rule_of(type(self), self._names)[0], (self.count, rules), {})  # type: ignore[arg-type]
        else:
            scalars = [self._scalars(hypers[i], _in_dtype(rates[i], dtype)) for i, dtype in kinds]
            self.count += 1
        return dict(zip(kinds, scalars, strict=True))

    def _states(self, hypers: Sequence[Any]) -> dict[str, Tensors]:
        """Return for each parameter the state that the hyperparameters need.

        Raises `ArgumentError` if some state was not created."""
        states: dict[str, Tensors] = {}
        for group, hyper in zip(self.groups, hypers, strict=True):
            names: dict[TensorType, list[str]] = {}
            for path in group.paths:
                type = self._types[path]
                if type not in names:
                    names[type] = [*self._state_types(hyper, type)]
                try:
                    states[path] = [self._state[name][path] for name in names[type]]
                except KeyError:
                    missing = [n for n in names[type] if path not in self._state.get(n, ())]
                    raise ArgumentError(
                        f"{self._name}: {path!r} has no state {missing[0]!r}, because the "
                        f"hyperparameters at construction did not need it; create a new optimizer"
                    ) from None
        return states

    def _hyper(self, group: Group) -> Any:
        """Return all hyperparameters of a group, as fields."""
        fields = vars(self)
        hyper = SimpleNamespace(**{name: fields[name] for name in self._options})
        own = vars(group)
        if len(own) > 2:  # the group sets more fields than `paths` and `_kinds`
            vars(hyper).update({name: own[name] for name in self._options if name in own})
        return hyper

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of state by path: `count`, `momentum/Dense_0/kernel`.

        Sharded state is gathered, so all members must call this method."""
        return self._layout.state(self._own_state())

    def _own_state(self) -> dict[str, Tensor]:
        return dict(named_leaves({"count": self.count, **self._state}))

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays to the state, in place, by the paths of `state`.

        The state changes only if all arrays fit. Raises `PathError` for paths that are missing or
        unknown, `DTypeError` for a wrong dtype, `ShapeError` for a wrong shape.

        Invalid calls:
            sgd.load_state({"count": np.ones(())})  # DTypeError
            sgd.load_state({})  # PathError
            sgd.load_state({"count": array})  # ShapeError
        """
        self._layout.load_state(self._own_state(), arrays)

    def _rate(self, hyper: Any) -> float | Tensor:
        """Return the learning rate of this update: a number, or the value of the schedule."""
        schedule = hyper.learning_rate
        if not callable(schedule):
            return schedule  # type: ignore[no-any-return]
        rate: object = schedule(self.count)
        if not isinstance(rate, Tensor) or rate.type is not _SCALAR:
            actual = rate.type if isinstance(rate, Tensor) else type(rate).__name__
            raise DTypeError(
                f"{self._name}: expected a schedule that returns {with_article(_SCALAR)}, "
                f"got {actual}; compute the rate "
                "from the update count n, for example where(n < 1000, 1e-3, 1e-4)"
            )
        return rate

    # --- defined by each rule ------------------------------------------------------------

    def _require(self, hyper: Any) -> None:
        """Raise `ArgumentError` for hyperparameters that cannot be combined."""

    _by_element: ClassVar[bool] = True
    """True if the update of an element depends only on the element's gradient and state.

    Parameters may then be sharded.
    """

    _couples_decay: ClassVar[bool] = False
    """True if `weight_decay` p is added to the gradient."""

    _state_names: ClassVar[tuple[str, ...]] = ()
    """Names of the state, initially zero."""

    def _state_of(self, hyper: Any) -> Sequence[str]:
        """Return the names of the state that these hyperparameters need."""
        return self._state_names

    def _state_types(self, hyper: Any, type: TensorType) -> Mapping[str, TensorType]:
        """Return the types of a parameter's state by name, by default the parameter's type."""
        return dict.fromkeys(self._state_of(hyper), self._layout.state_type(type))

    def _scalars(self, hyper: Any, rate: Tensor) -> Tensors:
        """Return the scalars of this update that depend on the rate or the count, in rate's dtype.

        By default, it is only -rate. `_step` reads all other numbers from the hyperparameters; a
        template uses no hyperparameter tensors.
        """
        return [-rate]

    def _step(self, hyper: Any, p: Tensor, g: Tensor, state: Tensors, scalars: Tensors) -> None:
        """Update one parameter and the parameter's state in place."""
        raise NotImplementedError

    def _step_all(self, hyper: Any, updates: Sequence[Update]) -> None:
        """Update the parameters and the state of one group, by default one by one.

        A rule that uses all parameters together overrides this method."""
        if not self._is_cached():
            for p, g, state, scalars in updates:
                self._step(hyper, p, self._effective_gradient(hyper, p, g), state, scalars)
            return
        steps, values = _rule_of(type(self), self._names)[1], self._values(hyper)  # type: ignore[arg-type]
        for _, same in groupby(updates, lambda update: id(update[3])):
            of_dtype = [*same]
            for i in range(0, len(of_dtype), _AT_ONCE):
                some = [update[:3] for update in of_dtype[i : i + _AT_ONCE]]
                call(steps, (values, of_dtype[0][3], some), {})

    def _is_cached(self) -> bool:
        """Return whether updates run the functions of `_rule_of` by templates.

        A captured call, and a user's rule, run the methods instead."""
        return current().recorder is None and module_of(type(self)).startswith("mlvm.")

    @property
    def _names(self) -> tuple[str, ...]:
        return self._options[1:]  # without the learning rate

    def _values(self, hyper: Any) -> tuple[Any, ...]:
        """Return the hyperparameters of `_names`."""
        return tuple(vars(hyper).values())[1:]

    def _effective_gradient(self, hyper: Any, p: Tensor, g: Tensor) -> Tensor:
        """Return the gradient for the rule.

        With `maximize` the sign is inverted. `weight_decay` p is added if the rule couples weight
        decay."""
        if hyper.maximize:
            g = -g
        if self._couples_decay and hyper.weight_decay:
            g = op.multiply_add(p, scalar(hyper.weight_decay, p.dtype), g)
        return g

    # --- checks --------------------------------------------------------------------------

    def _checked(self, grads: Tree) -> dict[str, Tensor]:
        """Return the gradients by path, after all checks of an update."""
        self._require_same_tensors()
        if isinstance(grads, Tensor) and not isinstance(self._tree, Tensor):
            raise PathError(
                f"{self._name}: update: expected gradients, a tree like the parameters, got one "
                f"{grads.type}; compute them with ml.grad(loss_of)(model)"
            )
        if grads is self._tree and not isinstance(grads, Tensor):
            raise PathError(
                f"{self._name}: update: expected gradients, got the parameters "
                "themselves; compute gradients with ml.grad(loss_of)(model)"
            )
        gradients = self._own(named_leaves(grads))
        types = self._layout.given_types(grads, self._types)
        require_types(types, {path: g.type for path, g in gradients.items()}, "gradient")
        require_live(gradients.values())
        if current().tape is not None:
            raise GradientError(
                f"{self._name}: an update in place has no gradient; "
                f"call update outside of the differentiated function"
            )
        states = [x for tensors in self._state.values() for x in tensors.values()]
        require_live([self.count, *self._params.values(), *states])
        vm = self.count.arena.vm
        arenas = {id(g.arena): g.arena for g in gradients.values()}
        for arena in (current_arena(), *arenas.values()):
            if not arena.vm.is_same(vm):
                raise HandleError(
                    f"{self._name}: arena {arena.name!r} is on {arena.vm.name}, the parameters "
                    f"are on {vm.name}; update inside `with arena:`, with an arena of that VM"
                )
        return gradients

    def _require_same_tensors(self) -> None:
        """Raise `DTypeError` unless the tree holds the tensors it held at construction."""
        snapshot = _snapshots.get(self)
        if snapshot is not None and snapshot.holds(self._tree):
            return
        present = self._own(named_leaves(self._tree))
        for path in self._leaves | present:
            if present.get(path) is not self._leaves.get(path):
                if path not in present and path in dict(named_leaves(self._tree, buffers=True)):
                    raise DTypeError(
                        f"{self._name}: parameter {path!r} was frozen after the optimizer was "
                        f"created; create a new optimizer, with where= to select parameters"
                    )
                raise DTypeError(
                    f"{self._name}: parameter {path!r} was replaced after the optimizer was "
                    f"created; update it in place, for example p *= 2, or create a new optimizer"
                )
        if current().recorder is None:
            _snapshots[self] = Snapshot(self._tree)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        public = {name: vars(self)[name] for name in self._options}
        groups = f", {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return f"<{self._name} of {len(self._params)} tensors{groups}: {_listed(public)}>"

    def _repr_html_(self) -> str:
        head = self._name, *[f"{len(group.paths)} tensors" for group in self.groups]
        rows = [
            (x, *[_text(vars(g).get(x, vars(self)[x])) for g in self.groups]) for x in self._options
        ]
        return html.table(head, rows, right=0)


_snapshots: WeakKeyDictionary[Optimizer, Snapshot] = WeakKeyDictionary()
"""The trees of optimizers at the last update. They are not fields, which captured calls guard."""


@cache
def _rule_of(kind: Any, names: tuple[str, ...]) -> tuple[Callable[..., Any], ...]:
    """Return the scalars and the steps of an optimizer's rule as pure functions.

    The arguments are the values of the named hyperparameters, and tensors. A rule of mlvm reads
    only `count` from the optimizer."""

    def hyper_of(values: tuple[Any, ...]) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(names, values, strict=True)))

    def begin(count: Tensor, rules: Iterable[tuple[Any, ...]]) -> list[Tensors]:
        rule = object.__new__(kind)
        vars(rule)["count"] = count
        scalars = [
            rule._scalars(hyper_of(values), _in_dtype(rate, dtype)) for values, rate, dtype in rules
        ]
        apply_into(count, _ADD, count, scalar(1, count.dtype))
        return scalars

    def steps(
        values: tuple[Any, ...],
        scalars: Tensors,
        updates: Iterable[tuple[Tensor, Tensor, Tensors]],
    ) -> None:
        rule = object.__new__(kind)
        hyper = hyper_of(values)
        for p, g, state in updates:
            rule._step(hyper, p, rule._effective_gradient(hyper, p, g), state, scalars)

    return begin, steps


def zeros_beside(x: Tensor, type: TensorType) -> Tensor:
    """Return zeros of this type in the arena of x."""
    with x.arena.hosting():
        return creation.zeros(type.shape, dtype=type.dtype)


def _unknown(where: str, name: str, names: Iterable[str]) -> ArgumentError:
    return ArgumentError(f"{where} has no hyperparameter {name!r}; expected: {', '.join(names)}")


def _assigned(where: str, name: str, value: Any, kind: Any) -> Any:
    """Check an assigned hyperparameter.

    Schedules and traced numbers are not checked. In a captured function, only the type of a tensor
    learning rate is checked, because a captured function must not read values."""
    is_rate = name == "learning_rate"
    if type(value) is Number or (is_rate and callable(value)):
        return value
    if not is_rate or not isinstance(value, Tensor):
        return checked_field(where, name, value, kind)
    if value.shape != () or not (value.dtype.is_float or value.dtype.is_integer):
        raise ArgumentError(f"{where}: expected {name} as a number or f32[], got {value.type}")
    if current().recorder is None:
        checked(where, name, value, kind)
    return value


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={_text(x)}" for k, x in options.items())


def _text(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def _in_dtype(value: float | Tensor, dtype: DType) -> Tensor:
    return elements.astype(value, dtype) if isinstance(value, Tensor) else scalar(value, dtype)
