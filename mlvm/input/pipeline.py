"""Input pipelines: batches of a dataset, prefetched into the slots of a queue.

    with Pipeline(dataset, 32, vm=vm, shuffle=True, workers=2) as pipeline:
        for epoch in range(20):
            for images, labels in pipeline:
                ...

The samples of a batch and the random numbers of a transform depend only on seed, epoch and index.
Therefore the bits do not depend on the number of workers.
"""

from __future__ import annotations

import operator
import os
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Generic, NamedTuple, Self, TypedDict

from mlvm.arena.arena import A, Allocation
from mlvm.core.errors import (
    DTypeError,
    PipelineError,
    QueueClosedError,
    QueueEmptyError,
    QueueFullError,
    brief,
    counted,
)
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import DType
from mlvm.input.batches import Batch, Recipe, Schedule, Transform
from mlvm.input.datasets import with_parts
from mlvm.input.padding import Pad, Padding, PadTo
from mlvm.input.queue import QueueTensor
from mlvm.input.workers import Crew
from mlvm.machines.closing import Closing

_SEEDS: Final = 2**64
_IN_USE: Final = 2  # slots for batches in use: the last batch and an earlier one


class PipelineState(TypedDict):
    """Position of a pipeline, which can be stored as JSON.

    The next batch begins at `next_index` in the order of `epoch`, both from 0.

        >>> class Numbers:
        ...     def __len__(self): return 10
        ...     def __getitem__(self, indices): return (indices,)
        >>> batches = ml.Pipeline(Numbers(), 4, vm=ml.VM())
        >>> _ = batches.get()
        >>> batches.state()
        {'epoch': 0, 'next_index': 4, 'seed': 0}
    """

    epoch: int
    next_index: int
    seed: int


class PipelineStats(NamedTuple):
    """Statistics of a pipeline: number of batches, and seconds of waiting.

    The consumer waits for batches, and the producers, added together, for free slots.

        >>> class Numbers:
        ...     def __len__(self): return 10
        ...     def __getitem__(self, indices): return (indices,)
        >>> batches = ml.Pipeline(Numbers(), 4, vm=ml.VM())
        >>> _ = batches.get()
        >>> batches.stats().batches
        1
    """

    batches: int
    consumer_waited: float
    producers_waited: float


