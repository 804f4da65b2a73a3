"""Groups over TCP: the same bits as threads, who may join, what passes, and how many messages."""

from __future__ import annotations

import ast
import os
import re
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlvm.core.errors import (
    AccessDeniedError,
    AddressError,
    EncodingError,
    GroupError,
    GroupTimeoutError,
)
from mlvm.core.ops.half import cast
from mlvm.core.types import DType
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.remote.handshake import Hello
from mlvm.machines.remote.limits import FIXED
from mlvm.parallel import messages, tcp
from mlvm.parallel.communicator import SMALL
from mlvm.parallel.group import Group
from mlvm.parallel.launched import launched
from mlvm.parallel.tcp import TcpGroup, TcpLink
from tests.brief import Patch, cases, refuses, with_long
from tests.cases.claim_tests import claims
from tests.parallel import places
from tests.parallel.joined import SECRET, Joined, free_address
from tests.parallel.members import Step, call
from tests.parallel.test_group import CANNOT_MEET, reduce

pytest.importorskip("threadpoolctl")


@pytest.fixture(scope="module")
def three() -> Iterator[Joined]:
    with Joined(3) as members:
        yield members


# --- the same bits -------------------------------------------------------------------


def every_type(rank: int, vm: VM) -> list[str]:
    """The digests of what all collectives leave, in dtypes of each kind, with `--long` in all,
    small and round the ring."""
    digests = []
    for dtype in with_long(("bool", "u8", "i64", "f32", "bf16", "c64"), DType.all):
        rng = np.random.default_rng(rank)
        for length in (0, 3, 9, 3 * SMALL // DType.named(dtype).itemsize):
            with np.errstate(invalid="ignore"):
                x = cast(np.asarray(9 * rng.standard_normal((length, 1))), DType.named(dtype))
            ops = {
                "bool": ["max"], "c64": ["sum"], "c128": ["sum"], "f16": ["sum", "mean"],
                "bf16": ["mean"],
            }  # fmt: skip
            for op in ops.get(dtype, ["sum", "min"]):
                digests.append(places.digest(call(vm, "all_reduce", x, op=op)))
                digests.append(places.digest(call(vm, "reduce_scatter", x, op=op)))
            digests.append(places.digest(call(vm, "all_gather", x)))
            digests.append(places.digest(call(vm, "broadcast", x, x[:1], root=length % 3)))
    return digests


def test_every_dtype_and_length_has_the_bits_of_threads(three: Joined, monkeypatch: Patch) -> None:
    with Group(3) as threads:
        expected = threads.run(every_type)
    assert three.run(every_type) == expected
    monkeypatch.setattr(messages, "RING", 0)
    assert three.run(every_type) == expected


def test_a_member_sends_as_many_messages_as_the_logarithm(monkeypatch: Patch) -> None:
    sent = Counter[int]()
    original = messages.Transport.tell_round

    def counted(self: Any, rank: int, run: int, *rest: Any) -> None:
        sent[self.rank] += 1
        original(self, rank, run, *rest)

    monkeypatch.setattr(messages.Transport, "tell_round", counted)
    for size, rounds in ((2, 1), (5, 3), (8, 3)):
        with Joined(size) as members:
            sent.clear()
            members.run(places.reduce)
            assert sent == dict.fromkeys(range(size), rounds)


# --- what goes wrong -----------------------------------------------------------------


@pytest.mark.parametrize(("steps", "texts"), CANNOT_MEET)
def test_members_that_cannot_meet_raise(steps: Any, texts: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(messages, "_PATIENCE", 0.02)
    with Joined(len(steps)) as members:
        fn = partial(_step_of, steps)
        if texts is None:
            members.run(fn)
        else:
            caught = refuses(GroupError, "", members.run, fn)
            if "different collectives" in str(caught):  # of two who send to each other, say
                texts = [text for text in texts if text != "deadlock: all members wait"]
            for text in texts:
                assert text in str(caught)
        assert members.run(reduce) == [[float(len(steps))] * 4] * len(steps)


def _step_of(steps: tuple[Step, ...], rank: int, vm: VM) -> Any:
    steps[rank](rank, vm)


def late(rank: int, vm: VM) -> None:
    if rank == 1:
        time.sleep(0.6)
    with suppress(GroupTimeoutError):
        call(vm, "barrier", timeout=5.0)
    if rank != 1:
        call(vm, "barrier", timeout=0.2)
    else:
        time.sleep(0.6)


def test_who_is_late_is_named_also_where_others_wait_for_others() -> None:
    with Joined(5) as members:
        text = r"has waited 0\.2 s in barrier\(\) for member 1 \(vm1\)\n"
        refuses(GroupTimeoutError, text, members.run, late)
        assert members.run(places.reduce) == [[5.0] * 4] * 5  # it came within a second


def test_a_run_whose_last_member_is_late_ends() -> None:
    with Joined(2, timeout=0.1) as members:
        text = r"has waited 0\.1 s for the end of member 1 \(vm1\)"
        refuses(GroupTimeoutError, text, members.run, lambda rank, vm: time.sleep(0.5 * rank))


# --- who may join --------------------------------------------------------------------


def both(*makes: Any) -> list[BaseException | None]:
    """Make members at the same time; return their errors."""
    with ThreadPoolExecutor(len(makes)) as pool:
        done = [pool.submit(each) for each in makes]
        errors = [each.exception(10) for each in done]
        for each, error in zip(done, errors, strict=True):
            if error is None:
                each.result().close()
    return errors


def test_a_range_of_ports_that_are_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = "{0}-{0}".format(taken.getsockname()[1])
        options: Any = {"secret": SECRET, "ports": text, "start": 1}
        refused = f"ports=: no port of {text} is free here; give a wider range"
        refuses(AddressError, refused, TcpGroup, 1, 2, free_address(), **options)


@cases("first", "joins", "is refused")
@cases(
    "secret, size, text",
    ("another secret of them", 3, "the secret is wrong"),
    (SECRET, 4, "expected a group of 3 members, got 4"),
)
def test_every_member_says_who_was_refused(secret: str, size: int, text: str, first: str) -> None:
    """Also one that joined before, or after."""
    address = free_address()
    wait = {"joins": (0.0, 0.3), "is refused": (0.3, 0.0)}[first]

    def member(seconds: float, rank: int, size: int, secret: str) -> TcpGroup:
        time.sleep(seconds)
        return TcpGroup(rank, size, address, secret=secret, start=1)

    errors = both(
        partial(member, 0, 0, 3, SECRET),
        partial(member, wait[1], 1, size, secret),
        partial(member, wait[0], 2, 3, SECRET),
    )
    assert isinstance(errors[0], GroupTimeoutError)
    assert isinstance(errors[1], AccessDeniedError)
    assert isinstance(errors[2], GroupError)
    assert all(text in str(each) for each in errors)
    late = (
        r"member 0 \(vm0\) waits for member 1 \(vm1\).*, who did not join; 127.0.0.1 was refused: "
    )
    assert re.match(late + text, str(errors[0]))


def test_other_versions_are_refused_unless_members_may_differ(monkeypatch: Patch) -> None:
    def other(wants: str, vm: str, name: str, has_secret: bool) -> Hello:
        return Hello(wants, vm, f"{name}0", has_secret)

    monkeypatch.setattr(tcp, "Hello", other)  # of who joins
    address = free_address()
    first = partial(TcpGroup, 0, 2, address, secret=SECRET, start=1)
    second = partial(TcpGroup, 1, 2, address, secret=SECRET)
    errors = both(first, second)
    text = "results may differ: member 1 (vm1) has mlvm"
    assert text in str(errors[0])
    assert isinstance(errors[1], AccessDeniedError)
    assert text in str(errors[1])
    assert "but member 0 (vm0) has mlvm" in str(errors[1])
    assert both(partial(first, mixed=True), partial(second, mixed=True)) == [None, None]


def test_members_are_reached_where_they_say_and_listen_where_they_may(monkeypatch: Patch) -> None:
    found: list[tuple[int, str]] = []
    original = tcp._Meeting._connected

    def connected(self: Any, rank: int, address: Any, here: int) -> TcpLink:
        found.append((rank, address.host))
        return original(self, rank, address, here)

    monkeypatch.setattr(tcp._Meeting, "_connected", connected)
    port = int(free_address().rpartition(":")[2])
    address = free_address()
    one, *others = (partial(TcpGroup, rank, 3, address, secret=SECRET) for rank in range(3))
    ports = f"{port}-{port}"
    second, third = partial(others[0], advertise="localhost", ports=ports), others[1]
    assert both(one, second, third) == [None] * 3
    assert (1, "localhost") in found


def test_who_says_nothing_or_nonsense_keeps_nobody_out() -> None:
    address = free_address()
    host, _, port = address.partition(":")
    strangers: list[socket.socket] = []

    def stranger(data: bytes) -> Any:
        while True:
            with suppress(ConnectionRefusedError):
                strangers.append(socket.create_connection((host, int(port))))
                strangers[-1].sendall(data)
                return TcpGroup(0, 1, address)

    def last() -> TcpGroup:
        while len(strangers) < 2:
            time.sleep(0.01)
        return TcpGroup(1, 2, address, secret=SECRET)

    first = partial(TcpGroup, 0, 2, address, secret=SECRET)
    assert both(first, partial(stranger, b""), partial(stranger, bytes(99)), last) == [None] * 4
    for each in strangers:
        each.close()


def test_strangers_take_a_few_places_and_no_more(monkeypatch: Patch) -> None:
    limits = FIXED._replace(strangers_of_peer=4, strangers=6)
    monkeypatch.setattr("mlvm.machines.remote.admission.FIXED", limits)
    address = free_address()
    host, _, port = address.partition(":")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(TcpGroup, 0, 2, address, secret=SECRET, start=20)
        strangers: list[socket.socket] = []
        while len(strangers) < 40:
            with suppress(ConnectionRefusedError):
                strangers.append(socket.create_connection((host, int(port)), 10))
        for each in strangers[4:]:  # which find no place, and are told
            while each.recv(1 << 12):
                pass
        last = pool.submit(TcpGroup, 1, 2, address, secret=SECRET)
        for each in strangers:
            each.close()
        for member in (last.result(10), first.result(10)):
            member.close()


def test_members_may_have_many_open_files() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100:
        pytest.skip("this process may not have as many")
    address = free_address()
    members = [partial(TcpGroup, rank, 3, address, secret=SECRET, start=20) for rank in range(3)]
    with ExitStack() as files:
        while files.enter_context(open(os.devnull)).fileno() < 1030:
            pass
        assert both(*members) == [None] * 3


def test_a_secret_comes_from_the_environment_or_a_file(monkeypatch: Patch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(SECRET)
    monkeypatch.setenv("MLVM_SECRET", SECRET)
    address = free_address()
    second = partial(TcpGroup, 1, 2, address, secret_file=file)
    assert both(partial(TcpGroup, 0, 2, address), second) == [None, None]


# --- messages ------------------------------------------------------------------------


def linked() -> tuple[TcpLink, TcpLink, socket.socket, socket.socket]:
    """Two ends of a connection, and what lies between them."""
    ours, near = socket.socketpair()
    far, theirs = socket.socketpair()
    keys = b"one" * 8, b"two" * 8
    return TcpLink(ours, *keys), TcpLink(theirs, *keys[::-1]), near, far


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 99_999)), min_size=1, max_size=5),
    st.lists(st.integers(1, 70_000), min_size=1, max_size=5),
)
def test_messages_arrive_whole_however_they_are_cut(
    sizes: list[tuple[int, int]], cuts: list[int]
) -> None:
    one, other, near, far = linked()
    rng = np.random.default_rng(0)
    for head, body in sizes:
        one.send(rng.bytes(head), np.frombuffer(rng.bytes(body), np.uint8))
    near.setblocking(False)
    turn = 0
    while len(other.inbox) < len(sizes):
        one.flush()
        with suppress(BlockingIOError):
            far.sendall(near.recv(cuts[turn % len(cuts)]))
        turn += 1
        other.receive()
    rng = np.random.default_rng(0)
    for (head, body), (got_head, got_body) in zip(sizes, other.inbox, strict=True):
        assert got_head == rng.bytes(head)
        assert got_body.tobytes() == rng.bytes(body)
    for each in (one.socket, other.socket, near, far):
        each.close()


