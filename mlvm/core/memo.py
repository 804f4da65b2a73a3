"""Caches of limited size, which evict the least recently used entry.

`@memoized(limit)` caches the results of a function. `Memo(limit, name)` is a mapping for values
that are looked up and created in different places. Both are thread-safe and count hits and misses;
`caches` lists them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import _lru_cache_wrapper, lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from mlvm.core.locks import new_lock

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])

_MISSING: Final[Any] = object()
_PAIR: Final = struct.Struct("dd")
_lock: Final = new_lock()
_functions: Final[list[_lru_cache_wrapper[Any]]] = []
_memos: Final[WeakSet[Memo[Any, Any]]] = WeakSet()


def bits_of(number: Any) -> bytes:
    """Return the bits of a float or complex number of Python or numpy, as a key.

    Numbers with the same class and bits are the same: the signs of zeros and nans differ."""
    return _PAIR.pack(number.real, number.imag)


def exact_repr(value: Any) -> str:
    """Return `repr`, followed by the bits of nans in tuples, lists and mappings, as a key."""
    text = repr(value)
    return text if "nan" not in text else text + "".join(_nans(value))


def _nans(value: Any) -> Iterator[str]:
    if isinstance(value, (float, complex)):
        if value != value:
            yield bits_of(value).hex()
    elif isinstance(value, (tuple, list, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _nans(each)


class Memo(Generic[K, V]):
    """Cache of at most `limit` entries.

    name: name for the list of caches; several caches may share it.
    entries: the dict itself, for hot paths. Reading it counts no hit and does not mark the entry as
        recently used.
    evicted: called with each evicted value. It must not use this or a different cache.
    """

    __slots__ = ("__weakref__", "entries", "evicted", "hits", "limit", "misses", "name")

    def __init__(self, limit: int, name: str, evicted: Callable[[V], object] | None = None) -> None:
        self.limit, self.name, self.evicted = limit, name, evicted
        self.hits = self.misses = 0
        self.entries: dict[K, V] = {}  # ordered from the least recently used

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of the key; on a miss, compute it with `make` and store it."""
        with _lock:
            value: V = self.entries.pop(key, _MISSING)
            if value is not _MISSING:
                self.entries[key] = value
                self.hits += 1
                return value
            self.misses += 1
        value = make()
        with _lock:
            # keep the value of another thread that was faster
            self[key] = value = self.entries.get(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        with _lock:
            if not self.entries:
                _memos.add(self)
            self.entries[key] = value
            while len(self.entries) > self.limit:
                value = self.entries.pop(next(iter(self.entries)))
                if self.evicted is not None:
                    self.evicted(value)

    def __len__(self) -> int:
        return len(self.entries)

    def pop(self, key: K) -> V | None:
        """Remove the entry of the key, if it exists, and return the value."""
        with _lock:
            return self.entries.pop(key, None)

    def clear(self) -> None:
        self.entries.clear()


def memoized(limit: int) -> Callable[[F], F]:
    """Return a decorator that caches the results of a function by arguments."""

    def decorate(function: F) -> F:
        cached: Any = lru_cache(limit)(function)
        _functions.append(cached)
        return cached  # type: ignore[no-any-return]

    return decorate


class CacheInfo(NamedTuple):
    """State of all caches with the same name.

    `size` and `limit` are the sums over `number` caches.
    """

    name: str
    number: int
    size: int
    limit: int
    hits: int
    misses: int


def caches() -> list[CacheInfo]:
    """Return the state of each cache that has been used, by name."""
    with _lock:  # other threads may add to the set
        memos = list(_memos)
    rows = [(each.name, len(each), each.limit, each.hits, each.misses) for each in memos]
    for function in _functions:
        hits, misses, limit, size = function.cache_info()
        name = f"{function.__module__}.{function.__qualname__}".removeprefix("mlvm.")
        rows += [(name, size, limit or 0, hits, misses)] if misses else []
    sums: dict[str, tuple[int, ...]] = {}
    for name, *numbers in rows:
        sums[name] = tuple(map(sum, zip(sums.get(name, (0,) * 5), (1, *numbers), strict=True)))
    return [CacheInfo(name, *numbers) for name, numbers in sorted(sums.items())]
