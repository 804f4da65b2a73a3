"""Client of a VM in a different process, `RemoteVM`.

A call that has a result waits for it. A call without a result is a post, which does not wait. A few
dozen posts are sent together; after a pause, a post is sent immediately. If a post fails, the
server skips the following posts. The next call that waits raises the error, which names the line of
Python that made the post.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from struct import error as StructError
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mlvm.core import errors
from mlvm.core.errors import (
    AccessDeniedError,
    CallTimeoutError,
    ConnectionLostError,
    EncodingError,
    HandleError,
    MachineError,
    Place,
    brief,
    user_place,
)
from mlvm.core.locks import after_fork
from mlvm.core.memo import Memo
from mlvm.core.observe import explaining
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Kind
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle, TensorHandle
from mlvm.core.types import Array, TensorType
from mlvm.machines.closing import Closing
from mlvm.machines.native.extension import EXTENSION
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.outbox import PythonOutbox
from mlvm.machines.remote.session import POSTED_AT, launch_struct
from mlvm.machines.remote.stream import Buffer, Outgoing, Received, Stream
from mlvm.machines.wire import WireVM, read_answer, read_error, write_call

if TYPE_CHECKING:
    from mlvm.machines.native._native import FastPath, Outbox

_ALLOCATING: Final = "alloc_tensor", "alloc_storage"
_MAKING: Final = *_ALLOCATING, "tensor_from_storage"
_FAREWELL: Final = 0.2  # seconds to wait for the server's reason for a lost connection


class _Posted(NamedTuple):
    """Origin of a post: the line of Python, and a function that explains an error."""

    place: Place | None
    explain: Callable[[Exception], object]


class _Sent(NamedTuple):
    """Counters of the messages that were added to the stream.

    posts: number of posts.
    dequeued: number of posts from the outbox.
    calls: number of calls.
    places: origins of the posts that the server has not confirmed.
    """

    posts: int
    dequeued: int
    calls: int
    places: list[Place | _Posted | None]


class RemoteVM(Closing, WireVM):
    """VM at the other end of a stream; `mlvm.eager.connect` creates it.

    Thread-safe. After `close`, or once the connection is lost, every call except deallocations
    raises `ConnectionLostError`. In a forked process, every call raises it, because the connection
    belongs to the parent. `where` describes the VM in this error (default: the name of the VM).
    `shared` means that other clients also allocate on the VM. `interrupt(n)` aborts the launches of
    messages up to number n; Ctrl-C and timeouts call it.

        >>> from mlvm.machines.remote.server import Server
        >>> with Server("127.0.0.1:0", secret="between you and me") as server:
        ...     with ml.connect(str(server.address), secret="between you and me") as vm, ml.use(vm):
        ...         print(type(vm).__name__, ml.ones(2) + 1.0)
        RemoteVM Tensor([2., 2.], f32[2])
    """

    memory_limit: int | None = None
    """Limit that `limit_memory` has set, in bytes, or None."""

    def __init__(
        self,
        stream: Stream,
        name: str | None = None,
        *,
        where: str | None = None,
        shared: bool = False,
        interrupt: Callable[[int], object] | None = None,
    ) -> None:
        if isinstance(stream, str):
            raise MachineError(f"RemoteVM: expected a connection; write ml.connect({stream!r})")
        self._begin()
        self._stream = stream
        self._interrupt = interrupt
        self.call_timeout: float | None = None
        """Timeout in seconds of a call that waits, or None. On a timeout, the launch is stopped and
        the call raises `CallTimeoutError`. If a call cannot be sent in time, the connection is
        lost. It may be changed at any time."""
        self._timeout: float | None = None
        self.shared = shared
        self._live: set[int] = set()
        self._views: dict[StorageHandle, set[TensorHandle]] = {}
        self._sending = threading.RLock()  # acquired after `_lock`, for calls that wait
        self._outbox = new_outbox()
        stream.add((), _Sent(0, 0, 0, []))
        # name of an unanswered allocation, by number of the call
        self._allocs: dict[int, str] = {}
        self._blamed = Memo[int, Place | _Posted | None](64, "machines.remote.client failed posts")
        self._lost: str | None = None
        self._where = where or name or "the VM"
        self.name = name or self._call("name")
        self._where = where or self.name
        self.fast_path = None if EXTENSION is None else open_post_path(self)
        """The fast path of eager calls: see `native.loop.open_fast_path`."""
        _vms.add(self)

    # --- calls ---

    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle:
        handle = super().tensor_from_storage(storage, type, offset)
        self._views.setdefault(storage, set()).add(handle)
        return handle

    def dealloc_tensor(self, handle: TensorHandle) -> None:
        self._require([handle])
        self._live.discard(handle)
        self._post_freeing("dealloc_tensor", handle)

    def dealloc_storage(self, handle: StorageHandle) -> None:
        self._require([handle])
        self._live.discard(handle)
        self._live -= self._views.pop(handle, set())
        self._post_freeing("dealloc_storage", handle)

    def write(self, handle: TensorHandle, array: Array) -> None:
        self._require([handle])
        super().write(handle, array)

    def swap(self, h1: TensorHandle, h2: TensorHandle) -> None:
        self._call("swap", h1, h2)

    def limit_memory(self, nbytes: int) -> None:
        """Limit the total bytes of all storages of this client's VM.

        Raises `AccessDeniedError` if the server does not support this, `MachineError` for a shared
        VM.
        """
        try:
            self._call("limit_memory", nbytes)
        except EncodingError:
            raise AccessDeniedError(
                "the server's version of mlvm does not support memory=: omit it, and limit "
                "clients with --held-bytes of the server"
            ) from None
        self.memory_limit = nbytes

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        loaded = self.loaded(program)
        if loaded.outputs or max_steps is not None:
            return super().launch(program, args, max_steps=max_steps)
        try:
            body = launch_struct(len(args)).pack(loaded.number, *args)
        except (TypeError, StructError):  # the slow path raises a typed error
            return super().launch(program, args)
        self._require(args)
        self._add_post(HEADER.pack(MAGIC, VERSION, Kind.launch.value, len(body)) + body)
        return []

    def close(self, *, wait: bool = True) -> None:
        """Wait for all posts, then close the connection, which frees all tensors on the VM.
        Idempotent. Raises the error of a post, or `ConnectionLostError` if posts may be lost.
        Without `wait`, unfinished posts are lost."""
        try:
            if wait and self._lost is None:
                self._finish()
        finally:
            self._end("it was closed")
            self._close_attached(f"VM {self.name!r} was closed")

    def _finish(self) -> None:
        """Wait for the posts; if all are deallocations, only send them."""
        with self._sending:
            self._add_to_stream()
            waits = any(place is not None for place in self._stream.note.places)
        if waits:
            self.synchronize()
        else:
            with suppress(ConnectionLostError):
                self.flush()

    def _end(self, why: str) -> None:
        """Stop sending calls to the server."""
        self._lost = self._lost or why
        if self.fast_path is not None:
            self.fast_path.instrumented = True  # eager calls take the slow path, which raises
        self._stream.close()

    def _leave_to_parent(self) -> None:
        """Leave the connection to the parent after a fork, when no thread holds a lock."""
        self._lock, self._sending = threading.RLock(), threading.RLock()
        self._stream.socket.close()  # only close the descriptor: a shutdown would affect the parent
        self._end("this process was forked, and the connection belongs to the parent")

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, GeneratorExit):
            self.close()
            return
        try:
            self.close(wait=not isinstance(error, KeyboardInterrupt))
        except Exception as late:
            error.add_note(f"and as {self._where} was closed: {late}")

    def __repr__(self) -> str:
        state = "" if self._lost is None else f", {self._lost}"
        return f"<RemoteVM {self._where!r}{state}>"

    def _require(self, handles: Sequence[int]) -> None:
        """Raise `HandleError` immediately for a freed handle or a handle of a different client."""
        if self.shared:
            return
        try:
            if self._live.issuperset(handles):
                return
        except TypeError:  # not hashable; the encoding raises the error
            return
        self.require_open()
        handle = next(each for each in handles if each not in self._live)
        raise HandleError(
            f"handle {brief(handle)} does not exist on {self.name}: it was freed, or belongs to "
            "another client"
        )

    # --- posts ---

    def _post(self, name: str, *args: Any) -> None:
        first, *rest = _parts_of(Kind.post, name, args)
        if not rest:
            self._add_post(bytes(first))
            return
        with self._sending:  # sent immediately, because the caller may change the memory
            self._add_to_stream((first, *rest), user_place())
            self._flush()
        self._confirm()

    def _post_freeing(self, name: str, handle: int) -> None:
        """Queue a deallocation.

        It is sent later, because the garbage collector may call this during a different call.
        Without a connection, no memory needs to be freed.
        """
        if self._lost is None:
            [message] = _parts_of(Kind.post, name, (handle,))
            self._outbox.add(bytes(message), None)

    def _add_post(self, message: bytes) -> None:
        self.require_open()
        place, explain = user_place(), explaining.get()
        if self._outbox.add(message, place if explain is None else _Posted(place, explain)):
            self.flush()

    def flush(self) -> None:
        """Send the queued posts; wait only if thousands of posts are unconfirmed."""
        with self._sending:
            self._add_to_stream()
            self._flush()
        self._confirm()

    def _confirm(self) -> None:
        """Wait for the server, if too many posts are unconfirmed."""
        if len(self._stream.note.places) > FIXED.posts or self._stream.is_full:
            self.synchronize()

    def _flush(self) -> None:
        try:
            self._stream.flush()
        except ConnectionLostError as error:
            raise self._give_up(error) from None

    def _add_to_stream(
        self, message: Sequence[Buffer] = (), *places: Place | None, calls: int = 0
    ) -> None:
        """Move the queued posts to the stream, and add a message.

        `places` has the place of the message, if it is a post. The caller holds `_sending`.
        """
        self.require_open()
        sent: _Sent = self._stream.note
        if not self._outbox and not places:
            added = _Sent(sent.posts, sent.dequeued, sent.calls + calls, sent.places)
            self._stream.add(message, added)
            return
        posts, new = self._outbox.take(sent.dequeued)
        count, dequeued = sent.posts + len(new) + len(places), sent.dequeued + len(new)
        added = _Sent(count, dequeued, sent.calls + calls, [*sent.places, *new, *places])
        self._stream.add([posts, *message] if posts else message, added)

    # --- answers ---

    def _call(self, name: str, *args: Any) -> Any:
        message = _parts_of(Kind.call, name, args) if args else _message_without_args(name)
        with self._lock:
            deadline = None
            if self.call_timeout is not None or self._timeout is not None:
                deadline = self._deadline()
            try:
                if self._stream.received < self._stream.note.calls:
                    self._settle(deadline)
                with self._sending:
                    self._add_to_stream(message, calls=1)
                    sent: _Sent = self._stream.note
                    if name in _ALLOCATING:
                        self._allocs[sent.calls] = name
                    self._stream.flush()
                kind, reader = self._receive(deadline)
            except ConnectionLostError as error:
                raise self._give_up(error) from None
            self._allocs.clear()
            result = self._result_of(name, kind, reader, sent)
            if name in _MAKING:
                self._live.add(result)
            return result

    def _deadline(self) -> float | None:
        """Return the deadline of a call's answer, or None."""
        if self.call_timeout != self._timeout:  # also for a message that is partly sent or received
            self._timeout = self.call_timeout
            self._stream.set_timeouts(self._timeout or 0.0, self._timeout or 0.0)
        return None if self._timeout is None else self._stream.system.monotonic() + self._timeout

    def _receive(self, deadline: float | None) -> tuple[Kind, Received]:
        """Receive the next answer.

        At the deadline, or on an interrupt, end the launches that it waits for. Raises
        `CallTimeoutError`, `ConnectionLostError`.
        """
        try:
            if deadline is None or self._stream.is_coming(deadline):
                return self._stream.receive()
        except KeyboardInterrupt:
            with suppress(errors.MlvmError, OSError):
                self._end_launches()
            raise
        self._end_launches()
        took = f"a call exceeded the timeout of {self.call_timeout:g} seconds"
        raise CallTimeoutError(f"{self._where}: {took}")

    def _end_launches(self) -> None:
        """Make the server stop the launches of all sent messages, if an answer is pending.

        Raises `ConnectionLostError` if it does not react.
        """
        sent: _Sent = self._stream.note
        waits = self._stream.received < sent.calls and not self._stream.is_lost
        if self._interrupt is not None and waits:
            try:
                self._interrupt(sent.posts + sent.calls)
            except errors.AccessDeniedError as error:
                raise ConnectionLostError(str(error)) from None

    def _settle(self, deadline: float | None) -> None:
        """Receive the answers to calls that were interrupted, and free their allocations.

        If an answer is the error of a post, raise it, because the server sends it only once.
        """
        self.require_open()
        while self._stream.received < self._stream.note.calls:
            with self._sending:
                self._stream.flush()
            kind, reader = self._receive(deadline)
            name = self._allocs.pop(self._stream.received, "")
            if kind is Kind.answer and name:
                self._post_freeing(name.replace("alloc", "dealloc"), reader.integer())
            elif kind is Kind.error:
                error = read_error(reader)
                if POSTED_AT in vars(error):
                    raise self._located(error, self._stream.note)

    def _result_of(self, name: str, kind: Kind, reader: Received, sent: _Sent) -> Any:
        """Decode the answer to a call. Raises the error if the answer is one."""
        try:
            result = read_answer(kind, reader, name)
        except ConnectionLostError as error:
            raise self._give_up(error) from None
        except Exception as error:
            raise self._located(error, sent) from None
        self._forget_places(sent)
        return result

    def _forget_places(self, sent: _Sent) -> None:
        """Drop the origins of posts up to `sent`, which an answer confirms."""
        if not sent.places:
            return
        with self._sending:
            now: _Sent = self._stream.note
            later = min(now.posts - sent.posts, len(now.places))
            self._stream.add((), now._replace(places=now.places[len(now.places) - later :]))

    def _located(self, error: Exception, sent: _Sent) -> Exception:
        """Return the error of an answer, with a line of this process instead of the server's lines.

        This line made the call that caused the error. `sent` are the counters at the answered call.
        """
        self._forget_places(sent)
        posted = vars(error).pop(POSTED_AT, None)
        place: Place | _Posted | None = user_place()
        if isinstance(posted, int):
            if isinstance(error, errors.MlvmError):
                error.late = True
            index = posted - (sent.posts - len(sent.places))
            place = self._blamed.entries.get(posted)  # if it was already raised
            if 0 <= index < len(sent.places):
                place = self._blamed[posted] = sent.places[index]
        notes = errors.notes_of(error)
        if hasattr(error, "__notes__"):
            del error.__notes__
        for note in notes:
            error.add_note(note)
        if isinstance(place, _Posted):
            place.explain(error)
            place = place.place
        if place is not None and (notes or posted is not None):
            error.add_note(f"called from {errors.line_of(place)}")
        return error.with_traceback(None)

    def require_open(self) -> None:
        """Raise `ConnectionLostError` if the connection was lost."""
        if self._lost is not None:
            raise ConnectionLostError(f"{self._where}: {self._lost}")

    def _give_up(self, error: object) -> ConnectionLostError:
        """Mark the connection as lost, and return the error to raise."""
        self._stream.renounce()
        if self._lost is None:
            self._end(self._farewell() or str(error))
        return ConnectionLostError(f"{self._where}: {self._lost}")

    def _farewell(self) -> str | None:
        """Return the server's reason for closing the connection, or None."""
        mine: list[bool] = []
        try:
            mine.extend(map(self._lock.acquire, (False,)))  # atomic; see `stream`
            if mine[0]:  # otherwise another thread receives it
                with suppress(errors.MlvmError, OSError):
                    self._stream.set_timeouts(_FAREWELL, _FAREWELL)
                    while True:
                        kind, reader = self._stream.receive()
                        last_words = read_error(reader) if kind is Kind.error else None
                        if isinstance(last_words, ConnectionLostError):
                            return str(last_words)
        finally:
            if mine == [True]:  # without a call, during which Ctrl-C might occur
                self._lock.release()
        return None


