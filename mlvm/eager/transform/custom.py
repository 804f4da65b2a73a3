"""Rules of one's own: functions whose derivatives are what their author says, `custom_vjp` and
`custom_jvp`.

On a tape such a function leaves one node, with the rule. In the trace of another transformation it
stays a function of the program, which has the rule: the transformation makes a function of it with
a rule again, so that one that comes later finds the rule and not the body.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Generic, NoReturn, ParamSpec, TypeAlias, TypeVar

from mlvm.core.errors import GradientError, StaleTensor, brief
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.grad import as_argnums, vjp
from mlvm.eager.autodiff.joint import Cotangents, Held, Saved, leave, or_zeros
from mlvm.eager.autodiff.tape import Tape, taping
from mlvm.eager.control import functions
from mlvm.eager.control.state import as_tree
from mlvm.eager.tensor.apply import alias_of, untracked
from mlvm.eager.tensor.autocast import autocast, autocast_dtype
from mlvm.eager.tensor.context import current_capture, taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.transform.trace import Tracer
from mlvm.eager.tree import (
    Node,
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


class Custom:
    """A function from tensors to tensors, `fn`, with a rule. One of `custom_vjp` has `fwd`, from
    the tensors to the results and what the way back needs; and `bwd`, from that and the cotangents
    of the results to those of the tensors. One of `custom_jvp` has `jvp`, from tensors and tangents
    to results and tangents. What is no float has None for its tangent or cotangent."""

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
        block = autocast(autocast_dtype())  # rules that make the value run later, outside of it
        self.fwd = None if fwd is None else block(fwd)
        self.jvp = None if jvp is None else block(jvp)
        self.bwd = bwd

    def __call__(self, args: Tensors) -> Tensors:
        tape, on = taping(), current_capture.get()
        tracked = tape is not None and any(x.tape is tape for x in args)
        given = [untracked(x) for x in args] if tracked else args
        with taped(None if tape is None else _Outside(self, tape)):
            if tracked and self.fwd is not None:
                outs, res = self.fwd(given)
            elif tracked and self.jvp is not None and isinstance(on, Tracer):
                outs, res = self.jvp(given, [None] * len(given))[0], []  # by its rule, for others
            elif tracked:
                outs, res = self.fn(given), []
            elif not isinstance(on, Tracer):
                return self.fn(given)
            else:
                made: Tensors = functions.called(object(), self.name, given, self.fn)
                callee = on.calls[-1].callee
                assert callee is not None  # it was called
                callee.rule = self
                return made
        outs = [untracked(y) for y in outs]
        assert tape is not None  # it follows an argument
        leave(tape, outs, args, {}, [*args, *res], partial(self._pull, outs, len(args)))
        return outs

    def again(self, fn: Callable[[Tensors], Tensors]) -> Custom:
        """The same rule, for what the function has become."""
        return Custom(self.name, fn, fwd=self.fwd, bwd=self.bwd, jvp=self.jvp)

    def refused(self) -> GradientError:
        return GradientError(
            f"{self.name} is of custom_vjp, whose rule goes back only: a tangent goes through a "
            f"function of custom_jvp, which has gradients too"
        )

    def closes_over(self, type: object) -> GradientError:
        return GradientError(
            f"{self.name}, which has a rule of its own, uses a {type} from outside that is "
            f"differentiated; make it an argument"
        )

    def _pull(
        self, outs: Tensors, nargs: int, cotangents: Cotangents, saved: Saved, held: Held
    ) -> Held:
        """The cotangents of the arguments. Where an outer gradient is taken through them, what the
        way back needs is made again, so that it depends on the arguments."""
        args, res = list(saved[:nargs]), list(saved[nargs:])
        gs: Maybe = [
            or_zeros(g, y.type) if y.dtype.is_inexact else None
            for g, y in zip(cotangents, outs, strict=True)
        ]
        if self.bwd is not None and self.fwd is not None:
            on = current_capture.get()
            if taping() is not None or (on is not None and on.outer):
                res = self.fwd(args)[1]
            return self.bwd(res, gs)
        jvp = self.jvp
        assert jvp is not None  # it has a rule
        floats = [i for i, x in enumerate(args) if x.dtype.is_inexact]

        def linear(*ts: Tensor) -> Tensors:
            given = dict(zip(floats, ts, strict=True))
            _, made = jvp(args, [given.get(i) for i in range(nargs)])
            return [t for t in made if t is not None]

        zeros = [or_zeros(None, args[i].type) for i in floats]
        parts = vjp(linear, *zeros)[1]([g for g in gs if g is not None])
        found = dict(zip(floats, parts, strict=True))
        return [found.get(i) for i in range(nargs)]


class _Outside:
    """Stands for a tape while a function runs off it. It refuses what the function reaches of the
    tape's by itself."""

    within: object = None
    nodes: Sequence[Any] = ()

    def __init__(self, rule: Custom, tape: Tape) -> None:
        self.rule, self.tape = rule, tape

    def record(self, call: Any, operands: Sequence[Any], types: Any, out: Any) -> None:
        for x in operands:
            if x.tape is self.tape:
                raise self.rule.closes_over(x.type)

    def needs_operand(self, *_: Any) -> bool:
        return False

    def keeps(self, x: Any, stop: int | None = None) -> bool:
        return False

    def exchange(self, others: Any, x: Any) -> None:
        """It keeps nothing."""


