"""Names of numpy, PyTorch and JAX that are other names here: `ml.cat` says "use ml.concat".

A method that a tensor does not have is a descriptor; `__getattr__` would slow every other attribute
down. A module has a `__getattr__`, which is asked only for what it lacks. `dir` leaves all of these
names out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter, getattr_static, signature
from typing import Any, Final, NoReturn, TypeAlias

from mlvm.core.types import TensorType, u64
from mlvm.eager.tensor import wrapper
from mlvm.eager.tensor.tensor import Tensor

_KEY: Final = TensorType(u64, (2,))

_GRADIENT: Final = "see ml.grad and ml.value_and_grad"
_ANY: Final = "any tensor of floats may be differentiated by ml.grad: leave it out"
_VALUES: Final = "gradients are values, of ml.value_and_grad: leave it out"
_MEAN: Final = 'use ml.{}, with reduction="mean"'
_NO_TAPE: Final = (
    "only ml.grad and its like record: leave it out; within them, see ml.stop_gradient"
)
_ASTYPE: Final = "use x.astype(dtype), with ml.float32 and its like"
_NO_DEVICE: Final = (
    "a tensor is where its arena is: with ml.Arena(vm).allocating(), and a GPU is vm = "
    'ml.VM(device="cuda:0"), see docs/gpu.md'
)
_MODEL_DEVICE: Final = (
    "a model is where its tensors were made: with ml.Arena(vm).allocating(), and a GPU is vm = "
    'ml.VM(device="cuda:0"), see docs/gpu.md'
)
_MODEL_DTYPE: Final = "which is another model, with gradients to this one; see docs/dtypes.md"
_WIDE: Final = "use model.astype({}), " + _MODEL_DTYPE
_DEFAULT_DTYPE: Final = "floats are f32 unless told otherwise, as in ml.zeros(3, dtype=ml.float64)"
_AUTOCAST: Final = "compute with model.astype(ml.bfloat16); see docs/dtypes.md"
_GATES: Final = (
    "see model.named_parameters(): input_kernel, hidden_kernel and bias of each cell, kernels "
    "being the transpose of PyTorch's"
)
_AFFINE: Final = "scale and bias begin at 1 and 0, and ml.nn.buffer(layer) keeps them there"

METHODS: Final = {
    "add_": "use x += y",
    "addmm": "use c + x @ y",
    "at": "use x[i] = v, or x[i] += v",
    "backward": _GRADIENT,
    "block_until_ready": "use x itself: a call that returned has run",
    "bfloat16": "use x.astype(ml.bfloat16)",
    "bmm": "use x @ y",
    "bool": "use x.astype(ml.bool)",
    "chunk": "use ml.split(x, n, axis=...)",
    "clamp": "use x.clip(min, max)",
    "clone": "use x.copy()",
    "conjugate": "use x.conj()",
    "contiguous": "use x itself: every tensor is",
    "cpu": "use x itself, and x.numpy() for an array of numpy",
    "cuda": 'use x.to_device(vm), with vm = ml.VM(device="cuda:0"); see docs/gpu.md',
    "cumprod": "use ml.cumulative_prod(x, axis=...)",
    "cumsum": "use ml.cumulative_sum(x, axis=...)",
    "data": "use x itself, and ml.stop_gradient(x) in a gradient",
    "detach": "use ml.stop_gradient(x)",
    "diagonal": "use ml.linalg.diagonal(x)",
    "dim": "use x.ndim",
    "div": "use x / y",
    "dot": "use x @ y",
    "double": "use x.astype(ml.float64)",
    "element_size": "use x.itemsize",
    "eq": "use x == y",
    "expand": "use ml.broadcast_to(x, shape)",
    "expand_as": "use ml.broadcast_to(x, y.shape)",
    "fill": "use x[...] = value, or ml.full_like(x, value)",
    "fill_": "use x[...] = value, or ml.full_like(x, value)",
    "flat": "use x.ravel()",
    "float": "use x.astype(ml.float32)",
    "gather": "use ml.take_along_axis(x, indices, axis=...)",
    "ge": "use x >= y",
    "grad": _GRADIENT,
    "gt": "use x > y",
    "half": "use x.astype(ml.float16)",
    "index_add": "use x[i] += y; where indices repeat, x += ml.one_hot(i, len(x)).T @ y",
    "index_select": "use ml.take(x, i, axis=...)",
    "indices": "use x.argmax(axis=...) for positions",
    "int": "use x.astype(ml.int32)",
    "is_cuda": "see x.device",
    "is_floating_point": "use x.dtype.is_float",
    "le": "use x <= y",
    "long": "use x.astype(ml.int64)",
    "lt": "use x < y",
    "masked_fill": "use ml.where(mask, value, x)",
    "masked_select": "use x[mask]",
    "mm": "use x @ y",
    "mul": "use x * y",
    "mul_": "use x *= y",
    "mv": "use x @ y",
    "narrow": "use a slice such as x[:, start:stop]",
    "ne": "use x != y",
    "neg": "use -x",
    "new_ones": "use ml.ones(shape, dtype=x.dtype)",
    "new_zeros": "use ml.zeros(shape, dtype=x.dtype)",
    "norm": "use ml.linalg.norm(x), which takes axis=",
    "normal_": "use x[...] = ml.random.normal(x.shape)",
    "numel": "use x.size",
    "ptp": "use x.max() - x.min()",
    "random_": "use ml.random.randint",
    "repeat_interleave": "use x.repeat(n)",
    "requires_grad": _ANY,
    "requires_grad_": _ANY,
    "resize": "use x.reshape(shape)",
    "scatter_add": "use x[i] += y; where indices repeat, x += ml.one_hot(i, len(x)).T @ y",
    "select": "use an index such as x[:, i]",
    "sort": "use ml.sort(x), and x.argsort() for the positions",
    "split": "use ml.split(x, n, axis=...), into n parts",
    "strides": "elements lie in row-major order, without gaps",
    "sub": "use x - y",
    "sub_": "use x -= y",
    "t": "use x.T",
    "to": "use x.astype(dtype); a device is a VM: x.to_device(vm)",
    "tobytes": "use x.numpy().tobytes()",
    "trace": "use ml.linalg.trace(x)",
    "type_as": "use x.astype(y.dtype)",
    "unbind": "use ml.unstack(x, axis=...)",
    "uniform_": "use x[...] = ml.random.uniform(x.shape)",
    "unsqueeze": "use ml.expand_dims(x, axis=...)",
    "values": "use x.max(axis=...) itself: it gives the values alone",
    "view": "use x.reshape(shape), which copies nothing; the bits are those of x.numpy()",
    "view_as": "use x.reshape(y.shape), which copies nothing",
    "zero_": "use x[...] = 0, or ml.zeros_like(x)",
}
"""What to write for methods of other libraries' arrays."""

