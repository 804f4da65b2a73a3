"""`custom_vjp` and `custom_jvp`: functions with user-defined derivatives.

On a tape such a function is one node with the rule. In the trace of a transformation it is a
procedure with the rule. The transformation converts it to a procedure with a transformed rule, so
that an outer transformation also finds the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Generic, NoReturn, ParamSpec, TypeAlias, TypeVar

from mlvm.arena.context import context, current
from mlvm.core.errors import GradientError, StaleTensorError, brief, counted, takes, with_article
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.grad import are_alike, as_argnums, vjp
from mlvm.eager.autodiff.joint import Cotangents, Saved, Sums, add_node, or_zeros
from mlvm.eager.autodiff.tape import Tape, taping
from mlvm.eager.control import functions
from mlvm.eager.control.state import as_tree
from mlvm.eager.tensor.apply import alias_of, untracked
from mlvm.eager.tensor.autocast import in_present_precision
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.transform.trace import Tracer
from mlvm.eager.tree import (
    Structure,
    Tree,
    among_others,
    as_dicts,
    flatten,
    map,
    partners,
    unflatten,
)

P = ParamSpec("P")
R = TypeVar("R")

Tensors: TypeAlias = list[Tensor]
Maybe: TypeAlias = list[Tensor | None]


class CustomRule:
    """Function from tensors to tensors with a user-defined derivative.

    - `fwd`: for `custom_vjp`, from the arguments to the results and the residuals.

    - `bwd`: for `custom_vjp`, from residuals and the results' cotangents to the arguments'
      cotangents.

    - `jvp`: for `custom_jvp`, from arguments and tangents to results and tangents.

    The tangent or cotangent of a tensor that is not inexact is None.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[[Tensors], Tensors],
        *,
        fwd: Callable[[Tensors], tuple[Tensors, Tensors]] | None = None,
        bwd: Callable[[Tensors, Maybe], Maybe] | None = None,
        jvp: Callable[[Tensors, Maybe], tuple[Tensors, Maybe]] | None = None,
    ) -> None:
        self.name, self.fn = name, fn
        # rules that compute the value run later, outside of the present blocks
        self.fwd = None if fwd is None else in_present_precision(fwd)
        self.jvp = None if jvp is None else in_present_precision(jvp)
        self.bwd = bwd

    def __call__(self, args: Tensors) -> Tensors:
        tape, on = taping(), current().recorder
        tracked = tape is not None and any(x.tape is tape for x in args)
        operands = [untracked(x) for x in args] if tracked else args
        with context(tape=None if tape is None else _RefusingTape(self, tape)):
            if tracked and self.fwd is not None:
                outs, res = self.fwd(operands)
            elif tracked and self.jvp is not None and isinstance(on, Tracer):
                # the rule's jvp transforms the call
                outs, res = self.jvp(operands, [None] * len(operands))[0], []
            elif tracked:
                outs, res = self.fn(operands), []
            elif not isinstance(on, Tracer):
                return self.fn(operands)
            else:
                outputs: Tensors = functions.called(object(), self.name, operands, self.fn)
                callee = on.calls[-1].callee
                assert callee is not None  # the function was called
                callee.rule = self
                return outputs
        outs = [untracked(y) for y in outs]
        assert tape is not None  # the tape records an argument
        add_node(tape, outs, args, {}, [*args, *res], partial(self._vjp, outs, len(args)))
        return outs

    def with_fn(self, fn: Callable[[Tensors], Tensors]) -> CustomRule:
        """Return the same rule for a transformed function."""
        return CustomRule(self.name, fn, fwd=self.fwd, bwd=self.bwd, jvp=self.jvp)

    def no_tangent_error(self) -> GradientError:
        return GradientError(
            f"{self.name} has a custom_vjp, so it has no tangent; a custom_jvp has tangents and "
            f"gradients"
        )

    def captured_error(self, type: object) -> GradientError:
        return GradientError(
            f"{self.name}, which has a custom rule, uses {with_article(type)} from outside that is "
            f"differentiated; make it an argument"
        )

    def _vjp(self, outs: Tensors, nargs: int, gs_: Cotangents, saved: Saved, sums: Sums) -> Sums:
        """Return the cotangents of the arguments.

        Under an outer gradient `fwd` runs again, so that the residuals depend on the arguments.
        """
        args, res = list(saved[:nargs]), list(saved[nargs:])
        gs = _or_zeros(gs_, outs)
        if self.bwd is not None and self.fwd is not None:
            on = current().recorder
            if taping() is not None or (on is not None and on.outer):
                res = self.fwd(args)[1]
            return self.bwd(res, gs)
        jvp = self.jvp
        assert jvp is not None  # the function has a rule
        floats = [i for i, x in enumerate(args) if x.dtype.is_inexact]

        def linear(*ts: Tensor) -> Tensors:
            tangent_of = dict(zip(floats, ts, strict=True))
            _, tangents = jvp(args, [tangent_of.get(i) for i in range(nargs)])
            return [t for t in tangents if t is not None]

        zeros = [or_zeros(None, args[i].type) for i in floats]
        parts = vjp(linear, *zeros)[1]([g for g in gs if g is not None])
        cotangent_of = dict(zip(floats, parts, strict=True))
        return [cotangent_of.get(i) for i in range(nargs)]


