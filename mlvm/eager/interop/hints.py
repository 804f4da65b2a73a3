"""Names of numpy, PyTorch and JAX that are other names here: `ml.cat` says "use ml.concat".

A method that a tensor does not have is a descriptor; `__getattr__` would slow every other attribute
down. A module has a `__getattr__`, which is asked only for what it lacks. `dir` leaves all of these
names out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter, getattr_static, signature
from typing import Any, Final, NoReturn, TypeAlias

from mlvm.eager.tensor import wrapper

_GRADIENT: Final = "see ml.grad and ml.value_and_grad"
_NO_TAPE: Final = "only ml.grad and its like record; within them, see ml.stop_gradient"
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
_DEFAULT_DTYPE: Final = "floats are f32 unless told otherwise: dtype=ml.float64"
_AUTOCAST: Final = "compute with model.astype(ml.bfloat16); see docs/dtypes.md"
_GATES: Final = (
    "see model.named_parameters(): input_kernel, hidden_kernel and bias of each cell, kernels "
    "being the transpose of PyTorch's"
)
_AFFINE: Final = "scale and bias begin at 1 and 0, and ml.nn.buffer(layer) keeps them there"

METHODS: Final = {
    "add_": "use x += y",
    "at": "use x[i] = v, or x[i] += v",
    "backward": _GRADIENT,
    "block_until_ready": "nothing is to be waited for: a call that returned has run",
    "bfloat16": "use x.astype(ml.bfloat16)",
    "bmm": "use x @ y",
    "bool": _ASTYPE,
    "chunk": "use ml.split(x, n, axis=...)",
    "clamp": "use x.clip(min, max)",
    "clone": "use x.copy()",
    "conjugate": "use x.conj()",
    "contiguous": "every tensor is",
    "cpu": "use x.numpy()",
    "cuda": 'use x.to_device(vm), with vm = ml.VM(device="cuda:0"); see docs/gpu.md',
    "cumprod": "use ml.cumulative_prod(x, axis=...)",
    "cumsum": "use ml.cumulative_sum(x, axis=...)",
    "data": "use x itself, or x.numpy()",
    "detach": "use ml.stop_gradient(x)",
    "diagonal": "use ml.linalg.diagonal(x)",
    "dim": "use x.ndim",
    "dot": "use x @ y",
    "double": _ASTYPE,
    "element_size": "use x.itemsize",
    "eq": "use x == y",
    "expand": "use ml.broadcast_to(x, shape)",
    "expand_as": "use ml.broadcast_to(x, y.shape)",
    "fill": "use x[...] = value, or ml.full_like(x, value)",
    "fill_": "use x[...] = value, or ml.full_like(x, value)",
    "flat": "use x.ravel()",
    "float": _ASTYPE,
    "gather": "use ml.take_along_axis(x, indices, axis=...)",
    "grad": _GRADIENT,
    "half": "use x.astype(ml.float16)",
    "int": _ASTYPE,
    "is_cuda": "see x.device",
    "is_floating_point": "use x.dtype.is_float",
    "long": _ASTYPE,
    "masked_fill": "use ml.where(mask, value, x)",
    "mm": "use x @ y",
    "mul_": "use x *= y",
    "new_ones": "use ml.ones(shape, dtype=x.dtype)",
    "new_zeros": "use ml.zeros(shape, dtype=x.dtype)",
    "norm": "use ml.linalg.vector_norm(x), or ml.linalg.matrix_norm(x)",
    "numel": "use x.size",
    "ptp": "use x.max() - x.min()",
    "requires_grad": _GRADIENT,
    "requires_grad_": _GRADIENT,
    "resize": "use x.reshape(shape)",
    "scatter_add": "use x[i] += y; where indices repeat, x += ml.one_hot(i, len(x)).T @ y",
    "sort": "use ml.sort(x), a new tensor, and x.argsort() for the positions",
    "strides": "elements lie in row-major order, without gaps",
    "sub_": "use x -= y",
    "t": "use x.T",
    "to": 'use x.astype(dtype), or x.to_device(vm) with vm = ml.VM(device="cuda:0")',
    "tobytes": "use x.numpy().tobytes()",
    "trace": "use ml.linalg.trace(x)",
    "unbind": "use ml.unstack(x, axis=...)",
    "unsqueeze": "use ml.expand_dims(x, axis=...)",
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
    "half": _WIDE.format("ml.float16"),
    "load_state_dict": "use model.load_state(arrays)",
    "modules": "the parts of a model are its fields",
    "named_children": "the parts of a model are its fields",
    "named_modules": "the parts of a model are its fields; model.named_parameters() has the paths",
    "register_parameter": "assign a tensor to a field",
    "requires_grad_": "a gradient is taken of what ml.grad is given; ml.nn.buffer(part) freezes it",
    "register_buffer": "assign ml.nn.buffer(x) to a field",
    "state_dict": "use model.state()",
    "to": f"for a dtype use model.astype(dtype); {_MODEL_DEVICE}",
    "weight": "see model.named_parameters(): of a Linear it is kernel, the transpose of PyTorch's",
    "weight_hh_l0": _GATES,
    "weight_ih_l0": _GATES,
    "zero_grad": "gradients are values, see ml.value_and_grad",
}
"""What to write for methods and fields of other libraries' models."""

