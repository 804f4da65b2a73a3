"""Layers around the methods of a VM, for recorders, reports, listings and tests.

A layer is called instead of a method, with the method as the first argument, `proceed`. It may call
`proceed`, change arguments and results, or skip the call. The latest layer is the outermost. A VM
without layers has no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeAlias

from mlvm.core.errors import with_article
from mlvm.core.locks import new_lock
from mlvm.core.protocol import VMProtocol

Layer: TypeAlias = Callable[..., Any]
"""Function `layer(proceed, *args, **options)` that replaces `proceed(*args, **options)`."""

on_wait: Final[list[Callable[[str, str, float], None]]] = []
"""Functions to call after a thread has waited for a queue, on that thread.

The arguments are the queue's name, the event, and the start of the wait in seconds of
`time.perf_counter`.
"""

explaining: Final[ContextVar[Callable[[Exception], object] | None]] = ContextVar(
    "explaining", default=None
)
"""Function that adds the source of the instruction to errors of launches made inside it.

On a remote VM `launch` returns before errors are known.
"""

_LAYERS: Final = "_layers"
"""Name of the VM attribute with the layers by method, the outermost last."""

_lock: Final = new_lock()


@contextmanager
def observed(vm: VMProtocol, **layers: Layer) -> Iterator[None]:
    """Put a layer around each named method of the VM inside the block, on every thread.

    Blocks on one VM may overlap and end in any order. Raises `AttributeError` for a method that the
    VM does not have.

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
    """Put a layer around each named method of the VM for the VM's lifetime."""
    with _lock:
        for name in layers:
            if not callable(getattr(type(vm), name)):
                raise AttributeError(
                    f"{name!r} is not a method of {with_article(type(vm).__name__)}"
                )
        for name, layer in layers.items():
            _layers_of(vm, name).append(layer)
            _wrap(vm, name)


def of_updates(layer: Layer) -> Layer:
    """Mark a layer around `launch` that can ignore launches which only write to new memory.

    These launches then stay on the fast path.
    """
    layer.of_updates = True  # type: ignore[attr-defined]
    return layer


def _layers_of(vm: VMProtocol, name: str) -> list[Layer]:
    return vars(vm).setdefault(_LAYERS, {}).setdefault(name, [])  # type: ignore[no-any-return]


def _wrap(vm: VMProtocol, name: str) -> None:
    """Rebuild the instance's method from the layers, or delete it if no layer remains.

    The method is replaced atomically: a launch on another thread runs every remaining layer.
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
    if name == "launch" and fast_path is not None:  # layers do not see launches of the fast path
        fast_path.observed = not all(hasattr(layer, "of_updates") for layer in layers)
