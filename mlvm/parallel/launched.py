"""Environment of processes that a scheduler has started: rank, size and address.

torchrun and `python -m mlvm launch` set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Slurm's
srun, Open MPI's mpirun and Indexed Jobs of Kubernetes set other variables. If these contain no
address, the members meet at the first host of the job, at a port derived from the job's number.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from mlvm.core.errors import GroupError, brief
from mlvm.core.sizes import parse_count
from mlvm.machines.remote.address import TcpAddress

_PORTS: Final = range(61440, 65535)
"""Ports for jobs without MASTER_PORT. As in JAX, they are above the ephemeral ports."""


class Launched(NamedTuple):
    """Rank of this process, number of processes, and address where they meet."""

    rank: int
    size: int
    address: TcpAddress


def launched(variables: Mapping[str, str]) -> Launched:
    """Parse the variables of the environment.

    Raises `GroupError` if they are missing or incomplete.
    """
    for parse in (_by_torchrun, _by_kubernetes, _by_open_mpi, _by_slurm):
        job = parse(variables)
        if job is not None:
            return job
    for one, rest in _NEEDED.items():
        if one in variables:
            missing = " and ".join([each for each in rest if each not in variables])
            remedy = "; start the program by srun, not by sbatch alone" if "SLURM" in one else ""
            raise GroupError(f"{one} is set, so {missing} must also be set{remedy}")
    raise GroupError(
        "this process was not started by a scheduler: use `python -m mlvm launch`, torchrun, "
        "srun or mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


_PLACE: Final = "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_NEEDED: Final = {
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
    "SLURM_PROCID": ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    "SLURM_JOB_ID": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    "JOB_COMPLETION_INDEX": _PLACE,
    "RANK": _PLACE,
    "WORLD_SIZE": ("RANK", "MASTER_ADDR", "MASTER_PORT"),
}
"""Variables that must also be set if the key is set."""


def _by_torchrun(variables: Mapping[str, str]) -> Launched | None:
    if not {"RANK", "WORLD_SIZE"} <= variables.keys():
        return None
    if "MASTER_ADDR" not in variables or "MASTER_PORT" not in variables:
        raise GroupError(
            "RANK and WORLD_SIZE are set; MASTER_ADDR and MASTER_PORT must also be set"
        )
    port = _number(variables, "MASTER_PORT")
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens on MASTER_PORT
    return _at(variables, "RANK", "WORLD_SIZE", _host(variables["MASTER_ADDR"]), port)


def _by_kubernetes(variables: Mapping[str, str]) -> Launched | None:
    """Parse the variables that Kubernetes and the manifest set in a pod of an Indexed Job."""
    index = variables.get("JOB_COMPLETION_INDEX")
    if index is None or "WORLD_SIZE" not in variables:
        return None
    return _by_torchrun({"RANK": index, **variables})


def _by_open_mpi(variables: Mapping[str, str]) -> Launched | None:
    rank, size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if not {rank, size} <= variables.keys():
        return None
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
    here = variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == variables[size]
    host = _host(variables.get("MASTER_ADDR") or ("127.0.0.1" if here else None))
    if host is None:
        raise GroupError(
            "mpirun does not set the host of the first member: set MASTER_ADDR (-x MASTER_ADDR=...)"
        )
    return _at(variables, rank, size, host, _port(variables, zlib.crc32(job.encode())))


def _by_slurm(variables: Mapping[str, str]) -> Launched | None:
    rank, size, nodes = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
    if not {rank, size, nodes} <= variables.keys():  # a batch script has no srun step
        return None
    host = _host(variables.get("MASTER_ADDR") or None) or first_host(variables[nodes], nodes)
    job = _number(variables, "SLURM_JOB_ID") + _number(variables, "SLURM_STEP_ID")
    return _at(variables, rank, size, host, _port(variables, job))


_NUMBERS: Final = r"\d+(?:-\d+)?"
_NODE: Final = rf"(?:[\w.-]|\[{_NUMBERS}(?:,{_NUMBERS})*])+"


def first_host(nodes: str, name: str = "SLURM_STEP_NODELIST") -> str:
    """Return the first host of a list in Slurm's format: `rack[1-3,7]node[01-04],other`.

    Raises `GroupError`, which names the variable, if the format is invalid.
    """
    match = re.fullmatch(rf"({_NODE})(?:,{_NODE})*", nodes)
    if match is None:
        raise GroupError(
            f"{name}: expected a list of hosts such as node[01-04],other, got {brief(nodes)}; "
            f"start the program by srun, or set MASTER_ADDR"
        )
    return re.sub(r"\[(\d+)[^]]*]", r"\1", match[1])


def _host(text: str | None) -> str | None:
    """Return the host in MASTER_ADDR, or None. Raises `GroupError` if it is invalid."""
    if text is not None and not re.fullmatch(r"[\w.:%-]+", text):
        raise GroupError(f"MASTER_ADDR: expected a host name or an IP address, got {brief(text)}")
    return text


def _port(variables: Mapping[str, str], job: int) -> int:
    if "MASTER_PORT" in variables:
        return _number(variables, "MASTER_PORT")
    return _PORTS[job % len(_PORTS)]


def _at(
    variables: Mapping[str, str], rank: str, size: str, host: str | None, port: int
) -> Launched:
    number, count = _number(variables, rank), _number(variables, size)
    if number >= count:
        raise GroupError(f"{rank}: expected a rank below {size}={count}, got {number}")
    if port >= 1 << 16:
        raise GroupError(f"MASTER_PORT: expected a port below 65536, got {port}")
    assert host is not None  # each scheduler has set one, or was refused
    return Launched(number, count, TcpAddress(host, port))


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "0")
    if (number := parse_count(text)) is None:
        raise GroupError(f"{name}: expected an integer, got {brief(text)}")
    return number
