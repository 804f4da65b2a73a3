"""mlvm's eager language: `import mlvm.eager as ml`.

Names and signatures follow the Python Array API standard, or JAX for functions that the standard
does not define. Tensors are values on a VM; `with arena:` determines where results are allocated;
`grad` and `value_and_grad` differentiate; `ml.nn`, `ml.optim` and `ml.random` support training.

In docstrings `f[..., n]` is a tensor of floats with n elements along the last axis, and `[...]` is
a tensor of any shape; i is integers, c complex numbers. Each docstring names the errors for invalid
shapes, dtypes and values. It does not repeat the errors that every function raises. These are
`DTypeError` for an operand that is not a tensor, array or list, and for an unknown dtype;
`ArgumentError` for an argument of a wrong kind. A freed tensor raises `StaleTensorError`, and a
tensor of a different VM `HandleError`. `ArenaOverflowError` or `OutOfMemoryError` is raised if the
result does not fit.

A block `Invalid calls` lists calls with the error that each raises. In it v is f32[2], x and half
are f32[4,4], ints is i64[2], sequences is f32[1,4,2], images is f32[1,4,4,2], volumes is
f32[1,2,2,2,2], key is a random key, vm is a different VM, and stale is a tensor of a closed arena.
"""

import sys as _sys
from functools import partial
from importlib import import_module as _import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlvm.core.types import DType
from mlvm.eager import public
from mlvm.eager.interop import standard
from mlvm.eager.interop.hints import (
    existing,
    hint_at,
    hints,
    missing,
    of_users,
    refuse_assignment,
)
from mlvm.eager.tensor import primitives
from mlvm.renamed import NAMES, warn_of_old_name

if TYPE_CHECKING:
    from mlvm.eager.names import *  # noqa: F403
    from mlvm.eager.tensor.primitives import *  # noqa: F403

__array_api_version__ = standard.VERSION
__array_namespace_info__ = standard.Info

_here = _sys.modules[__name__]
_calls = {each: partial(getattr, _here, each) for each in primitives.__all__ + public.functions()}
hint_at(public.PRESENT["Tensor"], {**_calls, **hints()["mlvm.eager.Tensor"]}, of_users)
refuse_assignment(public.PRESENT["Tensor"])
hint_at(DType, hints()["mlvm.eager.DType"], existing)
hint_at(public.PRESENT["VM"], hints()["mlvm.eager.VM"], existing)

if not TYPE_CHECKING:  # mypy reads only a literal __all__, and follows the imports instead
    __all__ = [*dict.fromkeys([*primitives.__all__, *public.__all__])]
    _missing = missing(__name__, __all__)
    _primitives, _public = primitives, public
    _NAMES, _warn_of_old_name = NAMES, warn_of_old_name
    _at_once = public.PRESENT

    def __getattr__(name: str) -> Any:
        if name in _public.LATER:
            value = _public.later(name)
        elif name in _primitives.__all__:
            value = getattr(_primitives, name)
        elif (new := _NAMES["ml"].get(name)) is not None:
            _warn_of_old_name(f"ml.{name}", f"ml.{new}")
            return getattr(_here, new)
        else:
            _missing(name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*__all__]

    class _Language(ModuleType):
        """Class of the module `mlvm.eager`.

        When a subpackage is imported, Python assigns it to a name in the parent module. Such
        names, for example `ml.tensor`, are not names of the language, and `ml.capture` is the
        function."""

        def __setattr__(self, name: str, value: object) -> None:
            if value is not _sys.modules.get(f"{__name__}.{name}"):
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Any, ...]:
            return _import_module, (self.__name__,)  # a pickled function refers to this module

    for _name in [name for name in globals() if not name.startswith("_")]:
        del globals()[_name]
    globals().update(_at_once)
    _here.__class__ = _Language
