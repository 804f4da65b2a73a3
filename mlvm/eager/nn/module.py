"""Modules: trees of parameters and buffers with a `__call__`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Self, TypeVar, cast

from mlvm.core.errors import DTypeError, brief
from mlvm.core.types import DType, TensorType
from mlvm.eager.functions.elements import astype
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.copying import LeafMemo
from mlvm.eager.tensor.operands import as_operand
from mlvm.eager.tensor.pickling import reduced
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import module_of
from mlvm.eager.tensor.wrapper import hinted, require_arguments, require_options
from mlvm.eager.tree import (
    BUFFER_OF,
    Buffer,
    Copies,
    Node,
    Tree,
    Where,
    assign_buffers_too,
    buffer_of,
    children,
    containers,
    fields,
    freeze,
    holds_tensors,
    load,
    map_to_dicts,
    named_leaves,
    substitute,
)
from mlvm.eager.tree import named_tensors as _named_tensors
from mlvm.show import html

T = TypeVar("T")

_TRAINING: Final = "training"


class Name(str):
    """Name of a parameter, a str.

    Attributes of tensors and pairs raise errors that explain how to get the tensor."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self!r} is a path (str) without {name}: the parameters are "
            f"model.named_parameters().values(), and model.num_parameters() counts their elements"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        getattr(self, name)
        raise AttributeError(
            f"{self!r} is a path (str): model.named_parameters().values() are tensors"
        )

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is a path (str): use model.named_parameters().items() for pairs")


