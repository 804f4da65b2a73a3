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
from mlvm.eager.functions.indexing import Places
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
_NO_DEVICE: Final = (
    'a tensor is where its arena is: with ml.Arena(vm, "x").allocating(), and a GPU is vm = '
    'ml.VM(device="opencl:0"), see docs/gpu.md'
)
_MODEL_DEVICE: Final = (
    'a model is where its tensors were made: with ml.Arena(vm, "x").allocating(), and a GPU is '
    'vm = ml.VM(device="opencl:0"), see docs/gpu.md'
)
_MODEL_DTYPE: Final = "which is another model, with gradients to this one; see docs/dtypes.md"
_WIDE: Final = "use model.astype({}), " + _MODEL_DTYPE
_DEFAULT_DTYPE: Final = "floats are f32 unless told otherwise, as in ml.zeros(3, dtype=ml.float64)"
_GATES: Final = (
    "see model.named_parameters(): input_kernel, hidden_kernel and bias of each cell, kernels "
    "being the transpose of PyTorch's"
)
_FIELDS: Final = "the parts of a model are its fields"
_TRACE: Final = (
    "use with ml.default_vm().trace(path), which Perfetto opens, or python -m mlvm show SCRIPT"
)
_HOOKS: Final = "put a Module of your own in the place of the layer, which calls it"
_AFFINE: Final = "scale and bias begin at 1 and 0, and layer.freeze() keeps them there"

_PADDING: Final = (
    "mask= is True where a key is seen: mask=ml.logical_not(padding)[:, None, None, :]"
)

METHODS: Final = {
    "add_": "use x += y",
    "addmm": "use c + x @ y",
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
    "cuda": 'use x.to_device(vm), with vm = ml.VM(device="opencl:0"); see docs/gpu.md',
    "cumprod": "use ml.cumulative_prod(x, axis=...)",
    "cumsum": "use ml.cumulative_sum(x, axis=...)",
    "data": "use x itself, and ml.stop_gradient(x) in a gradient",
    "detach": "use ml.stop_gradient(x)",
    "dim": "use x.ndim",
    "div": "use x / y",
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
    "index_add": "use x.at[i].add(y), for the i of x[i]",
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
    "median": "use ml.median(x), the mean of the two in the middle",
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
    "random_": "use ml.random.randint",
    "repeat_interleave": "use x.repeat(n)",
    "requires_grad": _ANY,
    "requires_grad_": _ANY,
    "resize": "use x.reshape(shape)",
    "scatter_add": "use x.at[i].add(y), for the i of x[i]",
    "select": "use an index such as x[:, i]",
    "sort": "use ml.sort(x), and x.argsort() for the positions",
    "split": "use ml.split(x, n, axis=...), into n parts",
    "strides": "elements lie in row-major order, without gaps",
    "sub": "use x - y",
    "sub_": "use x -= y",
    "t": "use x.T",
    "to": "use x.astype(dtype); a device is a VM: x.to_device(vm)",
    "tobytes": "use x.numpy().tobytes()",
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
    "append": "make an nn.Sequential of all its layers, or keep them in a list that is a field",
    "apply": "see model.named_parameters() and load_parameters; a call is model(x)",
    "bfloat16": _WIDE.format("ml.bfloat16"),
    "bias_hh_l0": _GATES,
    "bias_ih_l0": _GATES,
    "buffers": "use model.named_buffers()",
    "build": "a layer has its parameters as soon as it is made",
    "children": _FIELDS,
    "compile": "use ml.capture of the step, with its gradients and update",
    "count_params": "use model.num_parameters()",
    "cpu": "model.state() has its tensors, and x.numpy() copies one out",
    "cuda": _MODEL_DEVICE,
    "device": "see x.device of its tensors, in model.state()",
    "double": _WIDE.format("ml.float64"),
    "dtype": "see x.dtype of its tensors, in model.state()",
    "extra_repr": "numbers, texts and functions in fields are printed as they are",
    "fit": "write the loop: ml.value_and_grad, and optimizer.update(gradients)",
    "flatten_parameters": "the kernels of all gates are one, and lie together",
    "float": _WIDE.format("ml.float32"),
    "forward": "a call is model(x), and __call__ is what a class of yours defines",
    "get_parameter": "use model.named_parameters()[path], with / in the path",
    "get_submodule": _FIELDS,
    "half": _WIDE.format("ml.float16"),
    "init": "a layer draws its parameters when it is made, with key=",
    "load_state_dict": "use model.load_state(arrays)",
    "load_weights": "use ml.load(file, into=model)",
    "modules": _FIELDS,
    "named_children": _FIELDS,
    "named_modules": f"{_FIELDS}; model.summary() lists them",
    "predict": "a call is model(x), after model.eval()",
    "register_forward_hook": _HOOKS,
    "register_full_backward_hook": _HOOKS,
    "register_parameter": "assign a tensor to a field",
    "requires_grad": "use model.freeze(), and model.named_parameters() has what is not frozen",
    "requires_grad_": "use model.freeze(), and model.unfreeze()",
    "register_buffer": "assign ml.nn.buffer(x) to a field",
    "save": "use ml.save(file, model)",
    "save_weights": "use ml.save(file, model)",
    "state_dict": "use model.state()",
    "to": f"for a dtype use model.astype(dtype); {_MODEL_DEVICE}",
    "trainable": "use model.freeze(), and model.unfreeze()",
    "trainable_variables": "use model.named_parameters()",
    "trainable_weights": "use model.named_parameters()",
    "variables": "use model.state()",
    "weight": "of a Linear it is model.kernel.T; see model.named_parameters()",
    "weight_hh_l0": _GATES,
    "weight_ih_l0": _GATES,
    "weights": "use model.state()",
    "zero_grad": _VALUES,
}
"""What to write for methods and fields of other libraries' models."""

OF_OPTIMIZERS: Final = {
    "add_param_group": "give groups= when it is made",
    "load_state_dict": "use optimizer.load_state(arrays)",
    "get_last_lr": "use optimizer.rate",
    "lr": "use optimizer.rate; optimizer.learning_rate may be assigned",
    "param_groups": "use optimizer.groups; optimizer.learning_rate may be assigned",
    "set_state": "use optimizer.load_state(arrays), or ml.load(file, into=optimizer)",
    "state_dict": "use optimizer.state()",
    "step": "use optimizer.update(gradients), with those of ml.value_and_grad",
    "zero_grad": _VALUES,
}
"""What to write for methods and fields of other libraries' optimizers."""

