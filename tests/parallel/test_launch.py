"""`python -m mlvm launch`: members that are started together, and again; and groups of Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import GroupError, MissingExtraError
from tests.brief import Patch, cases, line_of, refuses, run_python, start_python
from tests.cases.claim_tests import claims
from tests.parallel import places
from tests.parallel.joined import SECRET, free_address

SCRIPT = """
import os, sys
rank, attempt = os.environ["RANK"], os.environ["MLVM_RESTARTS"]
told = rank, os.environ["WORLD_SIZE"], attempt, len(os.environ["MLVM_SECRET"]) > 16
os.write(1, (" ".join(map(str, told)) + "\\n").encode())  # at once, beside the others
if attempt == sys.argv[1]:
    sys.exit(0)
if rank == "1":
    os.kill(os.getpid(), 9) if attempt == "0" else sys.exit(7)
import time; time.sleep(60)
"""


def launched(tmp_path: Path, restarts: int, argument: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["launch", "--members", "2", "--restarts", str(restarts), "--", str(script), argument]
    return run_python("-m", "mlvm", *command, MLVM_SECRET="", MLVM_SECRET_FILE="")


def test_members_are_started_again_until_all_end_well(tmp_path: Path) -> None:
    done = launched(tmp_path, 2, "2")
    assert done.returncode == 0
    tried = [f"{rank} 2 {attempt} True" for attempt in range(3) for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(tried)
    assert done.stderr.splitlines() == [
        "launch: member 1 was killed by SIGKILL; all members are started again, 1 of 2 times",
        "launch: member 1 has exited with status 7; all members are started again, 2 of 2 times",
    ]


def test_members_of_all_hosts_are_started_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["launch", "--members", "1", "--nodes", "2", "--restarts", "2", "--address"]
    command += [free_address(), "--node"]
    secret = {"MLVM_SECRET": SECRET}
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                start_python("-m", "mlvm", *command, str(node), "--", script, "2", env=secret)
            )
            for node in range(2)
        ]
        (first, told), (second, _) = [host.communicate(timeout=100) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    assert sorted(first.splitlines()) == [f"0 2 {attempt} True" for attempt in range(3)]
    assert sorted(second.splitlines()) == [f"1 2 {attempt} True" for attempt in range(3)]
    assert told.splitlines()[0] == (
        "launch: node 1: member 1 was killed by SIGKILL; all members are started again, "
        "1 of 2 times"
    )


@cases("number", signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
def test_members_end_with_who_has_started_them(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)\n")
    command = "-m", "mlvm", "launch", "--members", "2", "--", script
    reset = partial(signal.signal, number, signal.SIG_DFL)  # nohup has SIGHUP ignored
    with start_python(*command, stderr=subprocess.DEVNULL, preexec_fn=reset) as started:
        members = [int(line_of(started)) for _ in range(2)]
        started.send_signal(number)
        started.communicate(timeout=20)  # which ends when nobody is left to write
    assert started.returncode == 128 + number
    for member in members:
        refuses(ProcessLookupError, "", os.kill, member, 0)


def test_the_status_is_that_of_the_member_which_failed(tmp_path: Path) -> None:
    assert launched(tmp_path, 0, "never").returncode == 128 + 9


# --- Ray -----------------------------------------------------------------------------


def test_without_ray_the_error_names_the_extra(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses(MissingExtraError, r'pip install "mlvm\[ray\]"', ml.parallel.group, "ray:2")


def is_killed_once(rank: int, vm: Any) -> Any:
    return (places.is_killed if os.environ["MLVM_RESTARTS"] == "0" else places.reduce)(rank, vm)


def test_actors_of_ray_do_what_threads_do() -> None:
    ray = pytest.importorskip("ray")
    with ml.parallel.RayGroup(4, num_cpus=0.5, timeout=60, restarts=1) as members:
        assert members.run(places.everything) == places.expected_of_everything(4)
        count = members.keep(places.Counting)
        assert count([1, 2, 3, 4]) == [(0, 1), (1, 2), (2, 3), (3, 4)]
        assert count([1, 2, 3, 4], factor=10) == [(0, 11), (1, 22), (2, 33), (3, 44)]
        for name, (fn, texts) in places.WRONG.items():
            message = places.outcome(members, fn)
            assert all(text in message for text in texts), (name, message)
        assert members.run(places.reduce) == [[4.0] * 4] * 4
        assert members.run(is_killed_once) == [[4.0] * 4] * 4
        refuses(GroupError, "started again since this was kept", count, [0, 0, 0, 0])
        dead = r"member 1 \(vm1\) has died: .* worker process has died"
        refuses(GroupError, dead, members.run, places.is_killed)
        assert members.closed
    assert not ray.is_initialized()


def test_ray_has_the_resources_that_actors_need() -> None:
    pytest.importorskip("ray")
    text = "2 actors need 2 CPU, 2 magic; the cluster has .* CPU, 0 magic"
    refuses(GroupError, text, ml.parallel.RayGroup, 2, resources={"magic": 1})


@cases(
    "text, options",
    ("2 actors need 20000 CPU; this host has \\d+ CPU", {"num_cpus": 10_000}),
    ("invalid options of an actor: The quantity", {"num_cpus": -1}),
    ("invalid options of an actor: .*'num_cpus'", {"num_cpus": "x"}),
    ("invalid options of an actor: .*'resources'", {"resources": 3}),
    ("invalid options of an actor: .* nosuch", {"nosuch": 3}),
    ("mixed=: expected True or False, got 3", {"mixed": 3}),
    ("a group's start must be", {"start": -1}),
)
def test_wrong_options_of_actors_start_no_ray(text: str, options: dict[str, Any]) -> None:
    ray = pytest.importorskip("ray")
    refuses(GroupError, text, ml.parallel.RayGroup, 2, **options)
    assert not ray.is_initialized()


def test_a_ray_that_does_not_start_is_named(monkeypatch: Patch) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: Any) -> None:
        raise Exception("The current node timed out\nduring startup")

    monkeypatch.setattr(ray, "init", init)
    text = "RayGroup: Ray has not started: The current node timed out; call ray.init before it$"
    refuses(GroupError, text, ml.parallel.RayGroup, 1)


test_rows = claims("launch", globals())


def refused(call: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLVM_SECRET", "MLVM_SECRET_FILE"):
            patch.delenv(name, raising=False)
        call()
