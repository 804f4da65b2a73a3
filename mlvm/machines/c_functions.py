"""Host functions in C, loaded from shared libraries.

`mlvm.h` is the interface for authors of these functions, and `mlvm.machines.native.host` calls
them.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_int32, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

from mlvm.core.errors import LibraryError
from mlvm.machines.native import extension

if TYPE_CHECKING:
    from mlvm.machines.native.host import CFunction


def include_dir() -> str:
    """Return the folder of `mlvm.h`, for the compiler option `-I`."""
    return str(Path(__file__).parent)


class _Entry(ctypes.Structure):
    """`mlvm_entry` of `mlvm.h`."""

    _counts = ("nparams", c_int32), ("nresults", c_int32)
    _fields_ = (("name", c_char_p), ("function", c_void_p), *_counts)


def load_library(path: str | os.PathLike[str]) -> list[CFunction]:
    """Load a shared library; return the functions that it lists, in order. It stays loaded.

    Raises `LibraryError` for a file that is missing or not a library, that lists no functions or
    invalid functions, or that was built for a different version of `mlvm.h`; `MissingExtraError`
    without the extension, which calls the functions.
    """
    extension.require("functions in C need the native machine, which is not installed")
    from mlvm.machines.native._native import MLVM_ABI_VERSION

    file = Path(path).resolve()
    if not file.is_file():
        raise LibraryError(f"expected a shared library, but {file} does not exist")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise LibraryError(
            f"{file} cannot be loaded: {error}; compile it for this system"
        ) from None
    try:
        version = c_int32.in_dll(library, "mlvm_abi_version").value
        address = ctypes.addressof(_Entry.in_dll(library, "mlvm_functions"))
    except ValueError:
        raise LibraryError(
            f"{file} lists no functions; list them with MLVM_FUNCTIONS({...})"
        ) from None
    if version != MLVM_ABI_VERSION:
        text = f"{file}: expected version {MLVM_ABI_VERSION} of mlvm.h, got {version}"
        raise LibraryError(f"{text}; compile the library again")
    functions: dict[str, CFunction] = {}
    while (entry := _Entry.from_address(address)).name is not None:
        function = _function(entry, library, file)
        if functions.setdefault(function.name, function) is not function:
            raise LibraryError(
                f"{file}: expected distinct names, got {function.name!r} twice; rename one"
            )
        address += ctypes.sizeof(_Entry)
    return list(functions.values())


def _function(entry: _Entry, library: ctypes.CDLL, file: Path) -> CFunction:
    from mlvm.machines.native.host import CFunction

    name = entry.name.decode(errors="backslashreplace")
    counts = [None if n == -1 else n for n in (entry.nparams, entry.nresults)]
    if not name or not entry.function or any(n is not None and n < 0 for n in counts):
        raise LibraryError(
            f"{file} lists an invalid function: name {name!r}, address "
            f"{entry.function or 0:#x}, {entry.nparams} parameters, {entry.nresults} results; "
            "correct MLVM_FUNCTIONS"
        )
    return CFunction(name, entry.function, counts[0], counts[1], library)