OF_MODULES: Final = {
    "add_module": "assign it to a field, or put it in a list or dict that is one",
    "apply": "see model.named_parameters() and load_parameters",
    "bfloat16": _WIDE.format("ml.bfloat16"),
    "bias_hh_l0": _GATES,
    "bias_ih_l0": _GATES,
    "children": "the parts of a model are its fields",
    "cpu": "model.state() has its tensors, and x.numpy() copies one out",
    "cuda": _MODEL_DEVICE,
    "double": _WIDE.format("ml.float64"),
    "flatten_parameters": "the kernels of all gates are one, and lie together",
    "float": _WIDE.format("ml.float32"),
    "forward": "call it: model(x); its layers' __call__ is what forward is in PyTorch",
    "half": _WIDE.format("ml.float16"),
    "init": "a model has its parameters once it is made",
    "load_state_dict": "use model.load_state(arrays)",
    "modules": "the parts of a model are its fields",
    "named_children": "the parts of a model are its fields",
    "named_modules": "the parts of a model are its fields; model.named_parameters() has the paths",
    "register_parameter": "assign a tensor to a field",
    "requires_grad_": "a gradient is taken of what ml.grad is given; ml.nn.buffer(part) freezes it",
    "register_buffer": "assign ml.nn.buffer(x) to a field",
    "state_dict": "use model.state()",
    "to": f"for a dtype use model.astype(dtype); {_MODEL_DEVICE}",
    "weight": "of a Linear it is model.kernel.T; see model.named_parameters()",
    "weight_hh_l0": _GATES,
    "weight_ih_l0": _GATES,
    "zero_grad": _VALUES,
}
"""What to write for methods and fields of other libraries' models."""

