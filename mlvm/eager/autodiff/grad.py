"""Gradients of functions: `grad`, `value_and_grad` and `vjp`.

Each runs the function while a tape records, and then processes the tape in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import getclosurevars, signature, unwrap
from itertools import chain
from types import FunctionType
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from mlvm.arena.context import context
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    brief,
    user_line,
    with_article,
)
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.tape import CotangentAccumulator, Tape, Tracked, count_derivative, taping
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.operands import as_operand
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes
from mlvm.eager.tensor.warn import NoEffectWarning, warn_at
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import (
    Copies,
    Leaves,
    Node,
    Structure,
    Tree,
    Where,
    as_dicts,
    at_operands,
    copied,
    flatten,
    map_to_dicts,
    partners,
    pruned,
    rebind_buffers,
    selected,
    unflatten,
)

P = ParamSpec("P")
A = TypeVar("A")


class Collector(Protocol):
    """Collector of gradients; it gets each gradient as soon as it is final, in backward order."""

    def add(self, i: int, g: Tensor) -> None:
        """Add the gradient of variable number i; no other object uses the gradient's memory."""

    def finish(self) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Return the collected value, and the collected gradients by number."""


Collect: TypeAlias = Callable[[Tensor, Sequence[Tree], Sequence[Tensor]], Collector]
"""Function that creates the collector from a value, arguments, and distinct variables in order."""


class _Session:
    """One differentiation: the arguments for the call of a function, and the tape that it fills.

    The function gets variables: new tensors over the same bytes. Threads may therefore share
    tensors, and an update of a variable does not change the caller's tensor. Other tensors that the
    function reads are constants, and so are tensors of arguments that `where` does not select. A
    tensor that occurs twice in one argument is one variable; in two arguments it is two.

    Attributes:
        outer: the tape of an outer differentiation, if there is one.
        tape: the outer tape, or a new one.
        variables: each variable once, in argument order.
        origins: the tape nodes of the variables.
        copies: the copied Modules; the function may rebind buffers of these.
        arguments: trees with variables instead of tensors.
        start: the first tape node of the function.
        unreached: the nodes of variables on which no value has depended.
    """

    def __init__(self, arguments: Sequence[Tree], where: Where | None = None) -> None:
        outer = taping()
        self.outer, self.tape = outer, outer or Tape()
        flat = [_of_tensors(*flatten(each, ends=at_operands)) for each in arguments]
        active = [leaves for leaves, _ in flat]
        if where is not None:
            ids = selected([each for leaves in active for each in leaves], where)
            active = [[each for each in leaves if id(each[1]) in ids] for leaves in active]
        for path, x in chain.from_iterable(active):
            if not x.dtype.is_inexact:
                place = f" at {path}" if path else ""
                raise DTypeError(
                    f"expected floats or complex numbers to differentiate with respect to, got "
                    f"{x.type}{place}; a constant in a Module is an nn.buffer; write 2.0 for "
                    f"2, or convert with astype"
                )
        self.variables: list[Tensor] = []
        self.origins: list[int] = []  # nodes of the variables, which the function may update
        self.copies: Copies = []
        self.arguments: list[Tree] = []
        self._structures: list[tuple[Structure, list[int]]] = []  # with the node of each leaf
        for (leaves, structure), active_leaves in zip(flat, active, strict=True):
            once = {id(x): x for _, x in active_leaves}
            variables = {key: self.tape.watch(x) for key, x in once.items()}
            self.variables += variables.values()
            self.origins += [each.node for each in variables.values()]
            replaced = [variables.get(id(x), x) for _, x in leaves]
            self.arguments.append(copied(structure, replaced, self.copies))
            if where is not None:
                structure = pruned(structure, [id(x) in once for _, x in leaves])
            nodes = [variables[id(x)].node for _, x in active_leaves]
            self._structures.append((structure, nodes))
        self.start = len(self.tape.nodes)
        count_derivative()
        self.number = self.tape.sessions
        self.unreached: set[int] = set()  # nodes of variables on which no value has depended

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context(tape=self.tape):
            result = fn(*args, **kwargs)
        rebind_buffers(self.copies)
        return result

    def pull(
        self, outs: Sequence[Tensor | Tracked], seeds: Sequence[Tensor], *, keep: bool
    ) -> list[Tree]:
        """Return the cotangents as trees like the arguments, with zeros for unused variables.

        No two cotangents share memory, because an in-place update of a cotangent must not change
        another cotangent. A variable that occurs twice gets the same cotangent in both positions.
        """
        keep = keep or self.outer is not None
        cotangents = self.tape.cotangents(outs, seeds, self.origins, self.start, keep=keep)
        in_use = {id(seed) for seed in seeds}
        by_node: dict[int, Tensor] = {}
        for x, origin, g in zip(self.variables, self.origins, cotangents, strict=True):
            if origin in by_node:
                continue
            if g is None:
                self.unreached.add(origin)
                g = full(x.shape, 0.0, dtype=x.dtype)
            elif g.base is not None or id(g) in in_use:
                g = op.copy(g)
            in_use.add(id(g))
            by_node[origin] = g
        return self._as_trees(by_node)

    def _as_trees(self, by_node: Mapping[int, Tensor]) -> list[Tree]:
        """Return trees like the arguments, from one tensor for the node of each variable."""
        return [
            as_dicts(each, [by_node[node] for node in nodes]) for each, nodes in self._structures
        ]

    def pull_into(self, out: Tensor, seed: Tensor, collect: Collect) -> tuple[Tensor, list[Tree]]:
        """Return the collector's value, and trees of gradients."""
        collector = collect(op.copy(out), self.arguments, self.variables)
        numbers = {origin: i for i, origin in reversed([*enumerate(self.origins)])}

        def final(number: int, g: Tensor | None, others: CotangentAccumulator) -> None:
            x = self.variables[numbers[number]]
            if g is None:
                self.unreached.add(number)
                g = full(x.shape, 0.0, dtype=x.dtype)
            elif self.tape.keeps(g) or others.share(g):
                g = op.copy(g)
            collector.add(numbers[number], g if g.base is None else op.copy(g))

        self.tape.cotangents([out], [seed], self.origins, self.start, keep=False, final=final)
        value, gradients = collector.finish()
        return value, self._as_trees({origin: gradients[i] for origin, i in numbers.items()})

    def require_reached(self, fn: Callable[..., Any]) -> None:
        """Warn if the value of `fn` depends on no parameter of a Module among the arguments.

        A value that depends on gradients is exempt, because the gradients of a linear function are
        constants."""
        if self.tape.sessions > self.number:
            return
        is_lost = bool(self.origins) and self.unreached.issuperset(self.origins)
        if self.tape.read_at is not None and is_lost:
            warn_at(
                user_line(),
                f"the gradient is zero: {self.tape.read_at} reads values of a tensor, and no "
                f"gradient goes through arrays; compute with functions of ml",
                NoEffectWarning,
            )
            return
        name = getattr(fn, "__name__", type(fn).__name__)
        text = f"{name} does not use its argument"
        if self.tape.has_lost:
            text = (
                f"{name} uses its argument only through operations without a gradient: argmax, "
                f"comparisons, casts to integers"
            )
        models = [each for each in self._structures if isinstance(each[0].container, Node)]
        for structure, nodes in models:
            model = structure.container
            if nodes and self.unreached.issuperset(nodes):
                place = _name_of(model, unwrap(fn))
                reason = text
                if place is not None:
                    reason = f"{name} reads the {place}, not its argument; compute with it"
                warn_at(
                    user_line(),
                    f"the gradient with respect to this {type(model).__name__} is zero, as it "
                    f"reaches none of its parameters: {reason}",
                    NoEffectWarning,
                )
        if is_lost and self.tape.has_lost and not models:
            warn_at(user_line(), f"the gradient is zero: {text}", NoEffectWarning)

    def close(self) -> None:
        """Delete the tape's nodes and saved values, unless an outer differentiation uses them."""
        if self.outer is None:
            self.tape.nodes.clear()
            self.tape.saved_roots.clear()
            self.tape.within = None  # a tensor that was updated in it may outlive it
            live_tapes.discard(self.tape)

    def __del__(self) -> None:
        if hasattr(self, "tape"):  # an interrupt may have ended the constructor
            self.close()


