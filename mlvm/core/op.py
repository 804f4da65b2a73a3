"""Declaration of tensor ops: one function per op, from which everything else is derived.

    @op(infer=broadcast)
    def multiply(out: Array, x: Array, y: Array) -> None:
        \"\"\"x * y, elementwise, with broadcasting.\"\"\"
        np.multiply(x, y, out)

The parameters after `out` are tensor inputs (`*xs` for any number), keyword-only parameters are
attributes, and the body is the kernel. `infer` is the type rule: it receives the input types and
the attributes, and returns the type of `out`. An op with a shape that depends on values (`nonzero`)
has no `out`: the rule returns None and the kernel returns the array. The function table, the
assembler, `mlvm.eager` and `python -m mlvm ops` read `OPS`.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, Union, final

import numpy as np

from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    OpError,
    ShapeError,
    brief,
    counted,
    did_you_mean,
)
from mlvm.core.locks import cached_property
from mlvm.core.memo import Memo
from mlvm.core.sizes import MAX_EXACT
from mlvm.core.types import DType, TensorType

Attributes = Mapping[str, Any]
Rule = Callable[..., TensorType | None]
Kernel = Callable[..., Any]
Flops = Callable[..., int]

NO_ATTRIBUTES: Attributes = types.MappingProxyType({})
OPS: dict[str, Op] = {}
MAX_NESTING: Final = 64
"""Maximum nesting depth of an attribute value, and of the encoding."""
REQUIRED = inspect.Parameter.empty
PLAIN: Final = frozenset({bool, int, float, complex, str, type(None)})
"""Classes of values that are always in canonical form."""
_INT: Final = frozenset({int})
_ANY: Final = 1000  # larger than the number of operands of any op


_hints: Final = cache(typing.get_type_hints)


@final
@dataclass(frozen=True)
class Attribute:
    """Keyword-only parameter of an op: the annotation and the default."""

    name: str
    default: Any
    kernel: Kernel

    @cached_property
    def hint(self) -> Any:
        """The annotation. It is evaluated at the first use, because evaluation is slow."""
        return _hints(self.kernel)[self.name]

    @cached_property
    def common(self) -> frozenset[object]:
        """The classes of values that always match the hint: see `_is_common`."""
        samples = (True, False), (-7, 11), (-0.5, 1e300), ("?", "!"), (None,), ((), (-7, 11, 13))
        kinds = [type(each[0]) for each in samples if all(_matches(x, self.hint) for x in each)]
        # an int is converted to a float
        return frozenset(kinds) - {int if self.hint is float else None}

    @property
    def kind(self) -> str:
        """The annotation as text."""
        hint = self.hint.__name__ if isinstance(self.hint, type) else str(self.hint)
        return hint.replace("typing.", "")

    def __str__(self) -> str:
        default = "" if self.default is REQUIRED else f" = {self.default!r}"
        return f"{self.name}: {self.kind}{default}"


class Traits(NamedTuple):
    """Properties of an op as a function, on which types, gradients and public names depend.

    `is_cheap`: running it again costs less than keeping the result for the backward pass.
    `is_holomorphic`: a complex result is a nonlinear holomorphic function of the operands. The
        gradient rules are written for real numbers, and the engine conjugates them.
    `precision`: the dtype that mixed precision uses instead of the operands' dtypes: half precision
        for matrix products, and f32 for ops that would lose accuracy.
    `public`: users have a function of that name, with these or other operands and attributes.
    `takes_storage`: it supports low-bit dtypes, which all other ops reject.
    """

    is_cheap: bool = False
    is_holomorphic: bool = False
    precision: Literal["half", "f32"] | None = None
    public: bool = True
    takes_storage: bool = False


NO_TRAITS: Final = Traits()


@final
@dataclass(eq=False, repr=False)
class Op:
    """Tensor op: `name`, `kernel`, type rule, `inputs`, `attributes` and documentation.

    `variadic`: the last input stands for any number of tensors.
    `dynamic`: the shape of the result is known only after the op has run.
    `elementwise`: an element of the result depends on only one element of each operand, and the
        kernel makes one pass over them. A chain of such ops can run block by block.
    `links`: the op may be a link of a chain; so may some ops with reference kernels that make
        several passes.
    `heads`: the first call of a chain may be of this op, although it is not elementwise.
    `reduces`: it reduces many elements to one, along axes.
    `in_place`: number of first operands that `out` may be.
    `images`: number of first operands that have a row for each image, as the result has; the rows
        are independent.
    `copies_only`: it only moves data: each element of the result is an element of an operand, or 0,
        whatever its bits mean. `is_view`: NumPy returns a view.
    `may_raise`: the kernel raises an error for some values of operands that the type rule accepts,
        such as an index out of range. All other ops accept any value, so they may run even if the
        result is not needed.
    `slope`: the op with the same operands and attributes that computes the derivative, and shares
        work.
    `traits`: what low-bit dtypes, gradients, mixed precision and the public names depend on.
    """

    kernel: Kernel
    _infer: Rule
    _flops: Flops | None = None
    elementwise: bool = False
    links: bool = False
    heads: bool = False
    reduces: bool = False
    in_place: int = 0
    images: int = 0
    copies_only: bool = False
    is_view: bool = False
    may_raise: bool = False
    slope: str | None = None
    traits: Traits = NO_TRAITS

    def __post_init__(self) -> None:
        self.name: str = self.kernel.__name__
        self._inferred_types = Memo[tuple[TensorType, ...], TensorType](512, "core.op")
        self.links |= self.elementwise
        parameters = list(inspect.signature(self.kernel).parameters.values())
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.dynamic: bool = not positional or positional[0].name != "out"
        tensors = positional if self.dynamic else positional[1:]
        self.variadic: bool = bool(tensors) and tensors[-1].kind is inspect.Parameter.VAR_POSITIONAL
        self.inputs: tuple[str, ...] = tuple(p.name for p in tensors)
        self.attributes: dict[str, Attribute] = {
            p.name: Attribute(p.name, p.default, self.kernel)
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
        }

    @property
    def doc(self) -> str:
        """Return the documentation, which is the docstring of the kernel."""
        return inspect.getdoc(self.kernel) or ""

    @property
    def signature(self) -> str:
        """Return the signature as text: `sum(x, *, axis: ... = None, keepdims: bool = False)`."""
        inputs = [*self.inputs[:-1], "*" + self.inputs[-1]] if self.variadic else [*self.inputs]
        star = ["*"] if self.attributes and not self.variadic else []
        return f"{self.name}({', '.join([*inputs, *star, *map(str, self.attributes.values())])})"

    def bind(self, attributes: Attributes) -> Attributes:
        """Return the attributes in the op's order, with defaults, and lists converted to tuples.

        Raises `ArgumentError` for an attribute that is unknown or missing, or has a wrong type.
        """
        if not attributes and not self.attributes:
            return NO_ATTRIBUTES
        unknown = [name for name in attributes if name not in self.attributes]
        if unknown:
            names = ", ".join(map(str, self.attributes.values())) or "none"
            hint = did_you_mean(unknown[0], self.attributes)
            refused = ArgumentError(f"no attribute {unknown[0]!r}{hint}; expected: {names}")
            raise refused.at(self.name, ())
        bound = {}
        for name, attribute in self.attributes.items():
            value = attributes.get(name, attribute.default)
            if _is_common(value, attribute.common):
                bound[name] = value
                continue
            value = canonical(value)
            if value is REQUIRED:
                raise ArgumentError(
                    f"expected a value for the attribute {name}, got none; pass {name}="
                ).at(self.name, ())
            if not _matches(value, attribute.hint):
                raise ArgumentError(
                    f"expected {name} of type {attribute.kind}, got {brief(value)}"
                ).at(self.name, ())
            bound[name] = float(value) if attribute.hint is float else value
        return bound

    def infer(self, operands: Sequence[TensorType], attributes: Attributes) -> TensorType | None:
        """Infer the result's type; return None if it depends on values.

        `attributes` are as `bind` returns them. Raises an `OpError` that names the op and the
        operand types if they are invalid.
        """
        if attributes:
            return self._inferred(operands, attributes)
        key = tuple(operands)
        result = self._inferred_types.entries.get(key)
        if result is None:
            result = self._inferred(operands, attributes)
            if result is not None and not (result.is_open or any(x.is_open for x in key)):
                self._inferred_types[key] = result
        return result

    def _inferred(
        self, operands: Sequence[TensorType], attributes: Attributes
    ) -> TensorType | None:
        least = len(self.inputs) - self.variadic
        try:
            if len(operands) < least or (len(operands) > least and not self.variadic):
                expected = f"{least} or more tensors" if self.variadic else counted(least, "tensor")
                raise ShapeError(f"expected {expected}, got {len(operands)}")
            out = self._infer(*operands, **attributes)
            if not self.traits.takes_storage:
                for type in operands if out is None else (out, *operands):
                    if type.dtype.is_storage:
                        raise DTypeError(
                            f"{type.dtype.name} can only be stored, or multiplied by "
                            f"quantized_matmul; convert with astype(x, ...)"
                        )
            return out
        except OpError as error:
            error.at(self.name, operands)
            raise

    def flops(self, operands: Sequence[TensorType], out: TensorType, attributes: Attributes) -> int:
        """Return the number of floating-point operations of the kernel, by default one per element.

        A function of a single element counts as one operation."""
        if self._flops is not None:
            return self._flops(*operands, **attributes)
        return sum(operand.size for operand in operands) if self.reduces else out.size

    def __repr__(self) -> str:
        return f"<op {self.signature}>"


def op(*, infer: Rule, flops: Flops | None = None, **how: Any) -> Callable[[Kernel], Op]:
    """Declare the decorated kernel as an op with this type rule, and add it to `OPS`.

    `flops` has the same parameters as `infer`, and counts operations as `Op.flops` does. Other
    keywords are fields of `Traits` and `Op`.
    """
    traits = Traits(**{name: how.pop(name) for name in Traits._fields if name in how})

    def declare(kernel: Kernel) -> Op:
        declared = Op(kernel, infer, flops, traits=traits, **how)
        if OPS.setdefault(declared.name, declared) is not declared:
            raise ValueError(f"an op named {declared.name!r} exists already; rename one")
        return declared

    return declare


def no_flops(*_: TensorType, **__: Any) -> int:
    """Return 0, the cost of an op without arithmetic."""
    return 0


pointwise: Final = partial(op, elementwise=True, in_place=_ANY)
"""Decorator for ops with one pass over elements, which may overwrite any of the operands."""
reduction: Final = partial(op, reduces=True)
movement: Final = partial(op, flops=no_flops)
"""Decorator for ops that move or fill elements."""
internal: Final = partial(op, public=False)


def canonical(value: Any, depth: int = 0) -> Any:
    """Return an attribute's value in canonical form.

    Lists become tuples, numpy scalars Python numbers, keys of a mapping strings, and dtypes names.

    Raises `ArgumentError` for a value that is nested too deep or contains itself."""
    kind = value.__class__
    if kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value))):
        return value  # the common case, without a slow check of ABCs
    if depth > MAX_NESTING:
        raise ArgumentError(
            f"expected an attribute nested at most {MAX_NESTING} levels deep, got a deeper value"
        )
    if isinstance(value, (list, tuple)):
        return tuple([canonical(each, depth + 1) for each in value])
    if isinstance(value, Mapping):
        return {str(name): canonical(each, depth + 1) for name, each in value.items()}
    if isinstance(value, DType):
        return value.name
    return value.item() if isinstance(value, np.generic) else value


def _is_common(value: Any, kinds: frozenset[object]) -> bool:
    """Return whether a value is in canonical form and has one of these classes.

    Ints have at most 53 bits, and tuples contain only these ints."""
    kind = value.__class__
    if kind not in kinds:
        return False
    if kind is tuple:
        ints = _INT.issuperset(map(type, value))
        return ints and (not value or -MAX_EXACT <= min(value) <= max(value) <= MAX_EXACT)
    return kind is not int or -MAX_EXACT <= value <= MAX_EXACT


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an annotation into origin and arguments, cached since `typing` is slow."""
    return typing.get_origin(hint), typing.get_args(hint)


def _matches(value: Any, hint: Any) -> bool:
    """Return whether an attribute's value matches the annotation (a bool is not an int here)."""
    if value.__class__ is hint and hint is not int:
        return True
    origin, arguments = _parts(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_matches(each, arguments[0]) for each in value)
        return len(value) == len(arguments) and all(map(_matches, value, arguments))
    if hint is type(None):
        return value is None
    if isinstance(value, bool):
        return hint is bool
    if hint is int and isinstance(value, int):
        return abs(value) <= 2**64  # every u64 is smaller
    if hint is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, hint)