OF_OPTIMIZERS: Final = {
    "add_param_group": "give groups= when it is made",
    "load_state_dict": "use optimizer.load_state(arrays)",
    "lr": "use optimizer.learning_rate, which may be assigned",
    "param_groups": "use optimizer.groups; optimizer.learning_rate may be assigned",
    "state_dict": "use optimizer.state()",
    "step": "use optimizer.update(gradients), with those of ml.value_and_grad",
    "zero_grad": _VALUES,
}
"""What to write for methods and fields of other libraries' optimizers."""

OF_LOSS_SCALES: Final = {
    "get_scale": "use scale.value",
    "is_enabled": "it is whenever it is called",
    "load_state_dict": "use scale.load_state(arrays)",
    "state_dict": "use scale.state()",
    "step": "use scale.update(optimizer, scale.unscale(gradients))",
    "unscale_": "use scale.unscale(gradients), which returns them",
}
"""What to write for methods of PyTorch's GradScaler."""

OF_DTYPES: Final = {
    "is_complex": 'use ml.isdtype(dtype, "complex floating")',
    "is_floating_point": 'use dtype.is_float, or ml.isdtype(dtype, "real floating")',
    "is_signed": 'use ml.isdtype(dtype, ("signed integer", "real floating"))',
}
"""What to write for fields of other libraries' dtypes."""

KEYWORDS: Final = {
    "a_max": "max",
    "a_min": "min",
    "constant_values": "value",
    "ddof": "correction",
    "diagonal": "k",
    "dim": "axis",
    "dims": "axis",
    "embedding_dim": "features",
    "keepdim": "keepdims",
    "kernel_size": "window",
    "lr": "learning_rate",
    "maxval": "high",
    "minval": "low",
    "normalized_shape": "features",
    "num": "n",
    "num_channels": "channels",
    "num_features": "channels",
    "num_groups": "groups",
    "p": "rate",
    "shifts": "shift",
    "size": "shape",
    "steps": "num",
    "unbiased": "correction",
}
"""The keywords of other libraries, and what they are called here."""

_NO_KEYWORDS: Final = {
    "affine": _AFFINE,
    "alpha": "write x + alpha * y",
    "as_tuple": "a tuple is what it gives",
    "bias": "a layer has one, which begins at 0; ml.nn.buffer(layer.bias) keeps it there",
    "batch_first": "x is [time, batch, features]; give it ml.moveaxis(x, 0, 1)",
    "dampening": "momentum takes each gradient whole",
    "device": f"it is where the arena is that it is made in: {_NO_DEVICE.partition(': ')[2]}",
    "dilation": "the places of a window lie side by side",
    "elementwise_affine": _AFFINE,
    "dtype": "convert with ml.astype; sums of halves are accumulated in f32 as it is",
    "inplace": "only what is assigned to changes: x[...] = y",
    "loc": "write loc + scale * ml.random.normal(shape)",
    "maximize": "give the optimizer the gradients of the negative",
    "padding_idx": "multiply by a mask, or give losses an ignore_index=",
    "requires_grad": _ANY,
    "return_counts": "use ml.unique_counts(x)",
    "scale": "write loc + scale * ml.random.normal(shape)",
    "upper": "lower= is its opposite",
    "training": "a layer asks for it: ml.nn.Dropout(rate), and its eval()",
    "weight_decay": "use ml.optim.AdamW, which has one",
    "weights": "write ml.sum(weights * x) / ml.sum(weights)",
}
"""Keywords of other libraries that have no other name here, and what to write."""