@overload
def value_and_grad(
    fn: Callable[P, Tensor],
    argnums: int | Sequence[int] | None = None,
    *,
    argnames: str | Sequence[str] | None = None,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, tuple[Tensor, Any]]: ...
@overload
def value_and_grad(
    fn: Callable[P, tuple[Tensor, A]],
    argnums: int | Sequence[int] | None = None,
    *,
    argnames: str | Sequence[str] | None = None,
    has_aux: Literal[True],
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, tuple[tuple[Tensor, A], Any]]: ...
@hinted
def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    *,
    argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[..., Any]:
    """Return a function that returns `fn`'s value and the gradient with respect to `argnums`.

    Arguments:

    - `fn`: a function that returns a float tensor of shape ().

    - `argnums`: the index of a positional argument, or a tuple of indices; negative indices count
      from the last. Default: 0.

    - `argnames`: the name of an argument, or several names, for which the gradients are a dict. If
      both `argnums` and `argnames` are given, the gradient is a pair of both.

    - `has_aux`: `fn` returns a pair of the value and any other object, and the result is `((value,
      aux), gradient)`. Default: False.

    - `holomorphic`: for complex arguments and a complex value, compute the complex derivative
      df/dz. Default: False.

    - `where`: selects the variables, as in `Module.freeze`: a pattern for tensor paths, in which
      `*` also matches "/", or a function of path and tensor. All other tensors are constants; in
      the gradient they are missing, or None in a list.

    The selected arguments are trees of float or complex tensors, arrays and numbers, which `fn`
    gets as tensors. A gradient has the same structure as the argument, with dicts for Modules, and
    zeros where the value does not depend on a tensor. A `NoEffectWarning` is issued if the value
    depends on no tensor of a Module, or on the arguments only through a comparison, an argmax or a
    cast to integers. A tensor that occurs twice in one argument is one variable, with one gradient
    in both positions.

    The gradient with respect to a complex z = x + iy is dL/dx + i dL/dy, as in PyTorch: the
    direction of steepest ascent (Kreutz-Delgado, "The Complex Gradient Operator", 2009).

    Everything else is a constant: no gradient flows through it, and no error is raised. Constants
    are tensors that `fn` reads from the environment, such as a parameter in a closure. Results of
    other dtypes are also constants, for example of a comparison, `argmax` or a cast to integers,
    even if they are cast back. Piecewise constant ops with float results (`floor`, `round`, `sign`,
    ...) have no gradient; `stop_gradient` turns a tensor into a constant.

    Raises `GradientError` if the value is not a scalar, or depends on an argument through an op
    without a gradient; `DTypeError` if an argument contains tensors of other dtypes;
    `ArgumentError` if `where` selects none of them, or `fn` has no argument with a given name.

        >>> ml.value_and_grad(lambda x: ml.sum(x**2))(ml.asarray([1.0, 2.0]))
        (Tensor(5., f32[]), Tensor([2., 4.], f32[2]))
        >>> params = {"w": ml.ones(2), "b": ml.ones(1)}
        >>> ml.value_and_grad(lambda p: ml.sum(p["w"] * p["b"]), where="b")(params)
        (Tensor(2., f32[]), {'b': Tensor([2.], f32[1])})
        >>> ml.grad(lambda x, *, scale: ml.sum(x * scale), argnames="scale")(ml.ones(2), scale=3.0)
        Tensor(2., f32[])

    Invalid calls:
        ml.value_and_grad(ml.sum, where="w")(x)  # ArgumentError
        ml.grad(lambda x: ml.sum(x), argnames="y")  # ArgumentError
        ml.value_and_grad(ml.sum)(ints)  # DTypeError
        ml.value_and_grad(lambda x: x)(v)  # GradientError
    """
    options = {"has_aux": has_aux, "holomorphic": holomorphic, "where": where}
    return _differentiated(fn, argnums, argnames, options)


