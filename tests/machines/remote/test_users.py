"""Users of a server: a secret each, and what each may take of it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from mlvm.core.errors import AccessDeniedError, LimitExceededError
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import _Endpoint
from mlvm.machines.remote.handshake import Hello
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.users import Accounts, users_of
from tests.brief import Patch, cases, refuses
from tests.cases.claim_tests import claims
from tests.machines.remote.serving import FOR_EVER, HALT, Served, limits
from tests.threads import PATIENCE, wait_for

FILE = b"alice:the-secret-of-alice\n\n  bob:another-one-of-bobs \n"


def of(server: Served, user: str, **options: Any) -> RemoteVM:
    return server.vm(secret=f"{user}:{users_of(FILE)[user].decode()}", **options)


def test_each_user_proves_a_secret_of_its_own() -> None:
    small_limits = limits(user_connections=2)
    with Served(secret=FILE, limits=small_limits) as server:
        alices = [of(server, "alice") for _ in range(2)]
        refuses(
            AccessDeniedError, "this user has reached the limit of 2 clients", of, server, "alice"
        )
        of(server, "bob")
        server.vm(secret=users_of(FILE)["bob"])  # the name need not be said
        names = [each["user"] for each in server.status()["clients"]]
        assert names == ["alice", "alice", "bob", "bob"]
        for wrong in ("carol:the-secret-of-carol", "alice-the-secret-of-alice"):
            refuses(AccessDeniedError, "the secret is wrong", server.vm, secret=wrong)
        server.reload(b"carol:the-secret-of-carol")
        refuses(AccessDeniedError, "the secret is wrong", of, server, "bob")
        server.vm(secret="carol:the-secret-of-carol")
        alices[0].synchronize()


def test_a_users_lease_is_no_other_users() -> None:
    with Served(secret=FILE, limits=limits(lease_seconds=20.0)) as server:
        of(server, "alice", retry=5.0)
        [lease] = server.lender.clients.values()
        endpoint = _Endpoint(str(server.address), users_of(FILE)["bob"], None, False)
        for wants in ("resume", "interrupt"):
            hello = Hello(wants, lease.key, "1")
            refuses(
                AccessDeniedError,
                "does not belong to a connected client",
                endpoint.open,
                hello,
                5.0,
            )


def test_what_a_client_took_is_counted_once_though_it_goes_meanwhile() -> None:
    with Served(limits=limits(user_launches=10**9)) as server:
        vm, status, over = server.vm(), server.lender.status, threading.Event()

        def goes_meanwhile() -> dict[str, Any]:
            snapshot = status()
            if snapshot["clients"] and threading.current_thread().name == "mlvm quotas":
                vm.close()
                wait_for(lambda: not status()["clients"])
                over.set()
            return snapshot

        vm.launch(HALT)
        vm.synchronize()
        server.lender.status = goes_meanwhile  # type: ignore[method-assign]
        assert over.wait(PATIENCE)
        wait_for(lambda: not server.lender.accounts._totals)
        assert sum(each for each, _ in server.lender.accounts._spent[""].values()) == 1


def test_a_users_second_process_gets_half_of_the_firsts_share() -> None:
    with Served(secret=FILE, processes=3) as server:
        of(server, "alice"), of(server, "alice"), of(server, "bob")

        def shares() -> list[int]:
            pids = [each["pid"] for each in server.status()["clients"]]
            return [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids]

        base = os.getpriority(os.PRIO_PROCESS, 0)
        wait_for(lambda: shares() == [base, min(base + 3, 19), base])


@pytest.fixture
def often(monkeypatch: Patch) -> None:
    """Quotas are looked at all the time."""
    monkeypatch.setattr("mlvm.machines.remote.lender._LOOK_AT_QUOTAS", 0.01)


@pytest.mark.usefixtures("often")
@cases("processes", 0, 4)
def test_a_user_who_holds_too_much_has_to_give_something_up(processes: int) -> None:
    with Served(secret=FILE, limits=limits(user_bytes=1000), processes=processes) as server:
        one, two, other = of(server, "alice"), of(server, "alice"), of(server, "bob")
        storage = one.alloc_storage(800)
        two.alloc_storage(800)
        message = "the user 'alice' has used 1,600 bytes, and the quota is 1,000"
        wait_for(lambda: is_refused(one, message) and is_refused(two, message))
        other.alloc_storage(800)
        one.dealloc_storage(storage)
        one.flush()
        wait_for(lambda: not is_refused(one, message) and not is_refused(two, message))


def is_refused(vm: RemoteVM, message: str) -> bool:
    try:
        vm.dealloc_storage(vm.alloc_storage(0))
    except LimitExceededError as error:
        return str(error) == message
    return False


@pytest.mark.usefixtures("often")
@cases(
    "quota, text, processes",
    ({"user_launches": 20}, "launches per hour, and the quota is 20", 0),
    ({"user_seconds": 0.05}, "seconds of processor time per hour, and the quota is 0", 4),
)
def test_launches_and_seconds_have_a_quota_by_the_hour(
    quota: dict[str, Any], text: str, processes: int
) -> None:
    most = limits(**quota, launch_seconds=60.0)
    with Served(secret=FILE, limits=most, processes=processes) as server:
        greedy, other = of(server, "alice"), of(server, "bob")
        refuses(LimitExceededError, text, launch_for_ever, greedy)
        other.launch(HALT)
        greedy.close()
        wait_for(lambda: len(server.status()["clients"]) == 1)
        refuses(AccessDeniedError, text, of, server, "alice")
        other.launch(HALT)


def launch_for_ever(vm: RemoteVM) -> None:
    """Launches that take a while, as long as one is let."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            vm.launch(FOR_EVER, max_steps=10**5)
        except LimitExceededError as error:
            if "exceeded its limit of instructions" not in str(error):
                raise


def test_an_hour_later_all_is_as_before(monkeypatch: Patch) -> None:
    now = 1000.0
    monkeypatch.setattr("mlvm.machines.remote.users.monotonic", lambda: now)
    accounts = Accounts(Limits(user_launches=10, user_seconds=5.0))
    accounts.spend("alice", 1, 8, 1.0)
    accounts.spend("alice", 2, 2, 1.0)
    assert accounts.over("alice") is None
    now += 1800
    accounts.spend("alice", 1, 9, 1.0)  # since it came
    assert accounts.over("alice") == (
        "the user 'alice' has used 11 launches per hour, and the quota is 10"
    )
    assert accounts.over("bob") is None
    now += 1900
    assert accounts.over("alice") is None
    accounts.leave(1)
    accounts.spend("alice", 1, 1, 5.5)  # another one of that number
    assert "6 seconds of processor time" in str(accounts.over("alice"))


test_rows = claims("users", globals())