@cases("what", "changed", "repeated", "dropped", "nonsense")
def test_what_is_changed_on_its_way_is_refused(what: str) -> None:
    one, other, near, far = linked()
    for i in range(2):
        one.send(b"head", np.full(9, i, np.uint8))
    data = near.recv(1 << 16)
    half = len(data) // 2
    data = {
        "changed": data[: half - 1] + b"\7" + data[half:],
        "repeated": data[:half] + data[:half],
        "dropped": data[half:],
        "nonsense": bytes(len(data)),
    }[what]
    far.sendall(data)
    refuses(EncodingError, "changed in transit|not a message", other.receive)
    assert len(other.inbox) == (what == "repeated")
    for each in (one.socket, other.socket, near, far):
        each.close()


VALUES: list[Any] = [
    *(None, True, 7, -0.5, "text", b"bytes", [1, (2, "x")], {"a": [b"", {3: None}]}, 2**70),
    [np.arange(6, dtype=np.int16).reshape(2, 3), {"x": np.zeros((), np.float32)}],
]


def test_nothing_that_arrives_is_unpickled() -> None:
    for module in (tcp, messages):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        names = {
            name
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in (getattr(node, "module", None), *[each.name for each in node.names])
        }
        assert not any(name and "pickl" in name for name in names)


def test_what_is_no_plain_data_is_refused_by_all(three: Joined) -> None:
    refuses(GroupError, "is not supported", three.run, lambda rank, vm: threading.Lock())
    assert three.run(places.reduce) == [[3.0] * 4] * 3


# --- what schedulers tell ------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "one", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "rack1node[07-09,12],other", "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-one-77@1",
}  # fmt: skip


test_rows = claims("tcp", globals())


def alone(make: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLVM_SECRET", raising=False)
        patch.delenv("MLVM_SECRET_FILE", raising=False)
        make()


def told(variables: dict[str, str]) -> tuple[int, int, str]:
    location = launched(variables)
    return location.rank, location.size, str(location.address)