class Pipeline(Closing, Generic[A]):
    """Pipeline that yields the batches of `dataset` as tensors on `vm`, in order, for one thread.

    `dataset`: an array, a tuple of arrays with a row for each sample, or a dict or frame of arrays,
        which yields named tuples. It may also be a list, or any object with samples by number, each
        an array, a number, or a tuple or dict of these; or a `Dataset`, which returns many samples
        per call.
    `batch_size`: number of samples per batch.
    `vm`: VM of the batches.
    `epochs`: number of epochs, after which `QueueClosedError` is raised; None is endless.
    `shuffle`: use a different random order in each epoch.
    `transform`: function `transform(arrays, random)` that changes the arrays of each batch; with
        padding, it receives padded arrays.
    `seed`: seed of `shuffle` and `transform`; by default the seed of `ml.random.seed` at the first
        batch, or 0.
    `drop_last`: drop the samples after the last whole batch of an epoch, which otherwise are a
        smaller batch.
    `dtype`: dtype of all floats; by default f64 becomes f32.
    `pad`: pad samples that differ in length along the first axis with this value, or with values
        by name or position of a column, such as `{"tokens": 0, "labels": -100}`.
    `pad_to`: length of a batch: the length of the "longest" sample, rounded up to "powers of two",
    or to
        the next of some lengths, such as `[64, 128, 256]`. A number is the length of all batches.
        Without explicit lengths, all samples are read once to find theirs.
    `workers`: number of threads that prefetch batches. Without workers, `get` constructs the batch.
    `processes`: give each worker a separate process, started by spawn.
    `prefetch`: number of prefetched batches, by default 2 per worker.

    A `for` iterates over one epoch, of `len(pipeline)` batches, and the next `for` over the next
    epoch. After a `for` that was left early, the next `for` repeats all batches of that `for`.
    `get` ignores epochs: it returns one batch after the other. It continues from any position, and
    so does a `for` after `get` or `restore`.

    The first `get` allocates slots: for the prefetched batches, and for two that are in use. A
    batch is in use until all tensors are freed, or until the `with arena:` block exits in which it
    was returned.

    Raises `PipelineError` for invalid options, for a missing `vm`, and for a dataset that is empty
    or returns no arrays. Other errors of `dataset` or `transform` on the first sample are raised
    unchanged.

        >>> class Numbers:
        ...     def __len__(self): return 10
        ...     def __getitem__(self, indices): return (indices,)
        >>> with ml.Pipeline(Numbers(), 4, vm=ml.VM()) as batches:
        ...     for epoch in range(2):
        ...         for (numbers,) in batches: print(epoch, numbers.tolist())
        0 [0, 1, 2, 3]
        0 [4, 5, 6, 7]
        0 [8, 9]
        1 [0, 1, 2, 3]
        1 [4, 5, 6, 7]
        1 [8, 9]

    Invalid calls:
        ml.Pipeline([1.0], 0)  # PipelineError
        list(ml.Pipeline([1.0], 1, epochs=0))  # QueueClosedError
    """

    _kind: type[A] = Allocation  # type: ignore[assignment]

    def __init__(
        self,
        dataset: object,
        batch_size: int,
        *,
        vm: VMProtocol | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        epochs: int | None = None,
        drop_last: bool = False,
        workers: int = 0,
        processes: bool = False,
        transform: Transform | None = None,
        dtype: object = None,
        prefetch: int | None = None,
        pad: Pad | None = None,
        pad_to: PadTo = "longest",
        name: str = "pipeline",
    ) -> None:
        self.name = name
        self._vm = self._default_vm() if vm is None else vm
        self._workers = self._integer("workers", workers, 0)
        self._processes = processes
        default = max(1, 2 * self._workers)
        self._prefetch = default if prefetch is None else self._integer("prefetch", prefetch, 1)
        if transform is not None and not callable(transform):
            raise PipelineError(f"{name}: expected a function as transform, got {brief(transform)}")
        self._has_seed = seed is not None
        seed = self._integer("seed", seed or 0, 0, _SEEDS)
        float_dtype = None if dtype is None else self._float(dtype)
        padding = self._padding(pad, pad_to)
        self._recipe = Recipe(
            dataset, transform, shuffle=shuffle, seed=seed, dtype=float_dtype, padding=padding
        )
        self._schedule = Schedule(
            self._recipe.length,
            self._integer("batch_size", batch_size, 1),
            None if epochs is None else self._integer("epochs", epochs, 0),
            drop_last,
        )
        if drop_last and self._recipe.length < batch_size:
            raise PipelineError(
                f"{name}: expected at least {batch_size} samples, one batch, got "
                f"{self._recipe.length}; use a smaller batch_size, or drop_last=False"
            )
        self._types = self._recipe.types()
        self._next = self._schedule.at(0, 0)
        # first batch of the last `for`, unless `get` or `restore` was called since
        self._first: Batch | None = None
        self._crew: Crew | None = None
        self._close: weakref.finalize[Any, Any] | None = None
        self._closed = False
        self._loops = 0
        self._process = os.getpid()
        self._batches = 0
        self._consumer_waited = 0.0
        self._producers_waited = 0.0  # time of closed crews

    @classmethod
    def from_ray(cls, dataset: Any, batch_size: int, **options: Any) -> Self:
        """Return a pipeline over the rows of a `ray.data.Dataset`, with the options of `Pipeline`.

        The rows stay in Ray's object store, as blocks of columns; each batch is a named tuple of
        columns. Raises `MissingExtraError` without ray, and what `Pipeline` raises.
        """
        from mlvm.input.ray import RayRows

        return cls(RayRows(dataset), batch_size, **options)

    def get(self, timeout: float | None = None) -> tuple[A, ...]:
        """Return the next batch.

        If constructing the batch failed, this call and all later calls raise the error.

        Raises `QueueClosedError` after the last epoch and after `close`, and `QueueEmptyError` if
        no batch is ready within `timeout` seconds. Raises `PipelineError` if all slots are in use,
        or in a process that did not create the pipeline.

        Invalid calls:
            batches.get()  # QueueClosedError
            slow.get(timeout=0.0)  # QueueEmptyError
            [greedy.get() for _ in range(9)]  # PipelineError
        """
        return self._take(timeout, None)

    def peek(self) -> tuple[A, ...]:
        """Return the batch that the next `get` returns, made on this thread in separate memory.
        Raises `QueueClosedError` as `get` does, and errors of the dataset or the transform.

        Invalid calls:
            batches.peek()  # QueueClosedError
        """
        batch = self._coming()
        types = [type.with_shape((batch.size, *type.shape[1:])) for type in self._types]
        queue = QueueTensor(self._vm, types, 1, name=f"{self.name} peek", single_threaded=True)
        reservation = queue.reserve()
        with reservation as arrays:
            reservation.resize(self._recipe.fill(batch, arrays))
        return with_parts(self._types, queue.get(kind=self._kind))

    def __iter__(self) -> Iterator[tuple[A, ...]]:
        """Yield the batches of this epoch that `get` has not returned.

        After a `for` loop that exited early, the next loop repeats the batches. Raises
        `QueueClosedError` after the last epoch, and the errors of `get`.
        """
        coming, first = self._coming(), self._first
        if first is None or first.epoch != coming.epoch:
            self._loops += 1
            first = coming
        elif first != coming:
            # more than one batch was read
            if coming.start - first.start > self._schedule.batch_size:
                warnings.warn(
                    f"{self.name}: the last `for` was left at position {coming.start} of epoch "
                    f"{coming.epoch}, and this one begins at position {first.start} again; `get` "
                    f"continues",
                    stacklevel=2,
                )
            self._stop()
            self._next = first
        while self._next is not None and self._next.epoch == first.epoch:
            yield self._take(None, first)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._schedule.batches

    # --- progress ---

    def state(self) -> PipelineState:
        """Return the state with which `restore` continues after the last returned batch."""
        self._settle_seed()
        epoch, start, _ = self._next or (self._schedule.epochs or 0, 0, 0)
        return PipelineState(epoch=epoch, next_index=start, seed=self._recipe.seed)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this pipeline or another pipeline with the same options.

        Prefetched batches are dropped. Raises `PipelineError` for an invalid state, and for a state
        beyond this dataset or these epochs; the pipeline is then unchanged.

        Invalid calls:
            greedy.restore({"epoch": 0})  # PipelineError
        """
        self._require_usable()
        if not isinstance(state, Mapping) or set(state) != set(PipelineState.__annotations__):
            names = ", ".join(PipelineState.__annotations__)
            raise PipelineError(f"{self.name}: expected a state with {names}, got {brief(state)}")
        epochs = self._schedule.epochs
        epoch = self._integer("epoch", state["epoch"], 0, None if epochs is None else epochs + 1)
        start = self._integer("next_index", state["next_index"], 0, self._recipe.length)
        seed = self._integer("seed", state["seed"], 0, _SEEDS)
        self._stop()
        recipe, batch = self._recipe.with_seed(seed), self._schedule.at(epoch, start)
        self._recipe, self._has_seed, self._next, self._first = recipe, True, batch, None

    def stats(self) -> PipelineStats:
        """Return the number of batches and the waiting times."""
        waited = self._producers_waited + (self._crew.producers_waited if self._crew else 0.0)
        return PipelineStats(self._batches, self._consumer_waited, waited)

    # --- the end ---

    def close(self) -> None:
        """Stop the workers and free the slots. Batches in use stay valid. Idempotent."""
        self._closed = True
        self._stop()

    def __exit__(self, error: object, *_: object) -> None:
        self.close()
        epochs = self._schedule.epochs or 1
        if error is None and self._loops == 1 < epochs and self._next == self._schedule.at(1, 0):
            warnings.warn(
                f"{self.name}: a `for` iterates over 1 of {epochs} epochs, and the "
                f"next `for` over the next epoch: nest it in `for epoch in range({epochs})`",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"<Pipeline {self.name!r}: {facts}>"

    # --- inside ---

    def _facts(self) -> dict[str, str]:
        """Describe the pipeline, for `repr` and notebooks."""
        size, batch = self._schedule.batch_size, self._next
        types = [str(type.with_shape((size, *type.shape[1:]))) for type in self._types]
        place = f"position {batch.start} of epoch {batch.epoch}" if batch else "the end"
        kind = "processes" if self._processes else "threads"
        return {
            "batches": " ".join(types),
            "in an epoch": f"{len(self)}",
            "workers": f"{self._workers} {kind}" if self._workers else "0",
            "at": "closed" if self._closed else place,
            **({"padded with": str(padding)} if (padding := self._recipe.padding) else {}),
        }

    def _default_vm(self) -> VMProtocol:
        raise PipelineError(f"{self.name}: expected vm=, the VM of the batches, got none")

    def _default_seed(self) -> int:
        return 0

    def _settle_seed(self) -> None:
        """Set the default seed once, if no seed was given."""
        if not self._has_seed:
            self._recipe, self._has_seed = self._recipe.with_seed(self._default_seed()), True

    def _take(self, timeout: float | None, first: Batch | None) -> tuple[A, ...]:
        """Return the next batch as `get` does, for a `for` that started at `first`."""
        began = time.perf_counter()
        batch = self._coming()
        crew = self._crew
        if crew is None or not crew.ready:  # interrupted while it started or returned a batch
            self._stop()
            crew = self._start(batch)
        crew.ready = False
        try:
            if not self._workers:
                self._make_one(crew)
            tensors = crew.queues[batch.size].get(timeout, kind=self._kind)
        except Exception as end:  # no batch was taken, or none remain
            crew.ready = crew.failure is not None or isinstance(
                end, (QueueClosedError, QueueEmptyError)
            )
            # otherwise this thread would wait for itself
            if isinstance(end, QueueEmptyError) and timeout is None:
                raise self._all_in_use() from None
            raise (isinstance(end, QueueClosedError) and crew.failure) or end from None
        finally:
            self._consumer_waited += time.perf_counter() - began
        self._batches += 1
        named, after = with_parts(self._types, tensors), self._schedule.after(batch)
        self._next, self._first, crew.ready = after, first, True
        return named

    def _start(self, first: Batch) -> Crew:
        """Create slots for the batches from `first` on, and start the workers that fill them."""
        self._vm.require_open()
        self._settle_seed()
        queues = {}
        for size in sorted(self._schedule.sizes(first)):
            queues[size] = QueueTensor(
                self._vm,
                [type.with_shape((size, *type.shape[1:])) for type in self._types],
                self._prefetch + _IN_USE if size == self._schedule.batch_size else _IN_USE,
                name=f"{self.name} of {size}",
                single_threaded=not self._workers,
                shared=self._processes and self._workers > 0,
            )
        crew = Crew(self._recipe, self._schedule.starting(first), queues)
        self._crew = crew
        # also if the user does not close the pipeline
        self._close = weakref.finalize(self, crew.close)
        crew.start(self._workers, processes=self._processes, name=self.name)
        return crew

    def _make_one(self, crew: Crew) -> None:
        try:
            crew.make_one()
        except QueueFullError:
            self._stop()
            raise self._all_in_use() from None

    def _all_in_use(self) -> PipelineError:
        return PipelineError(
            f"{self.name}: all slots are in use by live tensors; copy those that you keep, or "
            f"use a larger prefetch"
        )

    def _stop(self) -> None:
        """Stop the crew, if any; the next `get` starts a new crew."""
        crew = self._crew
        if crew is not None:
            crew.close()
            waited = self._producers_waited + crew.producers_waited
            self._crew, self._producers_waited = None, waited
            if self._close is not None:
                self._close.detach()

    def _coming(self) -> Batch:
        """Return the next batch. Raises `QueueClosedError` after the last one, or after `close`."""
        self._require_usable()
        if self._next is None:
            raise QueueClosedError(
                f"{self.name}: finished after {counted(self._schedule.epochs or 0, 'epoch')}; "
                "go back with restore(state), or pass epochs=None for endless epochs"
            )
        return self._next

    def _require_usable(self) -> None:
        if self._closed:
            raise QueueClosedError(f"{self.name} was closed; create a new pipeline")
        if os.getpid() != self._process:
            raise PipelineError(
                f"{self.name} belongs to process {self._process}; create a pipeline in each process"
            )

    def _padding(self, pad: Pad | None, pad_to: PadTo) -> Padding | None:
        if pad is None and pad_to == "longest":
            return None
        if pad is None:
            raise PipelineError(f"{self.name}: pad_to needs a value: pad=0, or pad={{'tokens': 0}}")
        return Padding(pad, pad_to)

    def _float(self, dtype: object) -> DType:
        with suppress(DTypeError):
            if (parsed := DType.of(dtype)).is_float:
                return parsed
        raise PipelineError(f"{self.name}: expected a float dtype, got {brief(dtype)}")

    def _integer(self, name: str, value: Any, low: int, below: int | None = None) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = low - 1
        if number < low or (below is not None and number >= below):
            limit = f">= {low}" if below is None else f"in {low} .. {below - 1}"
            raise PipelineError(
                f"{self.name}: expected {name} as an integer {limit}, got {brief(value)}"
            )
        return number
