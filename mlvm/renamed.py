"""Deprecated public names: the table, and aliases that continue to work.

Each use of an old name warns once per name and line. `python -m mlvm migrate FILE` rewrites
scripts by the same table.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final


def _pairs(words: str) -> dict[str, str]:
    return dict(word.split(":") for word in words.split())


NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "ml": _pairs(
        """
        batch:auto_batch call:host_call cosine_embedding:cosine_embedding_loss ctc:ctc_loss
        function:subroutine gaussian_nll:gaussian_nll_loss hardshrink:hard_shrink hinge:hinge_loss
        huber:huber_loss l1:l1_loss margin_ranking:margin_ranking_loss nll:nll_loss
        poisson_nll:poisson_nll_loss smooth_l1:smooth_l1_loss softshrink:soft_shrink
        tanhshrink:tanh_shrink triplet_margin:triplet_margin_loss
        """
    ),
    "ml.errors": _pairs(
        """
        AccessRefused:AccessDeniedError ArenaBusy:ArenaBusyError ArenaOverflow:ArenaOverflowError
        AttributeRefused:ArgumentError AxisRefused:AxisError CallTimeout:CallTimeoutError
        CheckFailed:CheckError ConnectionLost:ConnectionLostError CopyRefused:CopyError
        ExchangeRefused:ExchangeError GradientMismatch:GradientMismatchError
        GroupTimeout:GroupTimeoutError IndexRefused:IndexingError LimitExceeded:LimitExceededError
        MaskRefused:MaskError MissingExtra:MissingExtraError NoExchange:DLPackError
        NoLength:LengthError NoTranspose:TransposeError NotFinite:NonFiniteError
        OutOfMemory:OutOfMemoryError PositionRefused:PositionError QueueEmpty:QueueEmptyError
        QueueFull:QueueFullError ShutDown:QueueClosedError StaleTensor:StaleTensorError
        UnknownFunction:UnknownFunctionError WorkerDied:WorkerDiedError
        """
    ),
}
"""Old and new names of functions and classes, by the module in which users find them."""

ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = {
    "Model": {"asked": "static_inputs"},
    "MultiSteps": {"rate": "learning_rate"},
    "Optimizer": {"rate": "learning_rate"},
    "Plan": {"ahead": "hoisted_nbytes"},
    "Plateau": {"least": "min_rate"},
    "QuantizationErrors": {"left": "unquantized"},
    "VM": {"trace": "profile"},
}
"""Old and new names of attributes and methods, by class."""

KEYWORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Captured": {"lengths": "dynamic_axes", "at_most": "max_sizes"},
    "Captured.plot": {"lengths": "sizes"},
    "LBFGS.search": {"most": "max_calls"},
    "Plateau": {"least": "min_rate"},
    "Recording.forget": {"most": "max_tensors"},
    "capture": {"lengths": "dynamic_axes", "at_most": "max_sizes"},
    "measure": {"lengths": "dynamic_axes", "at_most": "max_sizes"},
    "record": {"most": "max_tensors"},
}
"""Old and new names of keyword arguments, by function, class or method."""

MODULES: Final[Mapping[str, str]] = {
    "mlvm.eager.capture.captured": "mlvm.eager",
    "mlvm.eager.functions.windows": "mlvm.eager",
    "mlvm.eager.optim.rules": "mlvm.eager.optim",
}
"""Old modules that pickles name, and the module in which users find their functions and classes."""

_INNER: Final = ("mlvm", "importlib")
_INSPECTORS: Final = ("inspect", "pydoc", "rlcompleter")
"""Modules that read every attribute of a class or instance, as `help` does."""
_registries: Final[dict[str, dict[Any, Any]]] = {}
"""By file, the registry of `warnings` for its lines."""


def warn_of_old_name(old: str, new: str) -> None:
    """Issue the `DeprecationWarning` for an old name, at the innermost line outside of mlvm.

    An import statement reads a name twice: the first time, from `_handle_fromlist`, does not warn.
    """
    frame, module = sys._getframe(1), "mlvm"
    while frame.f_back and module.partition(".")[0] in _INNER:
        if frame.f_code.co_name == "_handle_fromlist":
            return
        frame = frame.f_back
        module = str(
            frame.f_globals.get("__name__", "<string>")
        )  # the same default as in `warnings.warn`
    if module in _INSPECTORS:
        return
    file = frame.f_code.co_filename
    warnings.warn_explicit(
        f"{old} is now {new}; `python -m mlvm migrate FILE` rewrites old names",
        DeprecationWarning,
        file,
        frame.f_lineno,
        module=module,
        registry=_registries.setdefault(file, {}),
    )


def old_names(module: str, shown: str, space: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, for the old names of the objects in its `space`.

    Users find these objects in the module `shown`.
    """

    def __getattr__(name: str) -> Any:
        new = NAMES[shown].get(name)
        if new is None or new not in space:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        warn_of_old_name(f"{shown}.{name}", f"{shown}.{new}")
        return space[new]

    return __getattr__


class OldAttribute:
    """Descriptor of an old attribute or method: issues a warning and returns the new one."""

    def __init__(self, owner: str, name: str) -> None:
        self.old = f"{owner}.{name}"
        self.name = ATTRIBUTES[owner][name]
        self.new = f"{owner}.{self.name}"
        self.__doc__ = f"Old name of `{self.name}`."

    def __get__(self, instance: object, owner: type) -> Any:
        warn_of_old_name(self.old, self.new)
        return getattr(owner if instance is None else instance, self.name)

    def __set__(self, instance: object, value: object) -> None:
        warn_of_old_name(self.old, self.new)
        setattr(instance, self.name, value)

    def __delete__(self, instance: object) -> None:
        warn_of_old_name(self.old, self.new)
        delattr(instance, self.name)


def with_new_names(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pickled instance by new name."""
    return {ATTRIBUTES[owner].get(name, name): value for name, value in values.items()}


class _OldModules:
    """Module finder and loader for the modules that old pickles name."""

    @classmethod
    def find_spec(cls, name: str, *_: object) -> ModuleSpec | None:
        """Return the description of an old module, or None."""
        loader: Any = cls
        return ModuleSpec(name, loader) if name in MODULES else None

    @staticmethod
    def create_module(_: ModuleSpec) -> None:
        """Return None: `importlib` creates the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Define the attributes of an old module: the public functions and classes."""
        vars(module)["__getattr__"] = partial(getattr, import_module(MODULES[module.__name__]))


sys.meta_path.append(_OldModules)