OF_MULTI_STEPS: Final = {
    **OF_OPTIMIZERS,
    "learning_rate": "it is that of its .optimizer, and may be assigned there; .rate is the next",
    "lr": "see .rate; the learning_rate of its .optimizer may be assigned",
    "param_groups": "see the groups of its .optimizer",
}
"""What to write for methods and fields of optimizers, of one around another."""

OF_AVERAGES: Final = {
    "average": "use average.state(), or with average.swapped(): the model has the averages",
    "load_state_dict": "use average.load_state(arrays)",
    "model": "the model has the averages inside of: with average.swapped()",
    "module": "the model has the averages inside of: with average.swapped()",
    "shadow": "use average.state(), or with average.swapped(): the model has the averages",
    "state_dict": "use average.state()",
    "step": "use average.update()",
    "update_parameters": "use average.update()",
}
"""What to write for methods and fields of other libraries' averages of weights."""

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

OF_PLACES: Final = {
    "apply": "use x.at[i].set(fn(x[i])), where indices do not repeat",
    "divide": "use x.at[i].multiply(1 / y)",
    "maximum": "use x.at[i].max(y)",
    "minimum": "use x.at[i].min(y)",
    "mul": "use x.at[i].multiply(y)",
    "power": "use x.at[i].set(x[i] ** y), where indices do not repeat",
    "subtract": "use x.at[i].add(-y)",
}
"""What to write for methods of JAX's `x.at[i]`."""

KEYWORDS: Final = {
    "T_0": "first_steps",
    "T_max": "total_steps",
    "T_mult": "factor",
    "a_max": "max",
    "a_min": "min",
    "attn_mask": "mask",
    "b_init": "bias_init",
    "causal": "is_causal",
    "constant_values": "value",
    "d_model": "embed_dim",
    "ddof": "correction",
    "decay_steps": "total_steps",
    "diagonal": "k",
    "dim": "axis",
    "dim_feedforward": "hidden_dim",
    "dims": "axis",
    "div_factor": "initial_divisor",
    "downscale_factor": "factor",
    "dropout_p": "dropout",
    "embedding_dim": "features",
    "eta_min": "final",
    "final_div_factor": "final_divisor",
    "gamma": "decay_rate",
    "group_size": "group",
    "in_dims": "in_axes",
    "kdim": "memory_dim",
    "keepdim": "keepdims",
    "kernel_size": "window",
    "lambd": "limit",
    "layer_norm_eps": "eps",
    "lr": "learning_rate",
    "max_lr": "peak",
    "max_val": "max",
    "maxval": "high",
    "min_val": "min",
    "minval": "low",
    "nhead": "num_heads",
    "nonlinearity": "negative_slope",
    "norm_first": "pre_norm",
    "normalized_shape": "features",
    "num": "n",
    "num_channels": "channels",
    "num_features": "channels",
    "num_groups": "groups",
    "num_parameters": "channels",
    "num_workers": "workers",
    "out_dims": "out_axes",
    "output_size": "size",
    "p": "rate",
    "padding_mode": "padding",
    "pct_start": "warmup_fraction",
    "per_sample_weights": "weights",
    "prefetch_factor": "prefetch",
    "scale_factor": "scale",
    "shifts": "shift",
    "size": "shape",
    "src_mask": "mask",
    "start_dim": "start",
    "stddev": "std",
    "steps": "num",
    "tgt_mask": "mask",
    "unbiased": "correction",
    "upscale_factor": "factor",
    "w_init": "kernel_init",
    "warmup": "warmup_steps",
    "weight_init": "kernel_init",
}
"""The keywords of other libraries, and what they are called here."""

_NO_KEYWORDS: Final = {
    "affine": _AFFINE,
    "alpha": "write x + alpha * y",
    "as_tuple": "a tuple is what it gives",
    "bias": 'a layer has one, which begins at 0; layer.freeze("bias") keeps it there',
    "bits": 'a dtype says it: ml.quantize(model, "i4")',
    "cache_enabled": "a captured function casts a weight that nothing updates once: leave it out",
    "ceil_mode": "windows lie inside: pad the far sides, padding=((0, 1), (0, 1))",
    "batch_first": "x is [time, batch, features]; give it ml.moveaxis(x, 0, 1)",
    "collate_fn": "samples of a shape are stacked; transform= changes the arrays of each batch",
    "dampening": "momentum takes each gradient whole",
    "device": f"it is where the arena is that it is made in: {_NO_DEVICE.partition(': ')[2]}",
    "elementwise_affine": _AFFINE,
    "dtype": "convert with ml.astype; sums of halves are accumulated in f32 as it is",
    "inplace": "only what is assigned to changes: x[...] = y",
    "loc": "write loc + scale * ml.random.normal(shape)",
    "maximize": "give the optimizer the gradients of the negative",
    "key_padding_mask": _PADDING,
    "output_padding": "take it off the far sides of the padding: padding=((1, 0), (1, 0)) is "
    "padding=1 with output_padding=1",
    "padding_idx": "multiply by a mask, or give losses an ignore_index=",
    "pin_memory": "batches are made where the machine reads them: leave it out",
    "requires_grad": _ANY,
    "src_key_padding_mask": _PADDING,
    "return_counts": "use ml.unique_counts(x)",
    "scale": "write loc + scale * ml.random.normal(shape)",
    "upper": "lower= is its opposite",
    "tgt_key_padding_mask": _PADDING,
    "training": "a layer asks for it: ml.nn.Dropout(rate), and its eval()",
    "weight_decay": "use ml.optim.AdamW, which has one",
    "weights": "write ml.sum(weights * x) / ml.sum(weights)",
}
"""Keywords of other libraries that have no other name here, and what to write."""