OF_OPTIMIZERS: Final = {
    "add_param_group": "give groups= when it is made",
    "load_state_dict": "use optimizer.load_state(arrays)",
    "lr": "use optimizer.learning_rate, which may be assigned",
    "param_groups": "use optimizer.groups; optimizer.learning_rate may be assigned",
    "state_dict": "use optimizer.state()",
    "step": "use optimizer.update(gradients), with those of ml.value_and_grad",
    "zero_grad": "gradients are values, see ml.value_and_grad",
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
    "ddof": "correction",
    "dim": "axis",
    "dims": "axis",
    "embedding_dim": "features",
    "keepdim": "keepdims",
    "kernel_size": "window",
    "lr": "learning_rate",
    "normalized_shape": "features",
    "num_channels": "channels",
    "num_features": "channels",
    "num_groups": "groups",
    "p": "rate",
    "unbiased": "correction",
}
"""The keywords of other libraries, and what they are called here."""

_NO_KEYWORDS: Final = {
    "affine": _AFFINE,
    "bias": "a layer has one, which begins at 0; ml.nn.buffer(layer.bias) keeps it there",
    "batch_first": "x is [time, batch, features]; give it ml.moveaxis(x, 0, 1)",
    "dampening": "momentum takes each gradient whole",
    "device": f"it is where the arena is that it is made in: {_NO_DEVICE.partition(': ')[2]}",
    "dilation": "the places of a window lie side by side",
    "elementwise_affine": _AFFINE,
    "dtype": "convert with ml.astype; sums of halves are accumulated in f32 as it is",
    "inplace": "only what is assigned to changes: x[...] = y",
    "maximize": "give the optimizer the gradients of the negative",
    "padding_idx": "multiply by a mask, or give losses an ignore_index=",
    "requires_grad": _GRADIENT,
    "weight_decay": "use ml.optim.AdamW, which has one",
}
"""Keywords of other libraries that have no other name here, and what to write."""

