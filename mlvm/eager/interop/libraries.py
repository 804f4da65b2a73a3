"""Registration of mlvm with einops and opt_einsum.

These libraries select the functions for an array from internal lists, by the library of the array.
When one of them is imported, before mlvm or after, this module registers mlvm. Neither is required:
this module only uses libraries that the program imports itself. Libraries that get the namespace
from an array, as in the Python Array API standard, need no registration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from mlvm.eager.functions.contraction import einsum
from mlvm.eager.functions.creation import arange, asarray
from mlvm.eager.functions.shapes import concat, expand_dims, permute_dims, stack, tile
from mlvm.eager.tensor.tensor import Tensor


def _enter_in_einops(backends: Any) -> None:
    """Define a subclass of einops' `AbstractBackend` for mlvm.

    einops selects the backend by the class of the array, among imported frameworks."""

    class Backend(backends.AbstractBackend):  # type: ignore[misc]
        """Backend that reshapes, transposes and reduces by the methods of a tensor."""

        framework_name = "mlvm"

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, Tensor)

        def from_numpy(self, x: object) -> Tensor:
            return asarray(x)

        def to_numpy(self, x: Tensor) -> Any:
            return x.numpy()

        def arange(self, start: int, stop: int) -> Tensor:
            return arange(start, stop)

        def stack_on_zeroth_dimension(self, tensors: list[Tensor]) -> Tensor:
            return stack(tensors)

        def tile(self, x: Tensor, repeats: tuple[int, ...]) -> Tensor:
            return tile(x, repeats)

        def concat(self, tensors: list[Tensor], axis: int) -> Tensor:
            return concat(tensors, axis=axis)

        def add_axis(self, x: Tensor, new_position: int) -> Tensor:
            return expand_dims(x, axis=new_position)

        def is_float_type(self, x: Tensor) -> bool:
            return x.dtype.is_float

        def einsum(self, pattern: str, *x: Tensor) -> Tensor:
            return einsum(pattern, *x)

    backends.MlvmBackend = Backend  # a base class holds no strong reference to subclasses


def _enter_in_opt_einsum(dispatch: Any) -> None:
    """Register the functions of "mlvm", the package of Tensor, with names other than numpy's."""
    dispatch._aliases["mlvm"] = "mlvm.eager"
    dispatch._cached_funcs["transpose", "mlvm"] = permute_dims


_THEN: Final[dict[str, Callable[[Any], None]]] = {
    "einops._backends": _enter_in_einops,
    "opt_einsum.backends.dispatch": _enter_in_opt_einsum,
}


class _AfterImport:
    """Import hook that runs a function on a module after a different finder has loaded it.

    If a version of the library has no such lists, the hook has no effect."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _THEN:
            return None
        others = (each for each in sys.meta_path if each is not self)
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _enter(name, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _enter(name: str, module: ModuleType) -> None:
    with suppress(AttributeError, TypeError):
        _THEN[name](module)


for _name in _THEN:
    if _name in sys.modules:
        _enter(_name, sys.modules[_name])
sys.meta_path.insert(0, _AfterImport())
