"""Threads that take turns in arenas, and end what the others use.

    python -m tests.fuzz threads --seconds 60 --seed 0

In each round several threads use the arenas of one VM, and each its default one. They enter and
leave them, compute what is known in advance, read each other's tensors, change their own, free,
mark, rewind, reset, trim and close. Whatever one does, the others may only get the right value, or
an `MlvmError` that says what has ended, does not fit, or is entered by another thread. After a
round no thread is inside an arena, and the VM holds no byte. Prints what was tried and outcomes.
The first wrong value, other error, lost byte or hang is printed with the seed, and the exit status
is 1. Threads are never the same twice: a seed makes the choices again, not the order.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import itertools
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.arena.arena import Mark, scope
from mlvm.eager.functions.random import prepare
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.garbage import collect
from tests.fuzz.command import Wrong, parser_of
from tests.threads import start, taking_turns

SHAPES: Final = [(1,), (8,), (2, 4), (9,), (16,), (3, 5), (40,)]
SWITCHES: Final = (1e-6, 1e-5, 1e-4)
"""Seconds after which one thread hands over to another; each round has its own."""

ROUND: Final = 0.5
PATIENCE: Final = 60.0
"""Seconds that a round may take longer than it should, before it counts as hanging."""

BELONGS: Final = (ml.errors.StaleTensorError, ml.errors.ArenaError)
"""What an operation may raise, because another thread has ended, entered, closed or filled
something."""

_POOL: Final = 24
_LARGE: Final = 1 << 20  # what is not less is not squared again

_values = itertools.count(1)


@dataclass(frozen=True)
class Known:
    """A tensor and the value of all its elements. `shared` are those that other threads know, and
    that no thread changes."""

    tensor: ml.Tensor
    value: int

    def check(self) -> None:
        """Raise `Wrong` for another value, `StaleTensorError` if the tensor has ended."""
        values = self.tensor.numpy()
        if not (values == self.value).all():
            raise Wrong(f"a {self.tensor.type} of {self.value} holds {values.ravel()[:8]}")


@dataclass
class World:
    """State shared by the threads of a round."""

    vm: ml.VM
    queue: ml.QueueTensor
    until: float
    arenas: list[ml.Arena] = field(default_factory=list)
    pool: list[Known] = field(default_factory=list)
    generators: list[Iterator[None]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def goes_on(self) -> bool:
        return not self.failures and time.monotonic() < self.until

    def new_arena(self, rng: random.Random) -> ml.Arena:
        kind = rng.randrange(3)
        return ml.Arena(self.vm, "shared", capacity=1 << 12 if kind == 0 else None, trims=kind == 1)


class Worker:
    """One thread: it does one thing after the other, chosen at random."""

    def __init__(self, world: World, seed: str) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.step = ml.capture(lambda x, y: (x + y) * x - y)

    def run(self) -> None:
        try:
            while self.world.goes_on():
                self.block(2)
        except BaseException:
            self.world.failures.append(traceback.format_exc())

    def task(self) -> None:
        """`run`, with blocks of several asyncio tasks inside each other."""

        async def blocks() -> None:
            for _ in range(10):
                with self.outcome("task"), self.rng.choice(self.world.arenas):
                    mine = self.new()
                    await asyncio.sleep(0)
                    self.derived(mine).check()

        async def tasks() -> None:
            await asyncio.gather(*[blocks() for _ in range(3)])

        try:
            while self.world.goes_on():
                asyncio.run(tasks())
        except BaseException:
            self.world.failures.append(traceback.format_exc())

    def block(self, depth: int) -> None:
        """A few operations inside `with arena:`, or `allocating`, or neither."""
        rng, arena, outside = self.rng, self.rng.choice(self.world.arenas), scope()
        inside = rng.choice([arena, arena, arena, arena.allocating(), None])
        with ExitStack() as stack:
            if inside is not None:
                try:
                    stack.enter_context(inside)
                except ml.errors.ArenaBusyError:
                    self.world.outcomes["enter: ArenaBusyError"] += 1
                else:
                    if scope() is not arena:
                        raise Wrong(f"results go to {scope()}, not to {arena}")
            mine: list[Known] = []
            for _ in range(rng.randrange(1, 8)):
                if depth and rng.random() < 0.1:
                    self.block(depth - 1)
                else:
                    operation = rng.choice(OPERATIONS)
                    with self.outcome(operation.__name__):
                        operation(self, mine)
                del mine[8:]
        if scope() is not outside:
            raise Wrong(f"after a block results go to {scope()}, not to {outside}")

    @contextmanager
    def outcome(self, name: str) -> Iterator[None]:
        """Count how it ends. What an operation may not raise goes through."""
        try:
            yield
        except BELONGS as error:
            self.world.outcomes[f"{name}: {type(error).__name__}"] += 1
        else:
            self.world.outcomes[name] += 1

    # --- values ---

    def new(self) -> Known:
        value = next(_values) % _LARGE
        array = np.full(self.rng.choice(SHAPES), value, np.int64)
        return Known(ml.asarray(array), value)

    def derived(self, x: Known) -> Known:
        """A tensor computed from that one, which may have ended."""
        kind = self.rng.randrange(0 if x.value < _LARGE else 2, 4)
        if kind == 0:
            return Known(x.tensor + x.tensor, 2 * x.value)
        if kind == 1:
            return Known(ml.square(x.tensor) - x.tensor, x.value**2 - x.value)
        if kind == 2:
            return Known(ml.reshape(x.tensor, (-1,)), x.value)
        return Known(ml.where(x.tensor == x.tensor, x.tensor, -x.tensor), x.value)

    def pick(self, mine: list[Known]) -> Known:
        """One of this thread's tensors, or of those that all know, or a new one."""
        pool = self.world.pool.copy()  # others add to it
        choices = [*mine, *self.rng.sample(pool, min(4, len(pool)))]
        return self.rng.choice(choices) if choices else self.new()

    # --- operations ---

    def make(self, mine: list[Known]) -> None:
        mine.append(self.new())

    def compute(self, mine: list[Known]) -> None:
        x = self.derived(self.pick(mine))
        for _ in range(self.rng.randrange(3)):
            x = self.derived(x)
        x.check()
        mine.append(x)

    def read(self, mine: list[Known]) -> None:
        self.pick(mine).check()

    def share(self, mine: list[Known]) -> None:
        pool = self.world.pool
        pool.append(self.derived(self.new()))
        if len(pool) > _POOL:
            del pool[: self.rng.randrange(_POOL)]

    def update(self, mine: list[Known]) -> None:
        x = self.new()
        tensor = x.tensor
        tensor += tensor
        Known(tensor, 2 * x.value).check()

    def keep(self, mine: list[Known]) -> None:
        x = self.pick(mine)
        copy = Known(self.rng.choice(self.world.arenas).keep(x.tensor), x.value)
        copy.check()
        mine.append(copy)

    def captured(self, mine: list[Known]) -> None:
        x = self.pick(mine)
        if x.value >= _LARGE:
            return
        y = Known(ml.full(x.tensor.shape, 3, dtype=ml.int64), 3)
        result = self.step(x.tensor, y.tensor)
        x.check()  # a replay does not look whether an operand has ended meanwhile
        Known(result, (x.value + 3) * x.value - 3).check()

    def free(self, mine: list[Known]) -> None:
        x = self.pick(mine).tensor
        if x.base is None:
            x.arena.free(x)

    def rewind(self, mine: list[Known]) -> None:
        arena = self.rng.choice(self.world.arenas)
        mark: Mark = arena.mark()
        with arena.allocating():
            for _ in range(self.rng.randrange(1, 4)):
                self.derived(self.new()).check()
        arena.rewind(mark)

    def reset(self, mine: list[Known]) -> None:
        self.rng.choice(self.world.arenas).reset()

    def trim(self, mine: list[Known]) -> None:
        self.rng.choice(self.world.arenas).trim()

    def close(self, mine: list[Known]) -> None:
        arenas = self.world.arenas
        number = self.rng.randrange(len(arenas))
        old, arenas[number] = arenas[number], self.world.new_arena(self.rng)
        old.close()

    def put(self, mine: list[Known]) -> None:
        value = next(_values)
        arrays = [np.full(type.shape, value, np.int64) for type in self.world.queue.types]
        try:
            self.world.queue.put_nowait(arrays)
        except ml.errors.QueueFullError:
            self.get(mine)

    def get(self, mine: list[Known]) -> None:
        try:
            x, y = self.world.queue.get_nowait()
        except ml.errors.QueueEmptyError:
            return
        before = x.numpy()
        x += y
        if not (x.numpy() == 2 * before.flat[0]).all() or not (y.numpy() == before.flat[0]).all():
            raise Wrong(f"an element of a queue holds {x} and {y}, and has held {before}")

    def elsewhere(self, mine: list[Known]) -> None:
        """Let another thread do something in a copy of this one's context."""
        context = contextvars.copy_context()
        start(context.run, self.compute, []).result(PATIENCE)

    def begin(self, mine: list[Known]) -> None:
        """Enter an arena in a generator, for any thread to finalize."""

        def inside(arena: ml.Arena) -> Iterator[None]:
            with arena:
                yield

        generator = inside(self.rng.choice(self.world.arenas))
        contextvars.Context().run(next, generator)
        self.world.generators.append(generator)

    def finalize(self, mine: list[Known]) -> None:
        generators = self.world.generators
        while generators:
            try:
                generator: Any = generators.pop(0)
            except IndexError:
                return
            contextvars.Context().run(generator.close)