_OTHER_NAMES: Final = {
    "abs": "absolute fabs",
    "acos": "arccos",
    "acosh": "arccosh",
    "all": "alltrue",
    "any": "sometrue",
    "asarray": "array as_tensor from_numpy tensor asanyarray ascontiguousarray",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "astype": "cast",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
    "bitwise_invert": "bitwise_not invert",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "bool": "bool_ bool8",
    "broadcast_to": "expand broadcast",
    "capture": "jit compile",
    "clip": "clamp",
    "concat": "cat concatenate dstack row_stack",
    "copy": "clone",
    "cumulative_prod": "cumprod",
    "cumulative_sum": "cumsum",
    "divide": "div true_divide",
    "equal": "eq",
    "expand_dims": "unsqueeze",
    "eye": "identity",
    "float32": "float single",
    "float64": "double",
    "full": "fill",
    "grad": "backward autograd",
    "greater": "gt",
    "greater_equal": "ge",
    "int32": "int",
    "int64": "int_ long intp",
    "less": "lt",
    "less_equal": "le",
    "linalg.cholesky": "cholesky",
    "linalg.cross": "cross",
    "linalg.det": "det",
    "linalg.diagonal": "diagonal",
    "linalg.eigh": "eigh",
    "linalg.inv": "inv inverse",
    "linalg.matrix_power": "matrix_power",
    "linalg.pinv": "pinv",
    "linalg.qr": "qr",
    "linalg.slogdet": "slogdet",
    "linalg.solve": "solve",
    "linalg.svd": "svd",
    "linalg.trace": "trace",
    "linalg.vector_norm": "norm",
    "map": "vmap pmap",
    "matmul": "dot mm bmm mv",
    "max": "amax",
    "mean_squared_error": "mse_loss",
    "min": "amin",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "permute_dims": "permute transpose",
    "pow": "power float_power",
    "prod": "product",
    "random.normal": "randn",
    "random.permutation": "randperm",
    "random.seed": "manual_seed",
    "random.uniform": "rand",
    "remainder": "mod",
    "reshape": "ravel view",
    "result_type": "promote_types",
    "rad2deg": "degrees",
    "deg2rad": "radians",
    "round": "rint around round_",
    "sigmoid": "expit",
    "silu": "swish",
    "huber": "huber_loss",
    "kl_divergence": "kl_div",
    "softmax_cross_entropy": "nll_loss softmax_cross_entropy_with_integer_labels",
    "split": "chunk tensor_split hsplit vsplit dsplit",
    "stop_gradient": "detach",
    "subtract": "sub",
    "swapaxes": "swapdims",
    "take_along_axis": "gather",
    "tree.map": "tree_map",
    "trunc": "fix",
    "unstack": "unbind",
    "vecdot": "inner vdot",
}
"""The name here, and what it is called elsewhere."""