_OF_CAPTURE: Final = {
    **dict.fromkeys(
        ("static_argnums", "static_argnames"),
        "an argument that is no tensor is known by its value: leave it out",
    ),
    **dict.fromkeys(
        ("donate_argnums", "donate_argnames"),
        "what the function updates in place, as by x += y, has no second copy: leave it out",
    ),
    **dict.fromkeys(
        ("backend", "fullgraph", "mode", "options"),
        "each call is one program, fused and planned: leave it out",
    ),
    "dynamic": "tensors of another shape have a program of their own: leave it out",
}
"""Keywords of `jax.jit` and `torch.compile`, and what to write."""

_OTHER_NAMES: Final = {
    "abs": "absolute fabs",
    "acos": "arccos",
    "acosh": "arccosh",
    "adaptive_avg_pool": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "adaptive_max_pool": "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    "all": "alltrue reduce_and",
    "any": "sometrue reduce_or",
    "arange": "iota",
    "array_equal": "array_equiv",
    "asarray": "array as_tensor from_numpy tensor asanyarray ascontiguousarray",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "astype": "cast convert_element_type",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
    "bfloat16": "bf16",
    "binary_cross_entropy": "bce",
    "bitwise_invert": "bitwise_not invert",
    "bitwise_left_shift": "left_shift shift_left",
    "bitwise_right_shift": "right_shift shift_right_arithmetic",
    "bool": "bool_ bool8",
    "broadcast_arrays": "broadcast_tensors",
    "broadcast_to": "expand broadcast broadcast_in_dim",
    "capture": "jit compile",
    "checkpoint": "remat",
    "clip": "clamp",
    "complex128": "c128 cdouble",
    "complex64": "c64 cfloat",
    "concat": "cat concatenate dstack row_stack",
    "conj": "conjugate conj_physical",
    "copy": "clone",
    "cosine_embedding": "cosine_embedding_loss",
    "ctc": "ctc_loss",
    "cumulative_prod": "cumprod",
    "cumulative_sum": "cumsum",
    "custom_vjp": "custom_gradient",
    "deg2rad": "radians",
    "digamma": "psi",
    "divide": "div true_divide",
    "equal": "eq",
    "erfinv": "erf_inv",
    "expand_dims": "unsqueeze",
    "eye": "identity",
    "flip": "rev",
    "float16": "f16 fp16",
    "float32": "float single f32 fp32",
    "float64": "double f64 fp64",
    "float8_e4m3fn": "f8e4m3 float8_e4m3",
    "float8_e5m2": "f8e5m2",
    "fmod": "rem",
    "full": "fill",
    "gaussian_nll": "gaussian_nll_loss",
    "grad": "backward",
    "greater": "gt",
    "greater_equal": "ge",
    "hamming": "hamming_window",
    "hanning": "hann_window",
    "hard_sigmoid": "hardsigmoid",
    "hard_swish": "hardswish hard_silu",
    "hard_tanh": "hardtanh",
    "hinge": "hinge_loss",
    "histogram": "histc",
    "huber": "huber_loss",
    "int16": "i16 short",
    "int32": "i32 int",
    "int64": "i64 int_ long intp",
    "int8": "i8",
    "interpolate": "upsample resize upsample_nearest upsample_bilinear",
    "kl_divergence": "kl_div",
    "l1": "l1_loss",
    "less": "lt",
    "less_equal": "le",
    "lgamma": "gammaln",
    "linalg.cholesky": "cholesky",
    "linalg.cholesky_solve": "cholesky_solve",
    "linalg.det": "det",
    "linalg.eig": "eig",
    "linalg.eigh": "eigh",
    "linalg.inv": "inv inverse",
    "linalg.lstsq": "lstsq",
    "linalg.lu": "lu",
    "linalg.lu_solve": "lu_solve",
    "linalg.matrix_power": "matrix_power",
    "linalg.matrix_rank": "matrix_rank",
    "linalg.pinv": "pinv pinverse",
    "linalg.qr": "qr",
    "linalg.slogdet": "slogdet",
    "linalg.solve": "solve",
    "linalg.svd": "svd",
    "linalg.vector_norm": "norm",
    "log_sigmoid": "logsigmoid",
    "logcumsumexp": "cumlogsumexp",
    "margin_ranking": "margin_ranking_loss",
    "matmul": "mm bmm mv batch_matmul chain_matmul",
    "max": "amax reduce_max",
    "min": "amin reduce_min",
    "moveaxis": "movedim rollaxis",
    "multiply": "mul",
    "negative": "neg",
    "nll": "nll_loss",
    "not_equal": "ne",
    "outer": "ger",
    "permute_dims": "permute transpose",
    "poisson_nll": "poisson_nll_loss",
    "pow": "power float_power integer_pow",
    "prod": "product reduce_prod",
    "rad2deg": "degrees",
    "random.binomial": "binomial",
    "random.normal": "randn",
    "random.permutation": "randperm",
    "random.poisson": "poisson",
    "random.seed": "manual_seed",
    "random.uniform": "rand",
    "remainder": "mod",
    "reshape": "ravel view",
    "result_type": "promote_types",
    "round": "rint around round_",
    "scaled_dot_product_attention": "dot_product_attention",
    "scatter_add": "index_add",
    "sigmoid": "expit logistic",
    "sign": "sgn",
    "silu": "swish",
    "smooth_l1": "smooth_l1_loss",
    "soft_sign": "softsign",
    "softmax_cross_entropy": "softmax_cross_entropy_with_integer_labels",
    "split": "chunk tensor_split hsplit vsplit dsplit",
    "stop_gradient": "detach",
    "subtract": "sub",
    "sum": "reduce_sum",
    "swapaxes": "swapdims",
    "take_along_axis": "gather take_along_dim",
    "trapezoid": "trapz",
    "tree.map": "tree_map",
    "triplet_margin": "triplet_margin_loss",
    "trunc": "fix",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "uint8": "u8 byte",
    "unstack": "unbind",
    "vmap": "apply_along_axis",
}
"""The name here, and what it is called elsewhere."""