def _differentiated(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] | None,
    argnames: str | Sequence[str] | None,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return the function of `value_and_grad`.

    Arguments by name are passed as one additional argument, a dict, before the other arguments."""
    if argnames is None:
        return collecting(fn, 0 if argnums is None else argnums, **options)
    require_function(fn)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    positions = _positions_of(fn, names)

    def of_dict(named: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for name, x in named.items():
            place = positions.get(name, len(values))
            if name in kwargs or place >= len(values):
                kwargs[name] = x
            else:
                values[place] = x
        return fn(*values, **kwargs)

    numbers: tuple[int, ...] = () if argnums is None else as_argnums(argnums)
    after = tuple([number + (number >= 0) for number in numbers])
    differentiated = collecting(of_dict, (0, *after), **options)

    @wraps(fn, updated=())
    def by_name(*args: Any, **kwargs: Any) -> Any:
        named = {}
        for name in names:
            place = positions.get(name, len(args))
            if name not in kwargs and place >= len(args):
                raise ArgumentError(f"argnames: the call has no argument {name!r}; pass {name}=")
            named[name] = kwargs[name] if name in kwargs else args[place]
        result, (gradients, *others) = differentiated(named, *args, **kwargs)
        mine = gradients[argnames] if isinstance(argnames, str) else gradients
        if argnums is None:
            return result, mine
        return result, (others[0] if isinstance(argnums, int) else tuple(others), mine)

    return by_name


def _positions_of(fn: Callable[..., Any], names: Sequence[str]) -> dict[str, int]:
    """Return the positions of the named parameters that may be passed by position.

    Raises `ArgumentError` if the function has no parameter with a given name."""
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"argnames: expected names of arguments, got {brief(names)}")
    try:
        parameters = signature(fn).parameters
    except (TypeError, ValueError):  # a function in C
        return {}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [name for name in names if name not in parameters and not takes_any]
    if unknown:
        listed = ", ".join(parameters) or "none"
        raise ArgumentError(f"argnames: expected names among {listed}, got {unknown[0]!r}")
    by_place = [n for n, each in parameters.items() if each.kind < each.VAR_POSITIONAL]
    return {name: place for place, name in enumerate(by_place)}


def collecting(
    fn: Callable[..., Any],
    argnums: int | Sequence[int],
    *,
    has_aux: bool,
    holomorphic: bool = False,
    where: Where | None = None,
    collect: Collect | None = None,
) -> Callable[..., Any]:
    """Return the function of `value_and_grad`.

    With `collect` the collector returns the gradients, which cannot be differentiated again."""
    require_function(fn)
    several = not isinstance(argnums, int)
    requested = as_argnums(argnums)

    @wraps(fn, updated=())
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        numbers = resolve_argnums(requested, args)
        session = _Session([args[i] for i in numbers], where)
        try:
            result = session.run(fn, *with_args(args, numbers, session.arguments), **kwargs)
            value = _scalar(result, has_aux, holomorphic)
            if holomorphic:
                _require_complex(session.variables)
            one = full((), 1.0, dtype=value.dtype)
            if collect is None:
                gradients = session.pull([value], [one], keep=False)
                if holomorphic:
                    gradients = map_to_dicts(op.conj, gradients)
            elif session.outer is not None:
                raise GradientError(
                    "gradients that a group has averaged cannot be differentiated again; "
                    "differentiate before the average"
                )
            else:
                value, gradients = session.pull_into(value, one, collect)
            if session.unreached:
                session.require_reached(fn)
        finally:
            session.close()
        if value.tape is not session.tape:  # the function may have returned an outer tensor
            value = alias_of(value)
        primal = (value, result[1]) if has_aux else value
        return primal, tuple(gradients) if several else gradients[0]

    return differentiated


@overload
def grad(
    fn: Callable[P, Tensor],
    argnums: int | Sequence[int] | None = None,
    *,
    argnames: str | Sequence[str] | None = None,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, Any]: ...
@overload
def grad(
    fn: Callable[P, tuple[Tensor, A]],
    argnums: int | Sequence[int] | None = None,
    *,
    argnames: str | Sequence[str] | None = None,
    has_aux: Literal[True],
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, tuple[Any, A]]: ...
@hinted
def grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    *,
    argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[..., Any]:
    """Return a function that returns the gradient of `fn`, as `value_and_grad` describes it.

    With `has_aux` it returns `(gradient, aux)`.

    Raises the errors of `value_and_grad`.

        >>> ml.grad(lambda x: ml.sum(x**3))(ml.asarray([1.0, 2.0]))
        Tensor([ 3., 12.], f32[2])
    """
    options = {"has_aux": has_aux, "holomorphic": holomorphic, "where": where}
    differentiated = _differentiated(fn, argnums, argnames, options)

    @wraps(fn, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        result, gradients = differentiated(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return gradient


@overload
def vjp(
    fn: Callable[..., Any], *primals: Tree, has_aux: Literal[False] = False
) -> tuple[Any, Callable[[Any], Any]]: ...
@overload
def vjp(
    fn: Callable[..., Any], *primals: Tree, has_aux: Literal[True]
) -> tuple[Any, Callable[[Any], Any], Any]: ...
@hinted
def vjp(fn: Callable[..., Any], *primals: Tree, has_aux: bool = False) -> Any:
    """Return `fn(*primals)`, and a function that maps a cotangent of it to the primals' cotangents.

    The function returns a tuple, and may be called repeatedly. As long as it exists, it keeps the
    values that it needs: an update in place moves the tensor to other memory. With `has_aux`, `fn`
    returns a pair of the value and any other object, which is the third result.

    The value: [...], floats, or a tree of tensors. The cotangent has the same structure and types;
    a number, a list or an array may replace a tensor. The cotangent of a result that is not a float
    is None. Raises the errors of `value_and_grad`, and `GradientError` if the value contains no
    float, or a cotangent has a different type than the value. Warns as `value_and_grad` does.

        >>> y, pull = ml.vjp(ml.sin, ml.asarray([0.0]))
        >>> pull(ml.ones(1))
        (Tensor([1.], f32[1]),)
        >>> (y, z), pull = ml.vjp(lambda x: (x * 2.0, x * x), ml.asarray(3.0))
        >>> pull((1.0, 1.0))
        (Tensor(8., f32[]),)

    Invalid calls:
        ml.vjp(ml.sin, ints)  # DTypeError
        ml.vjp(ml.sin, v)[1](x)  # GradientError
    """
    require_function(fn)
    session = _Session(primals)
    try:
        result = session.run(fn, *session.arguments)
        aux = None
        if has_aux:
            result, aux = as_pair(result)
        results, structure = _results(result)
    except BaseException:
        session.close()
        raise

    values = [value if value.tape is session.tape else alias_of(value) for value in results]
    tracked = [Tracked(y.type, y.tape, getattr(y, "node", 0)) for y in values]
    if not any(y.tape is session.tape for y in values):
        session.unreached.update(session.origins)
        session.require_reached(fn)

    def pullback(cotangent: Any) -> Any:
        leaves = partners(structure, cotangent, are_alike, _differ)
        pairs = [
            (y, _cotangent(y.type, g))
            for y, g in zip(tracked, leaves, strict=True)
            if y.type.dtype.is_inexact or g is not None
        ]
        return tuple(session.pull([y for y, _ in pairs], [g for _, g in pairs], keep=True))

    value = unflatten(structure, values)
    return (value, pullback, aux) if has_aux else (value, pullback)


def _results(result: Tree) -> tuple[list[Tensor], Structure]:
    """Return the tensors of a function's result. Raises `GradientError` if none is a float."""
    try:
        leaves, structure = flatten(result)
    except DTypeError:
        leaves, structure = [], None
    if structure is None or not any(y.dtype.is_inexact for _, y in leaves):
        raise GradientError(
            f"expected a function that returns a tree of float or complex tensors, "
            f"got {_kind(result)}"
        )
    return [y for _, y in leaves], structure