_NONE: Final = {
    "addmm": "c + x @ y",
    "append": "ml.concat([x, ml.asarray([y])])",
    "atleast_1d": "x.reshape(-1) if x.ndim < 1 else x",
    "atleast_2d": "x.reshape(1, -1) if x.ndim < 2 else x",
    "average": "ml.sum(weights * x) / ml.sum(weights), or ml.mean(x)",
    "bernoulli": "ml.random.bernoulli(p.shape, p)",
    "bincount": "ml.sum(ml.one_hot(x, length, dtype=ml.int64), axis=0)",
    "cbrt": "ml.sign(x) * ml.abs(x) ** (1 / 3)",
    "column_stack": "ml.stack(arrays, axis=1) of vectors, ml.concat(arrays, axis=1) of matrices",
    "cosine_similarity": "ml.vecdot(x / ml.linalg.norm(x, axis=-1, keepdims=True), y / ...)",
    "cov": "c @ c.T / (n - 1), with c = x - ml.mean(x, axis=1, keepdims=True)",
    "delete": "ml.concat([x[:i], x[i + 1 :]])",
    "digitize": "ml.searchsorted(bins, x, side='right')",
    "divmod": "x // y, x % y",
    "embedding": "weight[i], or see ml.nn.Embedding",
    "flatnonzero": "ml.nonzero(x.ravel())[0]",
    "fliplr": "ml.flip(x, axis=1)",
    "flipud": "ml.flip(x, axis=0)",
    "fmax": "ml.where(ml.isnan(x), y, ml.where(ml.isnan(y), x, ml.maximum(x, y)))",
    "fmin": "ml.where(ml.isnan(x), y, ml.where(ml.isnan(y), x, ml.minimum(x, y)))",
    "fmod": "x - y * ml.trunc(x / y)",
    "frombuffer": "ml.asarray(numpy.frombuffer(...))",
    "hardtanh": "ml.clip(x, -1.0, 1.0)",
    "heaviside": "ml.where(x > 0, 1.0, ml.where(x == 0, y, 0.0))",
    "hessian": "ml.stack([ml.grad(lambda x: ml.grad(fn)(x)[i])(x) for i in range(len(x))])",
    "histogram": "numpy.histogram(x.numpy())",
    "insert": "ml.concat([x[:i], ml.asarray([y]), x[i:]])",
    "interp": "numpy.interp(x.numpy(), xp, fp), or see ml.searchsorted",
    "intersect1d": "ml.unique_values(x[ml.isin(x, y)])",
    "is_tensor": "isinstance(x, ml.Tensor)",
    "jacfwd": "ml.stack([ml.grad(lambda x: fn(x)[i])(x) for i in range(m)])",
    "jacobian": "ml.stack([ml.grad(lambda x: fn(x)[i])(x) for i in range(m)])",
    "jacrev": "ml.stack([ml.grad(lambda x: fn(x)[i])(x) for i in range(m)])",
    "kron": "ml.einsum('ij,kl->ikjl', x, y), and reshape it to a matrix",
    "lerp": "x + weight * (y - x)",
    "lexsort": "i[ml.argsort(major[i])], with i = ml.argsort(minor)",
    "linear": "x @ weight.T + bias, or see ml.nn.Linear",
    "loadtxt": "ml.asarray(numpy.loadtxt(...))",
    "log_sigmoid": "-ml.softplus(-x)",
    "logsigmoid": "-ml.softplus(-x)",
    "logspace": "ml.pow(10.0, ml.linspace(start, stop, num))",
    "masked_select": "x[mask]",
    "median": "ml.mean(ml.sort(x)[(n - 1) // 2 : n // 2 + 1]), with x of n elements",
    "mgrid": "ml.meshgrid(ml.arange(n), ml.arange(m), indexing='ij')",
    "multinomial": "ml.random.categorical(ml.log(p), shape=(n,))",
    "nan_to_num": "ml.where(ml.isnan(x), 0.0, x), and ml.clip where infinite",
    "nanmax": "ml.max(ml.where(ml.isnan(x), -ml.inf, x))",
    "nanmean": "ml.mean(x[~ml.isnan(x)])",
    "nanmin": "ml.min(ml.where(ml.isnan(x), ml.inf, x))",
    "nansum": "ml.sum(ml.where(ml.isnan(x), 0.0, x))",
    "normal": "mean + std * ml.random.normal(shape)",
    "normalize": "x / ml.linalg.norm(x, axis=-1, keepdims=True)",
    "percentile": "numpy.percentile(x.numpy(), q), or see ml.sort",
    "polyfit": "numpy.polyfit(x.numpy(), y.numpy(), degree)",
    "polyval": "sum(c * x**i for i, c in enumerate(reversed(p)))",
    "ptp": "ml.max(x) - ml.min(x)",
    "quantile": "numpy.quantile(x.numpy(), q), or see ml.sort",
    "rand_like": "ml.random.uniform(x.shape)",
    "randn_like": "ml.random.normal(x.shape)",
    "relu6": "ml.clip(x, 0.0, 6.0)",
    "select": "ml.where(c1, x1, ml.where(c2, x2, default))",
    "sinc": "ml.where(x == 0, 1.0, ml.sin(ml.pi * x) / (ml.pi * x))",
    "softsign": "x / (1.0 + ml.abs(x))",
    "trapezoid": "ml.sum((y[1:] + y[:-1]) * ml.diff(x)) / 2",
    "tri": "ml.tril(ml.ones((n, n)))",
    "tril_indices": "ml.nonzero(ml.tril(ml.ones((n, n))))",
    "triu_indices": "ml.nonzero(ml.triu(ml.ones((n, n))))",
}
"""Functions that are not here under any name, and what to write."""

