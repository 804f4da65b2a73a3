"""A server and its clients: leases, limits, shared VMs, how it ends, and clients that misbehave."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlvm.core import vm as core_vm
from mlvm.core.errors import (
    AccessDeniedError,
    ConnectionLostError,
    HandleError,
    LimitExceededError,
    MachineError,
    OutOfMemoryError,
    ProgramError,
    UnknownFunctionError,
)
from mlvm.core.machine.frame import Frame
from mlvm.core.op import OPS
from mlvm.core.program.assembly import assemble
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Kind, Writer
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.machines import wire
from mlvm.machines.local import LocalVM
from mlvm.machines.remote import admission, connect
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import Observer
from mlvm.machines.remote.handshake import BUSY, Greeting, Hello, pack
from mlvm.machines.remote.limits import FIXED, Limits
from mlvm.machines.remote.session import Session
from mlvm.machines.wire import encode_call
from tests.brief import Patch, cases, line_of, refuses, start_python, traced_memory
from tests.cases import CASES
from tests.core.programs import asm, put
from tests.machines.libraries import MACHINES
from tests.machines.remote.serving import (
    CERTIFICATE,
    COPIES,
    DEEP,
    DOUBLING,
    F32X3,
    FOR_EVER,
    HALT,
    SECRET,
    Served,
    connected,
    is_launching,
    limits,
)
from tests.threads import PATIENCE, start, wait_for, within

SECONDS = 20.0  # in which nothing may hang


def run(vm: RemoteVM, program: Program, *args: int) -> list[Any]:
    """Launch, and wait till it has ended. Raises what it raises."""
    outputs = vm.launch(program, args)
    vm.synchronize()
    return outputs


# --- leases ------------------------------------------------------------------------------


def test_what_a_client_made_ends_with_its_connection() -> None:
    with Served() as server:
        vm, other = server.vm(), server.vm()
        survivor = other.alloc_tensor(F32X3)
        vm.alloc_storage(1 << 20)
        handle = vm.alloc_tensor(F32X3)
        assert server.status()["bytes"] == (1 << 20) + 24
        refuses(HandleError, "", other.read, handle)  # nobody sees another's
        vm.close()
        wait_for(lambda: len(server.status()["clients"]) == 1)
        assert server.status()["bytes"] == 12
        assert other.read(survivor).tolist() == [0, 0, 0]
        assert server.events("disconnected", 1)[0]["left"] == 0


def test_what_was_made_in_a_launch_is_freed_too() -> None:
    """By what the server's own functions keep, as well."""

    def keep(frame: Frame) -> None:
        holder.alloc_storage(1 << 16)

    holder: Any = None

    def prepare(vm: LocalVM) -> None:
        nonlocal holder
        holder = vm
        vm.register("keep", keep, nparams=0, nresults=0)

    program = assemble('.func main 0 *\n    push_str "keep"\n    cfunc 0 0\n    halt\n')
    with Served(prepare=prepare) as server, server.vm() as vm:
        run(vm, program)
        assert server.status()["bytes"] == 1 << 16
        vm.close()
        wait_for(lambda: not server.status()["clients"])
        assert server.events("disconnected", 1)[0]["left"] == 0


def test_clients_that_come_and_go_leave_nothing() -> None:
    with Served() as server:
        for n in range(30):
            vm = server.vm()
            vm.alloc_storage(1000 * n)
            if n % 3 == 0:
                vm.launch(FOR_EVER)
            vm._stream.close() if n % 2 else vm.close(wait=False)
        wait_for(lambda: not server.status()["clients"])
        status = server.status()
        assert (status["bytes"], status["admitted"]) == (0, 30)
        wait_for(lambda: sum(t.name == "mlvm client" for t in threading.enumerate()) == 0)


# --- shared VMs --------------------------------------------------------------------------


