"""Members in processes and under MPI do what members in threads do, to the bit, and end alike."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import GroupError, MissingExtraError
from mlvm.core.program.program import Program
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel import messages
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.named import group
from mlvm.parallel.processes import ProcessGroup
from tests.brief import ROOT, Patch, cases, line_of, refuses, run_python, start_python
from tests.core.programs import put
from tests.fuzz import groups
from tests.parallel import places
from tests.parallel.joined import Joined
from tests.parallel.members import call
from tests.threads import wait_for

pytest.importorskip("threadpoolctl")

SHARED = Path("/dev/shm")
HAS_MPI = importlib.util.find_spec("mpi4py") is not None
HAS_CLOUDPICKLE = importlib.util.find_spec("cloudpickle") is not None


KINDS = {"threads": Group, "processes": ProcessGroup, "tcp": Joined}


@pytest.fixture(scope="module", params=KINDS)
def members(request: pytest.FixtureRequest) -> Iterator[AnyGroup]:
    with KINDS[request.param](2) as members:
        yield members


only = partial(pytest.mark.parametrize, "members", indirect=True)


# --- the same everywhere -------------------------------------------------------------


def test_every_collective_does_what_numpy_does(members: AnyGroup) -> None:
    assert members.run(places.everything) == places.expected_of_everything(2)


def test_three_threads_do_too() -> None:
    with Group(3) as members:
        assert members.run(places.everything) == places.expected_of_everything(3)


@cases("size, ring", (3, 0), (6, messages.RING))
def test_several_over_tcp_do_too(size: int, ring: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(messages, "RING", ring)
    with Joined(size) as members:
        assert members.run(places.everything) == places.expected_of_everything(size)
        assert members.run(places.at_once) == [places.expected_beside(size)] * size


def test_three_processes_do_too() -> None:
    with ProcessGroup(3) as members:
        assert members.run(places.everything) == places.expected_of_everything(3)
        assert members.run(places.at_once) == [places.expected_beside(3)] * 3
        assert members.run(alone) == [1, 1, 1]


def alone(rank: int, vm: VM) -> int:
    """A group in a member, of a process in a process."""
    if rank:
        return 1
    with ProcessGroup(1) as members:
        return len(members.run(places.reduce))


def test_what_is_started_is_done_beside_the_program(members: AnyGroup) -> None:
    assert members.run(places.at_once) == [places.expected_beside(2)] * 2


def test_members_keep_functions(members: AnyGroup) -> None:
    counting, other = members.keep(places.Counting), members.keep(places.Counting)
    assert counting([1, 2]) == [(0, 1), (1, 2)]
    assert counting([3, 4], factor=10) == [(0, 31), (1, 42)]
    assert other([0, 0]) == [(0, 0), (1, 0)]
    refuses(GroupError, "one item for each of 2 members", counting, [1, 2, 3])


# --- what goes wrong -----------------------------------------------------------------


@pytest.mark.parametrize("name", places.WRONG)
def test_members_that_cannot_meet_say_why(members: AnyGroup, name: str) -> None:
    fn, texts = places.WRONG[name]
    for _ in range(2):
        message = places.outcome(members, fn)
        assert all(text in message for text in texts), message
    assert members.run(places.reduce) == [[2.0] * 4] * 2


@only(["processes"])
def test_an_error_of_a_process_has_its_traceback(members: AnyGroup) -> None:
    caught = refuses(ValueError, "boom", members.run, places.fails)
    notes = "\n".join(caught.__notes__)
    assert 'raise ValueError("boom")' in notes
    assert "raised by member 1 (vm1) of a group of 2" in notes


@only(["processes"])
def test_a_process_that_exits_ends_the_run(members: AnyGroup) -> None:
    refuses(GroupError, "SystemExit: 3", members.run, places.exits)
    assert members.run(places.reduce) == [[2.0] * 4] * 2


def wait_wrongly(rank: int, vm: VM) -> None:
    call(vm, "all_reduce.wait", np.ones(3))


def start_twice(rank: int, vm: VM) -> None:
    x = put(vm, np.ones(3))
    for _ in range(2):
        vm.launch(Program.of_op("all_reduce.start", 1, {"op": "sum"}, 0), [x])


@only(["threads"])
def test_what_was_not_started_is_not_waited_for(members: AnyGroup) -> None:
    refuses(
        GroupError, r"expected an earlier all_reduce\.start of these", members.run, wait_wrongly
    )
    refuses(
        GroupError,
        r"all_reduce\(f64\[3\].* was started before; call its wait first",
        members.run,
        start_twice,
    )


@only(["processes"])
def test_functions_without_a_name_need_cloudpickle(members: AnyGroup) -> None:
    k = 5
    if HAS_CLOUDPICKLE:
        assert members.run(lambda rank, vm: k + rank) == [5, 6]
        assert members.run(lambda rank, vm: float(ml.ones(k).sum())) == [5, 5]
    else:
        with pytest.raises(MissingExtraError, match=r'pip install "mlvm\[processes\]"'):
            members.run(lambda rank, vm: k + rank)


def unpicklable(rank: int, vm: VM) -> Any:
    return vm.name, (i for i in range(3))


@only(["processes"])
def test_what_has_no_bytes_cannot_be_returned(members: AnyGroup) -> None:
    refuses((GroupError, MissingExtraError), "generator", members.run, unpicklable)


@cases("size", 0, -1, 257, True, "2", None)
def test_impossible_numbers_of_processes_are_refused(size: Any) -> None:
    refuses(GroupError, "a group must have 1 to 256 processes", ProcessGroup, size)


def test_groups_have_names() -> None:
    with group("threads:2") as threads:
        assert type(threads) is Group
        assert threads.size == 2
    for name in ("threads", "processes:two", "mpi:2", "hosts:3", "auto:2", ""):
        refuses(GroupError, "threads:N, processes:N, ray:N, mpi or auto", group, name)


# --- deaths --------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_members_killed_at_random_moments_leave_nothing() -> None:
    summary, wrong = groups.fuzz(1, 1, seed=0)
    assert not wrong
    assert summary.startswith("1 members killed")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


ORPHANS = """
import os, signal, sys, time
from mlvm.parallel.processes import ProcessGroup
from tests.fuzz import groups
from tests.parallel import places
from tests.parallel.joined import Joined
if __name__ == "__main__":
    members = ProcessGroup(2)
    print(*members.pids, flush=True)
    {then}
