"""Output files.

The contents are first written to a temporary file. This file replaces the target when it is
complete and on the disk, so a full disk or a killed process never damages an existing file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, Final, TypeAlias

import numpy as np

from mlvm.core.errors import ArgumentError, brief
from mlvm.core.types import Array

Name: TypeAlias = str | os.PathLike[str]

_DRAFT: Final = ".mlvm-"
_JUST_BEGUN: Final = 10.0  # seconds


_FORMATS: Final = (
    (rb".{7}\x00\{", "it is a safetensors file: use ml.load(file)"),
    (
        rb"\x80\x02|PK\x03\x04.*data\.pkl",
        "it is a pickle of torch.save, which may run any code: there write model.safetensors by "
        "safetensors.torch.save_file(model.state_dict(), file)",
    ),
    (
        rb"\x93NUMPY|PK\x03\x04",
        "it is numpy's: use ml.asarray(numpy.load(file)), or a value of numpy.load's",
    ),
    (rb"MLVM", "it is a saved step or a program: use python -m mlvm run FILE"),
    (rb"GGUF", "it is a GGUF file: use ml.load(file)"),
    (rb"\x89HDF", "it is HDF5: read it with Keras or h5py, and convert with ml.asarray"),
    (  # an ONNX file begins with a version
        rb"\x08[\0-\x1f]",
        "it may be an ONNX file: use ml.onnx.load(file), or python -m mlvm onnx FILE",
    ),
)
"""Patterns of the first bytes of files, and what reads these files."""


def format_of(head: bytes) -> str:
    """Return the format of a file that begins with these bytes, and what reads it; "" if unknown.

    A safetensors header of 640 bytes begins with the same bytes as a pickle."""
    return next((text for pattern, text in _FORMATS if re.match(pattern, head, re.DOTALL)), "")


def write_file(file: Name, content: str | bytes) -> None:
    """Replace the contents of a file; write directly to a pipe or a device.

    Text is encoded as UTF-8. Lone surrogates, as in file names, are escaped. Raises `OSError`.
    """
    path = Path(file)
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if _is_stream(path):
        path.write_bytes(data)
    else:
        write_files({path: data})


def write_files(contents: Mapping[Path, str | bytes]) -> None:
    """Replace several files, after the contents of all files are on the disk."""
    with contextlib.ExitStack() as stack:
        for path, content in reversed([*contents.items()]):  # an ExitStack exits in reverse order
            data = content.encode() if isinstance(content, str) else content
            stream = stack.enter_context(replacing(path))
            stream.write(data)
            stream.flush()


def open_to_append(file: Path) -> BinaryIO:
    """Create a file to which a process appends without buffering.

    Each write reaches the system immediately, so data that a killed process has written is not
    lost.
    Raises `FileExistsError`, and other `OSError`.
    """
    return file.open("xb", buffering=0)


def write_array(file: Name, array: Array) -> None:
    """Replace a file by a .npy file of the array. Raises `OSError`."""
    with replacing(Path(file)) as stream:  # numpy ignores write errors of real files
        np.save(SimpleNamespace(write=stream.write), array)


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a temporary file, which replaces the target after the block if the block succeeds.

    The new file has the mode of the old file, and links are followed. If a process is killed, the
    temporary file, `.mlvm-` and 16 digits, remains in the same folder until a later write removes
    it. Raises `OSError` with the name of the target, also if the target is not a regular file.
    """
    target, mode = destination(file)
    _remove_drafts(target.parent)
    draft = target.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
    try:
        with _named(file), draft.open("xb") as stream:
            _is_free(stream.fileno())  # lock it, so that no other process removes it
            yield stream
            stream.flush()
            if mode is not None:
                draft.chmod(mode)
            os.fsync(stream.fileno())
        with _named(file):
            draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Set the file name in an `OSError` of the block to the target's name."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename and _DRAFT not in os.fspath(error.filename)):
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(file)) from None


def destination(file: Path) -> tuple[Path, int | None]:
    """Resolve the path of a file to write, following links; also return the mode of the file.

    Raises `OSError` if it is not a regular file, such as a folder or a pipe, or is write-protected.
    """
    try:
        mode = mode_of(file)
    except FileNotFoundError:
        mode = None
    if mode is not None and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(file))
    return Path(os.path.realpath(file)), mode


def mode_of(file: Path) -> int:
    """Return the mode of a regular file. Raises `OSError` if it is a different kind of file."""
    try:
        mode = file.stat().st_mode
    except ValueError as error:  # an invalid file name
        raise OSError(errno.EINVAL, str(error), str(file)) from None
    if stat.S_ISDIR(mode):
        reason = f"{os.strerror(errno.EISDIR)}, not a regular file"
        raise IsADirectoryError(errno.EISDIR, reason, os.fspath(file))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file; choose a different path", str(file))
    return stat.S_IMODE(mode)


def require_writable(file: Name, *, is_stream_allowed: bool = True) -> None:
    """Raise `OSError` unless the file can be written. The file is not changed."""
    path = Path(file)
    if is_stream_allowed and _is_stream(path):
        return
    target, _ = destination(path)
    draft = target.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
    with _named(path):
        draft.open("xb").close()
        draft.unlink()


def require_suffix(file: Name, suffix: str, where: str) -> None:
    """Raise `ArgumentError` unless the file name has the suffix of the format.

    A pipe, a device and a folder may have any name. The error begins with `where`.
    """
    if not isinstance(file, str | os.PathLike):
        raise ArgumentError(f"{where}: expected a path, got {brief(file)}")
    path = Path(file)
    if path.suffix.lower() != suffix and not (_is_stream(path) or path.is_dir()):
        name = path.with_suffix(suffix) if path.name else path / f"picture{suffix}"
        raise ArgumentError(
            f"{where}: expected a name that ends in {suffix}, the only supported format, got "
            f"{str(path)!r}: write {str(name)!r}"
            + (" and convert it, for example with rsvg-convert" if suffix == ".svg" else "")
        )


def _is_stream(path: Path) -> bool:
    """Return whether the path names a pipe, a socket or a device."""
    with contextlib.suppress(OSError, ValueError):
        mode = path.stat().st_mode
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return False


def _remove_drafts(folder: Path) -> None:
    """Remove temporary files of killed processes, which are neither locked nor new."""
    with contextlib.suppress(OSError):
        for draft in folder.glob(f"{_DRAFT}{'[0-9a-f]' * 16}"):
            with contextlib.suppress(OSError):
                status = draft.lstat()
                if not stat.S_ISREG(status.st_mode) or time.time() - status.st_mtime < _JUST_BEGUN:
                    continue
                with draft.open("rb") as stream:
                    if _is_free(stream.fileno()):
                        draft.unlink()


def _is_free(descriptor: int) -> bool:
    """Lock the file; return False if another process has locked it, or the system has no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