def test_a_shared_vm_is_open_to_several() -> None:
    with Served(shared=["weights"]) as server:
        one, two = server.vm(vm="weights"), server.vm(vm="weights")
        handle = put(one, np.ones(3, np.float32))
        one.synchronize()
        assert two.read(handle).tolist() == [1, 1, 1]
        mine = two.alloc_tensor(F32X3)
        one.close()
        wait_for(lambda: len(server.status()["clients"]) == 1)
        refuses(HandleError, "", two.read, handle)  # it was the other's, who is gone
        assert two.read(mine).tolist() == [0, 0, 0]
        assert server.status()["shared"][0]["bytes"] == 12
        text = r"unknown shared VM 'other'; available are \['weights'\]"
        refuses(AccessDeniedError, text, server.vm, vm="other")
    refuses(MachineError, "distinct names", Served, shared=["x", "x"])


@cases("by", "swap", "launch")
def test_bytes_that_a_view_came_to_own_end_with_the_client(by: str) -> None:
    """By a swap with a tensor, or since a launch stored its result under the view's handle."""
    with Served(shared=["weights"]) as server:
        one, other = server.vm(vm="weights"), server.vm(vm="weights")
        stays = other.alloc_tensor(F32X3)
        view = one.tensor_from_storage(one.alloc_storage(64), F32X3, 16)
        if by == "swap":
            one.swap(one.alloc_tensor(F32X3), view)
        else:
            store = f"load_arg 0\n push_int {view}\n store_global\n"
            one.launch(program_of(store), [one.alloc_tensor(F32X3)])
        one.close()
        wait_for(lambda: len(server.status()["clients"]) == 1)
        assert server.status()["shared"][0]["bytes"] == 12
        assert other.read(stays).tolist() == [0, 0, 0]


def test_a_session_forgets_tensors_that_ended_with_their_storage() -> None:
    vm = LocalVM()
    session = Session(vm, own=False)
    alive = session.perform("alloc_tensor", [F32X3])
    for _ in range(3):
        storage = session.perform("alloc_storage", [64])
        for _ in range(1000):
            session.perform("tensor_from_storage", [storage, F32X3, 0])
        session.perform("dealloc_storage", [storage])
    assert len(session._tensors) < 2100
    assert alive in session._tensors
    session.close()
    assert vm.consumed_size_in_mib() == 0


def test_who_waits_for_anothers_launch_can_go() -> None:
    """By a launch, by any other call, and by a launch that is known by its bytes."""
    add = Program.of_op("add.out", 3, {}, 0)
    with Served(shared=["s"], limits=limits(launch_seconds=60.0)) as server:
        one = server.vm(vm="s")
        others = [server.vm(vm="s") for _ in range(3)]
        handles = [[vm.alloc_tensor(F32X3) for _ in range(3)] for vm in others]
        for vm, handle in zip(others, handles, strict=True):
            for _ in range(2):
                vm.launch(add, handle)
            vm.synchronize()
        running = server.launch_for_ever(one)
        others[0].launch(add, handles[0][::-1])
        others[1].launch(add, handles[1])
        others[2]._stream.socket.sendall(encode_call("read", [handles[2][0]]))
        for vm in others:
            vm.flush()
        time.sleep(0.05)
        for vm in others:
            vm._stream.close()
        wait_for(lambda: len(server.status()["clients"]) == 1, 2.0)
        one._stream.close()
        refuses(ConnectionLostError, "", running.result, PATIENCE)
        wait_for(lambda: not server.status()["bytes"])


# --- limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("native", MACHINES)
def test_each_limit_of_a_launch_is_held(native: bool) -> None:
    small_limits = limits(launch_seconds=0.3, launch_bytes=1 << 22, launch_steps=1 << 40)
    with Served(limits=small_limits, options={"native": native}) as server, server.vm() as vm:
        handle = vm.alloc_tensor(TensorType("f32", (1 << 16,)))
        with within(SECONDS / 4):
            refuses(LimitExceededError, r"the limit of 0\.3 seconds", run, vm, FOR_EVER)
        refuses(OutOfMemoryError, "the limit is 4,194,304", run, vm, DOUBLING, handle)
        with pytest.raises(
            OutOfMemoryError, match=r"the launch returns 10,.* the limit is 4,194,304"
        ):
            run(vm, COPIES, handle)
        assert not np.any(vm.read(handle))  # and it goes on
        assert server.status()["bytes"] == 4 << 16