_OTHER_NAMES: Final = {
    "abs": "absolute fabs",
    "acos": "arccos",
    "acosh": "arccosh",
    "all": "alltrue",
    "any": "sometrue",
    "asarray": "array as_tensor from_numpy tensor asanyarray ascontiguousarray frombuffer",
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
    "capture": "jit compile make_jaxpr",
    "clip": "clamp",
    "concat": "cat concatenate column_stack dstack append",
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
    "matmul": "dot mm bmm mv inner",
    "max": "amax",
    "mean": "average",
    "mean_squared_error": "mse_loss",
    "min": "amin",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "nonzero": "flatnonzero",
    "not_equal": "ne",
    "permute_dims": "permute transpose",
    "pow": "power float_power",
    "prod": "product",
    "random.normal": "randn",
    "random.permutation": "randperm",
    "random.seed": "manual_seed",
    "random.uniform": "rand",
    "remainder": "mod fmod",
    "reshape": "ravel view",
    "result_type": "promote_types",
    "round": "rint around round_",
    "sigmoid": "expit",
    "silu": "swish",
    "softmax_cross_entropy": "cross_entropy nll_loss",
    "split": "chunk array_split tensor_split hsplit vsplit dsplit",
    "stop_gradient": "detach",
    "subtract": "sub",
    "swapaxes": "swapdims",
    "take": "index_select",
    "take_along_axis": "gather",
    "tree": "tree_util",
    "tree.map": "tree_map",
    "trunc": "fix",
    "unstack": "unbind",
}
"""The name here, and what it is called elsewhere."""

_NONE: Final = {
    "atleast_1d": "x.reshape(-1) if x.ndim < 1 else x",
    "atleast_2d": "x.reshape(1, -1) if x.ndim < 2 else x",
    "bincount": "ml.sum(ml.one_hot(x, length, dtype=ml.int64), axis=0)",
    "cov": "c @ c.T / (n - 1), with c = x - ml.mean(x, axis=1, keepdims=True)",
    "fmax": "ml.where(ml.isnan(x), y, ml.where(ml.isnan(y), x, ml.maximum(x, y)))",
    "fmin": "ml.where(ml.isnan(x), y, ml.where(ml.isnan(y), x, ml.minimum(x, y)))",
    "histogram": "numpy.histogram(x.numpy())",
    "interp": "numpy.interp(x.numpy(), xp, fp), or see ml.searchsorted",
    "intersect1d": "ml.unique_values(x[ml.isin(x, y)])",
    "kron": "ml.einsum('ij,kl->ikjl', x, y), and reshape it to a matrix",
    "lexsort": "i[ml.argsort(major[i])], with i = ml.argsort(minor)",
    "median": "ml.mean(ml.sort(x)[(n - 1) // 2 : n // 2 + 1]), with x of n elements",
    "nan_to_num": "ml.where(ml.isnan(x), 0.0, x), and ml.clip where infinite",
    "nanmean": "ml.mean(x[~ml.isnan(x)])",
    "nansum": "ml.sum(ml.where(ml.isnan(x), 0.0, x))",
    "percentile": "numpy.percentile(x.numpy(), q), or see ml.sort",
    "quantile": "numpy.quantile(x.numpy(), q), or see ml.sort",
    "trapezoid": "ml.sum((y[1:] + y[:-1]) * ml.diff(x)) / 2",
}
"""Functions that are not here under any name, and what to write."""