class _RefusingTape:
    """Tape that raises for tensors of other tapes, while a function with a rule runs."""

    within: object = None
    has_lost: bool = False
    nodes: Sequence[Any] = ()

    def __init__(self, rule: CustomRule, tape: Tape) -> None:
        self.rule, self.tape = rule, tape

    def record(self, call: Any, operands: Sequence[Any], types: Any, out: Any) -> None:
        for x in operands:
            if x.tape is self.tape:
                raise self.rule.captured_error(x.type)

    def needs_operand(self, *_: Any) -> bool:
        return False

    def keeps(self, x: Any, stop: int | None = None) -> bool:
        return False

    def exchange(self, others: Any, x: Any) -> None:
        """Do nothing, because this tape saves no tensors."""


# --- the public decorators -------------------------------------------------------------


class _Arguments:
    """Arguments of a call: trees of tensors to differentiate, and all other arguments."""

    def __init__(self, owner: _CustomFunction[Any, Any], args: Sequence[Any]) -> None:
        self.owner, self.args = owner, args
        self.numbers = [i for i in range(len(args)) if i not in owner.nondiff_argnums]
        self.nondiff = [args[i] for i in owner.nondiff_argnums]
        flat = [flatten(as_tree(args[i]), ends=among_others) for i in self.numbers]
        self.structures = [structure for _, structure in flat]
        self.xs: Tensors = [x for leaves, _ in flat for _, x in leaves]
        self.out: Structure = flatten(None)[1]
        self.types: list[TensorType] = []
        self.res: Structure = self.out

    def trees(self, xs: Sequence[Tensor]) -> list[Tree]:
        """Return the differentiated arguments with these tensors."""
        rest = iter(xs)
        return [unflatten(s, [next(rest) for _ in range(s.size)]) for s in self.structures]

    def all(self, xs: Sequence[Tensor]) -> list[Any]:
        tree_of = dict(zip(self.numbers, self.trees(xs), strict=True))
        return [tree_of.get(i, arg) for i, arg in enumerate(self.args)]

    def slopes(self, ts: Sequence[Tensor | None]) -> list[Tree]:
        """Return trees of tangents, in the structure of the arguments."""
        rest = iter(ts)
        return [as_dicts(s, [next(rest) for _ in range(s.size)]) for s in self.structures]

    def result(self, out: Tree) -> Tensors:
        """Return the tensors of a result; store the structure."""
        leaves, self.out = flatten(as_tree(out), ends=among_others)
        self.types = [y.type for _, y in leaves]
        return [y for _, y in leaves]

    def fn(self, xs: Tensors) -> Tensors:
        return self.result(self.owner.fun(*self.all(xs)))

    def checked(
        self, structure: Structure, types: Sequence[TensorType], tree: Tree, what: str
    ) -> Maybe:
        """Return the leaves of tangents or cotangents.

        Raises `GradientError` if the type or structure differs from the expected one.
        """
        if tree is None:
            return [None] * structure.size

        def differ(path: str, tree: Tree, other: Tree) -> NoReturn:
            actual, expected = type(other).__name__, type(tree).__name__
            raise GradientError(
                f"{what}: expected {with_article(expected)}, got {with_article(actual)}"
            )

        leaves = partners(structure, tree, are_alike, differ)
        for x, type_ in zip(leaves, types, strict=True):
            if x is not None and (not isinstance(x, Tensor) or x.type is not type_):
                raise GradientError(f"{what}: expected {type_}, got {described(x)}")
            if x is not None and not type_.dtype.is_inexact:
                raise GradientError(f"{what}: expected None for {type_}, which is not a float")
        return leaves


