"""Host functions that print values while a program runs, or store them in a series.

    debug.print {"format": f, "names": n, "line": l}  ( x.. -- )    prints `l: f` with the values
    debug.watch {"name": n}                           ( x -- )      adds a copy to the series n

`register` adds them to a VM. A server does not register them, so it does not print for clients.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mlvm.core.errors import HostFunctionError, counted
from mlvm.core.locks import new_lock
from mlvm.core.machine.callee import is_tensor
from mlvm.core.machine.frame import Frame
from mlvm.core.ops.half import shown
from mlvm.core.types import Array
from mlvm.core.vm import VM

PRINT: Final = "debug.print"
WATCH: Final = "debug.watch"

_series: Final[dict[str, deque[Array]]] = {}
"""The latest 10,000 values of each series."""

_lock: Final = new_lock()


def register(vm: VM) -> None:
    """Register the host functions on a VM of this process."""
    read = vm.memory.read

    def arrays(frame: Frame) -> list[Array]:
        return [*map(read, filter(is_tensor, map(frame.param, range(frame.nparams))))]

    def show(frame: Frame) -> None:
        values, attributes = arrays(frame), frame.attributes
        text = formatted(attributes["format"], attributes["names"], values)
        sys.stdout.write(f"{attributes['line']}: {text}\n")
        sys.stdout.flush()

    def keep(frame: Frame) -> None:
        [x] = arrays(frame)
        with _lock:
            series = _series.setdefault(frame.attributes["name"], deque(maxlen=10_000))
            series.append(x)

    vm.register(PRINT, show, nresults=0, result=lambda *_, **__: ())
    vm.register(WATCH, keep, nparams=1, nresults=0, result=lambda *_, **__: ())


def register_silent(vm: VM) -> None:
    """Register host functions with these names that do nothing, for a replay of a call."""

    def ignore(frame: Frame) -> None:
        """Do nothing."""

    vm.register(PRINT, ignore, nresults=0, result=lambda *_, **__: ())
    vm.register(WATCH, ignore, nparams=1, nresults=0, result=lambda *_, **__: ())


def take_series(name: str, *, clear: bool) -> list[Array]:
    """Return the series of a name, oldest first; with `clear`, empty it."""
    with _lock:
        series = _series.pop(name, deque()) if clear else _series.get(name, deque())
        return [*series]


def formatted(text: str, names: Sequence[str], values: Sequence[Array]) -> str:
    """Format the values as `str.format` does; `names` are the names of the last values.

    A format specification applies to each element. Raises `HostFunctionError` for an invalid
    format.
    """
    shown_values = [_Shown(x) for x in values]
    count = len(values) - len(names)
    try:
        result = text.format(
            *shown_values[:count], **dict(zip(names, shown_values[count:], strict=True))
        )
        if all(each.is_used for each in shown_values):
            return result
        reason = "each value needs a placeholder {}"
    except IndexError:
        reason = f"it refers to more than {counted(count, 'positional value')}"
    except KeyError as error:
        reason = f"no value is named {error}"
    except (TypeError, AttributeError):
        reason = "a field is the name or number of a value, without an index or attribute"
    except ValueError as error:  # for example "Single '}' encountered in format string"
        reason = str(error)
    raise HostFunctionError(f"{PRINT}: expected a format for str.format, got {text!r}: {reason}")


class _Shown:
    """Wrapper of an array for `str.format`. `is_used`: whether the text contains the value."""

    def __init__(self, array: Array) -> None:
        self._array = shown(array)
        self.is_used = False

    def __repr__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        self.is_used = True
        if not spec:
            return str(self._array)
        if not self._array.ndim:
            return format(self._array.item(), spec)

        def element(x: Any) -> str:
            return format(x.item(), spec)

        return np.array2string(self._array, formatter={"all": element})