def _cotangent(type: TensorType, g: Any) -> Tensor:
    """Convert g to a cotangent of a value of that type.

    Raises `GradientError` if the type of g differs."""
    if not type.dtype.is_inexact:
        raise GradientError(
            f"expected None as the cotangent of {type}, which is not a float, got {_kind(g)}"
        )
    if g is not None and not isinstance(g, (Tensor, dict, tuple)):
        g = asarray(g, dtype=type.dtype)
    if not isinstance(g, Tensor) or g.type is not type:
        raise GradientError(f"expected {type} as the cotangent, got {_kind(g)}")
    return g


def are_alike(tree: Tree, other: Tree) -> bool:
    """Return whether two nodes have the same type, or one is a Module and the other a dict."""
    return type(tree) is type(other) or (isinstance(other, dict) and isinstance(tree, Node))


def _differ(path: str, tree: Tree, other: Tree) -> NoReturn:
    where = f" at {path}" if path else ""
    raise GradientError(
        f"expected a cotangent with the structure of the value: {_kind(tree)}{where}, "
        f"got {_kind(other)}"
    )


def _of_tensors(leaves: Leaves, structure: Structure) -> tuple[Leaves, Structure]:
    """Return the leaves with arrays and numbers replaced by new tensors."""
    return [(path, x if isinstance(x, Tensor) else as_operand(x)) for path, x in leaves], structure


