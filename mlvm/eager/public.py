"""The names of `mlvm.eager`, by the modules that define them; `primitives` defines the ops.

Names that few programs use are imported at the first access (`LATER`).
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import isclass, isfunction
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from mlvm.arena.arena import Arena
from mlvm.eager.functions import halves
from mlvm.eager.functions import indexing as _gives_tensors_getitem  # noqa: F401
from mlvm.eager.functions import methods as _gives_tensors_methods  # noqa: F401
from mlvm.eager.interop import libraries as _enters_mlvm_in_libraries  # noqa: F401
from mlvm.eager.interop.hints import existing, hint_at, hints, missing
from mlvm.eager.tensor import operators as _gives_tensors_operators  # noqa: F401
from mlvm.eager.tensor.wrapper import hinted
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.native.extension import install
from mlvm.renamed import NAMES

AT_ONCE: Final = {
    "mlvm.arena.arena": "Arena",
    "mlvm.core.types": """TensorType bf16 bf16:bfloat16 bool_:bool c64 c64:complex64 c128
        c128:complex128 f16 f16:float16 f32 f32:float32 f4e2m1 f4e2m1:float4_e2m1fn f64 f64:float64
        f8e4m3 f8e4m3:float8_e4m3fn f8e5m2 f8e5m2:float8_e5m2 i16 i16:int16 i2 i2:int2 i32 i32:int32
        i4 i4:int4 i64 i64:int64 i8 i8:int8 u16 u16:uint16 u2 u2:uint2 u32 u32:uint32 u4 u4:uint4
        u64 u64:uint64 u8 u8:uint8""",
    "mlvm.eager.autodiff.grad": "grad value_and_grad vjp",
    "mlvm.eager.functions.activations": """celu elu glu hard_shrink hard_sigmoid
        hard_swish hard_tanh leaky_relu log_sigmoid mish prelu relu6 selu silu soft_shrink soft_sign
        softplus tanh_shrink""",
    "mlvm.eager.functions.attention": """rotary_encoding scaled_dot_product_attention
        sinusoidal_encoding""",
    "mlvm.eager.functions.contraction": "einsum",
    "mlvm.eager.functions.convolution": """conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d""",
    "mlvm.eager.functions.creation": """arange asarray e empty empty_like eye full full_like inf
        linspace nan newaxis ones ones_like pi zeros zeros_like""",
    "mlvm.eager.functions.elements": """angle argwhere astype clip count_nonzero deg2rad
        dynamic_slice dynamic_update exp2 flatnonzero nonzero one_hot positive rad2deg round
        stop_gradient take take_along_axis unravel_index where""",
    "mlvm.eager.functions.indexing": "scatter_add",
    "mlvm.eager.functions.losses": """binary_cross_entropy binary_cross_entropy_with_logits
        cosine_embedding_loss cosine_similarity gaussian_nll_loss hinge_loss huber_loss
        kl_divergence l1_loss margin_ranking_loss mean_squared_error nll_loss poisson_nll_loss
        smooth_l1_loss softmax_cross_entropy triplet_margin_loss""",
    "mlvm.eager.functions.neural": "dropout embedding_bag",
    "mlvm.eager.functions.pooling": """adaptive_avg_pool adaptive_max_pool avg_pool1d avg_pool2d
        avg_pool3d max_pool1d max_pool2d max_pool3d""",
    "mlvm.eager.functions.shapes": """broadcast_arrays broadcast_shapes broadcast_to concat
        concat:concatenate expand_dims flatten hstack matrix_transpose meshgrid moveaxis pad
        permute_dims permute_dims:transpose repeat reshape roll rot90 split squeeze stack swapaxes
        tile tril triu unstack vstack""",
    "mlvm.eager.functions.sorting": """argpartition argsort interp isin partition searchsorted
        sort topk unique unique_all unique_counts unique_inverse unique_values""",
    "mlvm.eager.functions.sums": """cummax cummin cumulative_prod cumulative_prod:cumprod
        cumulative_sum cumulative_sum:cumsum diff gradient logcumsumexp outer std trapezoid var""",
    "mlvm.eager.functions.sliding": "fold unfold",
    "mlvm.eager.interop.exchange": "from_dlpack",
    "mlvm.eager.tensor.autocast": "autocast",
    "mlvm.eager.tensor.context": "default_arena default_vm use",
    "mlvm.eager.tensor.default": "default_dtype set_default_dtype",
    "mlvm.eager.tensor.dtypes": "can_cast finfo iinfo isdtype result_type",
    "mlvm.eager.tensor.precision": "PrecisionWarning",
    "mlvm.eager.tensor.tensor": "Tensor",
    "mlvm.eager.tensor.warn": "NoEffectWarning",
    "mlvm.machines.local": "LocalVM:VM",
}
"""Names that `import mlvm.eager` imports immediately.