FUNCTIONS: Final[dict[str, dict[str, str]]] = {
    "mlvm.eager": {
        **{other: f"use ml.{n}" for n, others in _OTHER_NAMES.items() for other in others.split()},
        **{other: f"there is none; write {text}" for other, text in _NONE.items()},
        "__version__": "use mlvm.__version__",
        "Array": "tensors are ml.Tensor",
        "array_split": "use ml.split(x, n), or ml.split(x, [i, j]) for parts of other lengths",
        "autograd": _GRADIENT,
        "block_until_ready": "use x itself: a call that returned has run",
        "config": "there are no switches: a dtype is an argument, dtype=ml.float64",
        "cross_entropy": _MEAN.format("softmax_cross_entropy"),
        "custom_vjp": "see ml.call, whose vjp= is a gradient of your own, and docs/functions.md",
        "data": "a DataLoader is ml.Pipeline, see docs/pipelines.md",
        "DataLoader": "use ml.Pipeline; see docs/pipelines.md",
        "device_get": "use x.numpy()",
        "devices": 'a device is a VM: ml.default_vm(), or ml.VM(device="cuda:0"), see docs/gpu.md',
        "distributed": "see ml.parallel, and docs/parallel.md",
        "distributions": "see ml.random for draws, such as ml.random.normal(shape)",
        "floating": 'use ml.isdtype(x.dtype, "real floating")',
        "fromfunction": "call it with ml.arange(n)[:, None] and ml.arange(m)",
        "func": "the functions are ml's own: ml.grad, ml.value_and_grad, ml.vjp",
        "Generator": "use ml.random.key(seed), and give it to the draw",
        "get_num_threads": "use ml.VM(threads=n); see docs/performance.md",
        "GradScaler": "use ml.optim.LossScale; see docs/dtypes.md",
        "amp": f"{_AUTOCAST}, and ml.optim.LossScale is its GradScaler",
        "autocast": _AUTOCAST,
        "backends": _NO_DEVICE,
        "bitcast_convert_type": "there is none; the bits are those of x.numpy(), f32 for bf16",
        "cuda": _NO_DEVICE,
        "device": _NO_DEVICE,
        "device_put": _NO_DEVICE,
        "enable_grad": _GRADIENT,
        "functional": "the functions are ml.relu, ml.softmax_cross_entropy and the like",
        "get_default_dtype": _DEFAULT_DTYPE,
        "gradient": "see ml.grad for derivatives; of samples, see ml.diff",
        "half": "see ml.float16",
        "index_select": "use ml.take(x, i, axis=...)",
        "inference_mode": _NO_TAPE,
        "integer": 'use ml.isdtype(x.dtype, "integral")',
        "is_complex": 'use ml.isdtype(x.dtype, "complex floating")',
        "is_floating_point": 'use x.dtype.is_float, or ml.isdtype(x.dtype, "real floating")',
        "issubdtype": 'use ml.isdtype(x.dtype, "real floating")',
        "jvp": "there is none; of one number write ml.sum(ml.grad(fn)(x) * t)",
        "l1_loss": _MEAN.format("l1"),
        "lax": "the functions are ml's own, such as ml.scan, ml.cond and ml.stop_gradient",
        "make_jaxpr": "use ml.program_of(fn, *args), which ml.disassemble prints",
        "ndarray": "tensors are ml.Tensor, and ml.asarray makes one",
        "ndim": "use x.ndim",
        "no_grad": _NO_TAPE,
        "numel": "use x.size",
        "numpy": "the functions are ml's own; x.numpy() copies a tensor out",
        "randint": "use ml.random.randint(shape, low=..., high=...)",
        "savez": "use ml.save(file, {name: x})",
        "scipy": "the functions are ml's own, such as ml.erf, ml.logsumexp and ml.linalg.solve",
        "set_default_dtype": _DEFAULT_DTYPE,
        "set_grad_enabled": _NO_TAPE,
        "set_num_threads": "use ml.VM(threads=n); see docs/performance.md",
        "set_printoptions": "use numpy.set_printoptions, which tensors follow",
        "shape": "use x.shape",
        "size": "use x.size",
        "smooth_l1_loss": _MEAN.format("huber"),
        "special": "the functions are ml's own, such as ml.erf and ml.logsumexp",
        "tree_util": "use ml.tree.map, ml.tree.leaves",
        "unique": "use ml.unique_values(x), or ml.unique_counts(x) and ml.unique_inverse(x)",
        "use_deterministic_algorithms": "a program gives the same bits each time: leave it out",
        "vectorize": "use ml.map(fn, x), or give fn tensors",
        "utils": "a DataLoader is ml.Pipeline, see docs/pipelines.md; see also ml.checkpoint",
    },
    "mlvm.eager.fft": {
        "fft2": "use ml.fft.fftn(x, axes=(-2, -1))",
        "ifft2": "use ml.fft.ifftn(x, axes=(-2, -1))",
        "irfft2": "use ml.fft.irfftn(x, axes=(-2, -1))",
        "rfft2": "use ml.fft.rfftn(x, axes=(-2, -1))",
    },
    "mlvm.eager.linalg": {
        "cond": "there is none; write s[0] / s[-1], with s = ml.linalg.svdvals(x)",
        "expm": "there is none; write scipy.linalg.expm(x.numpy())",
        "inverse": "use ml.linalg.inv",
        "kron": f"there is none; write {_NONE['kron']}",
        "solve_triangular": "use ml.linalg.solve(x, y)",
        "multi_dot": "use x @ y @ z",
    },
    "mlvm.eager.nn": {
        "BCELoss": "use ml.binary_cross_entropy_with_logits, of logits",
        "BCEWithLogitsLoss": _MEAN.format("binary_cross_entropy_with_logits"),
        "BatchNorm1d": "use ml.nn.BatchNorm",
        "BatchNorm2d": "use ml.nn.BatchNorm",
        "ConvTranspose1d": "use ml.nn.ConvTranspose2d, with axes of length 1",
        "CrossEntropyLoss": _MEAN.format("softmax_cross_entropy"),
        "DataParallel": "see ml.parallel.data_parallel, and docs/parallel.md",
        "Dense": "use ml.nn.Linear",
        "Flatten": "use lambda x: x.flatten(1)",
        "HuberLoss": _MEAN.format("huber"),
        "Identity": "use lambda x: x",
        "KLDivLoss": "use ml.kl_divergence",
        "L1Loss": _MEAN.format("l1"),
        "MSELoss": "use ml.mean_squared_error",
        "ModuleDict": "a dict of Modules in a field is part of the tree",
        "ModuleList": "a list of Modules in a field is part of the tree",
        "Parameter": "a tensor in a field of a Module is a parameter; see ml.nn.buffer for others",
        "SmoothL1Loss": _MEAN.format("huber"),
        "Transformer": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "TransformerDecoderLayer": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "TransformerEncoder": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "TransformerEncoderLayer": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "functional": "the functions are ml's own: ml.relu, ml.softmax_cross_entropy and the like",
        "init": "see ml.random for draws, and load_parameters",
        "relu": "use ml.relu",
        "utils": "use ml.optim.clip_by_global_norm(gradients, most), and lengths= of ml.nn.LSTM",
    },
    "mlvm.eager.optim": {
        "GradScaler": "use ml.optim.LossScale; see docs/dtypes.md",
        "CosineAnnealingLR": "use ml.optim.cosine as learning rate",
        "LambdaLR": "a function from the number of updates to the rate may be a learning rate",
        "OneCycleLR": "use ml.optim.one_cycle as learning rate",
        "StepLR": "a function from the number of updates to the rate may be a learning rate",
        "clip_grad_norm_": "use ml.optim.clip_by_global_norm",
        "lr_scheduler": "use ml.optim.cosine, ml.optim.one_cycle and the like as learning rate",
    },
    "mlvm.eager.random": {
        "binomial": "there is none; write ml.sum(ml.random.bernoulli((n, *shape), p), axis=0)",
        "PRNGKey": "use ml.random.key",
        "default_rng": "use ml.random.key, and give it to the draw",
        "gumbel": "use ml.random.categorical for a draw by logits",
        "manual_seed": "use ml.random.seed",
        "rand": "use ml.random.uniform(shape)",
        "randn": "use ml.random.normal(shape)",
        "random": "use ml.random.uniform",
        "shuffle": "use ml.random.permutation(x), a new tensor",
        "standard_normal": "use ml.random.normal",
    },
}
"""What to write for functions of other libraries, by the module in which they are looked for."""