class Module(Node):
    """Base class of all layers and models: a tree of parameters and buffers with a `__call__`.

        >>> class Mlp(ml.nn.Module):
        ...     def __init__(self, features: int, classes: int) -> None:
        ...         self.hidden = ml.nn.Linear(features, 64)
        ...         self.head = ml.nn.Linear(64, classes)
        ...
        ...     def __call__(self, x: ml.Tensor) -> ml.Tensor:
        ...         return self.head(ml.gelu(self.hidden(x)))
        >>> model = Mlp(8, 2)
        >>> model(ml.ones((5, 8))).type, model.num_parameters(), list(model.state())[0]
        (f32[5,2], 706, 'hidden/kernel')

    `training` is True while the Module is trained; Dropout and BatchNorm read it. It is initially
    True, as in PyTorch. `train` and `eval` set it for all submodules of a model; a captured
    function compiles one program for each mode. Gradients and copies keep the value.
    """

    training: bool

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and module_of(cls).startswith("mlvm."):
            cls.__init__ = hinted(cls.__init__)  # type: ignore[method-assign]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        require_options(cls, args, kwargs)
        require_arguments(cls, args, kwargs)
        module = super().__new__(cls)
        vars(module)[_TRAINING] = True
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hint = "; rename forward to __call__" if hasattr(self, "forward") else ""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__{hint}")

    def train(self, mode: bool = True) -> Self:
        """Set `training` to `mode` in this Module and all Modules in it; return self.

        A Module in a buffer is not trained, and the mode of the Module does not change.
        """
        for part in containers(self, buffers=not mode):
            if isinstance(part, Module) and (part._buffer_of is None or not mode):
                part.training = mode
        return self

    def eval(self) -> Self:
        """Set `training` to False in all submodules, including those in buffers; return self."""
        return self.train(False)

    @hinted
    def freeze(self, where: Where | None = None) -> Self:
        """Make parameters constant: they become buffers until `unfreeze`.

        Return self.

        `where` selects the parameters: a pattern for the paths of `named_parameters`, in which `*`
        also matches "/", or a function of path and tensor; None selects all. A pattern that matches
        the path of a submodule selects all parameters in it: "blocks_*/mlp". A tensor that occurs
        twice in the model is frozen in both positions. `training` does not change. Create an
        optimizer after this call, not before.

        Raises `ArgumentError` if `where` selects nothing, or only some tensors of a dict.

            >>> model = ml.nn.Sequential(ml.nn.Linear(2, 3), ml.nn.Linear(3, 1))
            >>> list(model.freeze("layers_0").named_parameters()), len(model.state())
            (['layers_1/kernel', 'layers_1/bias'], 4)

        Invalid calls:
            model.freeze("x")  # ArgumentError
        """
        freeze(self, where, frozen=True)
        return self

    @hinted
    def unfreeze(self, where: Where | None = None) -> Self:
        """Undo `freeze` for the parameters that `where` selects; return self.

        Fields assigned as an `nn.buffer` stay buffers.

            >>> model = ml.nn.Linear(2, 3).freeze()
            >>> list(model.unfreeze("bias").named_parameters())
            ['bias']
        """
        freeze(self, where, frozen=False)
        return self

    @hinted
    def astype(self, dtype: object) -> Self:
        """Return a Module with the float parameters converted to that dtype, and the same buffers.

        Use it to compute in f16 or bf16 while the parameters are trained in f32. Gradients flow
        through the conversion.

            def loss_of(model, x, labels):
                logits = model.astype(ml.bfloat16)(ml.astype(x, ml.bfloat16))
                logits = ml.astype(logits, ml.float32)
                return ml.softmax_cross_entropy(logits, labels, reduction="mean")

        A buffer that is assigned to the returned Module is also assigned to this Module. Raises
        `DTypeError` if `dtype` is not a float.

            >>> half = ml.nn.Linear(2, 3).astype(ml.bfloat16)
            >>> half(ml.ones((1, 2), dtype=ml.bfloat16)).type
            bf16[1,3]

        Invalid calls:
            ml.nn.Linear(2, 2).astype(ml.int32)  # DTypeError
        """
        target = DType.of(dtype)
        if not target.is_float:
            raise DTypeError(f"expected a float dtype, got {target.name}").at("Module.astype", ())
        copies: Copies = []
        converted: Self = substitute(
            lambda x: astype(x, target) if x.dtype.is_float else x, self, copies
        )
        for module, copied in copies:
            assign_buffers_too(copied, module)
        return converted

    def parameters(self) -> dict[str, Tree]:
        """Return the parameters as nested dicts by field name.

        The items of a list field `Dense` are named `Dense_0`, `Dense_1`, ..."""
        parameters: dict[str, Tree] = map_to_dicts(lambda x: x, self)
        return type(parameters)({Name(name): part for name, part in parameters.items()})

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the parameters by path, as in `block_0/mixing/kernel`; shared tensors once."""
        return {Name(path): x for path, x in _named_tensors(self).items()}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the tensors of the buffers by path; a shared tensor occurs once."""
        parameters = dict(named_leaves(self))
        return {path: x for path, x in self.state().items() if path not in parameters}

    def state(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by path, in the form in which a model is saved."""
        return self._whole(_named_tensors(self, buffers=True))

    def num_parameters(self) -> int:
        """Return the total number of elements of all parameters."""
        named = self.named_parameters()
        return sum(self._wholes.get(path, x.type).size for path, x in named.items())

    def load_parameters(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays to the parameters, in place, by the paths of `named_parameters`.

        Nothing is written unless all arrays fit. Raises `PathError` if paths are missing or
        unknown; `DTypeError` if a dtype is wrong, or `arrays` is not a mapping to arrays;
        `ShapeError` if a shape is wrong.

        Invalid calls:
            model.load_parameters({"kernel": np.eye(2), "bias": bias})  # DTypeError
            model.load_parameters({"bias": bias})  # PathError
            model.load_parameters({"kernel": bias, "bias": bias})  # ShapeError
        """
        self._load(self.named_parameters(), arrays, "parameter")

    @hinted
    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays to parameters and buffers, in place, by the paths of `state`.

        The rules and errors are the same as for `load_parameters`."""
        self._load(_named_tensors(self, buffers=True), arrays, "tensor")

    _wholes: ClassVar[Mapping[str, TensorType]] = {}
    """Types of the parameters of which this process stores only a shard, by path."""

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the unsharded tensors.

        Classes of `ml.parallel` gather and load shards here."""
        return tensors

    _load = staticmethod(load)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the Module, with parameters and buffers in the current arena."""
        if not isinstance(memo, LeafMemo):
            for x in _named_tensors(self, buffers=True).values():
                if id(x) not in memo:
                    memo[id(x)] = op.copy(x)
        copied = memo[id(self)] = copy.copy(self)
        vars(copied).update(copy.deepcopy(self._alone(vars(self)), memo))
        return copied

    def _alone(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a copy: buffers of other Modules become buffers of the copy."""
        return state if self._buffer_of is None else {**state, BUFFER_OF: self}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values of parameters and buffers, which load into the current arena."""
        make, kind, state = reduced(self)
        return make, kind, self._alone(state)

    summary: ClassVar[Callable[..., Any]]
    """Table of the layers; `summary.py` assigns it."""

    def __repr__(self) -> str:
        return "\n".join(_describe(self, (), counted=True))

    def _repr_html_(self) -> str:
        """Return a collapsible representation for notebooks."""
        return html.folded(repr(self).splitlines())

    if not TYPE_CHECKING:  # otherwise a type checker would allow it

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(f"{_a(self)} is not indexed; {_PARTS}")

        def __len__(self) -> NoReturn:
            raise TypeError(f"{_a(self)} has no len(); {_PARTS}")

        def __bool__(self) -> bool:
            return type(self).__len__ is Module.__len__ or len(self) > 0


@hinted
def buffer(x: T) -> T:
    """Mark state of a Module that is saved but not trained; assign the result to a field.

    x is a tensor of any dtype, a container of tensors, or a Module with constant parameters. A
    numpy array is copied into a tensor. A Module may also be an item of a list or dict: `blocks[0]
    = ml.nn.buffer(blocks[0])`. `Module.freeze` makes parameters constant temporarily.

        >>> class Centered(ml.nn.Module):
        ...     def __init__(self, features: int) -> None:
        ...         self.scale = ml.ones(features)
        ...         self.mean = ml.nn.buffer(ml.zeros(features))
        ...
        ...     def __call__(self, x: ml.Tensor) -> ml.Tensor:
        ...         if self.training:
        ...             self.mean += 0.1 * (ml.stop_gradient(ml.mean(x, axis=0)) - self.mean)
        ...         return (x - self.mean) * self.scale
        >>> layer = Centered(3)
        >>> list(layer.named_parameters()), list(layer.named_buffers())
        (['scale'], ['mean'])

    The field contains x itself; a list item becomes a new Module with the tensors of x. Later
    values of the field are also buffers, until the field is deleted. A buffer is a constant for
    gradients and is ignored by optimizers; `state` contains it. A function being differentiated may
    assign to the field, and the Module keeps the new value. Inside an arena that is reset after the
    step, update the buffer in place as above.

    Raises `DTypeError` if x is not a Module and contains no tensor.

    Invalid calls:
        ml.nn.buffer(5)  # DTypeError
    """
    if isinstance(x, Module):
        return x if x._buffer_of is not None else buffer_of(x)
    values = as_operand(x) if hasattr(x, "__array__") and not isinstance(x, Tensor) else x
    if not holds_tensors(values):
        text = f"expected a tensor or a tree of tensors as buffer, got {brief(x)}"
        raise DTypeError(f"{text}; convert with ml.asarray")
    return cast(T, Buffer(values))  # for a type checker it has the type of the field's value


_PARTS: Final = "its layers are its fields, and an nn.Sequential or a list is indexed"


def _a(module: Module) -> str:
    return f"a Module such as this {type(module).__name__}"


def _describe(part: Tree, above: tuple[Tree, ...], *, counted: bool) -> Iterator[str]:
    """Yield one line for a submodule, and one indented line for each submodule inside it.

    The parameters are `counted`, except in buffers."""
    if isinstance(part, Tensor):
        yield repr(part.type)
        return
    if any(part is each for each in above):
        yield f"{type(part).__name__}(...)"
        return
    named = dict(fields(part, buffers=True)) if isinstance(part, Node) else children(part)
    kinds = dict.fromkeys(named, "")
    if isinstance(part, Node) and part._buffer_of is None:
        trained, frozen = dict(fields(part)), dict(fields(part, frozen=True))
        kinds = {
            name: "" if name in trained else "frozen " if name in frozen else "buffer "
            for name in named
        }
    plain = [
        f"{name}={getattr(value, '__name__', None) or repr(value)}"
        for name, value in named.items()
        if not holds_tensors(value) and name != _TRAINING
    ]
    count = 0
    if counted and isinstance(part, Module):
        with suppress(DTypeError):  # a Module that contains itself
            count = part.num_parameters()
    yield "".join(
        [
            type(part).__name__,
            f"({', '.join(plain)})" if plain else "",
            f", {count:,} parameter{'s' * (count != 1)}" if count else "",
        ]
    )
    for name, value in named.items():
        if holds_tensors(value):
            if isinstance(value, Node) and value._buffer_of is not None:
                kinds[name] = "buffer "
            inside = counted and not kinds[name]
            head, *rest = _describe(value, (*above, part), counted=inside)
            yield f"  {name}: {kinds[name]}{head}"
            yield from (f"  {line}" for line in rest)