`bool_:bool` is named `bool_` in the module, and `bool` in `ml`. An object may have several names,
as in NumPy: `concat` and `concatenate`."""

WHEN_ASKED: Final = {
    "mlvm.arena.recording": "Recording",
    "mlvm.core.program.assembly": "disassemble",
    "mlvm.eager.tensor.primitives": """abs:absolute acos:arccos acosh:arccosh asin:arcsin
        asinh:arcsinh atan:arctan atan2:arctan2 atanh:arctanh bitwise_invert:bitwise_not
        bitwise_invert:invert bitwise_left_shift:left_shift bitwise_right_shift:right_shift
        conj:conjugate divide:true_divide pow:power""",
    "mlvm.eager.transform.host": "host_call",
    "mlvm.eager.runs.captured": "Captured capture",
    "mlvm.eager.capture.measuring": "CurvePoint Measured measure",
    "mlvm.eager.capture.guards.changing": "RecompilationWarning",
    "mlvm.eager.capture.guards.frozen": "FrozenWarning",
    "mlvm.eager.capture.replacing": "ReplacementWarning",
    "mlvm.eager.control.branches": "cond switch",
    "mlvm.eager.control.checking": "check",
    "mlvm.eager.control.checkpoint": "checkpoint",
    "mlvm.eager.control.functions": "subroutine",
    "mlvm.eager.control.loops": "fori_loop map scan while_loop",
    "mlvm.eager.files.checkpoints": "load save",
    "mlvm.eager.functions.elementary": """cbrt complex fmax fmin heaviside ldexp logaddexp2
        put_along_axis scatter select sinc view view_as_complex view_as_real""",
    "mlvm.eager.functions.images": "grid_sample interpolate pixel_shuffle pixel_unshuffle",
    "mlvm.eager.functions.linalg": "cross tensordot vecdot",
    "mlvm.eager.functions.pieces": """array_split atleast_1d atleast_2d atleast_3d column_stack
        delete diag_embed dsplit dstack hsplit unflatten vsplit""",
    "mlvm.eager.functions.products": """cdist diag diagonal dot inner kron trace tril_indices
        triu_indices vdot""",
    "mlvm.eager.functions.quantization": """dequantize_linear dynamic_quantize_linear
        quantize_groups quantize_linear""",
    "mlvm.eager.functions.segments": """segment_max segment_mean segment_min segment_prod
        segment_sum""",
    "mlvm.eager.functions.signal": "convolve correlate hamming hanning istft stft",
    "mlvm.eager.functions.special": """allclose array_equal fmod gamma i0 isclose lerp
        logit multigammaln nan_to_num polygamma xlogy""",
    "mlvm.eager.functions.statistics": """average bincount corrcoef cov digitize histogram
        median nanmax nanmean nanmedian nanmin nanpercentile nanquantile nanstd nansum nanvar
        percentile ptp quantile""",
    "mlvm.eager.nn.ctc": "ctc_loss",
    "mlvm.eager.nn.quantization": "quantization_errors quantize",
    "mlvm.eager.recording.inputs": "Pipeline QueueTensor ScratchPad",
    "mlvm.eager.recording.listing": "program_of",
    "mlvm.eager.transform.batch": "auto_batch",
    "mlvm.eager.transform.custom": "custom_jvp custom_vjp",
    "mlvm.eager.transform.jacobians": "hessian hvp jacfwd jacrev",
    "mlvm.eager.transform.jvp": "jvp linearize",
    "mlvm.eager.transform.vmap": "vmap",
    "mlvm.input.batches": "Transform",
    "mlvm.input.datasets": "Dataset",
    "mlvm.input.pipeline": "PipelineState PipelineStats",
    "mlvm.input.sampling": "SampleRandom",
    "mlvm.machines.dry": "DryVM",
    "mlvm.machines.gpu.devices": "devices",
    "mlvm.machines.remote.client": "RemoteVM",
    "mlvm.machines.remote.connect": "connect",
    "mlvm.show.record": "record",
    "mlvm.show.scalars": "ScalarLog",
}
"""Names that are imported at the first access."""

SHOWN: Final = {
    "debug": "mlvm.eager.runs.debug",
    "errors": "mlvm.core.errors",
    "fft": "mlvm.eager.functions.fft",
    "linalg": "mlvm.eager.functions.linalg",
    "nn": "mlvm.eager.nn",
    "onnx": "mlvm.onnx",
    "optim": "mlvm.eager.optim",
    "parallel": "mlvm.eager.parallel",
    "random": "mlvm.eager.functions.random",
    "runs": "mlvm.eager.runs.public",
    "testing": "mlvm.eager.autodiff.testing",
    "tree": "mlvm.eager.tree",
}
"""The modules with public names that are available as `ml.NAME`, by NAME."""


def _places(rooms: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return for each name the module that defines it, and the name there."""
    listed = [
        (room, *word.partition(":")) for room, words in rooms.items() for word in words.split()
    ]
    return {name or there: (room, there) for room, there, _, name in listed}