Hint: TypeAlias = str | Callable[[], Callable[..., Any]]


class Elsewhere:
    """A name that a class does not have. Raises `AttributeError` with the hint, or with a call of
    the function that the hint gets. `help` lists it with the hint, too."""

    def __init__(self, name: str, hint: Hint) -> None:
        self.name = name
        self.hint = hint
        self.__doc__ = f"There is none; {hint if isinstance(hint, str) else f'use ml.{name}'}."

    def __get__(self, instance: object, owner: type) -> NoReturn:
        hint = self.hint
        if not isinstance(hint, str):
            hint = f"use ml.{_call(self.name, hint())}"
        name = owner.__name__
        vowels = "AEFHILMNORSX" if name.isupper() else "AEIOU"  # as they are spelled: an LSTM
        article = "an" if name[0] in vowels else "a"
        raise AttributeError(f"{article} {name} has no {self.name}; {hint}")


def _call(name: str, function: Callable[..., Any]) -> str:
    """A call with all arguments that the function must have."""
    given = []
    for each in signature(function).parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            given.append(f"*{each.name}")
        elif each.default is Parameter.empty and each.kind is not each.VAR_KEYWORD:
            given.append(f"{each.name}=..." if each.kind is each.KEYWORD_ONLY else each.name)
    return f"{name}({', '.join(given)})"


def hint_at(owner: type, hints: Mapping[str, Hint], listing: Callable[..., list[str]]) -> None:
    """Give the class these hints, where it has no such name, and `dir` of its instances by
    `listing`."""
    for name in hints.keys() - set(dir(owner)):
        setattr(owner, name, Elsewhere(name, hints[name]))
    owner.__dir__ = listing  # type: ignore[method-assign]