@pytest.mark.parametrize("native", MACHINES)
def test_launches_that_free_what_they_make_may_take_any_number_of_bytes(native: bool) -> None:
    rounds = asm(
        ".func main 0 * | load_arg 0 | push_int 0 | load_arg 1 | again: | get 0 | "
        'push_str "negative" | cfunc 1 1 | set 0 | get 2 | load_arg 2 | push_str "subtract" | '
        "cfunc 2 1 | set 2 | get 2 | jump_if_false end | jump again | end: | halt"
    )
    small_limits = limits(launch_bytes=1 << 20, launch_seconds=60.0)
    with Served(limits=small_limits, options={"native": native}) as server, server.vm() as vm:
        x = vm.alloc_tensor(TensorType("f32", (1 << 15,)))
        n, one = (vm.alloc_tensor(TensorType("i64", ())) for _ in range(2))
        for handle, value in ((n, 200), (one, 1)):
            vm.write(handle, np.array(value))
        outputs = run(vm, rounds, x, n, one)
        assert outputs[0].shape == (1 << 15,)
        assert len(outputs) == 2


INTS = ".func f 0 0\n" + 60 * "    push_int 4611686018427387904\n" + "    call f\n    return 0\n"
FRAMES = ".func f 0 0\n    call f\n    return 0\n"
EMPTIES = """.func f 0 0
    push_const none
    push_str "negative"
    cfunc 1 1
    call f
    return 0
"""


def _refused_in(vm: Any, program: Program) -> int:
    """Return the bytes that a launch takes until its limit, and all other threads meanwhile."""
    gc.collect()
    with traced_memory() as peak:
        refuses(OutOfMemoryError, "", run, vm, program)
        return peak()


@pytest.mark.parametrize("native", MACHINES)
@cases("function", INTS, FRAMES, EMPTIES, DEEP)
def test_all_that_lies_on_the_stack_of_a_launch_counts(function: Any, native: bool) -> None:
    small_limits = limits(launch_seconds=60.0, launch_bytes=1 << 20)
    text = f".const none f32[0]\n{function}.func main 0 *\n    call f\n    halt\n"
    program = DEEP if function is DEEP else assemble(text)
    with Served(limits=small_limits, options={"native": native}) as server, server.vm() as vm:
        vm.loaded(program)
        assert any(_refused_in(vm, program) < 3 << 20 for _ in range(3))
        [output] = vm.launch(assemble(LOADED), [vm.alloc_tensor(F32X3)])
        assert output.size == 3


def test_to_verify_has_a_limit_of_bytes() -> None:
    functions = "".join(
        f".func f{n} 0 {2 << n}\n call f{n - 1}\n call f{n - 1}\n return {2 << n}\n"
        for n in range(1, 24)
    )
    first = ".func f0 0 2\n push_int 1\n push_int 1\n return 2\n"
    program = assemble(f"{first}{functions}.func main 0 *\n call f23\n halt\n")
    small_limits = limits(launch_bytes=1 << 20)
    with Served(limits=small_limits) as server, server.vm() as vm, traced_memory() as peak:
        refuses(LimitExceededError, "calls leave too many values", run, vm, program)
        assert peak() < 3 << 20


def test_records_and_handles_count_beside_their_elements() -> None:
    push = """.const none f32[0]
    .func main 0 *
        push_str "residuals.begin"
        cfunc 0 0
    again:
        load_arg 0
        push_const none
        push_str "residuals.push"
        cfunc 2 0
        jump again
        halt
    """
    small_limits = limits(launch_seconds=60.0, launch_bytes=1 << 20, held_bytes=1 << 20)
    with Served(limits=small_limits) as server, server.vm() as vm:
        number = vm.alloc_tensor(TensorType("i64", ()))
        for _ in range(2):  # the second time as the first: none was kept
            refuses(OutOfMemoryError, "more bytes", run, vm, assemble(push), number)
            assert vm.consumed_size_in_mib() < 1.0
        empty = TensorType("f32", (0,))
        refuses(OutOfMemoryError, "", lambda: [vm.alloc_tensor(empty) for _ in range(1 << 13)])


