"""Gradients of functions: `grad`, `value_and_grad` and `vjp` run one with a tape on, and walk it
backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import getclosurevars, unwrap
from types import FunctionType
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from mlvm.core.errors import DTypeError, GradientError, brief, user_line
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.tape import CotangentAccumulator, Tape, Tracked, taping
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.context import taped
from mlvm.eager.tensor.operands import as_operand
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes
from mlvm.eager.tensor.warn import NoEffectWarning, warn_at
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
    """What takes gradients as soon as each is final, in the order of the way back."""

    def add(self, i: int, g: Tensor) -> None:
        """Take the gradient of variable number i, which has memory of its own."""

    def finish(self) -> tuple[Tensor, Mapping[int, Tensor]]:
        """What has become of the value, and of the gradients by number."""


Collect: TypeAlias = Callable[[Tensor, Sequence[Tree], Sequence[Tensor]], Collector]
"""Makes the collector for a value, arguments, and their variables, each once, in order."""


class _Session:
    """One differentiation: the arguments to call a function with, and the tape it fills.

    The function gets other tensors over the same bytes, the variables. So threads may share
    tensors. An update of a variable is none of the caller's. A tensor that the function reaches in
    another way is a constant, and so is one of the arguments that `where` does not mean. One that
    occurs twice in one argument is one variable; in two arguments it is two.
    """

    def __init__(self, arguments: Sequence[Tree], where: Where | None = None) -> None:
        self.outer = taping()
        self.tape = self.outer or Tape()
        flat = [_of_tensors(*flatten(each, ends=at_operands)) for each in arguments]
        wanted = [found for found, _ in flat]
        if where is not None:
            ids = selected([each for found in wanted for each in found], where)
            wanted = [[each for each in found if id(each[1]) in ids] for found in wanted]
        for found in wanted:
            for path, x in found:
                if not x.dtype.is_inexact:
                    where = f" at {path}" if path else ""
                    raise DTypeError(
                        f"a gradient is with respect to floats and complex numbers, not "
                        f"{x.type}{where}; a constant in a Module is an nn.buffer; write 2.0 for "
                        f"2, or convert with astype"
                    )
        self.variables: list[Tensor] = []
        self.origins: list[int] = []  # their nodes, as the function may update them
        self.copies: Copies = []
        self.arguments: list[Tree] = []
        self._structures: list[tuple[Structure, list[int]]] = []  # with the node of each leaf
        for (found, structure), of_these in zip(flat, wanted, strict=True):
            once = {id(x): x for _, x in of_these}
            variables = {key: self.tape.watch(x) for key, x in once.items()}
            self.variables += variables.values()
            self.origins += [each.node for each in variables.values()]
            given = [variables.get(id(x), x) for _, x in found]
            self.arguments.append(copied(structure, given, self.copies))
            if where is not None:
                structure = pruned(structure, [id(x) in once for _, x in found])
            nodes = [variables[id(x)].node for _, x in of_these]
            self._structures.append((structure, nodes))
        self.start = len(self.tape.nodes)
        self.tape.sessions += 1
        self.number = self.tape.sessions
        self.unreached: set[int] = set()  # variables that no value has depended on, by their nodes

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with taped(self.tape):
            result = fn(*args, **kwargs)
        rebind_buffers(self.copies)
        return result

    def pull(
        self, outs: Sequence[Tensor | Tracked], seeds: Sequence[Tensor], *, keep: bool
    ) -> list[Tree]:
        """The cotangents as trees like the arguments; zeros for what no result depends on.

        Each has memory of its own: an update in place of one must not change another. A variable
        that occurs twice has the same cotangent in both places.
        """
        keep = keep or self.outer is not None
        cotangents = self.tape.cotangents(outs, seeds, self.origins, self.start, keep=keep)
        taken = {id(seed) for seed in seeds}
        made: dict[int, Tensor] = {}
        for x, origin, g in zip(self.variables, self.origins, cotangents, strict=True):
            if origin in made:
                continue
            if g is None:
                self.unreached.add(origin)
                g = full(x.shape, 0.0, dtype=x.dtype)
            elif g.base is not None or id(g) in taken:
                g = op.copy(g)
            taken.add(id(g))
            made[origin] = g
        return self._as_trees(made)

    def _as_trees(self, made: Mapping[int, Tensor]) -> list[Tree]:
        """Trees like the arguments, of what was made for the node of each variable."""
        return [as_dicts(each, [made[node] for node in nodes]) for each, nodes in self._structures]

    def pull_into(self, out: Tensor, seed: Tensor, collect: Collect) -> tuple[Tensor, list[Tree]]:
        """The value and what `pull` returns, as the collector makes them."""
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
        value, made = collector.finish()
        return value, self._as_trees({origin: made[i] for origin, i in numbers.items()})

    def require_reached(self, fn: Callable[..., Any]) -> None:
        """Warn where the value of `fn` depends on no parameter of a Module among the arguments,
        unless it is made of gradients: those of a linear function depend on none."""
        if self.tape.sessions > self.number:
            return
        if self.tape.read_at is not None and self.unreached.issuperset(self.origins):
            warn_at(
                user_line(),
                f"the gradient is zero: {self.tape.read_at} reads values of a tensor, and no "
                f"gradient goes through arrays; compute with functions of ml",
                NoEffectWarning,
            )
        for structure, nodes in self._structures:
            model = structure.container
            if isinstance(model, Node) and nodes and self.unreached.issuperset(nodes):
                name = getattr(fn, "__name__", type(fn).__name__)
                place = _name_of(model, unwrap(fn))
                text = f"{name} does not use its argument"
                if place is not None:
                    text = f"{name} reads the {place}, not its argument; compute with the argument"
                warn_at(
                    user_line(),
                    f"the gradient with respect to this {type(model).__name__} is zero, as it "
                    f"reaches none of its parameters: {text}",
                    NoEffectWarning,
                )

    def close(self) -> None:
        """Drop what the tape keeps alive, unless the tape belongs to an outer differentiation."""
        if self.outer is None:
            self.tape.nodes.clear()
            self.tape.kept.clear()
            self.tape.within = None  # what is updated in it may outlive it
            live_tapes.discard(self.tape)

    def __del__(self) -> None:
        self.close()


@overload
def value_and_grad(
    fn: Callable[P, Tensor],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, tuple[Tensor, Any]]: ...
@overload
def value_and_grad(
    fn: Callable[P, tuple[Tensor, A]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, tuple[tuple[Tensor, A], Any]]: ...
def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[..., Any]:
    """A function that returns `fn`'s value and its gradient with respect to `argnums`.

    `argnums` is the number of an argument by position, or a tuple of such; below 0 it counts from
    the last. `fn` returns a float tensor of shape (); with `has_aux` a pair of it and anything
    else, which comes back as `((value, aux), gradient)`. The arguments named by `argnums` are trees
    of float or complex tensors, arrays and numbers, which `fn` gets as tensors; a gradient has its
    argument's structure, with dicts for Modules, and zeros where the value does not depend on a
    tensor; a Module of which it depends on no tensor is warned of, by `NoEffectWarning`. A tensor
    that occurs twice in one argument is one variable, with one gradient in both places.

    `where` says with respect to which of the arguments' tensors: a pattern of their paths, in which
    `*` matches "/" too, or a function of path and tensor, as in `Module.freeze`. The others are
    constants; in the gradient they are missing, or None in a list.

    The gradient with respect to a complex z = x + iy is dL/dx + i dL/dy, as in PyTorch: the
    direction of steepest ascent (Kreutz-Delgado, The Complex Gradient Operator and the
    CR-Calculus, 2009). With `holomorphic`, of complex arguments and a complex value, it is the
    complex derivative df/dz.

    All else is a constant: no gradient flows through it, and no error is raised. Constants are the
    tensors that `fn` reaches without these arguments, such as a parameter it closes over, and
    results that are no floats, such as those of a comparison, `argmax`, or a cast to integers, even
    if it is cast back. Ops with float results that are constant in pieces (`floor`, `round`,
    `sign`, ...) have no gradient; `stop_gradient` makes constants of them.

    Raises `GradientError` when the value is no scalar, or depends on an argument through an op
    that has no gradient; `DTypeError` when an argument holds tensors of other dtypes;
    `ArgumentError` when `where` means none of them.

        >>> ml.value_and_grad(lambda x: ml.sum(x**2))(ml.asarray([1.0, 2.0]))
        (Tensor(5., f32[]), Tensor([2., 4.], f32[2]))
        >>> params = {"w": ml.ones(2), "b": ml.ones(1)}
        >>> ml.value_and_grad(lambda p: ml.sum(p["w"] * p["b"]), where="b")(params)
        (Tensor(2., f32[]), {'b': Tensor([2.], f32[1])})

    Refuses:
        ml.value_and_grad(ml.sum, where="w")(x)  # ArgumentError
        ml.value_and_grad(ml.sum)(ints)  # DTypeError
        ml.value_and_grad(lambda x: x)(v)  # GradientError
    """
    return collecting(fn, argnums, has_aux=has_aux, holomorphic=holomorphic, where=where)


def collecting(
    fn: Callable[..., Any],
    argnums: int | Sequence[int],
    *,
    has_aux: bool,
    holomorphic: bool = False,
    where: Where | None = None,
    collect: Collect | None = None,
) -> Callable[..., Any]:
    """`value_and_grad`; with `collect` the gradients are what the collector makes of them, and
    there is no gradient of these."""
    _require_function(fn)
    several = not isinstance(argnums, int)
    asked = as_argnums(argnums)

    @wraps(fn, updated=())
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        numbers = among(asked, args)
        session = _Session([args[i] for i in numbers], where)
        try:
            given = with_given(args, numbers, session.arguments)
            result = session.run(fn, *given, **kwargs)
            value = _scalar(result, has_aux, holomorphic)
            if holomorphic:
                _require_complex(session.variables)
            one = full((), 1.0, dtype=value.dtype)
            if collect is None:
                gradients = session.pull([value], [one], keep=False)
                if holomorphic:
                    gradients = map_to_dicts(op.conj, gradients)
            elif session.outer is not None:
                raise GradientError("there is no gradient of gradients that members have averaged")
            else:
                value, gradients = session.pull_into(value, one, collect)
            if session.unreached:
                session.require_reached(fn)
        finally:
            session.close()
        if value.tape is not session.tape:  # it may be one that the function reaches
            value = alias_of(value)
        primal = (value, result[1]) if has_aux else value
        return primal, tuple(gradients) if several else gradients[0]

    return differentiated


@overload
def grad(
    fn: Callable[P, Tensor],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, Any]: ...
@overload
def grad(
    fn: Callable[P, tuple[Tensor, A]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[P, tuple[Any, A]]: ...
def grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    where: Where | None = None,
) -> Callable[..., Any]:
    """A function that returns the gradient of `fn`, as `value_and_grad` describes it.

    With `has_aux` it returns `(gradient, aux)`.

    Raises what `value_and_grad` raises.

        >>> ml.grad(lambda x: ml.sum(x**3))(ml.asarray([1.0, 2.0]))
        Tensor([ 3., 12.], f32[2])
    """
    differentiated = collecting(fn, argnums, has_aux=has_aux, holomorphic=holomorphic, where=where)

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
def vjp(fn: Callable[..., Any], *primals: Tree, has_aux: bool = False) -> Any:
    """`fn(*primals)`, and a function from its cotangent to a tuple of the primals' cotangents.

    That function may be called any number of times. Until it is dropped, it keeps the values that
    it needs: an update in place moves the tensor to other memory. With `has_aux`, `fn` returns a
    pair of its value and anything else, which is the third result.

    The value: [...], floats, or a tree of tensors; its cotangent is one of the same structure and
    types, in which a number, a list or an array may stand for a tensor. A result that is no float
    has None for its cotangent. Raises what `value_and_grad` raises, and `GradientError` for a value
    without floats, and a cotangent of another type than the value.

        >>> y, pull = ml.vjp(ml.sin, ml.asarray([0.0]))
        >>> pull(ml.ones(1))
        (Tensor([1.], f32[1]),)
        >>> (y, z), pull = ml.vjp(lambda x: (x * 2.0, x * x), ml.asarray(3.0))
        >>> pull((1.0, 1.0))
        (Tensor(8., f32[]),)

    Refuses:
        ml.vjp(ml.sin, ints)  # DTypeError
        ml.vjp(ml.sin, v)[1](x)  # GradientError
    """
    _require_function(fn)
    session = _Session(primals)
    try:
        result = session.run(fn, *session.arguments)
        aux = None
        if has_aux:
            result, aux = as_pair(result)
        found, structure = _results(result)
    except BaseException:
        session.close()
        raise

    values = [value if value.tape is session.tape else alias_of(value) for value in found]
    known = [Tracked(y.type, y.tape, getattr(y, "node", 0)) for y in values]

    def pullback(cotangent: Any) -> Any:
        given = partners(structure, cotangent, _are_alike, _differ)
        pairs = [
            (y, _cotangent(y.type, g))
            for y, g in zip(known, given, strict=True)
            if y.type.dtype.is_inexact or g is not None
        ]
        return tuple(session.pull([y for y, _ in pairs], [g for _, g in pairs], keep=True))

    value = unflatten(structure, values)
    return (value, pullback, aux) if has_aux else (value, pullback)


def _results(result: Tree) -> tuple[list[Tensor], Structure]:
    """The tensors of what a function returned. Raises `GradientError` where none is a float."""
    try:
        found, structure = flatten(result)
    except DTypeError:
        found, structure = [], None
    if structure is None or not any(y.dtype.is_inexact for _, y in found):
        raise GradientError(
            f"vjp is of a function to float or complex tensors, alone or in a tree, not to "
            f"{_kind(result)}"
        )
    return [y for _, y in found], structure


def _cotangent(type: TensorType, g: Any) -> Tensor:
    """The cotangent of a value of that type. Raises `GradientError` for one of another."""
    if not type.dtype.is_inexact:
        raise GradientError(f"the cotangent of {type}, which is no float, is None, not {_kind(g)}")
    if g is not None and not isinstance(g, (Tensor, dict, tuple)):
        g = asarray(g, dtype=type.dtype)
    if not isinstance(g, Tensor) or g.type is not type:
        raise GradientError(f"the cotangent of {type} cannot be {_kind(g)}")
    return g


def _are_alike(tree: Tree, other: Tree) -> bool:
    return type(tree) is type(other) or (isinstance(other, dict) and isinstance(tree, Node))


def _differ(path: str, tree: Tree, other: Tree) -> NoReturn:
    where = f" at {path}" if path else ""
    raise GradientError(
        f"a cotangent has the structure of the value: {_kind(tree)}{where}, not {_kind(other)}"
    )


def _of_tensors(leaves: Leaves, structure: Structure) -> tuple[Leaves, Structure]:
    """The leaves with tensors in place of arrays and numbers, each a new one."""
    found = [(path, x if isinstance(x, Tensor) else as_operand(x)) for path, x in leaves]
    return found, structure


def as_argnums(argnums: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of arguments. Raises `GradientError` for what says none."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if (
        not isinstance(numbers, (tuple, list))
        or any(not isinstance(i, int) or isinstance(i, bool) for i in numbers)
        or len(set(numbers)) < len(numbers)
    ):
        raise GradientError(f"argnums is an int or a tuple of different ints, not {brief(argnums)}")
    return tuple(numbers)


def among(numbers: tuple[int, ...], args: Sequence[Any]) -> tuple[int, ...]:
    """The numbers, of which those below 0 count from the last argument. Raises `GradientError`
    where there is none of that number, and for two that name the same one."""
    found = tuple([i + len(args) if i < 0 else i for i in numbers])
    for i, number in zip(found, numbers, strict=True):
        if not 0 <= i < len(args):
            raise GradientError(
                f"argnums names argument {number}; {len(args)} were given by position"
            )
    if len(set(found)) < len(found):
        raise GradientError(f"argnums names an argument twice: {numbers}")
    return found


def with_given(args: Sequence[Any], numbers: Sequence[int], given: Sequence[Any]) -> list[Any]:
    """The arguments, with these in place of those of the numbers."""
    found = dict(zip(numbers, given, strict=True))
    return [found.get(i, arg) for i, arg in enumerate(args)]


def as_pair(result: object) -> tuple[Any, Any]:
    """What a function with `has_aux` returned. Raises `GradientError` for anything but a pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise GradientError(f"with has_aux a function returns a pair, not {_kind(result)}")
    return result


