"""Throughput of a queue tensor: elements of 4 KiB, 1 MiB and 64 MiB, and the digits.

A producer copies an element from a dataset in memory, larger than the caches, and a consumer
gets it: `mlvm-put` by `put`, `mlvm-reserve` by filling the slot itself, `queue.Queue` by putting
a copy; `memcpy` copies and has no queue. The two sides take turns in one thread, so that the
queue is timed and not Python's scheduling of threads. `torch-0w` and `torch-2w` are PyTorch's
DataLoader without and with two worker processes over the same elements.

`digits` are batches of 32 shuffled and normalised digits: `mlvm-reserve` is `ml.Pipeline`, which
fills reserved slots; `mlvm-put` and `queue.Queue` put arrays that were made before; the
DataLoader collates samples. GB are 10**9 bytes.
"""

from __future__ import annotations

import itertools
import queue
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Contender, Round, Suite, say

ELEMENTS = {"4 KiB": (1 << 12, 5000), "1 MiB": (1 << 20, 200), "64 MiB": (1 << 26, 6)}
"""The bytes of an element, and how many elements are one round."""

DATASET = 1 << 27
"""The bytes of the data set that elements are taken from."""

BATCH = 32
EPOCHS = 20
SLOTS = 2
Transfer = Callable[[Any], None]
MEAN, SCALE = np.float32(0.305), np.float32(2.65)


def prepare_put(quick: bool) -> Mapping[str, Round]:
    def element(data: Any) -> Transfer:
        q = queue_tensor([f"u8[{data.shape[1]}]"])

        def transfer(x: Any) -> None:
            q.put((x,))
            q.get()

        return transfer

    q = queue_tensor([f"f32[{BATCH},64]", f"i64[{BATCH}]"])

    def pass_on(arrays: Any) -> None:
        q.put(arrays)
        q.get()

    return {**element_rounds(element, quick), "digits": digits_round(pass_on, quick)}


def prepare_reserve(quick: bool) -> Mapping[str, Round]:
    import mlvm.eager as ml

    def element(data: Any) -> Transfer:
        q = queue_tensor([f"u8[{data.shape[1]}]"])

        def transfer(x: Any) -> None:
            with q.reserve() as (slot,):
                np.copyto(slot, x)
            q.get()

        return transfer

    pipeline = ml.Pipeline(
        Digits(),
        BATCH,
        vm=ml.default_vm(),
        shuffle=True,
        epochs=None,
        drop_last=True,
        transform=lambda arrays, random: normalised(arrays),
    )

    def digits() -> dict[str, float]:
        count = epochs(quick) * (len(Digits()) // BATCH)
        return {"batches_per_s": rate(lambda: exhaust(pipeline.get, count), count)}

    return {**element_rounds(element, quick), "digits": digits}


def prepare_queue(quick: bool) -> Mapping[str, Round]:
    q: queue.Queue[Any] = queue.Queue(SLOTS)

    def element(data: Any) -> Transfer:
        def transfer(x: Any) -> None:
            q.put(x.copy())
            q.get()

        return transfer

    def pass_on(arrays: Any) -> None:
        q.put(arrays)  # arrays of this batch alone
        q.get()

    return {**element_rounds(element, quick), "digits": digits_round(pass_on, quick)}


def prepare_memcpy(quick: bool) -> Mapping[str, Round]:
    def element(data: Any) -> Transfer:
        into = itertools.cycle(np.zeros_like(data[:1].repeat(SLOTS, 0)))
        return lambda x: np.copyto(next(into), x)

    return element_rounds(element, quick)


def prepare_torch(workers: int, quick: bool) -> Mapping[str, Round]:
    import torch
    from torch.utils.data import DataLoader

    options = {"num_workers": workers, "persistent_workers": workers > 0}
    images, labels = map(torch.from_numpy, digits_arrays())

    class Element:
        def __init__(self, nbytes: int, length: int) -> None:
            self.data = torch.from_numpy(dataset(nbytes, quick))
            self.length = length

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, i: int) -> Any:
            return self.data[i % len(self.data)].clone()

    class Samples:
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, i: int) -> Any:
            return (images[i] - float(MEAN)) * float(SCALE), labels[i]

    def elements(nbytes: int, count: int) -> Round:
        loader: Any = DataLoader(Element(nbytes, count), batch_size=None, **options)
        return lambda: per_element(rate(lambda: exhaust_all(loader), count), nbytes)

    loader: Any = DataLoader(Samples(), batch_size=BATCH, shuffle=True, drop_last=True, **options)
    rounds: dict[str, Round] = {
        "digits": lambda: {"batches_per_s": rate(lambda: exhaust_all(loader), len(loader))}
    }
    for case, (nbytes, most) in ELEMENTS.items():
        if workers and not fits_shared_memory(8 * nbytes):
            say(f"queue: {case} do not fit into /dev/shm for torch-{workers}w, skipped")
        else:
            rounds[case] = elements(nbytes, count(most, quick))
    return rounds