def test_steps_bytes_and_handles_are_limited() -> None:
    small_limits = limits(launch_steps=1000, held_bytes=3000, handles=4, program_bytes=2000)
    with Served(limits=small_limits) as server, server.vm() as vm:
        refuses(LimitExceededError, "exceeded its limit of instructions", run, vm, FOR_EVER)
        refuses(
            LimitExceededError,
            "exceeded its limit of instructions",
            vm.launch,
            FOR_EVER,
            max_steps=10**6,
        )
        with pytest.raises(OutOfMemoryError, match=r"3,001 more bytes: the VM uses 0, .* is 3,000"):
            vm.alloc_storage(3001)
        for _ in range(4):
            vm.alloc_tensor(F32X3)
        refuses(LimitExceededError, "4 tensors and storages", vm.alloc_tensor, F32X3)
        refuses(LimitExceededError, r"more bytes of programs.* limit is 2,000", run, vm, DEEP)
        assert vm.consumed_size_in_mib() == 48 / 2**20


def test_programs_that_are_dropped_do_not_count() -> None:
    with Served(limits=limits(program_bytes=3000)) as server, server.vm() as vm:
        for _ in range(8):
            program = assemble(".func main 0 *\n" + 10 * "    push_int 1\n" + "    halt\n")
            assert vm.launch(program) == []
            del program
            gc.collect()
        assert server.status()["clients"][0]["program_bytes"] < 3000


LOADED = ".func main 0 *\n    load_arg 0\n    halt\n"


def test_a_program_that_cannot_be_verified_is_not_kept(monkeypatch: Patch) -> None:
    def fails(*_: object) -> None:
        raise RecursionError("too deep")

    with Served(limits=limits(program_bytes=2000)) as server, server.vm() as vm:
        with monkeypatch.context() as patch:
            patch.setattr(wire, "verify", fails)
            for _ in range(20):
                refuses(ProgramError, "cannot be verified: .*too deep", run, vm, assemble(LOADED))
        [client] = server.lender.clients.values()
        assert client.session is not None
        assert not client.session._programs
        vm.launch(assemble(LOADED), [vm.alloc_tensor(F32X3)])


@cases("place", wire, core_vm)
def test_to_verify_has_a_limit_of_time(place: Any, monkeypatch: Patch) -> None:
    """When a program is loaded, and when it is launched."""

    def endless(*args: Any) -> Any:
        while time.monotonic() < until:
            pass

    small_limits = limits(launch_seconds=0.1)
    with Served(limits=small_limits) as server, server.vm() as vm, monkeypatch.context() as patch:
        until = time.monotonic() + SECONDS
        x = vm.alloc_tensor(F32X3)
        patch.setattr(place, "verify", endless)
        refuses(LimitExceededError, r"the limit of 0\.1 seconds", run, vm, assemble(LOADED), x)
        patch.undo()
        assert time.monotonic() < until
        [output] = vm.launch(assemble(LOADED), [x])
        assert output.tolist() == [0, 0, 0]


def test_what_a_message_becomes_has_a_limit() -> None:
    writer = Writer()
    writer.text("launch")
    writer.integer(1)
    writer.sequence([1], Writer.integer)
    writer._data += b"(" + (1 << 21).to_bytes(4, "little") + (1 << 21) * b"i\x01\x01"
    with Served(limits=limits(program_bytes=30_000)) as server, server.vm() as vm:
        vm._stream.socket.sendall(writer.message(Kind.call))
        kind, reader = vm._stream.receive()
        assert kind is Kind.error
        assert reader.text() == "LimitExceededError"
        lines = "    push_int 1\n    pop 1\n"
        refuses(LimitExceededError, "items need .* the limit is", run, vm, program_of(lines * 300))
        run(vm, program_of(lines * 20))
        assert 2000 < server.status()["clients"][0]["program_bytes"] < 30_000


