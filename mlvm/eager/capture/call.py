"""Fast path of a captured call: C code matches the arguments and guards of known calls.

In: the arguments of a call. Out: the entry of the program, the scalar inputs and the tensors; or
    None if no known call matches. In that case Python looks the call up by signature, determines
    the difference, and traces if necessary.

A known call is a call that Python has matched once, as a flat pattern for C. It is valid while the
guards of the function hold, the context is the same and no update needs a copy first. Invariant: a
known call never matches a call that Python would reject; it may reject a call that Python accepts.

Callers: `Captured` at each call, from any thread. No lock is held: the C code holds the
interpreter's lock.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, DType
from mlvm.eager.capture.cache import CacheEntry
from mlvm.eager.capture.guards.checker import GuardChecker
from mlvm.eager.capture.guards.signature import (
    Signature,
    Signatures,
    context_guards,
    parts_of,
)
from mlvm.eager.capture.launch import ScalarInputs, Scratch
from mlvm.eager.functions.creation import asarray
from mlvm.eager.tensor.operands import array_beside, widest_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes
from mlvm.eager.tree import flatten, replace, within_containers
from mlvm.machines.native.extension import EXTENSION

_ARRAYS: Final = np.ndarray, np.generic


class KnownCall:
    """A call of a program, which C matches with later ones.

    entry: the program. scratch: the scratch memory of the VM. pattern: the pattern of the
    arguments, a C object.
    """

    def __init__(
        self, entry: CacheEntry, signature: Signature, parts: Any, scratch: Scratch
    ) -> None:
        self.entry, self.scratch, self._vm = entry, scratch, entry.vm
        self._context: Any = GuardChecker(context_guards(entry.vm)).native
        self._guards, self._checker = signature.guards, signature.guards.checker
        self._numbers: tuple[ScalarInputs, Any] | None = None
        self._narrays = len(entry.numbers.tensors)
        launch = entry.launch
        self._states = [launch.states[i] for role, i in launch.updates if role == "state"]
        self._updated = [i for role, i in launch.updates if role == "input"]
        reached = [x for x in signature.guards.keepalive if id(x) in signature.guards.tensors]
        assert EXTENSION is not None
        self.pattern = EXTENSION.Pattern(Tensor, Arena, parts, (*reached, *launch.states))

    def _numbers_of(self, scalars: ScalarInputs) -> Any:
        """Return a C check that numbers read by the function have not changed since the call."""
        numbers = self._numbers
        if numbers is None or numbers[0] is not scalars:
            numbers = self._numbers = scalars, self._guards.numbers_check(scalars.args)
        return numbers[1]

    def match(self, vm: VMProtocol, args: Any, kwargs: Any) -> Any:
        """Return the call's scalar inputs, tensors and inputs; None if the call does not match."""
        scalars = self.entry.scalars
        if vm is not self._vm or len(scalars.arrays) != self._narrays or not self._context.holds():
            return None
        if not self._checker.holds():
            return None
        if self._guards.numbers and not self._numbers_of(scalars).holds():
            return None
        match = self.pattern.match(args, kwargs, scalars.args)
        if match is not None and (self._states or self._updated):
            updated = [*self._states, *[match[1][i] for i in self._updated]]
            if live_tapes or not EXTENSION.exclusive(updated):  # type: ignore[union-attr]
                return None
        return None if match is None else (scalars, *match)


def known_call(
    entry: CacheEntry, signature: Signature, args: Any, kwargs: Any, scratch: Scratch
) -> KnownCall | None:
    """Return the entry with the call as a pattern for C.

    Return None if C cannot match such a call, or if the entry became known too often.
    """
    is_plain = not (
        entry.aliased_inputs
        or entry.state_views
        or entry.outcome.rebound
        or entry.outcome.returns_arguments
        or entry.launch.queues
    )
    # Maximum number of times that an entry may become known, so that calls which never repeat do
    # not replace known calls.
    if not is_plain or not signature.guards.is_flat or entry.times_known >= 16:
        return None
    parts = parts_of(signature, len(args), kwargs)
    if parts is None:
        return None
    entry.times_known += 1
    return KnownCall(entry, signature, parts, scratch)


def as_tensors(signatures: Signatures, vm: VMProtocol, args: Any, kwargs: Any) -> Any:
    """Return the arguments with numpy arrays converted to tensors.

    An f64 array is converted to the widest float dtype of the call's tensors: the other arguments,
    and the tensors that the function reads from the environment."""
    if not kwargs and {Tensor}.issuperset(map(type, args)):
        return args, kwargs
    is_flat = not kwargs and {Tensor, np.ndarray}.issuperset(map(type, args))
    if is_flat:  # faster than the walk below, with the same result
        arrays = [x for x in args if isinstance(x, np.ndarray)]
    else:
        arrays = [x for _, x in flatten((args, kwargs), None, ends=within_containers(_ARRAYS))[0]]
    if not arrays:
        return args, kwargs
    widest = None
    if any(array.dtype in (np.float64, np.complex128) for array in arrays):
        others = replace(lambda _: None, (args, kwargs), _ARRAYS)
        signature, _ = signatures.of(vm, *others)
        widest = widest_of([*signature.tensors, *signature.guards.keepalive])

    def tensor(x: Array) -> Tensor:
        own = DType.of(x.dtype)
        return asarray(x, dtype=own if widest is None else array_beside(own, widest.dtype))

    if is_flat:
        return tuple([tensor(x) if isinstance(x, np.ndarray) else x for x in args]), kwargs
    return replace(tensor, (args, kwargs), _ARRAYS)
