"""The names of `mlvm.eager`. Those of the ops are in `primitives`.

What many programs do not use is imported when it is first asked for: `LATER` says from where.
"""

from collections.abc import Mapping
from importlib import import_module
from inspect import isfunction
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from mlvm.arena.arena import Arena
from mlvm.core import errors
from mlvm.core.types import TensorType
from mlvm.core.types import bf16 as bfloat16
from mlvm.core.types import bool_ as bool
from mlvm.core.types import c64 as complex64
from mlvm.core.types import c128 as complex128
from mlvm.core.types import f16 as float16
from mlvm.core.types import f32 as float32
from mlvm.core.types import f64 as float64
from mlvm.core.types import i8 as int8
from mlvm.core.types import i16 as int16
from mlvm.core.types import i32 as int32
from mlvm.core.types import i64 as int64
from mlvm.core.types import u8 as uint8
from mlvm.core.types import u16 as uint16
from mlvm.core.types import u32 as uint32
from mlvm.core.types import u64 as uint64
from mlvm.eager import tree
from mlvm.eager.autodiff.grad import grad, value_and_grad, vjp
from mlvm.eager.functions import halves, random
from mlvm.eager.functions import indexing as _gives_tensors_getitem  # noqa: F401
from mlvm.eager.functions import methods as _gives_tensors_methods  # noqa: F401
from mlvm.eager.functions.attention import (
    rotary_encoding,
    scaled_dot_product_attention,
    sinusoidal_encoding,
)
from mlvm.eager.functions.contraction import einsum
from mlvm.eager.functions.creation import (
    arange,
    asarray,
    e,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    inf,
    linspace,
    nan,
    newaxis,
    ones,
    ones_like,
    pi,
    zeros,
    zeros_like,
)
from mlvm.eager.functions.elements import (
    astype,
    clip,
    count_nonzero,
    dynamic_update,
    nonzero,
    one_hot,
    positive,
    stop_gradient,
    take,
    take_along_axis,
    where,
)
from mlvm.eager.functions.losses import (
    binary_cross_entropy_with_logits,
    huber,
    kl_divergence,
    l1,
    mean_squared_error,
    softmax_cross_entropy,
)
from mlvm.eager.functions.neural import (
    avg_pool2d,
    conv1d,
    conv2d,
    conv_transpose2d,
    dropout,
    elu,
    leaky_relu,
    max_pool2d,
    silu,
    softplus,
)
from mlvm.eager.functions.shapes import (
    broadcast_arrays,
    broadcast_shapes,
    broadcast_to,
    concat,
    expand_dims,
    matrix_transpose,
    meshgrid,
    moveaxis,
    pad,
    permute_dims,
    repeat,
    reshape,
    roll,
    split,
    squeeze,
    stack,
    tile,
    unstack,
)
from mlvm.eager.functions.sorting import (
    argsort,
    isin,
    searchsorted,
    sort,
    topk,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)
from mlvm.eager.functions.sums import cumulative_prod, cumulative_sum, diff, outer, std
from mlvm.eager.interop import libraries as _enters_mlvm_in_libraries  # noqa: F401
from mlvm.eager.interop.exchange import from_dlpack
from mlvm.eager.interop.hints import (
    OF_LOSS_SCALES,
    OF_MODULES,
    OF_OPTIMIZERS,
    existing,
    hint_at,
    missing,
)
from mlvm.eager.tensor import operators as _gives_tensors_operators  # noqa: F401
from mlvm.eager.tensor.context import default_arena, default_vm, use
from mlvm.eager.tensor.dtypes import can_cast, finfo, iinfo, isdtype, result_type
from mlvm.eager.tensor.tensor import Tensor
from mlvm.machines.local import LocalVM as VM

