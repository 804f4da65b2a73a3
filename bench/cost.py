"""Model of a data-parallel step's cost: `python -m bench.cost --help` prints a table.

The time to pass a message of b bytes is latency + b / bandwidth, as in Hockney's model (Parallel
Computing 20, 1994), where a member's link carries all that it sends. `overhead` is the time of each
message on the sending processor (LogP: Culler et al., PPoPP 1993). Members compute alike, nothing
else uses their links, and the network between them never saturates. So the model is a lower bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from mlvm.eager.parallel.shards import BUCKET_NBYTES
from mlvm.machines.terminal import CommandParser
from mlvm.parallel.communicator import BLOCK_NBYTES, is_small
from mlvm.parallel.messages import RING

Shard: TypeAlias = Literal["optimizer", "all"]

BACKWARD: Final = 2 / 3
"""Share of the backward pass in a step: two products for each one of the forward pass."""


class Link(NamedTuple):
    """Connection of a member with the others.

    bandwidth: sent bytes per second
    latency: seconds until the first byte arrives
    overhead: seconds of work for each message
    """

    bandwidth: float
    latency: float
    overhead: float = 2e-6


# --- one collective ------------------------------------------------------------------


def meeting_time(members: int, link: Link) -> float:
    """Return the time of a barrier in which the members compare their calls: a message from each in
    each round, and twice the known members after each round."""
    return (members - 1).bit_length() * (link.latency + link.overhead)


def sent_by_all_reduce(nbytes: float, members: int) -> float:
    """Return the most bytes that a member sends. Small tensors: those of all members but one, along
    with the barrier. Larger ones: a part to each member, then its result to all. In the ring:
    totals and results."""
    others = members - 1
    if is_small(int(nbytes), members):
        return others * nbytes
    if nbytes < RING * members:
        return 2 * others / members * nbytes
    return nbytes if members == 2 else 2 * nbytes


def exchange_time(nbytes: float, members: int, link: Link) -> float:
    """Return the time in which each member sends every other one its part of `nbytes`, and receives
    as many: a message to each, all at once."""
    others = members - 1
    sent = others / members * nbytes
    return link.latency + others * link.overhead + sent / link.bandwidth


def _goes_by_parts(nbytes: float, members: int) -> bool:
    """Return whether a tensor is combined by parts: too large for one message, too small for the
    ring."""
    return not is_small(int(nbytes), members) and nbytes < RING * members


def all_reduce_time(nbytes: float, members: int, link: Link) -> float:
    """Return the time of an `all_reduce`."""
    if _goes_by_parts(nbytes, members):
        return meeting_time(members, link) + 2 * exchange_time(nbytes, members, link)
    return _round_time(nbytes, members, link, 2 * (members - 1), sent_by_all_reduce)


def reduce_scatter_time(nbytes: float, members: int, link: Link) -> float:
    """Return the time of a `reduce_scatter` of `nbytes`."""
    if _goes_by_parts(nbytes, members):
        return meeting_time(members, link) + exchange_time(nbytes, members, link)

    def sent(nbytes: float, members: int) -> float:
        return (1 + (members - 2) / members) * nbytes

    return _round_time(nbytes, members, link, 2 * (members - 1), sent)


def all_gather_time(nbytes: float, members: int, link: Link) -> float:
    """Return the time of an `all_gather` to `nbytes`."""

    def sent(nbytes: float, members: int) -> float:
        return (members - 1) / members * nbytes

    return _round_time(nbytes, members, link, members - 1, sent)


def _round_time(
    nbytes: float,
    members: int,
    link: Link,
    hops: int,
    sent: Callable[[float, int], float],
) -> float:
    """Return the time of blocks that pass `hops` links of a ring. The first block arrives after all
    hops, the others at the rate of the busiest link."""
    if members == 1:
        return 0.0
    meeting = meeting_time(members, link)
    if is_small(int(nbytes), members):
        return meeting + (members - 1) * nbytes / link.bandwidth
    block = min(max(nbytes / (4 * members), 1 << 15), BLOCK_NBYTES, nbytes)
    each = link.overhead + block / link.bandwidth
    return meeting + hops * (link.latency + each) + (sent(nbytes, members) / block - 1) * each


def ring_time(nbytes: float, members: int, link: Link) -> float:
    """Return the time of an `all_reduce` by a plain ring, for comparison (Patarasuk and Yuan, J.
    Parallel Distrib. Comput. 69, 2009): as many bytes, in 2 (members - 1) steps in order."""
    if members == 1:
        return 0.0
    steps = 2 * (members - 1)
    return steps * (link.latency + link.overhead + nbytes / members / link.bandwidth)


# --- a step --------------------------------------------------------------------------


def step_time(
    compute: float,
    nbytes: float,
    members: int,
    bandwidth: float,
    latency: float,
    *,
    overhead: float = Link(1, 0).overhead,
    shard: Shard | None = None,
    tensors: int = 1,
    bucket: float = BUCKET_NBYTES,
) -> float:
    """Return the seconds of a step of `data_parallel`, of which each member computes for `compute`
    seconds and has `nbytes` of gradients in `tensors` tensors.

    Gradients come one bucket after the other as the backward pass goes on, and their all_reduces
    overlap it, one after the other. So do the reduce_scatters with `shard="optimizer"`, and the
    all_gather of the weights follows the update. With "all" each tensor is gathered in the forward
    pass and scattered in the backward pass, without overlap.
    """
    if members == 1:
        return compute
    link = Link(bandwidth, latency, overhead)
    if shard == "all":
        each = nbytes / tensors
        both = all_gather_time(each, members, link) + reduce_scatter_time(each, members, link)
        return compute + tensors * both
    buckets = max(1, -(-int(nbytes) // int(bucket)))
    size = nbytes / buckets
    overlapped = all_reduce_time if shard is None else reduce_scatter_time
    done = 0.0
    for i in range(buckets):
        ready = compute * (1 - BACKWARD + BACKWARD * (i + 1) / buckets)
        done = max(done, ready) + overlapped(size, members, link)
    return done if shard is None else done + buckets * all_gather_time(size, members, link)


def table(
    compute: float, nbytes: float, link: Link, members: Sequence[int]
) -> list[tuple[int, float, float, float]]:
    """For each number of members: the seconds of a step, those of a plain ring after the backward
    pass, and the share of the step in which a member computes."""
    rows = []
    for n in members:
        step = step_time(compute, nbytes, n, link.bandwidth, link.latency, overhead=link.overhead)
        rows.append((n, step, compute + ring_time(nbytes, n, link), compute / step))
    return rows


def parser() -> CommandParser:
    """Return the parser of the command."""
    command = CommandParser(_run, prog="python -m bench.cost")
    for name, default, text in (
        ("compute", 0.5, "seconds that a member computes in a step"),
        ("bytes", 100e6, "bytes of gradients"),
        ("bandwidth", 1.25e9, "bytes per second of a member's link"),
        ("latency", 50e-6, "seconds until the first byte of a message"),
        ("overhead", 2e-6, "seconds of work for each message"),
    ):
        command.add_argument(f"--{name}", type=float, default=default, metavar="X", help=text)
    return command


def _run(options: argparse.Namespace) -> None:
    """Estimate the time of a data-parallel step for 1 to 4,096 members.

    The table also shows the time with a plain ring, and the share of the step in which a member
    computes.

    Example:
        python -m bench.cost --compute 0.1 --bytes 4e8
    """
    link = Link(options.bandwidth, options.latency, options.overhead)
    print("members    step ms    ring ms   computing")
    for n, step, ring, share in table(
        options.compute, options.bytes, link, [4**i for i in range(7)]
    ):
        print(f"{n:7}{1e3 * step:11.1f}{1e3 * ring:11.1f}{100 * share:10.1f} %")


if __name__ == "__main__":
    raise SystemExit(parser().run())