PLACES: Final = _places(AT_ONCE) | _places(WHEN_ASKED)
LATER: Final = {name: PLACES[name][0] for name in _places(WHEN_ASKED)} | SHOWN
PRESENT: Final[dict[str, Any]] = {
    name: getattr(import_module(room), there) for name, (room, there) in _places(AT_ONCE).items()
}
__all__ = sorted({*PLACES, *SHOWN})

for _owner in (Arena, VM, PRESENT["use"], PRESENT["default_dtype"]):
    _owner.__init__ = hinted(_owner.__init__)  # type: ignore[method-assign]
for _name in ("default_arena", "default_vm", "set_default_dtype"):
    PRESENT[_name] = hinted(PRESENT[_name])

_ADDED: Final[list[tuple[type, str, str]]] = [
    (Arena, "plot", "mlvm.show.picture"),
    (Arena, "report", "mlvm.show.report"),
    (Arena, "_repr_html_", "mlvm.show.picture"),
    (VM, "profile", "mlvm.show.vm_trace"),
    (VM, "on_device", "mlvm.machines.gpu.vm"),
]
"""Names that modules add to classes when they are imported."""


class _Added:
    """Descriptor for a name that a module adds to a class; reading it imports the module."""

    def __init__(self, name: str, room: str) -> None:
        self.name = name
        self.room = room

    def __get__(self, instance: object, owner: type) -> Any:
        import_module(self.room)
        return getattr(owner if instance is None else instance, self.name)


def functions() -> list[str]:
    """Return the public names of functions, without importing them."""
    return [
        name
        for name in __all__
        if name not in SHOWN and (name[0].islower() if name in LATER else isfunction(PRESENT[name]))
    ]


def _open_template_of(*call: Any) -> Any:
    """Import and call the function with that name, because a recorder is rarely needed."""
    return import_module("mlvm.eager.recording.families").open_template_of(*call)


install(trace=_open_template_of)


def later(name: str) -> Any:
    """Import and return the public object with that name."""
    module, is_shown = import_module(LATER[name]), name in SHOWN
    there = name if is_shown else PLACES[name][1]
    space = f"{__package__}.{name}" if is_shown else __package__
    for each, texts in hints().items():
        room, _, owner = each.rpartition(".")
        value = getattr(module, owner, None) if room == space and owner[0].isupper() else None
        # those classes define hints themselves
        if value is not None and value is not PRESENT.get(owner):
            hint_at(value, texts, existing)
    return _shown(name, module) if is_shown else _hinted(getattr(module, there))


def _hinted(value: Any) -> Any:
    """Let a function or class of a lower layer raise typed errors for wrong arguments."""
    if getattr(value, "__module__", "mlvm.eager").startswith("mlvm.eager"):
        return value
    is_error = isclass(value) and issubclass(value, BaseException)
    if isclass(value) and not is_error and isfunction(vars(value).get("__init__")):
        value.__init__ = hinted(value.__init__, names=False)  # type: ignore[method-assign]
    return hinted(value, names=False) if isfunction(value) else value


def _missing(path: str, name: str, module: ModuleType) -> Callable[[str], Any]:
    """Return the `__getattr__` of a shown module: old names, and remedies for unknown names."""
    none = missing(path, module.__all__)
    old = NAMES.get(f"ml.{name}", {})
    return lambda each: getattr(module, each) if each in old else none(each)


def _shown(name: str, module: ModuleType) -> ModuleType:
    """Return a module with only the public names of the given module.

    For example, `ml.optim` has no `math`, although the file imports it."""
    path = f"{__package__}.{name}"
    shown = ModuleType(path, module.__doc__)
    for each in module.__all__:
        value = getattr(module, each)
        inner = _shown(f"{name}.{each}", value) if isinstance(value, ModuleType) else _hinted(value)
        setattr(shown, each, inner)
    vars(shown).update(
        __all__=module.__all__,
        __getattr__=_missing(path, name, module),
        __dir__=lambda: [*module.__all__],
        __wrapped__=module,  # the module that defines the names
    )
    return shown


class _Finder:
    """Last finder of modules, which raises `ImportError` with a hint for names of other libraries.

    An example is `from mlvm.eager.nn import functional`."""

    @staticmethod
    def find_spec(path: str, *_: object) -> None:
        owner, name = path.rpartition(".")[::2]
        text = hints()[owner].get(name) if owner.startswith("mlvm.eager") else None
        if owner == __package__ and name in SHOWN:
            text = f"import mlvm.eager as ml, and write ml.{name}"
        if text is not None:
            raise ImportError(f"{owner} has no {name}; {text}", name=path)


sys.meta_path.append(_Finder)

if not TYPE_CHECKING:
    for _owner, _name, _room in _ADDED:
        if _name not in vars(_owner):
            setattr(_owner, _name, _Added(_name, _room))
    halves.checkpoint = lambda fn: later("checkpoint")(fn)
