"""The public function of every op; written by `python -m mlvm.eager.stub`."""

from typing import Literal

from mlvm.eager.tensor.operands import Operand
from mlvm.eager.tensor.tensor import Tensor

__all__ = [  # noqa: RUF022 - in the order of the functions
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "any",
    "argmax",
    "argmin",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "conj",
    "copy",
    "copysign",
    "cos",
    "cosh",
    "divide",
    "equal",
    "erf",
    "exp",
    "expm1",
    "flip",
    "floor",
    "floor_divide",
    "gelu",
    "greater",
    "greater_equal",
    "hypot",
    "imag",
    "isfinite",
    "isinf",
    "isnan",
    "layer_norm",
    "less",
    "less_equal",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "multiply",
    "negative",
    "nextafter",
    "not_equal",
    "pow",
    "prod",
    "real",
    "reciprocal",
    "relu",
    "remainder",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "slice",
    "softmax",
    "sqrt",
    "square",
    "subtract",
    "sum",
    "tan",
    "tanh",
    "tril",
    "triu",
    "trunc",
    "var",
]

def abs(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """|x|; of a complex number the length, which is real."""

def acos(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The arccosine; nan for a real x outside of [-1, 1]."""

def acosh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The inverse hyperbolic cosine; nan for a real x < 1."""

def add(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x + y, elementwise, with broadcasting."""

def all(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Whether no element along `axis` is zero; True of nothing."""

def any(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Whether an element along `axis` is not zero; False of nothing."""

def arange(
    *,
    start: int | float,
    stop: int | float,
    step: int | float,
    dtype: object,
    out: Tensor | None = None,
) -> Tensor:
    """start, start + step, start + 2 step, ... up to `stop`, which is left out."""

def argmax(
    x: Tensor, /, axis: int | None = None, *, keepdims: bool = False, out: Tensor | None = None
) -> Tensor:
    """Where the largest element is along `axis`, i64: the first of equals, or the first nan."""

def argmin(
    x: Tensor, /, axis: int | None = None, *, keepdims: bool = False, out: Tensor | None = None
) -> Tensor:
    """Where the smallest element is along `axis`, i64: the first of equals, or the first nan."""

def argsort(
    x: Tensor, /, axis: int = -1, *, descending: bool = False, out: Tensor | None = None
) -> Tensor:
    """The positions in x, along `axis`, of the elements that `sort` gives: i64."""

def asin(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The arcsine; nan for a real x outside of [-1, 1]."""

def asinh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The inverse hyperbolic sine."""

def astype(x: Tensor, /, *, dtype: object, out: Tensor | None = None) -> Tensor:
    """x in another dtype."""

def atan(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The arctangent."""

def atan2(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """atan(x / y) in the quadrant of the point (y, x), from -pi to pi, also where an operand is 0
    or infinite."""

def atanh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The inverse hyperbolic tangent; nan for a real x outside of [-1, 1]."""

def avg_pool2d(
    x: Tensor,
    /,
    *,
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    out: Tensor | None = None,
) -> Tensor:
    """The mean of each window, channel by channel."""

def batch_contract(
    x: Tensor,
    y: Tensor,
    /,
    *,
    transpose_x: bool = False,
    transpose_y: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The sum over the batch of x @ y: f[..., m, k], f[..., k, n] -> f[m, n]."""

def bernoulli(
    key: Tensor, p: Tensor, /, *, shape: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """True with probability p, which broadcasts to `shape`."""

def bitwise_and(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x & y, of integers or booleans."""

def bitwise_invert(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """~x, of integers or booleans."""

def bitwise_left_shift(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x << y, of integers."""

def bitwise_or(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x | y, of integers or booleans."""

def bitwise_right_shift(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x >> y, of integers, keeping the sign."""

def bitwise_xor(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x ^ y, of integers or booleans."""

def boolean_index(x: Tensor, mask: Tensor, /) -> Tensor:
    """The slices of x where the mask is True: [count, ...], in row-major order."""

def broadcast_to(x: Tensor, /, *, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """x repeated along new leading axes and along axes of length 1, up to `shape`."""

def ceil(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The smallest integer value >= x."""

def cholesky(x: Tensor, /, *, upper: bool = False, out: Tensor | None = None) -> Tensor:
    """The lower triangular L with x = L L^H, or the `upper` one U with x = U^H U: f[..., n, n]."""

def clip(x: Operand, lower: Operand, upper: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x limited to lower <= x <= upper, elementwise; upper where lower > upper."""

def concat(*xs: Tensor, axis: int = 0, out: Tensor | None = None) -> Tensor:
    """The tensors one after the other along `axis`; their dtypes promote."""

def conj(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The complex conjugate; x itself where it is real."""

def conv2d(
    x: Tensor,
    kernel: Tensor,
    /,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[tuple[int, int], tuple[int, int]],
    out: Tensor | None = None,
) -> Tensor:
    """The cross-correlation of images with a kernel, which deep learning calls convolution:
    [N,H,W,I] with [KH,KW,I,O] -> [N,OH,OW,O]."""

def copy(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The same tensor in memory of its own."""

def copysign(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """|x| with the sign of y, also that of zeros and nans."""

def cos(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The cosine of x radians."""

def cosh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic cosine."""

def cumulative_sum(
    x: Tensor, /, axis: int | None = None, *, dtype: object = None, out: Tensor | None = None
) -> Tensor:
    """The running sums along `axis` (None: the only one), in the dtype that `sum` uses."""

def det(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The determinants of square matrices: f[..., n, n] -> f[...]."""

def det_vjp(g: Tensor, x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The gradient g conj(det(x)) x^-H of `det`, also of singular matrices: f[...], f[..., n, n] ->
    f[..., n, n]."""

def divide(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x / y, elementwise, with broadcasting."""

def dropout(x: Tensor, key: Tensor, /, *, rate: float, out: Tensor | None = None) -> Tensor:
    """Keep each element of x with probability 1 - rate and multiply it by 1 / (1 - rate); the
    others become 0 (Srivastava et al., JMLR 15, 2014)."""

def dynamic_update(
    x: Tensor, update: Tensor, start: Tensor, /, axis: int, *, out: Tensor | None = None
) -> Tensor:
    """x, with its rows from `start` on along `axis` replaced by those of `update`."""

def eig(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """Eigenvalues in no order, and eigenvectors of length 1 as the columns of a matrix: complex,
    f[..., n, n] -> c[..., n + n n]."""

def eigh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """Eigenvalues in ascending order, and orthonormal eigenvectors as the columns of a matrix, of
    Hermitian matrices: f[..., n, n] -> f[..., n + n n]."""

def eigvals(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The eigenvalues of `eig` alone: f[..., n, n] -> c[..., n]."""

def eigvalsh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The eigenvalues of `eigh` alone, real: f[..., n, n] -> f[..., n]."""

def embed(
    x: Tensor,
    /,
    *,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    step: tuple[int, ...],
    out: Tensor | None = None,
) -> Tensor:
    """Zeros of `shape`, with x where `slice` with this start and step would read it."""

def equal(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x == y, elementwise, with broadcasting."""

def erf(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The error function, 2 / sqrt(pi) * integral of exp(-t^2) from 0 to x; its relative error is
    below 1e-15 in f64 and 1e-6 in f32."""

def exp(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """e to the power x."""

def expm1(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """e^x - 1, accurate near 0."""

def eye(*, rows: int, columns: int, k: int = 0, dtype: object, out: Tensor | None = None) -> Tensor:
    """A matrix of ones on the k-th diagonal (above the main one for k > 0), zeros elsewhere."""

def fft(
    x: Tensor,
    /,
    *,
    axes: tuple[int, ...] = (-1,),
    norm: Literal["backward", "ortho", "forward"] = "backward",
    out: Tensor | None = None,
) -> Tensor:
    """sum_j x_j exp(-2 pi i j k / n) for each k, along each of the axes: complex."""

def flip(
    x: Tensor, /, axis: int | tuple[int, ...] | None = None, *, out: Tensor | None = None
) -> Tensor:
    """x with the order of its elements reversed along `axis` (None: along all)."""

def floor(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The largest integer value <= x."""

def floor_divide(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """The floor of x / y, elementwise."""

def fold_in(key: Tensor, data: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """A new key for each value of the integer scalar `data` (a step, a layer): u64[2]."""

def full(value: Tensor, /, *, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """A tensor of that shape."""

def gelu(x: Tensor, /, *, approximate: bool = True, out: Tensor | None = None) -> Tensor:
    """x Phi(x), with Phi the standard normal distribution function (Hendrycks and Gimpel, arXiv
    1606.08415)."""

def gelu_vjp(g: Tensor, x: Tensor, /, *, approximate: bool, out: Tensor | None = None) -> Tensor:
    """g (Phi(x) + x Phi'(x)), with the Phi of `gelu`."""

def greater(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x > y, elementwise, with broadcasting."""

def greater_equal(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x >= y, elementwise, with broadcasting."""

def hypot(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """sqrt(x^2 + y^2), elementwise, with broadcasting; it overflows only where the result does."""

def ifft(
    x: Tensor,
    /,
    *,
    axes: tuple[int, ...] = (-1,),
    norm: Literal["backward", "ortho", "forward"] = "backward",
    out: Tensor | None = None,
) -> Tensor:
    """sum_k x_k exp(2 pi i j k / n) / n for each j, along each of the axes: complex."""

def imag(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The imaginary part; 0 of a real x."""

def index_add(
    x: Tensor, updates: Tensor, indices: Tensor, /, axis: int, *, out: Tensor | None = None
) -> Tensor:
    """x, with the updates added where `take` with these indices would read them."""

def index_set(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    /,
    axis: int,
    *,
    axes: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """x, with values where `take` with these indices would read it."""

def inv(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The inverses of square matrices: f[..., n, n]."""

def irfft(
    x: Tensor,
    /,
    *,
    n: int,
    axis: int = -1,
    norm: Literal["backward", "ortho", "forward"] = "backward",
    out: Tensor | None = None,
) -> Tensor:
    """`ifft` of the n elements whose first n // 2 + 1 are x along `axis`, and whose others are
    their conjugates in reverse order: real."""

def isfinite(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """True where x is neither inf nor nan."""

def isinf(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """True where x is inf or -inf."""

def isnan(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """True where x is nan."""

def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor, /, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * scale + bias over the last axis (Ba et al., arXiv
    1607.06450)."""

def layer_norm_normalize(x: Tensor, /, *, eps: float, out: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the last axis: `layer_norm` before scale and bias."""

def layer_norm_scale_vjp(
    g: Tensor, x: Tensor, /, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """The gradient of `layer_norm` for scale: the sum of g * n over all axes but the last, with n
    as in `layer_norm_normalize`."""

def layer_norm_vjp(
    g: Tensor, x: Tensor, scale: Tensor, /, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """The gradient of `layer_norm` for x: (h - mean(h) - n mean(h n)) / sqrt(var + eps), where h =
    g * scale and n is x normalised."""

def less(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x < y, elementwise, with broadcasting."""

def less_equal(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x <= y, elementwise, with broadcasting."""

def linspace(
    *,
    start: float,
    stop: float,
    num: int,
    endpoint: bool = True,
    dtype: object,
    out: Tensor | None = None,
) -> Tensor:
    """`num` evenly spaced floats from `start` up to `stop`, which is left out without
    `endpoint`."""

def log(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The natural logarithm; -inf at 0, nan below."""

def log10(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The logarithm of base 10."""

def log1p(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """log(1 + x), accurate near 0."""

def log2(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The logarithm of base 2."""

def log_softmax(x: Tensor, /, axis: int = -1, *, out: Tensor | None = None) -> Tensor:
    """x - log(sum(exp(x))) along the axis, computed from x - max(x) so that nothing overflows."""

def logaddexp(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """log(e^x + e^y), elementwise, with broadcasting, as max(x, y) + log(1 + e^-|x - y|): it
    overflows only where the result does."""

def logical_and(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x and y, of booleans."""

def logical_not(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """not x, of booleans."""

def logical_or(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x or y, of booleans."""

def logical_xor(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """Either x or y, of booleans."""

def logsumexp(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """log(sum(exp(x))) along `axis`, as m + log(sum(exp(x - m))) with m the maximum."""

def mask_scatter(
    updates: Tensor, mask: Tensor, /, *, shape: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """Zeros of `shape`, with the updates, in order, where the mask is True."""

def mask_set(x: Tensor, values: Tensor, mask: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """x, with values, in order, where `boolean_index` with this mask would read it."""

def matmul(
    x: Tensor,
    y: Tensor,
    /,
    *,
    transpose_x: bool = False,
    transpose_y: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x @ y: f[..., m, k] @ f[..., k, n] -> f[..., m, n], broadcasting the batch axes."""

def max(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The largest element along `axis`; nan if any is nan."""

def max_pool2d(
    x: Tensor,
    /,
    *,
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    out: Tensor | None = None,
) -> Tensor:
    """The largest element of each window, channel by channel."""

def maximum(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """The larger of x and y, elementwise; nan if either is nan."""

def mean(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The arithmetic mean along `axis`; nan of nothing."""

def min(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The smallest element along `axis`; nan if any is nan."""

def minimum(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """The smaller of x and y, elementwise; nan if either is nan."""

def multiply(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x * y, elementwise, with broadcasting."""

def multiply_add(x: Operand, y: Operand, z: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x * y + z, elementwise, with broadcasting; rounded to the result's dtype after the product
    and after the sum."""

def negative(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """-x; of an unsigned integer, 2^bits - x."""

def nextafter(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """The next float after x in the direction of y; y where they are equal."""

def nonzero_indices(x: Tensor, /) -> Tensor:
    """The positions of the elements that are not zero: i64[count, ndim], in row-major order."""

def normal(
    key: Tensor, /, *, shape: tuple[int, ...], dtype: object = "f32", out: Tensor | None = None
) -> Tensor:
    """Standard normal values, of mean 0 and variance 1."""

def not_equal(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x != y, elementwise, with broadcasting."""

def one_hot(
    indices: Tensor, /, *, num_classes: int, dtype: object = "f32", out: Tensor | None = None
) -> Tensor:
    """A new last axis of length `num_classes`: one at the index, zeros elsewhere."""

def pad(
    x: Tensor,
    /,
    *,
    widths: tuple[tuple[int, int], ...],
    value: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """x with a border of `value`: on axis i, widths[i] = (elements before, elements after)."""

def patches(
    x: Tensor,
    /,
    *,
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    pad_value: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Sliding windows over the padded image: [N,H,W,C] -> [N,OH,OW,KH,KW,C]."""

def permutation(key: Tensor, /, *, n: int, out: Tensor | None = None) -> Tensor:
    """The numbers 0 .. n-1 in random order: i64[n]."""

def permute_dims(x: Tensor, /, *, axes: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """x with its axes in another order: axis i of the result is axis axes[i] of x."""

def pinv(x: Tensor, rtol: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The Moore-Penrose inverses of matrices: f[..., m, n] -> f[..., n, m]."""

def pow(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x to the power y, elementwise."""

def prod(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    dtype: object = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product along `axis`, in the dtype that `sum` uses; 1 of nothing."""

def qr(
    x: Tensor, /, *, mode: Literal["reduced", "complete"] = "reduced", out: Tensor | None = None
) -> Tensor:
    """x = Q R, with orthonormal columns in Q, and R upper triangular with a real diagonal: f[...,
    m, n] -> f[..., m k + k n], with k = min(m, n), or k = m if it is "complete"."""

def randint(
    key: Tensor,
    /,
    *,
    low: int,
    high: int,
    shape: tuple[int, ...],
    dtype: object = "i64",
    out: Tensor | None = None,
) -> Tensor:
    """Integers low <= i < high, each exactly as likely as any other."""

def real(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The real part."""

def reciprocal(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """1 / x."""

def relu(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """max(x, 0)."""

def remainder(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x - floor(x / y) * y, elementwise, with the sign of y."""

def reshape(x: Tensor, /, *, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """The elements of x, in row-major order, in another shape of the same size."""

def rfft(
    x: Tensor,
    /,
    axis: int = -1,
    *,
    norm: Literal["backward", "ortho", "forward"] = "backward",
    out: Tensor | None = None,
) -> Tensor:
    """The first n // 2 + 1 elements of `fft` of n real ones along `axis`; the others are their
    conjugates in reverse order."""

def roll(
    x: Tensor,
    /,
    *,
    shift: int | tuple[int, ...],
    axis: int | tuple[int, ...] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x with every element moved up `shift` places along `axis`, past the end to the front."""

def round(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The nearest integer value, of both parts of a complex number; halves go to the even one."""

def rsqrt(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """1 / sqrt(x)."""

def scatter_add(
    updates: Tensor, indices: Tensor, /, axis: int, *, length: int, out: Tensor | None = None
) -> Tensor:
    """Zeros of length `length` along `axis`, to which the updates are added at `indices`."""

def scatter_add_along_axis(
    updates: Tensor, indices: Tensor, /, axis: int, *, length: int, out: Tensor | None = None
) -> Tensor:
    """Zeros, then out[i, indices[i, j, k], k] += updates[i, j, k], for `axis` 1 of 3."""

def sigmoid(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """1 / (1 + e^-x), accurate at both ends."""

def sign(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """-1, 0 or 1 as x is negative, zero or positive; nan for nan."""

def signbit(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """Whether the sign is negative, also that of zeros and nans."""

def sin(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The sine of x radians."""

def sinh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic sine."""

def slice(
    x: Tensor,
    /,
    *,
    start: tuple[int, ...],
    length: tuple[int, ...],
    step: tuple[int, ...],
    out: Tensor | None = None,
) -> Tensor:
    """On axis i, the length[i] elements at start[i], start[i] + step[i], ..."""

def slice_add(
    x: Tensor,
    updates: Tensor,
    /,
    *,
    start: tuple[int, ...],
    step: tuple[int, ...],
    out: Tensor | None = None,
) -> Tensor:
    """x, with the updates added where `slice` with this start and step would read them."""

def slice_set(
    x: Tensor,
    values: Tensor,
    /,
    *,
    start: tuple[int, ...],
    length: tuple[int, ...],
    step: tuple[int, ...],
    out: Tensor | None = None,
) -> Tensor:
    """x, with values where `slice` with this start, length and step would read it."""

def slogdet(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """det(x) as its sign det(x) / |det(x)| and log(|det(x)|): f[..., n, n] -> f[..., 2]."""

def softmax(x: Tensor, /, axis: int = -1, *, out: Tensor | None = None) -> Tensor:
    """exp(x) / sum(exp(x)) along the axis, computed from x - max(x) so that nothing overflows."""

def softmax_cross_entropy(
    logits: Tensor, labels: Tensor, /, *, out: Tensor | None = None
) -> Tensor:
    """log(sum(exp(logits))) - logits[label] along the last axis, one loss per label."""

def softmax_cross_entropy_vjp(
    g: Tensor, logits: Tensor, labels: Tensor, /, *, out: Tensor | None = None
) -> Tensor:
    """(softmax(logits) - one_hot(labels)) * g[..., None]: the gradient for logits."""

def solve(x: Tensor, y: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """z with x z = y: f[..., n, n], f[..., n, k] -> f[..., n, k], broadcasting the batch axes."""

def sort(
    x: Tensor, /, axis: int = -1, *, descending: bool = False, out: Tensor | None = None
) -> Tensor:
    """The elements in order along `axis`: complex ones by their real parts, then by their imaginary
    parts."""

def split_key(key: Tensor, /, *, n: int, out: Tensor | None = None) -> Tensor:
    """n new keys, independent of each other and of the key: u64[n,2]."""

def sqrt(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The square root; nan for a real x < 0."""

def square(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """x * x."""

def subtract(x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x - y, elementwise, with broadcasting."""

def sum(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    dtype: object = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sum along `axis`; 0 of nothing."""

def svd(x: Tensor, /, *, full_matrices: bool = True, out: Tensor | None = None) -> Tensor:
    """x = U diag(S) Vh, with orthonormal columns in U and rows in Vh, and S descending."""

def svdvals(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The singular values of `svd` alone, descending and real: f[..., m, n] -> f[..., k]."""

def take(x: Tensor, indices: Tensor, /, axis: int, *, out: Tensor | None = None) -> Tensor:
    """The slices of x at `indices` along `axis`; the indices' axes replace that axis."""

def take_along_axis(
    x: Tensor, indices: Tensor, /, axis: int, *, out: Tensor | None = None
) -> Tensor:
    """out[i, j, k] = x[i, indices[i, j, k], k], for `axis` 1 of 3 as an example."""

def tan(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The tangent of x radians."""

def tanh(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic tangent."""

def tril(x: Tensor, /, *, k: int = 0, out: Tensor | None = None) -> Tensor:
    """The matrices in the last two axes, zero above the k-th diagonal (the main one is 0)."""

def triu(x: Tensor, /, *, k: int = 0, out: Tensor | None = None) -> Tensor:
    """The matrices in the last two axes, zero below the k-th diagonal (the main one is 0)."""

def trunc(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """x without its fraction."""

def uniform(
    key: Tensor, /, *, shape: tuple[int, ...], dtype: object = "f32", out: Tensor | None = None
) -> Tensor:
    """Values evenly distributed over 0 <= u < 1."""

def unpatches(
    x: Tensor,
    /,
    *,
    shape: tuple[int, ...],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    out: Tensor | None = None,
) -> Tensor:
    """The transpose of `patches`: [N,OH,OW,KH,KW,C] -> [N,H,W,C]."""

def var(
    x: Tensor,
    /,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    correction: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The variance along `axis`: sum((x - mean(x))^2) / (n - correction), in two passes."""

def where(condition: Operand, x: Operand, y: Operand, /, *, out: Tensor | None = None) -> Tensor:
    """x where the condition holds, else y; all three broadcast."""

def zeros(*, shape: tuple[int, ...], dtype: object, out: Tensor | None = None) -> Tensor:
    """A tensor of that shape."""