_NONE: Final = {
    "addcdiv": "x + value * y / z",
    "addcmul": "x + value * y * z",
    "addmm": "c + x @ y",
    "addmv": "c + x @ y",
    "adjoint": "ml.conj(x.mT)",
    "affine_grid": "points @ theta.mT, with rows x, y, 1 in points; see ml.grid_sample",
    "aminmax": "ml.min(x), ml.max(x)",
    "append": "ml.concat([x, ml.asarray([y])])",
    "argpartition": "ml.argsort(x)",
    "associative_scan": "ml.cumulative_sum(x) or its like, or see ml.scan",
    "atleast_1d": "x.reshape(-1) if x.ndim < 1 else x",
    "atleast_2d": "x.reshape(1, -1) if x.ndim < 2 else x",
    "baddbmm": "c + x @ y",
    "batch_norm": "ml.nn.BatchNorm(channels)(x)",
    "bernoulli": "ml.random.bernoulli(p.shape, p)",
    "block": "ml.concat([ml.concat(row, axis=1) for row in rows])",
    "cbrt": "ml.sign(x) * ml.abs(x) ** (1 / 3)",
    "clamp_max": "ml.minimum(x, high)",
    "clamp_min": "ml.maximum(x, low)",
    "collapse": "ml.flatten(x, start, end)",
    "column_stack": "ml.stack(arrays, axis=1) of vectors, ml.concat(arrays, axis=1) of matrices",
    "compress": "x[mask]",
    "convolve": "ml.conv1d(x[None, :, None], ml.flip(y)[:, None, None])[0, :, 0]"
    ", and that is mode='valid'",
    "correlate": "ml.conv1d(x[None, :, None], y[:, None, None])[0, :, 0], and that is mode='valid'",
    "delete": "ml.concat([x[:i], x[i + 1 :]])",
    "diag_embed": "x[..., None] * ml.eye(x.shape[-1])",
    "diagflat": "ml.diag(x.reshape(-1))",
    "dist": "ml.linalg.vector_norm(x - y)",
    "divmod": "x // y, x % y",
    "dropout1d": "x * ml.dropout(ml.ones((n, 1, c)), rate)",
    "dropout2d": "x * ml.dropout(ml.ones((n, 1, 1, c)), rate)",
    "dropout3d": "x * ml.dropout(ml.ones((n, 1, 1, 1, c)), rate)",
    "dynamic_index_in_dim": "ml.take(x, i, axis=0)",
    "dynamic_slice": "ml.take(x, start + ml.arange(n), axis=0)",
    "dynamic_slice_in_dim": "ml.take(x, start + ml.arange(n), axis=0)",
    "ediff1d": "ml.diff(x.reshape(-1))",
    "embedding": "weight[i], or see ml.nn.Embedding",
    "extract": "x[mask]",
    "fill_diagonal": "x[ml.arange(n), ml.arange(n)] = value",
    "fliplr": "ml.flip(x, axis=1)",
    "flipud": "ml.flip(x, axis=0)",
    "fmax": "ml.where(ml.isnan(x), y, ml.where(ml.isnan(y), x, ml.maximum(x, y)))",
    "fmin": "ml.where(ml.isnan(x), y, ml.where(ml.isnan(y), x, ml.minimum(x, y)))",
    "frac": "x - ml.trunc(x)",
    "frombuffer": "ml.asarray(numpy.frombuffer(...))",
    "fromfile": "ml.asarray(numpy.fromfile(...))",
    "fromiter": "ml.asarray([*iterable])",
    "gcd": "numpy.gcd(x.numpy(), y.numpy())",
    "geomspace": "ml.exp(ml.linspace(math.log(start), math.log(stop), num))",
    "group_norm": "ml.nn.GroupNorm(groups, channels)(x)",
    "gumbel_softmax": "ml.softmax((x + ml.random.gumbel(x.shape)) / temperature)",
    "heaviside": "ml.where(x > 0, 1.0, ml.where(x == 0, y, 0.0))",
    "hinge_embedding_loss": "ml.where(y > 0, x, ml.relu(margin - x))",
    "index_copy": "x[i] = y",
    "index_fill": "x[i] = value",
    "index_in_dim": "x[i]",
    "index_put": "x[i] = y",
    "indices": "ml.meshgrid(ml.arange(n), ml.arange(m), indexing='ij')",
    "insert": "ml.concat([x[:i], ml.asarray([y]), x[i:]])",
    "instance_norm": "ml.nn.InstanceNorm(channels)(x)",
    "intersect1d": "ml.unique_values(x[ml.isin(x, y)])",
    "is_tensor": "isinstance(x, ml.Tensor)",
    "isneginf": "x == -ml.inf",
    "isposinf": "x == ml.inf",
    "isreal": "ml.imag(x) == 0",
    "ix_": "x[i[:, None], j]",
    "kthvalue": "ml.sort(x)[..., k - 1]",
    "lcm": "numpy.lcm(x.numpy(), y.numpy())",
    "ldexp": "x * 2.0**y",
    "lexsort": "i[ml.argsort(major[i])], with i = ml.argsort(minor)",
    "linear": "x @ weight.T + bias, or see ml.nn.Linear",
    "loadtxt": "ml.asarray(numpy.loadtxt(...))",
    "logdet": "ml.linalg.slogdet(x).logabsdet",
    "logmeanexp": "ml.logsumexp(x) - math.log(x.size)",
    "logspace": "ml.pow(10.0, ml.linspace(start, stop, num))",
    "masked_fill": "ml.where(mask, value, x)",
    "masked_select": "x[mask]",
    "mgrid": "ml.meshgrid(ml.arange(n), ml.arange(m), indexing='ij')",
    "modf": "x - ml.trunc(x), and ml.trunc(x)",
    "msort": "ml.sort(x, axis=0)",
    "multinomial": "ml.random.categorical(ml.log(p), shape=(n,))",
    "nanargmax": "ml.argmax(ml.where(ml.isnan(x), -ml.inf, x))",
    "nanargmin": "ml.argmin(ml.where(ml.isnan(x), ml.inf, x))",
    "nancumsum": "ml.cumulative_sum(ml.where(ml.isnan(x), 0.0, x))",
    "nanmedian": "ml.median(x[ml.logical_not(ml.isnan(x))])",
    "nanprod": "ml.prod(ml.where(ml.isnan(x), 1.0, x))",
    "nanquantile": "ml.quantile(x[ml.logical_not(ml.isnan(x))], q)",
    "narrow": "x[:, start : start + length]",
    "normal": "mean + std * ml.random.normal(shape)",
    "normalize": "x / ml.linalg.norm(x, axis=-1, keepdims=True)",
    "ogrid": "ml.arange(n)[:, None], and ml.arange(m)",
    "pairwise_distance": "ml.linalg.vector_norm(x - y, axis=-1)",
    "partition": "ml.sort(x)",
    "pdist": "ml.cdist(x, x)",
    "piecewise": "ml.where(c1, x1, ml.where(c2, x2, default))",
    "place": "x[mask] = y",
    "polar": "r * ml.exp(1j * angle)",
    "polyfit": "numpy.polyfit(x.numpy(), y.numpy(), degree)",
    "polyval": "sum(c * x**i for i, c in enumerate(reversed(p)))",
    "put": "x[i] = y",
    "r_": "ml.concat([x, y])",
    "rand_like": "ml.random.uniform(x.shape)",
    "randn_like": "ml.random.normal(x.shape)",
    "ravel_multi_index": "i * m + j, for a shape (n, m)",
    "rms_norm": "ml.nn.RMSNorm(features)(x)",
    "rsub": "y - x",
    "select": "ml.where(c1, x1, ml.where(c2, x2, default))",
    "setdiff1d": "ml.unique_values(x[ml.logical_not(ml.isin(x, y))])",
    "sinc": "ml.where(x == 0, 1.0, ml.sin(ml.pi * x) / (ml.pi * x))",
    "slice_in_dim": "x[start:stop]",
    "soft_margin_loss": "ml.softplus(-y * x)",
    "softmin": "ml.softmax(-x)",
    "sort_key_val": "ml.sort(x), y[ml.argsort(x)]",
    "squareplus": "(x + ml.sqrt(x * x + 4.0)) / 2.0",
    "standardize": "(x - ml.mean(x, axis=-1, keepdims=True)) / ml.std(x, axis=-1, keepdims=True)",
    "std_mean": "ml.std(x, correction=1), ml.mean(x)",
    "t": "x.T",
    "threshold": "ml.where(x > t, x, value)",
    "tri": "ml.tril(ml.ones((n, n)))",
    "tril_indices_from": "ml.tril_indices(n)",
    "triu_indices_from": "ml.triu_indices(n)",
    "unflatten": "ml.reshape(x, (*x.shape[:-1], n, m))",
    "union1d": "ml.unique_values(ml.concat([x, y]))",
    "vander": "x[:, None] ** ml.arange(n - 1, -1, -1)",
    "var_mean": "ml.var(x, correction=1), ml.mean(x)",
}
"""Functions that are not here under any name, and what to write."""

