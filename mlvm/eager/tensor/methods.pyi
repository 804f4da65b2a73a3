"""What a tensor has from the functions; written by `python -m mlvm.eager.stub methods`."""

from collections.abc import Sequence

from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import Axis
from mlvm.eager.tensor.operands import Operand
from mlvm.eager.tensor.tensor import Tensor

class Methods:
    __slots__ = ()

    @property
    def T(self) -> Tensor:
        """A two-dimensional tensor, transposed."""

    def __abs__(self) -> Tensor: ...
    def __add__(self, other: Operand) -> Tensor: ...
    def __and__(self, other: Operand) -> Tensor: ...
    def __eq__(self, other: Operand) -> Tensor: ...  # type: ignore[override]
    def __floordiv__(self, other: Operand) -> Tensor: ...
    def __ge__(self, other: Operand) -> Tensor: ...
    def __gt__(self, other: Operand) -> Tensor: ...
    def __iadd__(self, other: Operand) -> Tensor: ...
    def __iand__(self, other: Operand) -> Tensor: ...
    def __ifloordiv__(self, other: Operand) -> Tensor: ...
    def __ilshift__(self, other: Operand) -> Tensor: ...
    def __imatmul__(self, other: Operand) -> Tensor: ...
    def __imod__(self, other: Operand) -> Tensor: ...
    def __imul__(self, other: Operand) -> Tensor: ...
    def __invert__(self) -> Tensor: ...
    def __ior__(self, other: Operand) -> Tensor: ...
    def __ipow__(self, other: Operand) -> Tensor: ...
    def __irshift__(self, other: Operand) -> Tensor: ...
    def __isub__(self, other: Operand) -> Tensor: ...
    def __itruediv__(self, other: Operand) -> Tensor: ...
    def __ixor__(self, other: Operand) -> Tensor: ...
    def __le__(self, other: Operand) -> Tensor: ...
    def __lshift__(self, other: Operand) -> Tensor: ...
    def __lt__(self, other: Operand) -> Tensor: ...
    def __matmul__(self, other: Operand) -> Tensor: ...
    def __mod__(self, other: Operand) -> Tensor: ...
    def __mul__(self, other: Operand) -> Tensor: ...
    def __ne__(self, other: Operand) -> Tensor: ...  # type: ignore[override]
    def __neg__(self) -> Tensor: ...
    def __or__(self, other: Operand) -> Tensor: ...
    def __pow__(self, other: Operand) -> Tensor: ...
    def __radd__(self, other: Operand) -> Tensor: ...
    def __rand__(self, other: Operand) -> Tensor: ...
    def __rfloordiv__(self, other: Operand) -> Tensor: ...
    def __rlshift__(self, other: Operand) -> Tensor: ...
    def __rmatmul__(self, other: Operand) -> Tensor: ...
    def __rmod__(self, other: Operand) -> Tensor: ...
    def __rmul__(self, other: Operand) -> Tensor: ...
    def __ror__(self, other: Operand) -> Tensor: ...
    def __rpow__(self, other: Operand) -> Tensor: ...
    def __rrshift__(self, other: Operand) -> Tensor: ...
    def __rshift__(self, other: Operand) -> Tensor: ...
    def __rsub__(self, other: Operand) -> Tensor: ...
    def __rtruediv__(self, other: Operand) -> Tensor: ...
    def __rxor__(self, other: Operand) -> Tensor: ...
    def __sub__(self, other: Operand) -> Tensor: ...
    def __truediv__(self, other: Operand) -> Tensor: ...
    def __xor__(self, other: Operand) -> Tensor: ...
    def abs(self, /, *, out: Tensor | None = None) -> Tensor:
        """|x|; of a complex number the length, which is real."""

    def all(
        self,
        /,
        axis: int | tuple[int, ...] | None = None,
        *,
        keepdims: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Whether no element along `axis` is zero; True of nothing."""

    def any(
        self,
        /,
        axis: int | tuple[int, ...] | None = None,
        *,
        keepdims: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Whether an element along `axis` is not zero; False of nothing."""

    def argmax(
        self, /, axis: int | None = None, *, keepdims: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Where the largest element is along `axis`, i64: the first of equals, or the first nan."""

    def argmin(
        self, /, axis: int | None = None, *, keepdims: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Where the smallest element is along `axis`, i64: the first of equals, or the first
        nan."""

    def argsort(
        self,
        /,
        axis: int = -1,
        *,
        descending: bool = False,
        stable: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """The positions (i64) along `axis` of the elements that `sort` gives."""

    def astype(
        self, dtype: object, /, *, copy: bool = True, device: VMProtocol | None = None
    ) -> Tensor:
        """x in another dtype, on its VM or on `device`."""

    def clip(self, /, min: Operand | None = None, max: Operand | None = None) -> Tensor:
        """x limited to min <= x <= max, elementwise."""

    def conj(self, /, *, out: Tensor | None = None) -> Tensor:
        """The complex conjugate; x itself where it is real."""

    def copy(self, /, *, out: Tensor | None = None) -> Tensor:
        """The same tensor in memory of its own."""

    def flatten(self, /, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """The axes from `start_dim` to `end_dim` as one, as in PyTorch; without them a vector."""

    @property
    def imag(self) -> Tensor:
        """The imaginary part; 0 of a real x."""

    @property
    def mT(self) -> Tensor:
        """x with its last two axes swapped, `x.mT`; nothing is copied if one of them has length
        1."""

    def max(
        self,
        /,
        axis: int | tuple[int, ...] | None = None,
        *,
        keepdims: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The largest element along `axis`; nan if any is nan."""

    def mean(
        self,
        /,
        axis: Axis = None,
        dtype: object = None,
        out: Tensor | None = None,
        *,
        keepdims: bool = False,
    ) -> Tensor:
        """`mean`, with the keywords of numpy, which calls it for `numpy.mean(x)`."""

    def min(
        self,
        /,
        axis: int | tuple[int, ...] | None = None,
        *,
        keepdims: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The smallest element along `axis`; nan if any is nan."""

    def nonzero(self, /) -> tuple[Tensor, ...]:
        """The positions of the elements that are not zero, in row-major order: an i64 vector for
        each axis."""

    def permute(self, /, *axes: int | Sequence[int]) -> Tensor:
        """`permute_dims`, as PyTorch spells it: `x.permute(0, 2, 1)`."""

    def prod(
        self,
        /,
        axis: int | tuple[int, ...] | None = None,
        *,
        keepdims: bool = False,
        dtype: object = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The product along `axis`, in the dtype that `sum` uses; 1 of nothing."""

    def ravel(self, /) -> Tensor:
        """The elements as a vector, in row-major order."""

    @property
    def real(self) -> Tensor:
        """The real part."""

    def repeat(self, repeats: int | Sequence[int] | Tensor, /, axis: int | None = None) -> Tensor:
        """x with each element `repeats` times in a row along `axis` (None: flattened first)."""

    def reshape(self, /, *shape: int | Sequence[int], copy: bool | None = None) -> Tensor:
        """The elements in another shape, `x.reshape(2, -1)` or `x.reshape((2, -1))`."""

    def round(self, /, *, out: Tensor | None = None) -> Tensor:
        """The nearest integer value, of both parts of a complex number; halves go to the even
        one."""

    def squeeze(self, /, axis: Axis = None) -> Tensor:
        """x without these axes, which have length 1 (None: without all that have)."""

    def std(
        self,
        /,
        axis: Axis = None,
        dtype: object = None,
        out: Tensor | None = None,
        ddof: float = 0.0,
        *,
        correction: float | None = None,
        keepdims: bool = False,
    ) -> Tensor:
        """`std`, with the keywords of numpy, which calls it for `numpy.std(x)`; `ddof` is its name
        for `correction`."""

    def sum(
        self,
        /,
        axis: int | tuple[int, ...] | None = None,
        *,
        keepdims: bool = False,
        dtype: object = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The sum along `axis`; 0 of nothing."""

    def swapaxes(self, axis1: int, axis2: int, /) -> Tensor:
        """x with these two axes in each other's place."""

    def take(self, indices: Tensor, /, axis: int | None = None) -> Tensor:
        """The slices of x at `indices` along `axis`, which the axes of `indices` replace."""

    def transpose(self, /, *axes: int | Sequence[int] | None) -> Tensor:
        """`permute_dims`, as numpy spells it: `x.transpose(0, 2, 1)`; without axes, all in
        reverse."""

    def var(
        self,
        /,
        axis: Axis = None,
        dtype: object = None,
        out: Tensor | None = None,
        ddof: float = 0.0,
        *,
        correction: float | None = None,
        keepdims: bool = False,
    ) -> Tensor:
        """`var`, with the keywords of numpy, which calls it for `numpy.var(x)`; `ddof` is its name
        for `correction`."""