_OFTEN: Final = [Worker.make, Worker.compute, Worker.read, Worker.update, Worker.share]
_SOMETIMES: Final = [
    Worker.keep, Worker.captured, Worker.free, Worker.rewind, Worker.put, Worker.get, Worker.begin,
    Worker.finalize,
]  # fmt: skip
_SELDOM: Final = [Worker.reset, Worker.trim, Worker.close, Worker.elsewhere]
OPERATIONS: Final[list[Callable[[Worker, list[Known]], None]]] = [
    *(_OFTEN * 6), *(_SOMETIMES * 2), *_SELDOM,
]  # fmt: skip


def play(seed: str, seconds: float, nthreads: int, outcomes: Counter[str]) -> str | None:
    """One round; what went wrong, as text."""
    rng = random.Random(seed)
    vm = ml.VM()
    world = World(
        vm,
        ml.QueueTensor(vm, ["i64[2,4]", "i64[4]"], maxsize=3),
        time.monotonic() + seconds,
        outcomes=outcomes,
    )
    world.arenas += [world.new_arena(rng) for _ in range(nthreads)]
    workers = [Worker(world, f"{seed}/{k}") for k in range(nthreads)]
    runs = [worker.task if rng.random() < 0.2 else worker.run for worker in workers]

    def on_the_vm(run: Callable[[], None]) -> None:
        with ml.use(vm):
            run()

    with taking_turns(rng.choice(SWITCHES)):
        running = [start(on_the_vm, run) for run in runs]
        for each in running:
            each.result(PATIENCE + seconds)
    for generator in world.generators:
        generator.close()  # type: ignore[attr-defined]
    if world.failures:
        return world.failures[0]
    return left_over(world, workers)