def as_argnums(argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Return the indices of arguments as a tuple.

    Raises `GradientError` for any value except an int or different ints."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if (
        not isinstance(numbers, (tuple, list))
        or any(not isinstance(i, int) or isinstance(i, bool) for i in numbers)
        or len(set(numbers)) < len(numbers)
    ):
        raise GradientError(
            f"argnums: expected an int or a tuple of different ints, got {brief(argnums)}"
        )
    return tuple(numbers)


def resolve_argnums(numbers: tuple[int, ...], args: Sequence[Any]) -> tuple[int, ...]:
    """Resolve negative indices, which count from the last argument.

    Raises `GradientError` if there is no such argument, and if two indices select the same
    argument."""
    positions = tuple([i + len(args) if i < 0 else i for i in numbers])
    for i, number in zip(positions, numbers, strict=True):
        if not 0 <= i < len(args):
            if not args:
                raise GradientError("expected a positional argument to differentiate, got none")
            raise GradientError(
                f"expected argnums from {-len(args)} to {len(args) - 1}, for the positional "
                f"arguments, got {number}"
            )
    if len(set(positions)) < len(positions):
        raise GradientError(f"expected argnums of different arguments, got {numbers}")
    return positions


def with_args(args: Sequence[Any], numbers: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return the arguments, with those at the given indices replaced."""
    by_number = dict(zip(numbers, others, strict=True))
    return [by_number.get(i, arg) for i, arg in enumerate(args)]


def as_pair(result: object) -> tuple[Any, Any]:
    """Return the result of a function with `has_aux`.

    Raises `GradientError` unless it is a pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise GradientError(
            f"has_aux=True: expected a pair from the function, got {_kind(result)}; "
            "return (loss, aux)"
        )
    return result


def _scalar(result: object, has_aux: bool, holomorphic: bool) -> Tensor:
    """Return the value to differentiate from a function's result.

    Raises `GradientError` unless it is a scalar."""
    value = as_pair(result)[0] if has_aux else result
    if holomorphic:
        if isinstance(value, Tensor) and value.shape == () and value.dtype.kind == "complex":
            return value
        raise GradientError(
            f"holomorphic=True: expected a complex scalar to differentiate, got {_kind(value)}"
        )
    if not isinstance(value, Tensor) or value.shape != () or not value.dtype.is_float:
        hint = ""
        if isinstance(value, Tensor) and value.dtype.kind == "complex":
            hint = "; take the real part, or the absolute value, or see holomorphic=True"
        elif isinstance(value, Tensor) and value.shape:
            hint = "; take ml.sum or ml.mean, or see ml.vjp"
        elif isinstance(value, tuple) and not has_aux:
            hint = "; a loss with other values is returned with has_aux=True"
        elif not isinstance(value, Tensor):
            hint = "; return a loss that functions of ml compute from the arguments"
        got = f"the number {value}" if type(value) in (int, float) else _kind(value)
        raise GradientError(f"expected a float scalar to differentiate, got {got}{hint}")
    return value


def _require_complex(variables: Sequence[Tensor]) -> None:
    for x in variables:
        if x.dtype.kind != "complex":
            raise DTypeError(f"holomorphic=True: expected complex arguments, got {x.type}")


def _name_of(model: Node, fn: Any, depth: int = 3) -> str | None:
    """Return the name of a variable with a tensor of the Module, such as "local variable 'w'".

    The function, or a function that it calls, reads this variable."""
    if not isinstance(fn, FunctionType) or not depth:
        return None
    ids, names = {id(x) for _, x in flatten(model)[0]}, []
    places = getclosurevars(fn)
    for kind, variables in (("local", places.nonlocals), ("global", places.globals)):
        for name, value in variables.items():
            if isinstance(value, Node) and any(id(x) in ids for _, x in flatten(value)[0]):
                return f"{kind} variable {name!r}"
            names.append(_name_of(model, value, depth - 1))
    return next(filter(None, names), None)


def require_function(fn: object) -> None:
    if not callable(fn):
        raise GradientError(
            f"expected a function to differentiate, got {_kind(fn)}: write "
            f"ml.grad(loss_of)(model), where loss_of(model) computes the loss"
        )


def _kind(value: object) -> str:
    return str(value.type) if isinstance(value, Tensor) else with_article(type(value).__name__)