def _scalar(result: object, has_aux: bool, holomorphic: bool) -> Tensor:
    """The value to differentiate, out of what a function returned. Raises `GradientError`."""
    value = as_pair(result)[0] if has_aux else result
    if holomorphic:
        if isinstance(value, Tensor) and value.shape == () and value.dtype.kind == "complex":
            return value
        raise GradientError(
            f"with holomorphic=True a gradient is of a complex scalar, not of {_kind(value)}"
        )
    if not isinstance(value, Tensor) or value.shape != () or not value.dtype.is_float:
        hint = ""
        if isinstance(value, Tensor) and value.dtype.kind == "complex":
            hint = "; take the real part, or the absolute value, or see holomorphic=True"
        elif isinstance(value, Tensor) and value.shape:
            hint = "; take ml.sum or ml.mean of it, or see ml.vjp"
        elif isinstance(value, tuple) and not has_aux:
            hint = "; a loss with other values is returned with has_aux=True"
        raise GradientError(f"a gradient is of a float scalar, not of {_kind(value)}{hint}")
    return value


def _require_complex(variables: Sequence[Tensor]) -> None:
    for x in variables:
        if x.dtype.kind != "complex":
            raise DTypeError(f"with holomorphic=True arguments are complex, not {x.type}")


def _name_of(model: Node, fn: Any, depth: int = 3) -> str | None:
    """The global or local variable, in words, that has a tensor of the Module: one of the function,
    or of those that it calls."""
    if not isinstance(fn, FunctionType) or not depth:
        return None
    mine, names = {id(x) for _, x in flatten(model)[0]}, []
    places = getclosurevars(fn)
    for kind, variables in (("local", places.nonlocals), ("global", places.globals)):
        for name, value in variables.items():
            if isinstance(value, Node) and any(id(x) in mine for _, x in flatten(value)[0]):
                return f"{kind} variable {name!r}"
            names.append(_name_of(model, value, depth - 1))
    return next(filter(None, names), None)


def _require_function(fn: object) -> None:
    if not callable(fn):
        raise GradientError(
            f"a gradient is of a function, not of {_kind(fn)}: write ml.grad(loss_of)(model), "
            f"where loss_of(model) computes it"
        )


def _kind(value: object) -> str:
    return str(value.type) if isinstance(value, Tensor) else f"a {type(value).__name__}"