_PADS: Final = {
    "Circular": ', mode="wrap"',
    "Constant": ", value",
    "Reflection": ', mode="reflect"',
    "Replication": ', mode="edge"',
    "Zero": "",
}
"""PyTorch's layers that pad, and the arguments of `pad`."""

_SCATTERS: Final = {"max": "max", "min": "min", "mul": "multiply", "apply": "set"}
"""JAX's `scatter_max` and its like, and ours."""

_LOSSES: Final = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CTCLoss": "ctc",
    "CosineEmbeddingLoss": "cosine_embedding",
    "CrossEntropyLoss": "softmax_cross_entropy",
    "GaussianNLLLoss": "gaussian_nll",
    "HuberLoss": "huber",
    "KLDivLoss": "kl_divergence",
    "L1Loss": "l1",
    "MarginRankingLoss": "margin_ranking",
    "NLLLoss": "nll",
    "PoissonNLLLoss": "poisson_nll",
    "SmoothL1Loss": "smooth_l1",
    "TripletMarginLoss": "triplet_margin",
}
"""PyTorch's losses, which are a mean unless told otherwise, and ours."""

FUNCTIONS: Final[dict[str, dict[str, str]]] = {
    "mlvm.eager": {
        **{
            other: _MEAN.format(n) if other.endswith("_loss") else f"use ml.{n}"
            for n, others in _OTHER_NAMES.items()
            for other in others.split()
        },
        **{other: f"there is none; write {text}" for other, text in _NONE.items()},
        "matrix_exp": "use ml.linalg.expm",
        "triplet": "use ml.triplet_margin",
        "__version__": "use mlvm.__version__",
        "Array": "tensors are ml.Tensor",
        "array_split": "use ml.split(x, n), or ml.split(x, [i, j]) for parts of other lengths",
        "block_until_ready": "use x itself: a call that returned has run",
        "config": "a dtype is an argument, dtype=ml.float64; debug_nans is ml.debug.nans",
        "cross_entropy": _MEAN.format("softmax_cross_entropy"),
        "data": "a DataLoader is ml.Pipeline, see docs/pipelines.md",
        "DataLoader": "use ml.Pipeline; see docs/pipelines.md",
        "device_get": "use x.numpy()",
        "eval_shape": "use fn(x).type, with an x of the arena of an ml.DryVM(), which has no bytes",
        "export": "use ml.onnx.save(fn, args, path), or the save of what ml.capture gives",
        "distributed": "see ml.parallel, and docs/parallel.md",
        "distributions": "see ml.random for draws, such as ml.random.normal(shape)",
        "floating": 'use ml.isdtype(x.dtype, "real floating")',
        "fromfunction": "call it with ml.arange(n)[:, None] and ml.arange(m)",
        "func": "the functions are ml's own: ml.grad, ml.vjp, ml.jvp, ml.vmap, ml.jacrev",
        "Generator": "use ml.random.key(seed), and give it to the draw",
        "get_num_threads": "use ml.VM(threads=n); see docs/performance.md",
        "GradScaler": "use ml.optim.LossScale; see docs/dtypes.md",
        "index_select": "use ml.take(x, i, axis=...)",
        "integer": 'use ml.isdtype(x.dtype, "integral")',
        "issubdtype": 'use ml.isdtype(x.dtype, "real floating")',
        "load_state_dict": "use model.load_state(arrays)",
        "make_jaxpr": "use ml.program_of(fn, *args), which ml.disassemble prints",
        "numel": "use x.size",
        **dict.fromkeys(
            ("ao", "qint8", "quantization", "quantize_dynamic", "quint8"),
            'use ml.quantize(model, "i8"); see docs/quantization.md',
        ),
        "randint": "use ml.random.randint(shape, low=..., high=...)",
        "savez": "use ml.save(file, {name: x})",
        "scipy": "the functions are ml's own, such as ml.erf, ml.logsumexp and ml.linalg.solve",
        "set_grad_enabled": _NO_TAPE,
        "set_num_threads": "use ml.VM(threads=n); see docs/performance.md",
        "set_printoptions": "use numpy.set_printoptions, which tensors follow",
        "special": "the functions are ml's own, such as ml.erf and ml.logsumexp",
        "SummaryWriter": "use ml.ScalarLog",
        "amp": "its autocast is ml.autocast, and its GradScaler ml.optim.LossScale",
        "backends": _NO_DEVICE,
        "autograd": "use ml.grad; its detect_anomaly is ml.debug.nans",
        "checkify": "use ml.check",
        "bitcast_convert_type": "there is none; the bits are those of x.numpy(), f32 for bf16",
        "cuda": _NO_DEVICE,
        "device": _NO_DEVICE,
        "device_put": _NO_DEVICE,
        "enable_grad": _GRADIENT,
        "functional": "the functions are ml.relu, ml.softmax_cross_entropy and the like",
        "get_default_dtype": _DEFAULT_DTYPE,
        "gradient": "see ml.grad for derivatives; of samples, see ml.diff",
        "half": "see ml.float16",
        "image": "see ml.interpolate, ml.grid_sample and ml.nn.Upsample",
        "inference_mode": _NO_TAPE,
        "is_complex": 'use ml.isdtype(x.dtype, "complex floating")',
        "is_floating_point": 'use x.dtype.is_float, or ml.isdtype(x.dtype, "real floating")',
        "lax": "the functions are ml's own, such as ml.scan, ml.cond and ml.stop_gradient",
        "mse_loss": "use ml.mean_squared_error",
        "ndarray": "tensors are ml.Tensor, and ml.asarray makes one",
        "ndim": "use x.ndim",
        "no_grad": _NO_TAPE,
        "numpy": "the functions are ml's own; x.numpy() copies a tensor out",
        "profile": _TRACE,
        "profiler": _TRACE,
        "set_default_dtype": _DEFAULT_DTYPE,
        "set_float32_matmul_precision": 'for products in a half see ml.autocast("bfloat16")',
        "shape": "use x.shape",
        "ShapeDtypeStruct": "use ml.TensorType(dtype, shape)",
        "size": "use x.size",
        "tree_util": "use ml.tree.map, ml.tree.leaves",
        "use_deterministic_algorithms": "a program gives the same bits each time: leave it out",
        "utils": "a DataLoader is ml.Pipeline, see docs/pipelines.md; see also ml.checkpoint",
        "vectorize": "use ml.vmap(fn), or give fn tensors",
        "functional_call": "fn takes the Module: ml.grad(lambda model: ...)(model)",
        "jacobian": "use ml.jacrev(fn) or ml.jacfwd(fn)",
        "pmap": "use ml.parallel.data_parallel, see docs/parallel.md; lanes of one VM are ml.vmap",
        "psum": 'use ml.parallel.all_reduce(x, axis_name="i"), in place',
        "stack_module_state": "use ml.vmap(make)(keys); see docs/transformations.md",
        "bucketize": "use ml.searchsorted(edges, x)",
        "dot_general": "use ml.einsum, or x @ y",
        "dtype": "a dtype is ml.float32 and the like, or that of a tensor, x.dtype",
        "pure_callback": "use ml.call of a registered function, see docs/functions.md",
        "reduce": "use ml.sum, ml.max and the like, or ml.scan",
        "reduce_window": "see ml.max_pool2d, ml.avg_pool2d and ml.unfold",
        "select_n": "use ml.where(c, x, y), which gives x where c holds",
        "typeof": "use x.type",
        "top_k": "use ml.topk(x, k)",
        "unique_consecutive": "there is none; see ml.unique_counts, which sorts",
        "disable_jit": "call the function that ml.capture was given: its .fn",
        "debug_nans": "use ml.debug.nans",
        "enable_x64": _DEFAULT_DTYPE,
        "default_matmul_precision": 'for products in a half see ml.autocast("bfloat16")',
        "live_arrays": "an arena has them, arena.holders()",
        "named_scope": "traces and errors name lines of Python: leave it out",
        "print_environment_info": "use python -m mlvm info",
        "linear_transpose": "use ml.vjp",
        "get_rng_state": "use ml.random.state()",
        "set_rng_state": "use ml.random.set_state",
        "randint_like": "use ml.random.randint(x.shape, low=..., high=...)",
        "printoptions": "use numpy.printoptions, which tensors follow",
        "get_printoptions": "use numpy.get_printoptions, which tensors follow",
        **dict.fromkeys(("number", "inexact"), 'use ml.isdtype(x.dtype, "numeric")'),
        "complexfloating": 'use ml.isdtype(x.dtype, "complex floating")',
        **dict.fromkeys(
            ("scatter", "index_reduce", "put_along_axis", "scatter_reduce"),
            "use x.at[i].set(y), .add(y), .max(y) and the like",
        ),
        "scatter_sub": "use x.at[i].add(-y)",
        **{f"scatter_{n}": f"use x.at[i].{m}(y)" for n, m in _SCATTERS.items()},
        **dict.fromkeys(
            (
                "dynamic_update_index_in_dim",
                "dynamic_update_slice",
                "dynamic_update_slice_in_dim",
            ),
            "use ml.dynamic_update(x, update, start, axis=...)",
        ),
        **dict.fromkeys(
            ("conv", "conv_general_dilated", "conv_with_general_padding"),
            "use ml.conv2d, with x [N, H, W, C] and a kernel [KH, KW, I, O]",
        ),
        "conv_general_dilated_patches": "use ml.unfold",
        "conv_transpose": "use ml.conv_transpose2d and its like",
        **dict.fromkeys(
            ("default_backend", "device_count", "local_device_count", "local_devices"),
            "see ml.devices()",
        ),
        **dict.fromkeys(("default_device", "get_default_device", "set_default_device"), _NO_DEVICE),
        **dict.fromkeys(
            ("NamedSharding", "make_mesh", "set_mesh", "shard_map", "with_sharding_constraint"),
            "see ml.parallel, and docs/parallel.md",
        ),
        "axis_index": "use ml.parallel.rank",
        "process_count": "use ml.parallel.size()",
        "process_index": "use ml.parallel.rank()",
        "psum_scatter": 'use ml.parallel.reduce_scatter(x, axis_name="i")',
        "all_gather": 'use ml.parallel.all_gather(x, axis_name="i")',
        **{
            f"p{op}": f'use ml.parallel.all_reduce(x, "{op}", axis_name="i"), in place'
            for op in ("max", "mean", "min")
        },
    },
    "mlvm.eager.fft": {
        "fft2": "use ml.fft.fftn(x, axes=(-2, -1))",
        "ifft2": "use ml.fft.ifftn(x, axes=(-2, -1))",
        "irfft2": "use ml.fft.irfftn(x, axes=(-2, -1))",
        "rfft2": "use ml.fft.rfftn(x, axes=(-2, -1))",
    },
    "mlvm.eager.linalg": {
        "cho_solve": "use ml.linalg.cholesky_solve",
        "cond": "there is none; write s[0] / s[-1], with s = ml.linalg.svdvals(x)",
        "inverse": "use ml.linalg.inv",
        "kron": "use ml.kron",
        "matrix_exp": "use ml.linalg.expm",
        "multi_dot": "use x @ y @ z",
        **{f"{name}_ex": f"use ml.linalg.{name}" for name in ("cholesky", "inv", "solve")},
        "vander": "there is none; write x[:, None] ** ml.arange(n)",
    },
    "mlvm.eager.nn": {
        "BatchNorm1d": "use ml.nn.BatchNorm",
        "BatchNorm2d": "use ml.nn.BatchNorm",
        "BatchNorm3d": "use ml.nn.BatchNorm",
        "CosineSimilarity": "use ml.cosine_similarity",
        "DataParallel": "see ml.parallel.data_parallel, and docs/parallel.md",
        "Dense": "use ml.nn.Linear",
        "Fold": "use ml.fold",
        "MSELoss": "use ml.mean_squared_error",
        "ModuleDict": "a dict of Modules in a field is part of the tree",
        "ModuleList": "a list of Modules in a field is part of the tree",
        "Parameter": "a tensor in a field of a Module is a parameter; see ml.nn.buffer for others",
        "Softmin": "use lambda x: ml.softmax(-x)",
        "Transformer": "a list of ml.nn.TransformerEncoderLayer; see also models/transformer.py",
        "TransformerDecoder": "a list of ml.nn.TransformerDecoderLayer in a field of a Module",
        "TransformerEncoder": "a list of ml.nn.TransformerEncoderLayer in a field of a Module",
        "Unfold": "use ml.unfold",
        "UpsamplingBilinear2d": 'use ml.nn.Upsample(..., mode="bilinear", align_corners=True)',
        "UpsamplingNearest2d": "use ml.nn.Upsample",
        "ZeroPad2d": "use lambda x: ml.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))",
        "functional": "the functions are ml's own: ml.relu, ml.softmax_cross_entropy and the like",
        "relu": "use ml.relu",
        "utils": "use ml.optim.clip_by_global_norm(gradients, most), and lengths= of ml.nn.LSTM",
        "HingeEmbeddingLoss": "use ml.mean(ml.where(y > 0, x, ml.relu(margin - x)))",
        "PairwiseDistance": "use ml.linalg.vector_norm(x - y, axis=-1)",
        "ParameterDict": "a dict of tensors in a field is part of the tree",
        "ParameterList": "a list of tensors in a field is part of the tree",
        "RNNBase": "use ml.nn.RNN",
        "SoftMarginLoss": "use ml.mean(ml.softplus(-y * x))",
        "Softmax2d": "use ml.softmax: channels are the last axis",
        "SyncBatchNorm": "use ml.nn.BatchNorm",
        "Threshold": "use lambda x: ml.where(x > t, x, value)",
        "Unflatten": "use lambda x: ml.reshape(x, (*x.shape[:-1], n, m))",
        **{
            f"Dropout{n}d": f"use lambda x: x * ml.dropout(ml.ones((n, {'1, ' * n}c)), rate)"
            for n in (1, 2, 3)
        },
        **{
            f"{kind}Pad{n}d": f"use lambda x: ml.pad(x, widths{mode}), with (0, 0) for batch and "
            "channels"
            for kind, mode in _PADS.items()
            for n in (1, 2, 3)
            if (kind, n) != ("Zero", 2)
        },
        **{
            f"Lazy{kind}": f"use ml.nn.{kind}, which is told how many features come in"
            for kind in (
                "Linear",
                *(f"Conv{n}d" for n in (1, 2, 3)),
                *(f"ConvTranspose{n}d" for n in (1, 2, 3)),
            )
        },
        **{
            f"Adaptive{kind}Pool{n}d": f"use ml.nn.Adaptive{kind}Pool, of any number of axes"
            for kind in ("Avg", "Max")
            for n in (1, 2, 3)
        },
        **{name: _MEAN.format(loss) for name, loss in _LOSSES.items()},
        **dict.fromkeys(
            ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), "use ml.nn.InstanceNorm"
        ),
    },
    "mlvm.eager.nn.init": {
        **{
            f"{other}_{kind}": f"use ml.nn.init.{name}_{kind}"
            for other, name in (("glorot", "xavier"), ("he", "kaiming"))
            for kind in ("normal", "uniform")
        },
        "constant_": "use kernel_init=ml.nn.init.constant(value)",
        "trunc_normal_": "use kernel_init=ml.nn.init.truncated_normal",
        **{
            f"{name}_": f"use kernel_init=ml.nn.init.{name}"
            for kind in ("normal", "uniform")
            for name in (kind, f"kaiming_{kind}", f"xavier_{kind}")
        },
        **{
            f"{name}_": f"use kernel_init=ml.nn.init.{name}"
            for name in ("ones", "orthogonal", "zeros")
        },
    },
    "mlvm.eager.onnx": {
        "InferenceSession": "use ml.onnx.load(file), a Module",
        "export": "use ml.onnx.save(fn, args, path)",
    },
    "mlvm.eager.optim": {
        "GradScaler": "use ml.optim.LossScale; see docs/dtypes.md",
        "AveragedModel": "use ml.optim.EMA",
        "CosineAnnealingLR": "use ml.optim.cosine as learning rate",
        "CosineAnnealingWarmRestarts": "use ml.optim.cosine_restarts as learning rate",
        "ExponentialLR": "use ml.optim.exponential as learning rate",
        "LambdaLR": "a function from the number of updates to the rate may be a learning rate",
        "LinearLR": "use ml.optim.warmup as learning rate",
        "MultiStepLR": "a function from the number of updates to the rate may be a learning rate",
        "OneCycleLR": "use ml.optim.one_cycle as learning rate",
        "ReduceLROnPlateau": "use ml.optim.Plateau as learning rate",
        "StepLR": "use ml.optim.step as learning rate",
        "clip_grad_norm_": "use ml.optim.clip_by_global_norm",
        "cosine_decay_schedule": "use ml.optim.cosine as learning rate",
        "exponential_decay": "use ml.optim.exponential as learning rate",
        "linear_schedule": "use ml.optim.warmup as learning rate",
        "swa_utils": "use ml.optim.EMA",
        "lr_scheduler": "use ml.optim.cosine, ml.optim.one_cycle and the like as learning rate",
        "ASGD": "use ml.optim.SGD, and ml.optim.EMA for the average",
        "ConstantLR": "use ml.optim.constant as learning rate",
        "LRScheduler": "use ml.optim.cosine, ml.optim.one_cycle and the like as learning rate",
        **dict.fromkeys(
            ("ChainedScheduler", "CyclicLR", "MultiplicativeLR", "PolynomialLR", "SequentialLR"),
            "a function from the number of updates to the rate may be a learning rate",
        ),
    },
    "mlvm.eager.random": {
        "PRNGKey": "use ml.random.key",
        "default_rng": "use ml.random.key, and give it to the draw",
        "manual_seed": "use ml.random.seed",
        "rand": "use ml.random.uniform(shape)",
        "randn": "use ml.random.normal(shape)",
        "random": "use ml.random.uniform",
        "shuffle": "use ml.random.permutation(x), a new tensor",
        "standard_cauchy": "use ml.random.cauchy",
        "standard_exponential": "use ml.random.exponential",
        "standard_gamma": "use ml.random.gamma",
        "standard_normal": "use ml.random.normal",
        "standard_t": "use ml.random.student_t",
        "t": "use ml.random.student_t",
        "bits": "use ml.random.randint(shape, low=..., high=...)",
        "chisquare": "there is none; write 2 * ml.random.gamma(df / 2, shape)",
        "clone": "a key is a tensor, and may be used again",
        "geometric": "there is none; write 1 + ml.floor(ml.log(u) / math.log(1 - p)), with "
        "u = ml.random.uniform(shape)",
        "key_data": "a key is a tensor, u64[2]",
        "logistic": "there is none; write ml.logit(ml.random.uniform(shape))",
        "lognormal": "there is none; write ml.exp(ml.random.normal(shape))",
        "multivariate_normal": "there is none; write mean + ml.linalg.cholesky(cov) @ "
        "ml.random.normal((n,))",
        "orthogonal": "there is none; write ml.linalg.qr(ml.random.normal((n, n))).Q",
        "pareto": "there is none; write ml.exp(ml.random.exponential(shape) / b)",
        "rayleigh": "there is none; write ml.sqrt(2 * ml.random.exponential(shape))",
        "weibull_min": "there is none; write scale * ml.random.exponential(shape) ** (1 / k)",
    },
}
"""What to write for functions of other libraries, by the module in which they are looked for."""


