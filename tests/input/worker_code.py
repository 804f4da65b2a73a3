"""Transforms for worker processes of pipelines, and exceptions that cannot travel."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Odd(Exception):
    """An exception that is made otherwise than it is unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Gone(Exception):
    """It becomes no exception when it is unpickled."""

    def __reduce__(self) -> Any:
        return dict, ()


class Final(Exception):
    """It ends whoever unpickles it."""

    def __reduce__(self) -> Any:
        return sys.exit, ()


class Sealed(Exception):
    """It takes no notes once it is unpickled."""

    def __reduce__(self) -> Any:
        return Sealed, self.args, {"__notes__": 1}


class Silent(Exception):
    """It has no text, and no pickle."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


class Local(Exception):
    """It can be unpickled where it was raised alone."""

    def __reduce__(self) -> Any:
        return _local, (os.getpid(),)


def _local(pid: int) -> Local:
    if os.getpid() != pid:
        raise AttributeError("not here")
    return Local("local")


def raising(
    error: Callable[..., Exception], arguments: tuple[Any, ...], arrays: Any, random: Any
) -> Any:
    if 17 in arrays[1]:
        raise error(*arguments)
    return arrays


def exiting(arrays: Any, random: Any) -> Any:
    if 17 in arrays[1]:
        os._exit(3)
    return arrays


def slow(arrays: Any, random: Any) -> Any:
    time.sleep(0.002)
    return arrays


def stuck(arrays: Any, random: Any) -> Any:
    if len(arrays[1]) > 1:
        time.sleep(60)
    return arrays
