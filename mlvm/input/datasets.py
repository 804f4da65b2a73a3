"""Datasets of a pipeline: arrays, columns, and samples by number.

All are converted to a `Dataset`, which returns the arrays of many samples in one call.
"""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from mlvm.core.errors import PipelineError, brief, with_article
from mlvm.core.locks import cached_property
from mlvm.core.memo import memoized
from mlvm.core.types import Array
from mlvm.input.padding import Ragged
from mlvm.input.sampling import Indices

Arrays: TypeAlias = tuple[Array, ...]

_IN_MEMORY: Final = ("__array_interface__", "__dlpack__", "to_numpy")
"""Attributes of arrays in memory, which array-like files lack."""


@runtime_checkable
class Dataset(Protocol):
    """Samples by number.

    With `indices` i64[B] in any order, `dataset[indices]` is a tuple of arrays [B, ...]; row b
    belongs to sample `indices[b]`. Several threads may call it simultaneously.

        >>> class Numbers:
        ...     def __len__(self): return 10
        ...     def __getitem__(self, indices): return (indices,)
        >>> isinstance(Numbers(), ml.Dataset), Numbers()[[3, 1]]
        (True, ([3, 1],))
    """

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Indices, /) -> Arrays: ...


def as_dataset(source: Any, *, ragged: bool = False) -> Dataset:
    """Convert an argument of the user to a data set.

    If `ragged`, samples may differ in length: a batch then contains lists of arrays.

    1. An array is a column. A tuple contains columns, and so do a dict and a data frame; their
      batches are named tuples.
    2. Any other object has a length and is indexed by an array of numbers, or by one number. Both
      are tried, and arrays are used if the results agree.

    Raises `PipelineError` for any other object, and the errors of sample 0.
    """
    if isinstance(source, (_Columns, _Samples)):
        return source
    if issubclass(type(source), Mapping):
        return _Columns(source.values(), tuple(map(str, source)), ragged)
    if hasattr(source, "columns") and _is_in_memory(source):
        names = tuple(map(str, source.columns))
        return _Columns([source[name] for name in source.columns], names, ragged)
    if issubclass(type(source), tuple):
        return _Columns(source, getattr(source, "_fields", ()), ragged)
    if _is_in_memory(source):
        return _Columns([source], ragged=ragged)
    first = source[0] if ragged and type(source) is list and source else ()
    if not issubclass(type(first), (tuple, Mapping)):
        return _Columns([source], ragged=True)
    if not isinstance(source, Dataset):
        raise PipelineError(
            f"expected a dataset with a length and samples by number, or a tuple or dict of "
            f"arrays, got {with_article(type(source).__name__)}"
        )
    return source if _takes_arrays(source, ragged) else _Samples(source, ragged)


def length_of(dataset: Dataset) -> int:
    """Return the number of samples.

    Raises `PipelineError` for an empty data set, or an invalid length.
    """
    try:
        length = operator.index(len(dataset))
    except (TypeError, ValueError) as error:
        raise PipelineError(f"expected a dataset with a length: {error}; define __len__") from error
    if not length:
        raise PipelineError("expected a dataset with at least 1 sample, got none")
    return length


def parts_of(value: Any) -> tuple[Any, ...]:
    """Return the columns of a sample or a batch: a tuple unchanged, a dict as a named tuple."""
    if issubclass(type(value), Mapping):
        named: tuple[Any, ...] = _named(tuple(map(str, value)))(*value.values())
        return named
    columns: tuple[Any, ...] = value if issubclass(type(value), tuple) else (value,)
    return tuple(value) if issubclass(type(value), list) else columns