# --- what users write ----------------------------------------------------------------


class _Arguments:
    """The arguments of one call: those that are differentiated as trees of tensors, and the others,
    by number."""

    def __init__(self, owner: _Owner[Any, Any], args: Sequence[Any]) -> None:
        self.owner, self.args = owner, args
        self.numbers = [i for i in range(len(args)) if i not in owner.nondiff_argnums]
        self.nondiff = [args[i] for i in owner.nondiff_argnums]
        flat = [flatten(as_tree(args[i]), ends=among_others) for i in self.numbers]
        self.structures = [structure for _, structure in flat]
        self.xs: Tensors = [x for found, _ in flat for _, x in found]
        self.out: Structure = flatten(None)[1]
        self.types: list[TensorType] = []
        self.res: Structure = self.out

    def trees(self, xs: Sequence[Tensor]) -> list[Tree]:
        """The arguments that are differentiated, with these tensors."""
        rest = iter(xs)
        return [unflatten(s, [next(rest) for _ in range(s.size)]) for s in self.structures]

    def all(self, xs: Sequence[Tensor]) -> list[Any]:
        found = dict(zip(self.numbers, self.trees(xs), strict=True))
        return [found.get(i, arg) for i, arg in enumerate(self.args)]

    def slopes(self, ts: Sequence[Tensor | None]) -> list[Tree]:
        """Trees like the arguments, of tangents."""
        rest = iter(ts)
        return [as_dicts(s, [next(rest) for _ in range(s.size)]) for s in self.structures]

    def result(self, out: Tree) -> Tensors:
        """The tensors of a result, whose structure is kept."""
        found, self.out = flatten(as_tree(out), ends=among_others)
        self.types = [y.type for _, y in found]
        return [y for _, y in found]

    def fn(self, xs: Tensors) -> Tensors:
        return self.result(self.owner.fun(*self.all(xs)))

    def checked(
        self, structure: Structure, types: Sequence[TensorType], made: Tree, what: str
    ) -> Maybe:
        """The leaves of tangents or cotangents. Raises `GradientError` for one of another type, or
        structure."""
        if made is None:
            return [None] * structure.size

        def differ(path: str, tree: Tree, other: Tree) -> NoReturn:
            given, expected = type(other).__name__, type(tree).__name__
            raise GradientError(f"{what} is a {given}, not a {expected}")

        found = partners(structure, made, _are_alike, differ)
        for x, type_ in zip(found, types, strict=True):
            if x is not None and (not isinstance(x, Tensor) or x.type is not type_):
                given = x.type if isinstance(x, Tensor) else brief(x)
                raise GradientError(f"{what} is {given}, not {type_}")
            if x is not None and not type_.dtype.is_inexact:
                raise GradientError(f"{what} is for {type_}, which is no float: it is None")
        return found