FUNCTIONS: Final[dict[str, dict[str, str]]] = {
    "mlvm.eager": {
        **{other: f"use ml.{n}" for n, others in _OTHER_NAMES.items() for other in others.split()},
        **{other: f"there is none; write {text}" for other, text in _NONE.items()},
        "DataLoader": "use ml.Pipeline; see docs/pipelines.md",
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
        "inference_mode": _NO_TAPE,
        "is_complex": 'use ml.isdtype(x.dtype, "complex floating")',
        "is_floating_point": 'use x.dtype.is_float, or ml.isdtype(x.dtype, "real floating")',
        "lax": "ml.scan, ml.cond, ml.while_loop and the like are ml's own",
        "ndarray": "tensors are ml.Tensor, and ml.asarray makes one",
        "ndim": "use x.ndim",
        "no_grad": _NO_TAPE,
        "numpy": "the functions are ml's own; x.numpy() copies a tensor out",
        "set_default_dtype": _DEFAULT_DTYPE,
        "shape": "use x.shape",
        "size": "use x.size",
        "unique": "use ml.unique_values(x), or ml.unique_counts(x) and ml.unique_inverse(x)",
        "utils": "a DataLoader is ml.Pipeline, see docs/pipelines.md; see also ml.checkpoint",
    },
    "mlvm.eager.fft": {
        "fft2": "use ml.fft.fftn(x, axes=(-2, -1))",
        "ifft2": "use ml.fft.ifftn(x, axes=(-2, -1))",
        "irfft2": "use ml.fft.irfftn(x, axes=(-2, -1))",
        "rfft2": "use ml.fft.rfftn(x, axes=(-2, -1))",
    },
    "mlvm.eager.linalg": {
        "cond": "use ml.linalg.svdvals(x), the largest over the smallest",
        "expm": "there is none; write scipy.linalg.expm(x.numpy())",
        "inverse": "use ml.linalg.inv",
        "kron": f"there is none; write {_NONE['kron']}",
        "solve_triangular": "use ml.linalg.solve(x, y)",
        "multi_dot": "use x @ y @ z, or ml.einsum",
    },
    "mlvm.eager.nn": {
        "BCEWithLogitsLoss": "use ml.binary_cross_entropy_with_logits",
        "BatchNorm1d": "use ml.nn.BatchNorm",
        "BatchNorm2d": "use ml.nn.BatchNorm",
        "ConvTranspose1d": "use ml.nn.ConvTranspose2d, with axes of length 1",
        "CrossEntropyLoss": "use ml.softmax_cross_entropy",
        "Dense": "use ml.nn.Linear",
        "Flatten": "use lambda x: x.flatten(1)",
        "Identity": "use lambda x: x",
        "MSELoss": "use ml.mean_squared_error",
        "ModuleDict": "a dict of Modules in a field is part of the tree",
        "ModuleList": "a list of Modules in a field is part of the tree",
        "Parameter": "a tensor in a field of a Module is a parameter; see ml.nn.buffer for others",
        "Transformer": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "TransformerDecoderLayer": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "TransformerEncoder": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "TransformerEncoderLayer": "see models/transformer.py, of ml.nn.MultiHeadAttention",
        "functional": "the functions are ml.relu, ml.softmax_cross_entropy and the like",
        "init": "see ml.random for draws, and load_parameters",
        "relu": "use ml.relu",
        "utils": "see ml.optim.clip_by_global_norm, and lengths= of ml.nn.LSTM and its like",
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
        "PRNGKey": "use ml.random.key",
        "default_rng": "use ml.random.key, and give it to the draw",
        "gumbel": "use ml.random.categorical for a draw by logits",
        "manual_seed": "use ml.random.seed",
        "rand": "use ml.random.uniform",
        "randn": "use ml.random.normal",
        "random": "use ml.random.uniform",
        "shuffle": "use ml.random.permutation",
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
    function: str, args: Sequence[object], keywords: Iterable[str], known: Container[str]
) -> str | None:
    """What to write, if the arguments are those of another library's function: for the first such
    keyword what it is called here, if the function knows that."""
    if function == "where" and len(args) == 1:
        return "where() takes a condition, x and y; the places are ml.nonzero(c)"
    if function == "randint" and len(args) > 1:
        return "randint() takes low= and high= by name: randint(shape, low=..., high=...)"
    for name in keywords:
        if name in known:
            continue
        if name in _NO_KEYWORDS:
            return f"{function}(): there is no {name}=; {_NO_KEYWORDS[name]}"
        here = KEYWORDS.get(name)
        if here in known:
            also = ", 1 for True" if name == "unbiased" else ""
            return f"{function}(): there is no {name}=; use {here}={also}"
    return None


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


def missing(module: str, names: Iterable[str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__`: says for a name that it lacks what there is instead. `names` are
    those that it has."""
    hints, names = FUNCTIONS.get(module, {}), list(names)

    @lru_cache(maxsize=1024)  # libraries ask for the same names again and again
    def text(name: str) -> str:
        hint = hints.get(name)
        if hint is None and not name.startswith("_"):
            from difflib import get_close_matches  # which many programs do not use

            found = get_close_matches(name, names, 1, 0.75)
            hint = f"did you mean {found[0]}?" if found else None
        return f"{module} has no {name}" + (f"; {hint}" if hint else "")

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(text(name), name=name)

    return __getattr__