def program_of(lines: str) -> Program:
    return assemble(f".func main 0 *\n{lines}    halt\n")


def test_a_result_that_is_stored_counts_as_held() -> None:
    with Served(limits=limits(held_bytes=550)) as server, server.vm() as vm:
        x = vm.alloc_tensor(TensorType("f32", (12,)))
        store = asm(
            f'.func main 0 * | load_arg 0 | load_arg 0 | push_str "concat" | '
            f'cfunc 2 1 {{"axis": 0}} | push_int {x} | store_global | halt'
        )
        refuses(OutOfMemoryError, "96 more bytes: the VM uses 488", run, vm, store, x)
        assert server.status()["bytes"] == 48


def test_a_message_that_is_too_long_ends_the_connection() -> None:
    with Served(limits=limits(message_bytes=1 << 17)) as server, server.vm() as vm:
        handle = vm.alloc_tensor(TensorType("f32", (1 << 16,)))
        too_long = np.zeros(1 << 16, np.float32)
        with contextlib.suppress(LimitExceededError, ConnectionLostError):
            vm.write(handle, too_long)
        refuses((LimitExceededError, ConnectionLostError), "", vm.synchronize)
        wait_for(lambda: server.events("disconnected"))
        assert "at most 131,072 bytes" in server.events("disconnected", 1)[0]["reason"]


def test_connections_are_limited_and_a_place_is_free_again() -> None:
    with Served(limits=limits(connections=2)) as server:
        one, two = server.vm(), server.vm()
        refuses(AccessDeniedError, "limit of 2 clients", server.vm)
        one.close()
        wait_for(lambda: len(server.status()["clients"]) == 1)
        server.vm().close()
        two.close()


def test_an_idle_client_is_given_up() -> None:
    with Served(limits=limits(idle_seconds=0.1)) as server, server.vm() as vm:
        server.events("disconnected", 1)
        refuses(ConnectionLostError, "is lost: timeout", vm.consumed_size_in_mib)


def test_a_client_that_goes_on_is_not_idle() -> None:
    """Not by launches either that the server knows by their bytes."""
    add = Program.of_op("add.out", 3, {}, 0)
    with Served(limits=limits(idle_seconds=0.2)) as server, server.vm() as vm:
        x, y = vm.alloc_tensor(F32X3), vm.alloc_tensor(F32X3)
        for _ in range(8):
            vm.launch(add, [y, x, x])
            vm.flush()
            time.sleep(0.06)
        assert vm.read(y).tolist() == [0, 0, 0]


def test_a_client_that_does_not_read_holds_nobody_up() -> None:
    with Served(limits=limits(send_seconds=0.3)) as server, server.vm() as other:
        vm = server.vm()
        handle = vm.alloc_tensor(TensorType("f32", (1 << 22,)))
        number = handle.to_bytes(8, "little").rstrip(b"\0") + b"\0"
        body = b"\x04\0\0\0read" + bytes([len(number)]) + number
        call = HEADER.pack(MAGIC, VERSION, Kind.call.value, len(body)) + body
        vm._stream.socket.sendall(call)  # and the answer is never read
        with within(SECONDS):
            assert other.alloc_tensor(F32X3)
            wait_for(lambda: len(server.status()["clients"]) == 1)
        vm.close()


@cases("value", 0, -1, 1.5, True, "8", None, float("inf"), float("nan"))
def test_a_limit_that_is_no_number_is_refused(value: Any) -> None:
    refuses(MachineError, "connections: expected an integer above 0", Limits, connections=value)
    if not isinstance(value, float) or value != 1.5:
        refuses(MachineError, "idle_seconds: expected a number above 0", Limits, idle_seconds=value)


# --- the end -----------------------------------------------------------------------------


def slow(vm: LocalVM, seconds: float = 0.4) -> None:
    vm.register("slow", lambda frame: time.sleep(seconds), nparams=0, nresults=0)