def _own(xs: Sequence[Any]) -> list[Any]:
    """The tensors as a rule gets them, which may update them: others have them, too."""
    return [None if x is None else alias_of(x) for x in xs]


def _are_alike(tree: Tree, other: Tree) -> bool:
    return type(tree) is type(other) or (isinstance(tree, Node) and isinstance(other, dict))


def _pair(made: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise GradientError(f"{what}, not {brief(made)}")
    return made


class _Owner(Generic[P, R]):
    """A function with a rule of its own."""

    __name__: str
    _defines = ""

    def __init__(self, fun: Callable[P, R], nondiff_argnums: int | Sequence[int] = ()) -> None:
        if not callable(fun):
            raise GradientError(f"{type(self).__name__} is of a function, not of {brief(fun)}")
        self.fun = fun
        self.nondiff_argnums = as_argnums(nondiff_argnums)
        update_wrapper(self, fun, updated=())
        if not hasattr(self, "__name__"):
            self.__name__ = "a function"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a function in a class: a method."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given: Sequence[Any] = args
        if kwargs:
            bound = inspect.signature(self.fun).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.kwargs:
                raise GradientError(
                    f"{self.__name__}: {', '.join(bound.kwargs)} can be given by keyword only, and "
                    f"the rule of {type(self).__name__} gets its arguments by position"
                )
            given = bound.args
        found = _Arguments(self, given)
        made = self._rule(found)(found.xs)
        return unflatten(found.out, made)  # type: ignore[no-any-return]

    def _rule(self, given: _Arguments) -> Custom:
        raise NotImplementedError

    def _undefined(self) -> GradientError:
        return GradientError(
            f"{self.__name__} has no rule yet: give it one by {self.__name__}.{self._defines}"
        )

    def _run(self, rule: Callable[..., Any], *args: Any) -> Any:
        """What a rule makes. What it finds ended belongs to the trace of a function around it."""
        try:
            return rule(*args)
        except StaleTensor as error:
            raise GradientError(
                f"{self.__name__}: its rule uses a tensor that a function around it has made; make "
                f"it an argument, or let the rule keep it"
            ) from error


class custom_vjp(_Owner[P, R]):
    """A function whose gradient is what `defvjp` says, as JAX's `custom_vjp`.

    `fwd` takes the arguments of the function, and returns its result and what the way back needs, a
    tree of tensors. `bwd` takes that, and the cotangent of the result, and returns a tuple with a
    cotangent for each argument: a tree like it, or None for zeros. Arguments whose numbers are in
    `nondiff_argnums` may be anything; they are not differentiated, and `bwd` gets them first.

    Neither the function nor the rule may use a tensor from outside that is differentiated:
    `GradientError` says so. `jvp` does not go through such a function, but through its gradient. A
    rule is eager code: gradients of gradients go through it, and `vmap` runs it for all lanes.

    The tensors: of any shapes. Raises `GradientError` for a rule that is missing, or returns
    cotangents of other types.

        >>> @ml.custom_vjp
        ... def clipped(x):
        ...     return x
        >>> clipped.defvjp(lambda x: (x, None), lambda _, g: (ml.clip(g, -1.0, 1.0),))
        >>> ml.grad(lambda x: clipped(x) * 5.0)(ml.asarray(3.0))
        Tensor(1., f32[])
    """

    _defines = "defvjp(fwd, bwd)"
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Say how the function goes forward, and back."""
        self.fwd, self.bwd = fwd, bwd

    def _rule(self, given: _Arguments) -> Custom:
        first, last, name = self.fwd, self.bwd, self.__name__
        if first is None or last is None:
            raise self._undefined()

        def fwd(xs: Tensors) -> tuple[Tensors, Tensors]:
            made = self._run(first, *given.all(_own(xs)))
            out, res = _pair(made, f"{name}: fwd returns a pair of the result and what bwd needs")
            found, given.res = flatten(as_tree(res), None, ends=among_others)
            return given.result(out), [x for _, x in found]

        def bwd(res: Tensors, gs: Maybe) -> Maybe:
            tree, kept = as_dicts(given.out, _own(gs)), unflatten(given.res, _own(res))
            made = self._run(last, *given.nondiff, kept, tree)
            count = len(given.structures)
            if not isinstance(made, (tuple, list)) or len(made) != count:
                raise GradientError(
                    f"{name}: bwd returns a tuple of {count}, a cotangent for each argument, not "
                    f"{brief(made)}"
                )
            parts: Maybe = []
            for number, structure, g in zip(given.numbers, given.structures, made, strict=True):
                types = [x.type for x in given.xs[len(parts) : len(parts) + structure.size]]
                what = f"{name}: the cotangent that bwd returns for argument {number}"
                parts += given.checked(structure, types, g, what)
            return parts

        return Custom(name, given.fn, fwd=fwd, bwd=bwd)


class custom_jvp(_Owner[P, R]):
    """A function whose derivative is what `defjvp` or `defjvps` says, as JAX's `custom_jvp`. Its
    gradients are the rule's, transposed.

    The rule takes a tuple of the arguments, and one of their tangents, in which what is no float
    has None. It returns the result and its tangent, which is linear in these tangents. Arguments
    whose numbers are in `nondiff_argnums` may be anything; the rule gets them first.

    Neither the function nor the rule may use a tensor from outside that is differentiated.

    The tensors: of any shapes. Raises `GradientError` for a rule that is missing, or returns a
    tangent of another type than the result.

        >>> @ml.custom_jvp
        ... def absolute(x):
        ...     return ml.abs(x)
        >>> @absolute.defjvp
        ... def absolute_jvp(primals, tangents):
        ...     (x,), (t,) = primals, tangents
        ...     return absolute(x), ml.where(x >= 0.0, t, -t)
        >>> ml.grad(absolute)(ml.asarray(0.0))
        Tensor(1., f32[])
    """

    _defines = "defjvp(rule)"
    jvp: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Say what the function does to tangents. Returns the rule, so that it may decorate it."""
        self.jvp = jvp
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Say what it does to the tangent of each argument alone: `rule(t, result, *arguments)`
        makes a part of the result's tangent, and None is for none."""
        if self.nondiff_argnums:
            raise GradientError(
                f"{self.__name__}: defjvps goes without nondiff_argnums; see defjvp"
            )

        def jvp(primals: Sequence[Tree], tangents: Sequence[Tree]) -> tuple[Tree, Tree]:
            out: Any = self(*primals)  # type: ignore[call-arg]
            parts = [
                rule(t, out, *primals)
                for rule, t in zip(jvps, tangents, strict=True)
                if rule is not None
            ]
            total = map(lambda y: or_zeros(None, y.type) if y.dtype.is_inexact else None, out)
            for part in parts:
                total = map(lambda x, y: x + y, total, part)
            return out, total

        self.jvp = jvp

    def _rule(self, given: _Arguments) -> Custom:
        rule, name = self.jvp, self.__name__
        if rule is None:
            raise self._undefined()

        def jvp(xs: Tensors, ts: Maybe) -> tuple[Tensors, Maybe]:
            full = [
                or_zeros(t, x.type) if x.dtype.is_inexact else None
                for x, t in zip(xs, ts, strict=True)
            ]
            primals, slopes = given.trees(_own(xs)), given.slopes(_own(full))
            made = self._run(rule, *given.nondiff, tuple(primals), tuple(slopes))
            out, tangent = _pair(made, f"{name}: the rule returns a pair of result and tangent")
            ys = given.result(out)
            what = f"{name}: the tangent that the rule returns"
            found = given.checked(given.out, given.types, tangent, what)
            pairs = zip(found, ys, strict=True)
            return ys, [or_zeros(t, y.type) if y.dtype.is_inexact else None for t, y in pairs]

        return Custom(name, given.fn, jvp=jvp)