"""


def program(then: str, tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(ORPHANS.replace("{then}", then))
    reset = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return start_python(script, preexec_fn=reset)


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    with program("os.kill(os.getpid(), signal.SIGKILL)", tmp_path) as parent:
        output, errors = parent.communicate(timeout=30)
    pids = [int(pid) for pid in output.split()]
    assert len(pids) == 2
    wait_for(lambda: not any(map(is_alive, pids)), 5)
    assert "leaked" not in errors


def test_ctrl_c_ends_a_run_of_processes(tmp_path: Path) -> None:
    with program("members.run(places.waits)", tmp_path) as parent:
        pids = [int(pid) for pid in line_of(parent).split()]
        time.sleep(0.3)
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert not any(map(is_alive, pids))


# --- MPI -----------------------------------------------------------------------------


def mpirun(what: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "tests" / "parallel" / "places.py")
    return run_python("-m", "mlvm", "mpirun", "-n", "4", script, what)


needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="mpi4py is not installed")


@needs_mpi
def test_mpi_does_it_all() -> None:
    done = mpirun("everything")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["everything"] == places.expected_of_everything(4)
    assert results["beside"] == [places.expected_beside(4)] * 4
    for name, (_, texts) in places.WRONG.items():
        assert all(text in results["wrong"][name] for text in texts), results["wrong"][name]
    assert results["after"] == [[4.0] * 4] * 4
    assert results["kept"] == [
        [[rank, rank + 1] for rank in range(4)],
        [[rank, 11 * (rank + 1)] for rank in range(4)],
    ]
    if HAS_CLOUDPICKLE:
        assert results["lambda"] == [0, 2, 4, 6]


@needs_mpi
def test_an_mpi_process_that_leaves_is_named() -> None:
    done = mpirun("leaves")
    assert "member 1 (vm1) has left: RuntimeError: enough" in done.stdout, done.stderr
    assert done.returncode != 0


@needs_mpi
def test_an_mpi_process_that_stops_is_named_and_ended() -> None:
    done = mpirun("stops")
    text = (
        r"GroupTimeoutError: member \d \(vm\d\) has waited 1 s in barrier\(\) for member 1 \(vm1\)"
    )
    assert re.search(text, done.stdout), done.stderr
    assert done.returncode != 0


@needs_mpi
def test_one_mpi_process_prints_the_traceback_of_an_error_that_all_raise() -> None:
    done = mpirun("raises")
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert sum(line.startswith("Traceback") for line in lines) == 1, done.stderr
    assert lines.count("ValueError: boom") == 1, done.stderr
    for rank in (0, 2, 3):
        line = f"member {rank} (vm{rank}): ValueError: boom; see the traceback of member 1 (vm1)"
        assert line in lines, done.stderr


@needs_mpi
def test_mpiexec_ends_all_when_one_is_killed() -> None:
    there = set(SHARED.glob("mpich_shm_*"))
    done = mpirun("is_killed")
    assert done.returncode != 0
    assert "Group" not in done.stdout  # no member has waited for the timeout
    assert set(SHARED.glob("mpich_shm_*")) <= there


@pytest.mark.skipif(HAS_MPI, reason="mpi4py is installed")
def test_without_mpi4py_the_error_names_the_extra() -> None:
    done = mpirun("everything")
    assert done.returncode == 1
    assert done.stderr == 'error: mpi4py is not installed: pip install "mlvm[mpi]"\n'