if TYPE_CHECKING:  # at run time these are imported when they are first asked for: see `LATER`
    from mlvm.arena.recording import Recording
    from mlvm.core.program.assembly import disassemble
    from mlvm.eager import nn, optim, parallel
    from mlvm.eager.autodiff import testing
    from mlvm.eager.autodiff.host_call import call
    from mlvm.eager.capture.captured import Captured, Measured, capture, measure
    from mlvm.eager.capture.guards.changing import RecompilationWarning
    from mlvm.eager.control.branches import cond, switch
    from mlvm.eager.control.checking import check
    from mlvm.eager.control.checkpoint import checkpoint
    from mlvm.eager.control.functions import function
    from mlvm.eager.control.loops import fori_loop, map, scan, while_loop
    from mlvm.eager.files.checkpoints import load, save
    from mlvm.eager.functions import fft, linalg
    from mlvm.eager.functions.linalg import tensordot, vecdot
    from mlvm.eager.recording import debug
    from mlvm.eager.recording.inputs import Pipeline, QueueTensor, ScratchPad
    from mlvm.eager.recording.listing import program_of
    from mlvm.input.batches import Dataset, Transform
    from mlvm.input.pipeline import PipelineState, PipelineStats
    from mlvm.input.sampling import SampleRandom
    from mlvm.machines.dry import DryVM
    from mlvm.machines.remote.client import RemoteVM
    from mlvm.machines.remote.connect import connect
    from mlvm.show.record import record
    from mlvm.show.scalars import ScalarLog

__all__ = [
    "VM",
    "Arena",
    "Captured",
    "Dataset",
    "DryVM",
    "Measured",
    "Pipeline",
    "PipelineState",
    "PipelineStats",
    "QueueTensor",
    "RecompilationWarning",
    "Recording",
    "RemoteVM",
    "SampleRandom",
    "ScalarLog",
    "ScratchPad",
    "Tensor",
    "TensorType",
    "Transform",
    "arange",
    "argsort",
    "asarray",
    "astype",
    "avg_pool2d",
    "bfloat16",
    "binary_cross_entropy_with_logits",
    "bool",
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "call",
    "can_cast",
    "capture",
    "check",
    "checkpoint",
    "clip",
    "complex64",
    "complex128",
    "concat",
    "cond",
    "connect",
    "conv1d",
    "conv2d",
    "conv_transpose2d",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "debug",
    "default_arena",
    "default_vm",
    "diff",
    "disassemble",
    "dropout",
    "dynamic_update",
    "e",
    "einsum",
    "elu",
    "empty",
    "empty_like",
    "errors",
    "expand_dims",
    "eye",
    "fft",
    "finfo",
    "float16",
    "float32",
    "float64",
    "fori_loop",
    "from_dlpack",
    "full",
    "full_like",
    "function",
    "grad",
    "huber",
    "iinfo",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "isdtype",
    "isin",
    "kl_divergence",
    "l1",
    "leaky_relu",
    "linalg",
    "linspace",
    "load",
    "map",
    "matrix_transpose",
    "max_pool2d",
    "mean_squared_error",
    "measure",
    "meshgrid",
    "moveaxis",
    "nan",
    "newaxis",
    "nn",
    "nonzero",
    "one_hot",
    "ones",
    "ones_like",
    "optim",
    "outer",
    "pad",
    "parallel",
    "permute_dims",
    "pi",
    "positive",
    "program_of",
    "random",
    "record",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "rotary_encoding",
    "save",
    "scaled_dot_product_attention",
    "scan",
    "searchsorted",
    "silu",
    "sinusoidal_encoding",
    "softmax_cross_entropy",
    "softplus",
    "sort",
    "split",
    "squeeze",
    "stack",
    "std",
    "stop_gradient",
    "switch",
    "take",
    "take_along_axis",
    "tensordot",
    "testing",
    "tile",
    "topk",
    "tree",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "use",
    "value_and_grad",
    "vecdot",
    "vjp",
    "where",
    "while_loop",
    "zeros",
    "zeros_like",
]


SHOWN: Final = {
    "debug": "mlvm.eager.recording.debug",
    "errors": "mlvm.core.errors",
    "fft": "mlvm.eager.functions.fft",
    "linalg": "mlvm.eager.functions.linalg",
    "nn": "mlvm.eager.nn",
    "optim": "mlvm.eager.optim",
    "parallel": "mlvm.eager.parallel",
    "random": "mlvm.eager.functions.random",
    "testing": "mlvm.eager.autodiff.testing",
    "tree": "mlvm.eager.tree",
}
"""The modules of which `ml` has the public names, by their names there."""