def hint(
    function: str, args: Sequence[object], keywords: Iterable[str], known: Collection[str]
) -> str | None:
    """What to write, if the arguments are those of another library's function: what by position
    means something else here, and what each keyword is called that the function does not know."""
    text = _of_places(function, args, {*keywords}, known)
    told = [text] if text else []
    for name in keywords:
        if name in known:
            continue
        here = KEYWORDS.get(name)
        if name in _NO_KEYWORDS:
            told.append(f"there is no {name}=; {_NO_KEYWORDS[name]}")
        elif here in known:
            also = ", 1 for True" if name == "unbiased" else ""
            told.append(f"there is no {name}=; use {here}={also}")
    return f"{function}(): {'; '.join(told)}" if told else None


def _of_places(
    function: str, args: Sequence[object], keywords: set[str], known: Collection[str]
) -> str | None:
    first = next(iter(known), None)
    bounds = ", low=..., high=..." if "low" in known else ""
    ints = [x for x in args if isinstance(x, int)]
    missing_bounds = function == "randint" and not keywords & {"low", "high"}
    if function in ("empty", "ones", "zeros") and 1 < len(ints) == len(args):
        return f"the shape is one argument: write {function}({(*ints,)})"
    if function == "where" and len(args) == 1:
        return "takes a condition, x and y; the places are ml.nonzero(c)"
    if "key" in known and first != "key" and any(_is_key(x) for x in args):
        return f"the key is given by name: {function}({first}{bounds}, key=key)"
    if function == "layer_norm" and "eps" not in keywords:
        return "takes scale, bias and eps: layer_norm(x, ml.ones(n), ml.zeros(n), eps=1e-5)"
    if function == "normal" and len(args) > 1:
        return "has mean 0 and variance 1: write loc + scale * ml.random.normal(shape)"
    if missing_bounds or (function in ("randint", "uniform") and len(args) > 1):
        return f"takes low= and high= by name: {function}({first}{bounds})"
    return None


def _is_key(x: object) -> bool:
    return isinstance(x, Tensor) and x.type is _KEY


wrapper.hint = hint


_INNER: Final = {"prepare", "region", "root", "stale", "tape"}
"""What the files here need of a tensor, and nobody else."""


def existing(instance: object) -> list[str]:
    """The names that an instance has."""
    names = object.__dir__(instance)
    return [n for n in names if not isinstance(getattr_static(instance, n, None), Elsewhere)]


def of_users(instance: object) -> list[str]:
    """The names that a tensor has for its user. No property is evaluated for it, except one that
    is not for every shape."""
    owner = type(instance)
    return [
        name
        for name in object.__dir__(instance)
        if name not in _INNER
        and not (name.startswith("_") and not name.startswith("__"))
        and (isinstance(getattr_static(owner, name), property) or hasattr(instance, name))
    ]


def is_slip(name: str, meant: str) -> bool:
    """Whether a name is another one, mistyped: in other case, or with one letter too few, too many
    or another, or two in each other's place. That is inside a name of five letters or more: `glu`
    is no gelu, `image` no imag and `savez` no save."""
    if name.lower().replace("_", "") == meant.lower().replace("_", ""):
        return True
    start = _alike(name, meant)
    x, y = name[start:], meant[start:]
    end = _alike(x[::-1], y[::-1])
    x, y = x[: len(x) - end], y[: len(y) - end]
    swapped = len(x) == 2 and x == y[::-1]
    one = max(len(x), len(y)) == 1 and (end > 0 or len(x) == len(y))
    return min(len(name), len(meant)) >= 5 and start > 0 and (swapped or one)


def _alike(x: str, y: str) -> int:
    """With how many letters both begin."""
    pairs = enumerate(zip(x, y, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(x), len(y)))


def missing(module: str, names: Iterable[str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__`: says for a name that it lacks what there is instead. `names` are
    those that it has."""
    hints, names = FUNCTIONS.get(module, {}), list(names)

    @lru_cache(maxsize=1024)  # libraries ask for the same names again and again
    def text(name: str) -> str:
        hint = hints.get(name)
        if hint is None:
            meant = next((each for each in names if is_slip(name, each)), None)
            hint = f"did you mean {meant}?" if meant else None
        return f"{module} has no {name}" + (f"; {hint}" if hint else "")

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(text(name), name=name)

    return __getattr__