def left_over(world: World, workers: list[Worker]) -> str | None:
    """Return what the round has left behind and should not have."""
    inside = [arena for arena in world.arenas if arena._inside]
    if inside:
        return f"nobody is inside any more, but {inside} are entered"
    for arena in world.arenas:
        arena.reset()
        if arena.used:
            return f"{arena} was reset, and holds {arena.holders()}"
        arena.close()
    for worker in workers:
        worker.step.close()
    vm = world.vm
    world.pool.clear()
    workers.clear()
    del world.queue
    collect()  # also where another thread collects
    expected = constants(vm)
    nbytes = vm.consumed_size_in_mib() * 2**20 - expected
    return f"the VM still holds {nbytes:,.0f} bytes" if nbytes else None


def constants(vm: ml.VM) -> int:
    """The bytes of the Python scalars that a VM keeps."""

    return prepare_constants(vm).arena.capacity + prepare(vm).state.arena.capacity


def fuzz(seconds: float, seed: int, nthreads: int = 4) -> tuple[int, Counter[str], str | None]:
    """Run rounds for the given number of seconds; return their number, how operations ended, and
    what went wrong first."""
    outcomes, until, failure, number = Counter[str](), time.monotonic() + seconds, None, 0
    try:
        while failure is None and (remaining := until - time.monotonic()) > 0:
            faulthandler.dump_traceback_later(ROUND + PATIENCE, exit=True)
            failure = play(f"{seed}/{number}", min(ROUND, remaining), nthreads, outcomes)
            number += 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return number, outcomes, failure


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args(argv)
    rounds, outcomes, failure = fuzz(options.seconds, options.seed, options.threads)
    for name, n in sorted(outcomes.items()):
        print(f"{n:8}  {name}")
    print(f"{rounds} rounds, {outcomes.total():,} operations")
    if failure is not None:
        print(f"seed {options.seed}, round {rounds - 1}: {failure}")
    return int(failure is not None)