_ROOMS: Final = {
    "mlvm.arena.recording": "Recording",
    "mlvm.core.program.assembly": "disassemble",
    "mlvm.eager.autodiff.host_call": "call",
    "mlvm.eager.capture.captured": "Captured Measured capture measure",
    "mlvm.eager.capture.guards.changing": "RecompilationWarning",
    "mlvm.eager.control.branches": "cond switch",
    "mlvm.eager.control.checking": "check",
    "mlvm.eager.control.checkpoint": "checkpoint",
    "mlvm.eager.control.functions": "function",
    "mlvm.eager.control.loops": "fori_loop map scan while_loop",
    "mlvm.eager.files.checkpoints": "load save",
    "mlvm.eager.functions.linalg": "tensordot vecdot",
    "mlvm.eager.recording.inputs": "Pipeline QueueTensor ScratchPad",
    "mlvm.eager.recording.listing": "program_of",
    "mlvm.input.batches": "Dataset Transform",
    "mlvm.input.pipeline": "PipelineState PipelineStats",
    "mlvm.input.sampling": "SampleRandom",
    "mlvm.machines.dry": "DryVM",
    "mlvm.machines.remote.client": "RemoteVM",
    "mlvm.machines.remote.connect": "connect",
    "mlvm.show.record": "record",
    "mlvm.show.scalars": "ScalarLog",
}
"""What is imported when it is first asked for, by its module: what many programs do not use."""

LATER: Final = {name: room for room, names in _ROOMS.items() for name in names.split()} | SHOWN

_ADDED: Final[list[tuple[type, str, str]]] = [
    (Arena, "plot", "mlvm.show.picture"),
    (Arena, "report", "mlvm.show.report"),
    (VM, "trace", "mlvm.show.trace"),
    (VM, "on_device", "mlvm.machines.gpu"),
]
"""What modules add to classes when they are imported."""


class _Added:
    """Stands for what a module adds to a class. The module is imported when that is asked for."""

    def __init__(self, name: str, room: str) -> None:
        self.name = name
        self.room = room

    def __get__(self, instance: object, owner: type) -> Any:
        import_module(self.room)
        return getattr(owner if instance is None else instance, self.name)


def functions() -> list[str]:
    """The public names of functions, none of which is imported for it."""
    return [
        name
        for name in __all__
        if name not in SHOWN
        and (name[0].islower() if name in LATER else isfunction(globals()[name]))
    ]


def later(name: str) -> Any:
    """The public thing of that name, which is imported now."""
    module = import_module(LATER[name])
    if name not in SHOWN:
        return getattr(module, name)
    for owner, hints in _HINTS.get(name, {}).items():
        hint_at(getattr(module, owner), hints, existing)
    return _shown(name, module)


def _shown(name: str, module: ModuleType) -> ModuleType:
    """A module with the public names of the given one: `ml.optim` has no `math`, though its file
    imports it."""
    path = f"{__package__}.{name}"
    shown = ModuleType(path, module.__doc__)
    for each in module.__all__:
        setattr(shown, each, getattr(module, each))
    vars(shown).update(
        __all__=module.__all__,
        __getattr__=missing(path, module.__all__),
        __dir__=lambda: [*module.__all__],
        __wrapped__=module,  # where the names are defined
    )
    return shown


_HINTS: Final[dict[str, dict[str, Mapping[str, str]]]] = {
    "nn": {"Module": OF_MODULES},
    "optim": {"Optimizer": OF_OPTIMIZERS, "LossScale": OF_LOSS_SCALES},
}
"""What to write for names of other libraries, by module and class."""

if not TYPE_CHECKING:
    for _owner, _name, _room in _ADDED:
        if _name not in vars(_owner):
            setattr(_owner, _name, _Added(_name, _room))
    halves.checkpoint = lambda fn: later("checkpoint")(fn)
