"""Pickles of functions, values and outcomes for members in other processes."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

from mlvm.core.errors import GroupError, MissingExtraError, brief
from mlvm.core.extras import extra
from mlvm.machines.failure import Failure
from mlvm.parallel.outcome import Outcome


def packed(value: Any) -> bytes:
    """Pickle the result of a member. Raises what `pickled` raises."""
    return pickled(Outcome(value))


def packed_failure(error: BaseException, *, first: bool) -> bytes:
    """Pickle the failure of a member."""
    return pickled(Outcome(None, Failure.of(error), first))


def unpacked(data: bytes) -> Outcome:
    """Unpickle the outcome of a member's task."""
    outcome: Outcome = pickle.loads(data)
    return outcome


def pickled(value: Any) -> bytes:
    """Pickle a value for another process of this program.

    Functions are pickled by name, and lambdas and closures by cloudpickle. Raises
    `MissingExtraError` if cloudpickle is needed and missing; `GroupError` if the value cannot be
    pickled.
    """
    file = io.BytesIO()
    try:
        _ByName(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # any error that a __reduce__ raises
        try:
            data: bytes = extra("cloudpickle", "processes").dumps(value)
        except MissingExtraError as missing:
            raise MissingExtraError(
                f"{error}: only functions at the top level of a module can be pickled by name; for "
                f"other functions, {missing}"
            ) from None
        except Exception as error:
            raise GroupError(
                f"{brief(value)} cannot be sent to another process: {error}; "
                "define it at the top of a module"
            ) from None
        return data
    return file.getvalue()


class _ByName(pickle.Pickler):
    """Pickler that refuses functions of a `__main__` that another process cannot import."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and isinstance(
            value, type | type(pickled)
        ):
            main = sys.modules["__main__"]
            if getattr(main, "__spec__", None) is None and not hasattr(main, "__file__"):
                raise pickle.PicklingError(
                    f"{value!r} is not defined in a file; define it in a module"
                )
        return NotImplemented