def prepare_torch_0w(quick: bool) -> Mapping[str, Round]:
    return prepare_torch(0, quick)


def prepare_torch_2w(quick: bool) -> Mapping[str, Round]:
    return prepare_torch(2, quick)


# --- elements -------------------------------------------------------------------------


def queue_tensor(types: list[str]) -> Any:
    import mlvm.eager as ml

    return ml.QueueTensor(ml.default_vm(), types, SLOTS)


def element_rounds(element: Callable[[Any], Transfer], quick: bool) -> dict[str, Round]:
    """Return a round for each size of elements. `element(data)` makes the function that transfers
    one element of `data`."""

    def round_of(nbytes: int, count: int) -> Round:
        data = dataset(nbytes, quick)
        transfer = element(data)
        elements = itertools.cycle(data)

        def work() -> None:
            for x in itertools.islice(elements, count):
                transfer(x)

        return lambda: per_element(rate(work, count), nbytes)

    return {case: round_of(nbytes, count(most, quick)) for case, (nbytes, most) in ELEMENTS.items()}


def dataset(nbytes: int, quick: bool) -> Any:
    """Return elements of `nbytes` bytes, a row each; with `quick` few, which caches may hold."""
    return np.ones((max(DATASET // nbytes // (32 if quick else 1), 1), nbytes), np.uint8)


def count(most: int, quick: bool) -> int:
    """Return the number of elements in a round."""
    return max(most // 25, 1) if quick else most


def per_element(elements_per_s: float, nbytes: int) -> dict[str, float]:
    return {"elements_per_s": elements_per_s, "gb_per_s": elements_per_s * nbytes / 1e9}


def fits_shared_memory(nbytes: int) -> bool:
    """Return whether /dev/shm, which PyTorch's worker processes use for tensors, has `nbytes`
    bytes."""
    folder = Path("/dev/shm")
    return not folder.exists() or shutil.disk_usage(folder).free >= nbytes


# --- digits ---------------------------------------------------------------------------


def digits_arrays() -> tuple[Any, Any]:
    """Return the images as f32[1797,64] in 0 .. 1, and the labels."""
    from models.data.digits import FILE

    with np.load(FILE) as file:
        images, labels = file["images"], file["labels"]
    return images.reshape(len(images), -1).astype(np.float32) / 16, labels.astype(np.int64)


class Digits:
    """All digits as a dataset: `[indices]` gives images and labels."""

    def __init__(self) -> None:
        self.images, self.labels = digits_arrays()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        return self.images[indices], self.labels[indices]


def normalised(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    images, labels = arrays
    return (images - MEAN) * SCALE, labels


def digits_round(pass_on: Callable[[Any], None], quick: bool) -> Round:
    """Make the batches of some shuffled epochs, and pass each on."""
    data = Digits()
    generator = np.random.default_rng(0)

    def batches() -> Iterator[tuple[Any, ...]]:
        for _ in range(epochs(quick)):
            order = generator.permutation(len(data))
            for start in range(0, len(data) - BATCH + 1, BATCH):
                yield normalised(data[order[start : start + BATCH]])

    def work() -> None:
        for arrays in batches():
            pass_on(arrays)

    total = epochs(quick) * (len(data) // BATCH)
    return lambda: {"batches_per_s": rate(work, total)}


def epochs(quick: bool) -> int:
    return 1 if quick else EPOCHS


# --- time -----------------------------------------------------------------------------


def rate(work: Callable[[], object], count: int) -> float:
    """Return the rate, per second, of a call that does `count` things."""
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def exhaust(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def exhaust_all(loader: Any) -> None:
    for _ in loader:
        pass


SUITE = Suite(
    module="bench.queue",
    contenders=(
        Contender("mlvm-put", "mlvm", prepare_put),
        Contender("mlvm-reserve", "mlvm", prepare_reserve),
        Contender("queue.Queue", "numpy", prepare_queue),
        Contender("memcpy", "numpy", prepare_memcpy),
        Contender("torch-0w", "torch", prepare_torch_0w),
        Contender("torch-2w", "torch", prepare_torch_2w),
    ),
    units={"elements_per_s": "1/s", "gb_per_s": "GB/s", "batches_per_s": "1/s"},
    rates=frozenset({"elements_per_s", "gb_per_s", "batches_per_s"}),
    ours=("mlvm-put", "mlvm-reserve"),
    targets={
        ("1 MiB", "gb_per_s", "mlvm-reserve", "memcpy"): 0.9,
        ("digits", "batches_per_s", "mlvm-reserve", "torch-0w"): 5.0,
        ("digits", "batches_per_s", "mlvm-reserve", "torch-2w"): 5.0,
    },
    rounds=15,
    quick_rounds=1,
)