SLOW = assemble('.func main 0 *\n    push_str "slow"\n    cfunc 0 0\n    halt\n')


def test_a_launch_that_runs_may_finish_when_the_server_stops() -> None:
    with Served(prepare=slow) as server:
        vm, idle = server.vm(), server.vm()
        future = start(partial(vm.launch, SLOW, max_steps=10))
        wait_for(lambda: is_launching(server.status()))
        server.close(grace=SECONDS)
        assert future.result(PATIENCE) == []
        for each in (vm, idle):
            refuses(ConnectionLostError, "", each.consumed_size_in_mib)
        refuses(ConnectionLostError, "no server at", server.vm)


def test_a_launch_that_takes_too_long_ends_after_the_grace() -> None:
    with Served(limits=limits(launch_seconds=600.0)) as server:
        vm = server.vm()
        future = server.launch_for_ever(vm)
        with within(SECONDS / 4):
            server.close(grace=0.1)
        refuses((ConnectionLostError, LimitExceededError), "", future.result, PATIENCE)


def test_a_lost_server_is_noticed_at_once_and_for_ever() -> None:
    with Served(prepare=partial(slow, seconds=0.2)) as server, server.vm() as vm:
        future = start(partial(vm.launch, SLOW, max_steps=10))
        wait_for(lambda: is_launching(server.status()))
        for client in list(server.lender.clients.values()):
            client.connection.socket.shutdown(socket.SHUT_RDWR)
        refuses(ConnectionLostError, "", future.result, PATIENCE)
        calls: list[Callable[[], Any]] = [
            partial(vm.read, 1), partial(vm.alloc_tensor, F32X3), partial(vm.launch, SLOW),
            vm.synchronize,
        ]  # fmt: skip
        for call in calls:
            refuses(ConnectionLostError, "", call)


def test_the_status_says_who_does_what() -> None:
    with Served(shared=["s"]) as server, server.vm(name="me") as vm:
        vm.alloc_storage(1 << 20)
        with Observer(str(server.address), secret=SECRET) as observer:
            assert 0 < observer.ping() < SECONDS
            status = observer.status()
            assert observer.about["threads"] == 1
        [client] = status["clients"]
        assert (client["name"], client["bytes"]) == ("me", 1 << 20)
        assert status["shared"] == [{"vm": "s", "bytes": 0, "launches": 0}]
        with pytest.raises(AccessDeniedError, match="got 'x'"):
            connect._Endpoint(str(server.address), SECRET, None, False).open(Hello("x"), 5.0)
    refuses(
        ConnectionLostError, f"me at {re.escape(str(server.address))}: it was closed", vm.read, 1
    )


def test_too_few_file_descriptors_are_survived() -> None:
    resource = pytest.importorskip("resource")
    with Served() as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        here = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (here + 3, hard))
        socks = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    socks.append(connected(server, timeout=1))
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for sock in socks:
                sock.close()
        server.vm().close()


SERVER = """
import os, sys
from mlvm.machines.remote.server import Server

def refuse(event, args):
    if event == "open":
        raise OSError(24, "Too many open files")

with Server("127.0.0.1:0", secret=sys.argv[1]) as server:
    if "few files" in sys.argv:
        import resource
        here = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (here + 2, here + 2))
    print(server.address, flush=True)
    if "no files" in sys.argv:
        sys.addaudithook(refuse)
    sys.stdin.read()
"""


