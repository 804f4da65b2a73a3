"""One way to listen to a VM: layers around its methods, for recorders, reports, listings and tests.

A layer is called in place of a method, with the method as its first argument, `proceed`. It may
call `proceed`, change arguments and results, or not call it at all. The latest layer is the
outermost. A VM without layers has no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeAlias

from mlvm.core.locks import new_lock
from mlvm.core.protocol import VMProtocol

Layer: TypeAlias = Callable[..., Any]
"""`layer(proceed, *args, **options)`, in the place of `proceed(*args, **options)`."""

on_wait: Final[list[Callable[[str, str, float], None]]] = []
"""Functions called on the waiting thread when it has waited for a queue: with the queue's name,
what was waited for, and the seconds of `time.perf_counter` at which that began."""

explaining: Final[ContextVar[Callable[[Exception], object] | None]] = ContextVar(
    "explaining", default=None
)
"""What adds to an error of launches made meanwhile where its instruction came from: on a VM
elsewhere `launch` has returned before there is one."""

_LAYERS: Final = "_layers"
"""The VM's attribute with its layers by method, the outermost last."""

_lock: Final = new_lock()


@contextmanager
def observed(vm: VMProtocol, **layers: Layer) -> Iterator[None]:
    """Inside the block each named method of the VM has a layer around it, on every thread.

    Blocks on one VM may overlap, and end in any order. Raises `AttributeError` for a method that
    the VM does not have.

        >>> from mlvm.core.observe import observed
        >>> vm, sizes = ml.VM(), []
        >>> def noted(proceed, nbytes):
        ...     sizes.append(nbytes)
        ...     return proceed(nbytes)
        >>> with observed(vm, alloc_storage=noted): storage = vm.alloc_storage(64)
        >>> sizes
        [64]
    """
    observe(vm, **layers)
    try:
        yield
    finally:
        with _lock:
            for name, layer in layers.items():
                _layers_of(vm, name).remove(layer)
                _wrap(vm, name)


def observe(vm: VMProtocol, **layers: Layer) -> None:
    """Put a layer around each named method of the VM, for as long as the VM lives."""
    with _lock:
        for name in layers:
            if not callable(getattr(type(vm), name)):
                raise AttributeError(f"{name!r} is no method of a {type(vm).__name__}")
        for name, layer in layers.items():
            _layers_of(vm, name).append(layer)
            _wrap(vm, name)


def of_updates(layer: Layer) -> Layer:
    """The layer, around `launch`, which need not see launches that write to new memory alone. So
    these keep their short way."""
    layer.of_updates = True  # type: ignore[attr-defined]
    return layer


def _layers_of(vm: VMProtocol, name: str) -> list[Layer]:
    return vars(vm).setdefault(_LAYERS, {}).setdefault(name, [])  # type: ignore[no-any-return]


def _wrap(vm: VMProtocol, name: str) -> None:
    """Rebuild the instance's method from its layers, or delete it where no layer is left.

    The method is replaced in one step: a launch on another thread meets every layer that stays.
    """
    method = getattr(type(vm), name).__get__(vm)
    layers = _layers_of(vm, name)
    for layer in layers:
        method = partial(layer, method)
    if layers:
        setattr(vm, name, method)
    else:
        vars(vm).pop(name, None)
    fast_path = getattr(vm, "fast_path", None)
    if name == "launch" and fast_path is not None:  # else launches by it would not be seen
        fast_path.observed = not all(hasattr(layer, "of_updates") for layer in layers)