Hint: TypeAlias = str | Callable[[], Callable[..., Any]]


class Elsewhere:
    """Stands in a class for a name of other libraries. Asking for it raises `AttributeError` with
    the hint. A hint that is a function gives a function of `ml`, and the error shows a call of it.
    `help` shows the hint, too."""

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
    """The text of a call, with all arguments that the function requires."""
    given = []
    for each in signature(function).parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            given.append(f"*{each.name}")
        elif each.default is Parameter.empty and each.kind is not each.VAR_KEYWORD:
            given.append(f"{each.name}=..." if each.kind is each.KEYWORD_ONLY else each.name)
    return f"{name}({', '.join(given)})"


def hint_at(owner: type, hints: Mapping[str, Hint], listing: Callable[..., list[str]]) -> None:
    """Give the class a hint at each of these names that it lacks. `listing` becomes the `dir` of
    its instances."""
    for name in hints.keys() - set(dir(owner)):
        setattr(owner, name, Elsewhere(name, hints[name]))
    owner.__dir__ = listing  # type: ignore[method-assign]


def hint(
    function: str, args: Sequence[object], keywords: Iterable[str], known: Collection[str]
) -> str | None:
    """What to write where the arguments are meant for another library's function of that name. It
    tells what means something else here by its position, and what each unknown keyword is called.
    None where there is nothing to say."""
    text = _of_places(function, args, {*keywords}, known)
    told = [text] if text else []
    none = _NO_KEYWORDS | _OF_CAPTURE if function == "capture" else _NO_KEYWORDS
    for name in keywords:
        if name in known:
            continue
        here = KEYWORDS.get(name)
        if name in none:
            told.append(f"there is no {name}=; {none[name]}")
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
    if function == "autocast" and ("device_type" in keywords or (args and "dtype" in keywords)):
        return 'is for any device: ml.autocast("bfloat16")'
    if function in ("empty", "ones", "zeros") and 1 < len(ints) == len(args):
        return f"the shape is one argument: write {function}({(*ints,)})"
    if function.startswith("Conv") and len(args) > 3:
        return f"stride= and padding= are given by name: {function}(in, out, window, stride=...)"
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
    """The names that an instance has, without the hints."""
    names = object.__dir__(instance)
    return [n for n in names if not isinstance(getattr_static(instance, n, None), Elsewhere)]


hint_at(Places, OF_PLACES, existing)


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
    """A module's `__getattr__`. For a name that the module lacks it says what to write instead.
    `names` are those that the module has."""
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