def _or_zeros(ts: Sequence[Any], xs: Sequence[Tensor]) -> Maybe:
    """Return the tangents or cotangents of tensors, with zeros for absent ones of floats."""
    pairs = zip(ts, xs, strict=True)
    return [or_zeros(t, x.type) if x.dtype.is_inexact else None for t, x in pairs]


def _aliases(xs: Sequence[Any]) -> list[Any]:
    """Alias the tensors for a rule, which may update them."""
    return [None if x is None else alias_of(x) for x in xs]


def _pair(result: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise GradientError(f"{what}, got {brief(result)}")
    return result


class _CustomFunction(Generic[P, R]):
    """Function with a user-defined derivative."""

    __name__: str
    _defines = ""

    @hinted
    def __init__(self, fun: Callable[P, R], nondiff_argnums: int | Sequence[int] = ()) -> None:
        if not callable(fun):
            raise GradientError(f"{type(self).__name__}: expected a function, got {brief(fun)}")
        self.fun = fun
        self.nondiff_argnums = as_argnums(nondiff_argnums)
        update_wrapper(self, fun, updated=())
        if not hasattr(self, "__name__"):
            self.__name__ = "a function"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind the function as a method."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        positional: Sequence[Any] = args
        if kwargs:
            bound = inspect.signature(self.fun).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.kwargs:
                raise GradientError(
                    f"{self.__name__}: {', '.join(bound.kwargs)}: keyword-only "
                    f"arguments are not supported by {type(self).__name__}; pass them by position"
                )
            positional = bound.args
        arguments = _Arguments(self, positional)
        outputs = self._rule(arguments)(arguments.xs)
        return unflatten(arguments.out, outputs)  # type: ignore[no-any-return]

    def _rule(self, arguments: _Arguments) -> CustomRule:
        raise NotImplementedError

    def _undefined(self) -> GradientError:
        return GradientError(f"{self.__name__} has no rule; call {self.__name__}.{self._defines}")

    def _run(self, rule: Callable[..., Any], *args: Any) -> Any:
        """Call a rule; explain an invalidated tensor in it, which an enclosing trace created."""
        try:
            return rule(*args)
        except StaleTensorError as error:
            raise GradientError(
                f"{self.__name__}: its rule uses a tensor of an enclosing function; make "
                f"it an argument, or a residual"
            ) from error
        except TypeError:
            if takes(rule, len(args)):
                raise
            raise GradientError(
                f"{self.__name__}: expected a rule of {counted(len(args), 'argument')}, "
                f"got {brief(rule)}"
            ) from None


class custom_vjp(_CustomFunction[P, R]):
    """Function with a gradient that `defvjp` defines, like JAX's `custom_vjp`.

    `fwd` gets the arguments of the function, and returns the result and the residuals, a tree of
    tensors. `bwd` gets the residuals and the cotangent of the result. It returns a tuple with a
    cotangent for each argument: a tree like the argument, or None for zeros. Arguments in
    `nondiff_argnums` may be any objects; they are not differentiated, and `bwd` gets them first.

    The function and the rule must not use a differentiated tensor from outside: that raises
    `GradientError`. `jvp` of such a function also raises it; `jvp` of the gradient works. A rule is
    eager code, so it can be differentiated, and `vmap` runs it once for the batch.

    The tensors: any shapes. Raises `GradientError` for a missing rule, and for cotangents of wrong
    types.

        >>> @ml.custom_vjp
        ... def clipped(x):
        ...     return x
        >>> clipped.defvjp(lambda x: (x, None), lambda _, g: (ml.clip(g, -1.0, 1.0),))
        >>> ml.grad(lambda x: clipped(x) * 5.0)(ml.asarray(3.0))
        Tensor(1., f32[])

    Invalid calls:
        ml.custom_vjp(3)  # GradientError
        ml.custom_vjp(lambda x: x)(v)  # GradientError
    """

    _defines = "defvjp(fwd, bwd)"
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Define the forward and the backward pass."""
        self.fwd, self.bwd = fwd, bwd

    def _rule(self, arguments: _Arguments) -> CustomRule:
        first, last, name = self.fwd, self.bwd, self.__name__
        if first is None or last is None:
            raise self._undefined()

        def fwd(xs: Tensors) -> tuple[Tensors, Tensors]:
            result = self._run(first, *arguments.all(_aliases(xs)))
            out, res = _pair(result, f"{name}: expected a pair (result, residuals) from fwd")
            leaves, arguments.res = flatten(as_tree(res), None, ends=among_others)
            return arguments.result(out), [x for _, x in leaves]

        def bwd(res: Tensors, gs: Maybe) -> Maybe:
            tree = as_dicts(arguments.out, _aliases(gs))
            residuals = unflatten(arguments.res, _aliases(res))
            result = self._run(last, *arguments.nondiff, residuals, tree)
            count = len(arguments.structures)
            if not isinstance(result, (tuple, list)) or len(result) != count:
                raise GradientError(
                    f"{name}: expected a tuple of {counted(count, 'cotangent')} from bwd, one per "
                    f"argument, got {brief(result)}"
                )
            parts: Maybe = []
            for number, structure, g in zip(
                arguments.numbers, arguments.structures, result, strict=True
            ):
                types = [x.type for x in arguments.xs[len(parts) : len(parts) + structure.size]]
                what = f"{name}: the cotangent that bwd returns for argument {number}"
                parts += arguments.checked(structure, types, g, what)
            return parts

        return CustomRule(name, arguments.fn, fwd=fwd, bwd=bwd)


class custom_jvp(_CustomFunction[P, R]):
    """Function with a derivative that `defjvp` or `defjvps` defines, like JAX's `custom_jvp`.

    Gradients are computed by transposing the rule. The rule gets a tuple of the arguments, and a
    tuple of tangents, with None for arguments that are not inexact. It returns the result and the
    tangent of the result, which must be linear in the tangents. Arguments in `nondiff_argnums` may
    be any objects; the rule gets them first.

    The function and the rule must not use a differentiated tensor from outside.

    The tensors: any shapes. Raises `GradientError` for a missing rule, and for a tangent with a
    type other than the result's.

        >>> @ml.custom_jvp
        ... def absolute(x):
        ...     return ml.abs(x)
        >>> @absolute.defjvp
        ... def absolute_jvp(primals, tangents):
        ...     (x,), (t,) = primals, tangents
        ...     return absolute(x), ml.where(x >= 0.0, t, -t)
        >>> ml.grad(absolute)(ml.asarray(0.0))
        Tensor(1., f32[])

    Invalid calls:
        ml.custom_jvp(3)  # GradientError
        ml.custom_jvp(lambda x: x)(v)  # GradientError
    """

    _defines = "defjvp(rule)"
    jvp: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Define the tangent of the result; return the rule, so this is also a decorator."""
        self.jvp = jvp
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Define the tangent of the result by one rule per argument, `rule(t, result, *arguments)`.

        None represents an argument without a contribution.
        """
        if self.nondiff_argnums:
            raise GradientError(
                f"{self.__name__}: nondiff_argnums needs defjvp, not defjvps; call defjvp"
            )

        def jvp(primals: Sequence[Tree], tangents: Sequence[Tree]) -> tuple[Tree, Tree]:
            out: Any = self(*primals)  # type: ignore[call-arg]
            if len(jvps) != len(primals):
                counts = f"{len(primals)}, one per argument, got {len(jvps)}"
                raise GradientError(f"{self.__name__}: defjvps: expected {counts}")
            parts = [
                self._run(rule, t, out, *primals)
                for rule, t in zip(jvps, tangents, strict=True)
                if rule is not None
            ]
            total = map(lambda y: or_zeros(None, y.type) if y.dtype.is_inexact else None, out)
            for part in parts:
                total = map(lambda x, y: x + y, total, part)
            return out, total

        self.jvp = jvp

    def _rule(self, arguments: _Arguments) -> CustomRule:
        rule, name = self.jvp, self.__name__
        if rule is None:
            raise self._undefined()

        def jvp(xs: Tensors, ts: Maybe) -> tuple[Tensors, Maybe]:
            primals = arguments.trees(_aliases(xs))
            slopes = arguments.slopes(_aliases(_or_zeros(ts, xs)))
            result = self._run(rule, *arguments.nondiff, tuple(primals), tuple(slopes))
            out, tangent = _pair(result, f"{name}: expected a pair (result, tangent) from the rule")
            ys = arguments.result(out)
            what = f"{name}: the tangent that the rule returns"
            leaves = arguments.checked(arguments.out, arguments.types, tangent, what)
            return ys, _or_zeros(leaves, ys)

        return CustomRule(name, arguments.fn, jvp=jvp)
