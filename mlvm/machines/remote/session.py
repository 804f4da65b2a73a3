"""The server's end of one client: it performs the client's calls, and frees what the client made.

A `call` is answered. A `post` or `launch` is not: if it fails, what follows is passed over, but for
what frees, until the next call; the answer to that is the error. What was to be made by it, or by
what was passed over, has no value: who reads it gets that error, too. What was to be updated keeps
its value. So a program that goes wrong never goes on with wrong values, and a client that waits for
nothing loses no error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import numpy as np

from mlvm.core.errors import ConnectionLost, EncodingError, HandleError, LimitExceeded
from mlvm.core.machine.verify import uses_of
from mlvm.core.program.encoding import Kind
from mlvm.core.program.program import Program
from mlvm.core.types import check_array
from mlvm.core.vm import VM
from mlvm.machines.local import LocalVM
from mlvm.machines.remote.stream import Buffer, Incoming, Outgoing, Received, Stream
from mlvm.machines.wire import CALLS, WireServer, encode_error, read_args, read_name

POSTED_AT: Final = "posted"
"""The part of an error that tells the number of the post that failed, counted from 0."""

_MOST_HANDLES: Final = 1 << 16
"""In the message of a launch. Each takes four times its bytes once it is read."""

_FEW_TENSORS: Final = 1024  # handles after which a session looks which have ended

_FREEING: Final = frozenset({"dealloc_tensor", "dealloc_storage", "drop_program", "load_program"})


@lru_cache(maxsize=256)
def launch_struct(nhandles: int) -> struct.Struct:
    """A `launch`: the number of the program, and the handles of its arguments."""
    return struct.Struct(f"<{1 + nhandles}Q")


class Session(WireServer):
    """Performs one client's calls on a VM, which is the client's `own`, or which others use too.

    `launches` counts the programs that it has launched, `messages` what has come. It is `busy` from
    a message, but a launch that was made before, until the answer.
    """

    def __init__(self, vm: VM, *, own: bool = True) -> None:
        super().__init__(vm)
        self.launches = 0
        self.messages = 0
        self.busy = False
        self.answers = 0
        self.leased = False
        """Whether the client may go on with another connection."""
        self._last_answer: list[bytes] = []
        self._own = own
        self._tensors: set[int] = set()
        self._most_tensors = _FEW_TENSORS
        self._storages: set[int] = set()
        self._posts = 0
        self._failed: Exception | None = None
        self._known = vm.known_launches() if isinstance(vm, LocalVM) else None

    def serve(self, stream: Stream, stops: Callable[[], bool] = lambda: False) -> None:
        """Perform what comes until the connection ends, or after an answer if it `stops` then.
        Raises `ConnectionLost` at the end of the connection, and `EncodingError` or `LimitExceeded`
        for bytes that no client sends."""
        while True:
            if self.run_known(stream):
                continue
            kind, reader = stream.receive()
            if kind is Kind.goodbye:
                self.leased = False
                raise ConnectionLost("the client has ended its lease")
            if self.leased and isinstance(reader, Incoming):
                reader = reader.arrived()  # half a message is none
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
        """Go on with another connection: say what has come and gone, and repeat the last answer,
        which may have been lost. Raises `ConnectionLost`."""
        writer = Outgoing()
        writer.integer(self.messages)
        writer.integer(self.answers)
        stream.send([*writer.parts(Kind.answer), *self._last_answer])

    def run_known(self, stream: Stream) -> int:
        """Wait for messages, and run those at the beginning that are launches which were made
        before. Returns how many. Raises `ConnectionLost`."""
        if self._known is None or self._failed is not None:
            return 0
        stream.wait()
        count = stream.run(self._known.run)
        self._posts += count
        self.messages += count
        self.launches += count
        return count

    def handle(self, kind: Kind, reader: Received) -> Sequence[Buffer] | None:
        """The answer to a message, if it is to have one. Raises `EncodingError` for a message that
        is no call."""
        if kind in (Kind.launch, Kind.post):
            self._posts += 1
            try:
                if kind is Kind.post:
                    self._post_from(reader)
                else:
                    self._launch_from(reader)
            except Exception as error:
                self._fail(error)
            return None
        if kind is not Kind.call:
            raise EncodingError(f"a client sends calls, not a message of kind {kind.name}")
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
        """What a call has raised, before it is told. If this raises, the connection ends."""

    def _fail(self, error: Exception) -> None:
        self.heed(error)
        if self._failed is None:
            error.__traceback__ = None  # its frames hold arrays
            vars(error).setdefault(POSTED_AT, self._posts - 1)
            self._failed = error

    def _spoil(self, error: Exception, handles: Iterable[int]) -> None:
        """Tensors of these handles have no value, by that error."""
        if self._own:
            vars(error).setdefault(POSTED_AT, self._posts - 1)
        for handle in handles:
            with suppress(HandleError):  # it names nothing
                self._keep_from_reading(handle, error)

    def _keep_from_reading(self, handle: int, error: Exception) -> None:
        """Have whoever reads the tensor get the error, as long as nothing is written to it."""

    def _made_by(self, program: Program, args: Sequence[int]) -> set[int]:
        """Which of the arguments a launch gives a value that does not depend on what they had."""
        uses = uses_of(program, self.vm.functions, len(args))
        return {args[i] for i in uses.makes if i < len(args)} - {
            args[i] for i in uses.reads if i < len(args)
        }

    def _launch_from(self, reader: Received) -> None:
        if reader.remaining % 8 or not reader.remaining:
            raise reader.error("a launch is 8 bytes for its program and each handle")
        if reader.remaining > 8 * _MOST_HANDLES:
            raise LimitExceeded(f"a launch has less than {_MOST_HANDLES:,} arguments")
        body = reader.rest()
        number, *handles = launch_struct(len(body) // 8 - 1).unpack(body)
        program, args = self.program(number), tuple(handles)
        if self._failed is not None:
            self._spoil(self._failed, self._made_by(program, args))
            return
        self.launches += 1
        try:
            self.vm.launch(program, args)
        except Exception as error:
            self._spoil(error, self._made_by(program, args))
            raise
        if self._known is not None:
            self._known.learn(bytes(body), program, args)

    def _post_from(self, reader: Received) -> None:
        name = read_name(reader)
        if self._failed is None or name in _FREEING:
            self._perform_from(reader, name)
        elif name == "write":
            self._spoil(self._failed, [reader.integer()])

    def _perform_from(self, reader: Received, name: str) -> Any:
        """Make the call whose arguments follow."""
        if name == "write" and self._own and isinstance(reader, Incoming):
            return self._write_from(reader)
        args = read_args(reader, name)
        if name == "read" and self._own:
            return self.vm.borrow(*args)  # is sent before the next call
        return self.perform(name, args)

    def perform(self, name: str, args: list[Any]) -> Any:
        """Make the call, and remember what it made or ended."""
        if name in ("load_program", "drop_program") and self._known is not None:
            self._known.forget(args[0])
        self.launches += name == "launch"
        result = super().perform(name, args)
        match name:
            case "alloc_tensor" | "tensor_from_storage":  # a view may come to own bytes, by a swap
                self._tensors.add(result)
                if len(self._tensors) > self._most_tensors:
                    self._tensors = set(filter(self._is_alive, self._tensors))
                    self._most_tensors = 2 * len(self._tensors) + _FEW_TENSORS
            case "alloc_storage":
                self._storages.add(result)
            case "dealloc_tensor":
                self._tensors.discard(*args)
            case "dealloc_storage":
                self._storages.discard(*args)
        return result

    def _write_from(self, reader: Incoming) -> None:
        """A `write` whose elements go straight from the socket to the tensor."""
        handle, type = reader.integer(), reader.type()
        own = self.vm.type_of(handle)
        check_array(
            np.broadcast_to(np.zeros((), type.dtype.numpy), type.array_shape),
            own,
            f"write to {own}",
        )
        if type.nbytes != reader.remaining:
            raise reader.error(f"{type} has {type.nbytes} bytes, not {reader.remaining}")
        self.vm.make_writable([handle])
        elements = self.vm.borrow(handle).reshape(-1).view(np.uint8)
        reader.read_into(elements)
        if type.dtype.kind == "bool" and elements.max(initial=0) > 1:
            elements[...] = 0
            raise reader.error("a bool is 0 or 1")

    def close(self) -> None:
        """Free all that the client has made and not ended itself."""
        for handle in self._tensors:
            self._free(self.vm.dealloc_tensor, handle)
        for handle in self._storages:
            self._free(self.vm.dealloc_storage, handle)
        self._tensors.clear()
        self._storages.clear()
        self._programs.clear()

    def _is_alive(self, handle: int) -> bool:
        with suppress(HandleError):  # it ended with its storage
            self.vm.type_of(handle)
            return True
        return False

    def _free(self, dealloc: Any, handle: int) -> None:
        with suppress(HandleError):  # it ended with its storage, or by another client's hand
            dealloc(handle)