@contextlib.contextmanager
def served_apart(how: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    with start_python("-c", SERVER, SECRET, how, stdin=subprocess.PIPE) as server:
        yield server, line_of(server).strip()
        server.communicate("")


def test_who_finds_no_file_descriptor_hears_so_and_others_go_on() -> None:
    pytest.importorskip("resource")
    with served_apart("few files") as (_, address), ExitStack() as clients:
        vms: list[RemoteVM] = []

        def connect_all() -> None:
            while True:
                vms.append(clients.enter_context(connect.connect(address, secret=SECRET)))

        refuses(AccessDeniedError, "the server has too many open files", connect_all)
        assert vms
        for vm in vms:
            vm.dealloc_tensor(vm.alloc_tensor(F32X3))
            vm.synchronize()
        vms.pop().close()
        wait_for(lambda: is_admitted(address), 5)


def is_admitted(address: str) -> bool:
    with contextlib.suppress(AccessDeniedError):
        connect.connect(address, secret=SECRET).close()
        return True
    return False


def test_a_client_needs_no_file_of_the_server() -> None:
    """Modules are imported before a server listens: an import needs a file descriptor."""
    with served_apart("no files") as (_, address), connect.connect(address, secret=SECRET) as vm:
        for name, of_op in CASES.items():
            [case, *_] = of_op
            program = Program.of_op(name, len(case.inputs), OPS[name].bind(case.attributes), 1)
            handles = [put(vm, x) for x in case.inputs]
            for _ in range(2):
                vm.launch(program, handles)
        unknown = asm('.func main 0 *|load_arg 0|push_str "ad"|cfunc 1 1|halt')
        refuses(UnknownFunctionError, "did you mean", vm.launch, unknown, handles[:1])
        refuses(HandleError, "", vm.read, 1 << 40)
        vm.synchronize()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
def test_memory_of_clients_that_have_left_is_returned() -> None:
    def client(address: str) -> None:
        with connect.connect(address, secret=SECRET) as vm:
            kept = [put(vm, np.ones(1_500_000, np.float32)) for _ in range(12)]
            small = [put(vm, np.ones(1000 + i, np.float32)) for i in range(200)]
            vm.read(kept[0])
            vm.read(small[0])

    with served_apart() as (server, address):

        def resident() -> int:
            text = Path(f"/proc/{server.pid}/status").read_text()
            return int(next(line for line in text.splitlines() if "VmRSS" in line).split()[1]) >> 10

        client(address)
        before = resident()
        for _ in range(4):
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(client, [address] * 4))
        wait_for(lambda: resident() < before + 100, 10)  # 250 more are resident without a trim


def test_a_launch_has_so_many_arguments_at_most() -> None:
    with Served() as server:
        vm = server.vm()
        x = vm.alloc_tensor(F32X3)
        vm.launch(HALT, [x] * 65_535)
        vm.synchronize()
        vm.launch(HALT, [x] * 65_536)
        refuses(LimitExceededError, "at most 65,535 arguments", vm.synchronize)


@cases("tls", False, True)
def test_strangers_keep_nobody_out(tls: bool) -> None:
    """Neither those that say nothing nor those that know no secret, whatever host they are at."""
    options: Any = {"certificate": CERTIFICATE} if tls else {}
    with Served(**options) as server:
        hello = pack(Greeting.hello, (32).to_bytes(4, "little") + bytes(32) + b"t" + bytes(12))
        strangers: list[socket.socket] = []
        try:
            for n in range(300):
                each = connected(server, source_address=("127.0.0.1", 0))
                strangers.append(each)
                if n % 2 and not tls:
                    each.sendall(hello + pack(Greeting.proof, bytes(32)))
            for _ in range(3):
                with within(8), server.vm() as vm:
                    assert vm.consumed_size_in_mib() == 0
            reply = b""
            for each in strangers:
                each.settimeout(0.01)
                with contextlib.suppress(OSError):
                    reply += each.recv(4096)
            assert (BUSY.encode() in reply) is not tls
            assert server.status()["strangers"] <= FIXED.strangers_of_peer
            assert len(server.events("refused")) <= 60
            assert server.status()["refused"] > 150
        finally:
            for each in strangers:
                each.close()


def test_a_client_is_told_that_a_server_is_busy(monkeypatch: Patch) -> None:
    with Served() as server:
        monkeypatch.setattr(admission, "FIXED", FIXED._replace(strangers_of_peer=0))
        refuses(AccessDeniedError, BUSY, server.vm, timeout=1)
        monkeypatch.undo()
        server.vm()