_vms: Final = weakref.WeakSet[RemoteVM]()


def live_vms() -> list[RemoteVM]:
    """Return the remote VMs of this process that have not been freed."""
    return list(_vms)


@atexit.register
def _close_all() -> None:
    """Finish all posts before the process exits, or report the errors."""
    with ExitStack() as stack:
        for vm in list(_vms):
            stack.callback(vm.close)


@after_fork
def _leave_all_to_parent() -> None:
    for vm in list(_vms):
        vm._leave_to_parent()


def _parts_of(kind: Kind, name: str, args: Sequence[Any]) -> list[Buffer]:
    """Encode a call as the pieces of a message."""
    writer = Outgoing()
    write_call(writer, name, args)
    return writer.parts(kind)


@cache
def _message_without_args(name: str) -> list[Buffer]:
    """Encode a call without arguments."""
    return [bytes(part) for part in _parts_of(Kind.call, name, ())]


def new_outbox() -> PythonOutbox | Outbox:
    """Create an outbox, in C if the extension is available."""
    return PythonOutbox() if EXTENSION is None else EXTENSION.Outbox(errors.OURS, user_place)


def open_post_path(vm: RemoteVM) -> FastPath:
    """Open the fast path of eager calls to a VM, without keeping the VM alive."""
    of_vm = weakref.ref(vm)

    def prepare(program: Callable[[], Program], *_: object) -> int | None:
        vm = of_vm()
        loaded = vm.loaded(program()) if vm is not None else None
        return None if loaded is None or loaded.outputs else loaded.number

    def flush() -> None:
        vm = of_vm()
        if vm is not None:
            vm.flush()

    assert EXTENSION is not None
    fast_path: FastPath = EXTENSION.FastPath(prepare=prepare, outbox=vm._outbox, flush=flush)
    return fast_path