def with_parts(like: tuple[Any, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return a tuple of these parts, with the field names of `like`."""
    make: Callable[[Sequence[Any]], tuple[Any, ...]] = getattr(like, "_make", tuple)
    return make(parts)


@memoized(64)
def _named(names: tuple[str, ...]) -> Any:
    """Create a named tuple that also accepts names as indices.

    As in pandas' `itertuples`, an invalid name becomes its position.
    """

    def item(batch: tuple[Any, ...], key: Any) -> Any:
        return tuple.__getitem__(batch, names.index(key) if key in names else key)

    base = namedtuple("Batch", names, rename=True)  # type: ignore[misc]
    return type("Batch", (base,), {"__slots__": (), "__getitem__": item})


class _Columns:
    """Columns of equal length; each is an array or a data set with one array per sample."""

    def __init__(self, columns: Any, names: tuple[str, ...] = (), ragged: bool = False) -> None:
        self._names = names
        if len(set(names)) < len(names):
            raise PipelineError(f"expected columns of different names, got {brief(list(names))}")
        self._columns = [_column(each, ragged) for each in columns]
        lengths = list(dict.fromkeys(map(len, self._columns)))
        if len(lengths) != 1:
            raise PipelineError(f"expected columns of one length, got {brief(lengths)}")
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, indices: Indices) -> Arrays:
        arrays = [x[indices] for x in self._columns]
        columns = [x if isinstance(x, np.ndarray) else _only(x) for x in arrays]
        return parts_of(dict(zip(self._names, columns, strict=True)) if self._names else columns)


def _in_order(row: tuple[Any, ...], first: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts of a sample in the order of the first sample's names."""
    names, order = getattr(row, "_fields", None), getattr(first, "_fields", None)
    if names == order:
        return row
    if names is None or order is None or {*names} != {*order}:
        raise PipelineError(
            f"samples differ: some have the parts {brief(order)}, others {brief(names)}; "
            "return the same parts for each sample"
        )
    return with_parts(first, [getattr(row, name) for name in order])


class _Samples:
    """Data set of single samples, which are stacked.

    A sample is an array or a number, or several of them.
    """

    def __init__(self, samples: Any, ragged: bool = False) -> None:
        self._samples = samples
        self._ragged = ragged

    def __len__(self) -> int:
        return len(self._samples)

    @cached_property
    def _first(self) -> tuple[Any, ...]:
        return parts_of(self._samples[0])

    def __getitem__(self, indices: Indices) -> Arrays:
        rows = [parts_of(self._samples[int(i)]) for i in indices]
        if len({len(row) for row in rows}) > 1:
            counts = sorted({len(row) for row in rows})
            raise PipelineError(
                f"expected samples with the same number of parts, got {counts[0]} and {counts[-1]}"
            )
        if any(hasattr(row, "_fields") for row in rows):
            rows = [_in_order(row, self._first) for row in rows]
        columns = [[_array(x) for x in column] for column in zip(*rows, strict=True)]
        stacked: list[Any] = []
        for column in columns:
            shapes = list(dict.fromkeys(x.shape for x in column))
            if len(shapes) > 1 and not self._ragged:
                raise PipelineError(
                    f"samples differ: they have shapes {brief(shapes)}; pad them with pad=0"
                )
            stacked.append(np.stack(column) if len(shapes) == 1 else column)
        return with_parts(rows[0], stacked)


def _takes_arrays(dataset: Any, ragged: bool) -> bool:
    """Return whether the data set accepts an array of indices, and returns the same samples.

    The result is True if both ways fail: the first use then raises the error.
    """
    # descending, as some files support only ascending indices
    indices = np.arange(min(2, length_of(dataset)))[::-1]
    error: Exception | None = None
    together = one_by_one = None
    try:
        together = parts_of(dataset[indices])
    except Exception as failure:
        error = failure
    try:
        one_by_one = _Samples(dataset, ragged)[indices]
    except Exception as failure:
        if together is None and isinstance(error, TypeError) and not isinstance(failure, TypeError):
            raise
        if isinstance(failure, PipelineError) and together is not None:  # samples differ
            return all(x.shape[:1] == indices.shape for x in together if isinstance(x, np.ndarray))
    if one_by_one is None or together is None:
        return one_by_one is None
    return any(isinstance(x, list) or x.dtype.hasobject for x in one_by_one) or (
        len(together) == len(one_by_one)
        and all(isinstance(x, np.ndarray) for x in together)
        and all(map(_is_same, together, one_by_one))
    )


def _is_same(x: Array, y: Array) -> bool:
    return x.shape == y.shape and (x.tobytes() == y.tobytes() or bool(np.all(x == y)))


def _is_in_memory(x: object) -> bool:
    return any(hasattr(x, name) for name in _IN_MEMORY)


def _column(column: Any, ragged: bool) -> Any:
    if not isinstance(column, list) and not _is_in_memory(column):
        return as_dataset(column, ragged=ragged)
    try:
        array = _array(column)
    except PipelineError:  # rows of different lengths
        if not ragged or not isinstance(column, list):
            raise
        return Ragged(column)
    if ragged and array.dtype.hasobject and array.ndim == 1:
        return Ragged(array)
    if not array.ndim:
        raise PipelineError(f"expected a column with a row for each sample, got {brief(column)}")
    return array


def _only(arrays: object) -> Any:
    parts = parts_of(arrays)
    if len(parts) != 1:
        raise PipelineError(f"expected a column of one array, got a dataset of {len(parts)}")
    return parts[0] if isinstance(parts[0], list) else _array(parts[0])


def _array(x: Any) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise PipelineError("expected an array without masked values; fill them: x.filled(0)")
    try:
        return np.asarray(x)
    except Exception as error:
        raise PipelineError(
            f"numpy cannot convert {with_article(type(x).__name__)} of the dataset: {error}; "
            "return numpy arrays"
        ) from error
