"""Server side of a connection: executes a client's calls and frees the client's tensors.

A `call` is answered. A `post` or `launch` is not answered. If it fails, the session skips the
following messages, except deallocations, until the next call. The answer to that call is the error.
Tensors that a failed or skipped message should have overwritten have no value: reading them also
raises the error. Tensors that it should have updated do not change. Therefore a program never
continues with wrong values, and a client that does not wait receives every error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from mlvm.core.errors import (
    ConnectionLostError,
    EncodingError,
    HandleError,
    LimitExceededError,
    MachineError,
    counted,
)
from mlvm.core.memo import memoized
from mlvm.core.program.encoding import Kind
from mlvm.core.program.program import Program
from mlvm.core.types import check_array
from mlvm.core.vm import VM
from mlvm.machines.accesses import uses_of
from mlvm.machines.local import LocalVM
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.stream import Buffer, Incoming, Outgoing, Received, Stream
from mlvm.machines.wire import CALLS, WireServer, encode_error, read_args, read_name

POSTED_AT: Final = "posted"
"""Attribute of an error with the number of the failed post, starting with 0."""

_FREEING: Final = frozenset({"dealloc_tensor", "dealloc_storage", "drop_program", "load_program"})


@memoized(256)
def launch_struct(nhandles: int) -> struct.Struct:
    """Return the layout of a `launch`: the number of the program, and handles of arguments."""
    return struct.Struct(f"<{1 + nhandles}Q")


class Session(WireServer):
    """Session of a client on a VM, which is private (`own`) or shared.

    launches: number of launches.
    messages: number of received messages.
    busy: a message is being performed; False during launches from the cache.
    answers: number of sent answers.
    leased: the client may resume on a new connection.
    """

    def __init__(self, vm: VM, *, own: bool = True) -> None:
        super().__init__(vm)
        self.launches = 0
        self.messages = 0
        self.busy = False
        self.answers = 0
        self.leased = False
        self._last_answer: list[bytes] = []
        self._own = own
        self._tensors: set[int] = set()
        self._most_tensors = 0  # number of handles after which freed handles are dropped
        self._storages: set[int] = set()
        self._posts = 0
        self._failed: Exception | None = None
        self._launch_cache = vm.launch_cache() if isinstance(vm, LocalVM) else None

    def serve(self, stream: Stream, stops: Callable[[], bool] = lambda: False) -> None:
        """Execute messages until the connection is closed, or `stops` is true after an answer.
        Raises `ConnectionLostError` at the end of the connection, and `EncodingError` or
        `LimitExceededError` for an invalid message."""
        while True:
            if self.run_cached(stream):
                continue
            kind, reader = stream.receive()
            if kind is Kind.goodbye:
                self.leased = False
                raise ConnectionLostError("the client has ended the lease")
            if self.leased and isinstance(reader, Incoming):
                reader = reader.arrived()  # a partial message does not count
            self.busy = True
            self.messages += 1
            answer = self.handle(kind, reader)
            if answer is not None:
                if self.leased:
                    answer = self._last_answer = [bytes(part) for part in answer]
                self.answers += 1
                stream.send(answer)
                if stops():
                    return
            self.busy = False

    def resume(self, stream: Stream) -> None:
        """Resume on a new connection.

        Send the numbers of messages and answers, and repeat the last answer, which may have been
        lost. Raises `ConnectionLostError`.
        """
        writer = Outgoing()
        writer.integer(self.messages)
        writer.integer(self.answers)
        stream.send([*writer.parts(Kind.answer), *self._last_answer])

    def run_cached(self, stream: Stream) -> int:
        """Wait for messages, and run the first ones as long as they are launches in the cache.
        Return their number. Raises `ConnectionLostError`."""
        if self._launch_cache is None or self._failed is not None:
            return 0
        stream.wait()
        count = stream.run(self._launch_cache.run)
        self._posts += count
        self.messages += count
        self.launches += count
        return count

    def handle(self, kind: Kind, reader: Received) -> Sequence[Buffer] | None:
        """Execute a message, and return the answer to a call.

        Raises `EncodingError` for a message of a different kind.
        """
        if kind in (Kind.launch, Kind.post):
            self._posts += 1
            try:
                if kind is Kind.launch:
                    self._launch_from(reader)
                elif (name := read_name(reader)) in _FREEING or self._failed is None:
                    self._perform_from(reader, name)
                elif name == "write":
                    self._spoil(self._failed, [reader.integer()])
            except Exception as error:
                self._fail(error)
            return None
        if kind is not Kind.call:
            raise EncodingError(f"expected a call, got a message of kind {kind.name}")
        if self._failed is not None:
            failed, self._failed = self._failed, None
            return [encode_error(failed)]
        try:
            name = read_name(reader)
            result = self._perform_from(reader, name)
            writer = Outgoing()
            CALLS[name].result.write(writer, result)
            return writer.parts(Kind.answer)
        except Exception as error:
            self.heed(error)
            return [encode_error(error)]

    def heed(self, error: Exception) -> None:
        """Record the error of a call before the client receives it.

        Raising closes the connection.
        """

    def _fail(self, error: Exception) -> None:
        self.heed(error)
        if self._failed is None:
            error.__traceback__ = None  # the frames of the traceback hold arrays
            vars(error).setdefault(POSTED_AT, self._posts - 1)
            self._failed = error

    def _spoil(self, error: Exception, handles: Iterable[int]) -> None:
        """Mark tensors as invalid because of an error."""
        if self._own:
            vars(error).setdefault(POSTED_AT, self._posts - 1)
        for handle in handles:
            with suppress(HandleError):  # an unknown handle
                self._keep_from_reading(handle, error)

    def _keep_from_reading(self, handle: int, error: Exception) -> None:
        """Make reads of the tensor raise the error until the next write to it."""

    def _overwritten_by(self, program: Program, args: Sequence[int]) -> set[int]:
        """Return the arguments that a launch overwrites without reading them."""
        uses = uses_of(program, self.vm.functions, len(args))
        return {args[i] for i in uses.makes if i < len(args)} - {
            args[i] for i in uses.reads if i < len(args)
        }

    def _launch_from(self, reader: Received) -> None:
        if reader.remaining % 8 or not reader.remaining:
            raise reader.error(
                f"a launch: expected 8 bytes for the program and each handle, got "
                f"{reader.remaining} bytes"
            )
        most = FIXED.arguments  # a decoded handle needs four times the bytes
        if reader.remaining > 8 * (most + 1):
            raise LimitExceededError(f"a launch: expected at most {most:,} arguments, got more")
        body = reader.rest()
        number, *handles = launch_struct(len(body) // 8 - 1).unpack(body)
        program, args = self.program(number), tuple(handles)
        if self._failed is not None:
            self._spoil(self._failed, self._overwritten_by(program, args))
            return
        self.launches += 1
        try:
            self.vm.launch(program, args)
        except Exception as error:
            self._spoil(error, self._overwritten_by(program, args))
            raise
        if self._launch_cache is not None:
            self._launch_cache.add(bytes(body), program, args)

    def _perform_from(self, reader: Received, name: str) -> Any:
        """Decode the arguments and execute the call."""
        if name == "write" and self._own and isinstance(reader, Incoming):
            return self._write_from(reader)
        args = read_args(reader, name)
        if name == "read" and self._own:
            return self.vm.borrow(*args)  # the array is sent before the next call
        return self.perform(name, args)

    def perform(self, name: str, args: list[Any]) -> Any:
        """Execute the call, and track allocations and deallocations."""
        if name in ("load_program", "drop_program") and self._launch_cache is not None:
            self._launch_cache.forget(args[0])
        if name == "limit_memory" and not self._own:
            raise MachineError("limit_memory: expected a private VM, got a shared VM")
        self.launches += name == "launch"
        result = super().perform(name, args)
        match name:
            case "alloc_tensor" | "tensor_from_storage":  # after a swap, a view may own bytes
                self._tensors.add(result)
                if len(self._tensors) > self._most_tensors:
                    self._tensors = set(filter(self._is_alive, self._tensors))
                    self._most_tensors = 2 * len(self._tensors) + 1024
            case "alloc_storage":
                self._storages.add(result)
            case "dealloc_tensor":
                self._tensors.discard(*args)
            case "dealloc_storage":
                self._storages.discard(*args)
        return result

    def _write_from(self, reader: Incoming) -> None:
        """Receive the elements of a `write` directly into the tensor."""
        handle, type = reader.integer(), reader.type()
        own = self.vm.type_of(handle)
        like = np.broadcast_to(np.zeros((), type.dtype.numpy), type.array_shape)
        check_array(like, own, f"write to {own}")
        if type.nbytes != reader.remaining:
            raise reader.error(
                f"{type}: expected {counted(type.nbytes, 'byte')}, got {reader.remaining}"
            )
        self.vm.make_writable([handle])
        elements = self.vm.borrow(handle).reshape(-1).view(np.uint8)
        reader.read_into(elements)
        if type.dtype.kind == "bool" and elements.max(initial=0) > 1:
            elements[...] = 0
            raise reader.error("a bool: expected 0 or 1, got a different byte")

    def close(self) -> None:
        """Free all remaining tensors and storages of the client."""
        for handle in self._tensors:
            self._free(self.vm.dealloc_tensor, handle)
        for handle in self._storages:
            self._free(self.vm.dealloc_storage, handle)
        self._tensors.clear()
        self._storages.clear()
        self._programs.clear()

    def _is_alive(self, handle: int) -> bool:
        with suppress(HandleError):  # freed with its storage
            self.vm.type_of(handle)
            return True
        return False

    def _free(self, dealloc: Any, handle: int) -> None:
        with suppress(HandleError):  # freed together with the storage, or by a different client
            dealloc(handle)
