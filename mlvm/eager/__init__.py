"""mlvm's eager language: `import mlvm.eager as ml`.

Names and signatures are those of the Python Array API standard, JAX's where it is silent.
Tensors are values on a VM; `with arena:` says where results are allocated; `grad` and
`value_and_grad` differentiate; `ml.nn`, `ml.optim` and `ml.random` are what training needs.

In docstrings `f[..., n]` is a tensor of floats whose last axis has n elements, `[...]` one of any
shape; i is integers, c complex numbers. Each names the errors that shapes, dtypes and values raise
there. What every function raises is not said again: `DTypeError` for what is no tensor, array
or list, and for an unknown dtype, `AttributeRefused` for an argument of a wrong kind,
`StaleTensor` for a tensor whose memory has ended, `HandleError` for one of another VM, and
`ArenaOverflow` or `OutOfMemory` where the result does not fit.
"""

from typing import TYPE_CHECKING

from mlvm.core.types import DType
from mlvm.eager import public
from mlvm.eager.interop import standard
from mlvm.eager.interop.hints import (
    METHODS,
    OF_DTYPES,
    OF_LOSS_SCALES,
    OF_MODULES,
    OF_OPTIMIZERS,
    existing,
    functions_of,
    hint_at,
    missing,
    of_users,
)
from mlvm.eager.public import *  # noqa: F403
from mlvm.eager.tensor import primitives
from mlvm.eager.tensor.primitives import *  # noqa: F403

__array_api_version__ = standard.VERSION
__array_namespace_info__ = standard.Info

hint_at(public.Tensor, {**functions_of(primitives, public), **METHODS}, of_users)
hint_at(public.nn.Module, OF_MODULES, existing)
hint_at(public.optim.Optimizer, OF_OPTIMIZERS, existing)
hint_at(public.optim.LossScale, OF_LOSS_SCALES, existing)
hint_at(DType, OF_DTYPES, existing)

if not TYPE_CHECKING:  # mypy reads only a literal __all__; it follows the imports instead
    __all__ = [*primitives.__all__, *public.__all__]
    __getattr__ = missing(__name__, __all__)

    def __dir__() -> list[str]:
        return [*__all__]

    # `ml.tensor` and its like are no names of the language; Python still finds them as modules.
    for _name in [name for name in globals() if not name.startswith("_") and name not in __all__]:
        del globals()[_name]
    del _name
