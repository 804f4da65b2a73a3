"""Entries of a captured function: programs, with the calls that each is valid for.

In: the signature of a call, and the key (`Signatures.of`). Out: the `CacheEntry` that is valid for
the call, with the scalar inputs of the program. None is a miss: the caller then compiles an entry
and adds it. An entry has guards (the key, and `bind`), a flow (a separate trace, or an `OpenTrace`,
which has an entry for each combination of sizes), and plans (`Variants`). Entries with the same
key differ in properties that the key does not contain: the identities of arguments, and numbers
that Python code has read.

Invariant: a program may be launched only for a call that `bind` accepts. C matches the calls of
`matchers` without a signature, and tries the most recent match first. At most `LIMITS.programs`
entries are kept for each `OpenTrace`, and as many for all other traces. The least recently used
entry is evicted first. C does not report matches, so the entries of `matchers` count as used when
an entry is added.

Callers: `Captured`, from any thread. `lock` is held while the dicts change. The entries of a key
are a tuple, and the list `matchers` is replaced by one assignment, so readers need no lock.
"""

from __future__ import annotations

import copy
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from mlvm.core.errors import OpError
from mlvm.core.locks import new_lock
from mlvm.core.memo import Memo
from mlvm.core.protocol import VMProtocol
from mlvm.eager.capture.capture_limits import LIMITS
from mlvm.eager.capture.guards.guard_set import ASKS_CLASS
from mlvm.eager.capture.guards.signature import Signature
from mlvm.eager.capture.hoisted import hoisted_values
from mlvm.eager.capture.launch import Launch, ScalarInputs, Variants
from mlvm.eager.capture.trace import TracedCall
from mlvm.eager.tensor.constants import scalar_array
from mlvm.eager.tensor.number import is_same
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes, make_exclusive
from mlvm.machines.native.extension import EXTENSION
from mlvm.step.compile import Planned
from mlvm.step.open_step import OpenStep
from mlvm.step.replacement import Replaced

_LASTING: Final = Tensor, type, types.ModuleType, types.CodeType, types.BuiltinFunctionType
"""Classes of objects that an entry always keeps alive: launches need tensors, and the other objects
live as long as the process or are small."""


class CacheEntry:
    """A compiled program with the conditions under which a call may launch it.

    - outcome: the tree that a call returns, and the fields that it rebinds.
    - variants: the program, and a program without hoisted values.
    - numbers: the computation on the `free` numbers of a signature; all other numbers must be equal
      to the numbers in the trace.
    - scalars: the scalar inputs of the last call. The scalar inputs of the trace contain no arrays.
    - vm: the VM that runs the program.
    - keepalive: objects that the key or the program identifies by `id`.
    - fields: the fields that are treated as arguments.
    - input_types: the types of the inputs.
    - aliased_inputs: inputs that the function also reads from its environment, by input number.
    - state_views: functions that return a view of a state (None after it is freed), each with the
      state.
    - replaced: the calls of host functions, by name; see `capture(replace=)`.
    - opened: the trace with dynamic sizes from which the entry was made, if there is one.
    - times_known: the number of times that the entry was added to `CacheEntries.matchers`.
    - open_part: makes the part of a saved step that depends on sizes, if the step was planned for
      bounds of sizes.
    - sources: with `capture(check=)`, a function that accepts a call's signature and a function
      that traces the call again. It returns the program's trace and the new trace, for comparison.
    - traced: the trace, for a recording that is active while the entry is made.
    """

    sources: Callable[[Signature, Callable[..., TracedCall]], Any] | None = None
    traced: TracedCall | None = None

    def __init__(
        self,
        planned: Planned,
        call: TracedCall,
        signature: Signature,
        title: str,
        compile_unhoisted: Callable[..., Planned],
    ) -> None:
        record = call.record
        hoisted = hoisted_values(planned, record.outside.states, record.vm, title)
        self.outcome = call.outcome
        self.numbers, self.free = call.numbers, call.free
        self.scalars = ScalarInputs(signature.numbers, self.numbers.values, [])
        self.vm = record.vm
        self.keepalive = [*signature.guards.identities(), record.vm, *record.outside.keepalive]
        self._weak = [*signature.guards.weak.values()]
        self.fields = [field for field, _ in signature.fields]
        self.input_types = tuple([x.type for x in signature.inputs])
        self.aliased_inputs = {
            i: signature.inputs[i].root for i in record.placeholders.aliased_inputs
        }
        self.state_views = record.outside.state_views
        self._returned = self.outcome.outside
        self._state_ids = {id(x) for x in record.outside.states}
        self.replaced: dict[str, list[Replaced]] = {}
        self.opened: object = None
        self.times_known = 0
        self.open_part: Callable[..., OpenStep] | None = None
        self.variants = Variants(Launch(planned, call, hoisted), compile_unhoisted)

    def at(
        self,
        call: TracedCall,
        signature: Signature,
        launch: Launch,
        compile_unhoisted: Callable[..., Planned],
    ) -> CacheEntry:
        """Return an entry with a different launch, for a call that differs only in sizes."""
        other = copy.copy(self)
        other.keepalive = [*self.keepalive]
        other.outcome, other.numbers = call.outcome, call.numbers
        other.scalars = ScalarInputs(signature.numbers, other.numbers.values, [])
        other.input_types = tuple([x.type for x in signature.inputs])
        other.times_known = 0
        other.variants = Variants(launch, compile_unhoisted)
        return other

    @property
    def launch(self) -> Launch:
        """The launch of the first program, which uses hoisted values if there are any."""
        return self.variants.hoisting

    def loosen(self) -> list[weakref.ref[Any]]:
        """Replace strong references by weak ones where possible, and return the weak references."""
        previous, self.keepalive = self.keepalive, []
        references = [*self._weak]
        while previous:
            each = previous.pop()
            kind = type(each)  # isinstance might run user code
            if issubclass(kind, _LASTING) or kind.__weakrefoffset__ == 0:
                self.keepalive.append(each)
            else:
                references.append(weakref.ref(each))
        return references

    def tighten(self, references: Sequence[weakref.ref[Any]]) -> bool:
        """Restore the strong references, and return whether all objects still exist."""
        objects = [reference() for reference in references]
        self.keepalive += objects
        return all(each is not None for each in objects)

    def fits(self, signature: Signature) -> bool:
        """Return whether the program is valid for the inputs of a call.

        The function must read from the environment exactly the inputs that it read in the trace. A
        view of a state must still be a view of it. Objects that the function returns must be
        identical, not only equal, to objects that the function reaches now."""
        inputs = signature.inputs
        if any(reference() is None for reference in self._weak):
            return False
        if self._returned:
            reached = signature.guards.reached()
            if not all(id(each) in reached for each in self._returned):
                return False
        return (
            all(inputs[i].root is x for i, x in self.aliased_inputs.items())
            and not any(id(x.root) in self._state_ids for x in inputs)
            and all((x := view()) is None or x.root is root for view, root in self.state_views)
        )

    def bind_numbers(self, args: list[float]) -> ScalarInputs | None:
        """Return the scalar inputs for these numbers; None if the program needs other values."""
        last = self.scalars
        # the scalar inputs of the trace contain no arrays
        is_complete = len(last.arrays) == len(self.numbers.tensors)
        if is_complete and all(map(operator.is_, args, last.args)):
            return last
        free = set(self.free)
        for i, (x, before) in enumerate(zip(args, last.args, strict=True)):
            if i not in free and not is_same(x, before):
                return None
        values = self.numbers.again([args[i] for i in self.free])
        if values is None:
            return None
        try:
            arrays = [
                (x, scalar_array(values[place], dtype))
                for (place, dtype), x in self.numbers.tensors.items()
            ]
        except OpError:  # the next trace raises this error
            return None
        # one assignment: other threads see a complete object
        scalars = self.scalars = ScalarInputs(args, values, arrays)
        return scalars

    def bind(self, signature: Signature) -> ScalarInputs | None:
        """Return the scalar inputs for a call with this key; None if the program is not valid."""
        return self.bind_numbers(signature.numbers) if self.fits(signature) else None

    def make_exclusive(self, inputs: Sequence[Tensor]) -> bool:
        """Copy each updated input and state with shared memory, so that a launch may write to it.

        Return whether a tensor has moved; the signature of the call may have changed then."""
        updates, states = self.launch.updates, self.launch.states
        updated = [(inputs if role == "input" else states)[i] for role, i in updates]
        if EXTENSION is not None and not live_tapes and EXTENSION.exclusive(updated):
            return False
        is_moved = False
        for x in [each.root for each in updated]:
            if isinstance(x, Tensor):
                before = x.region
                make_exclusive(x)
                is_moved |= x.region is not before
        return is_moved

    def value_of_call(
        self,
        vm: VMProtocol,
        scalars: ScalarInputs,
        tensors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Any:
        """Return the value of a launched call, and rebind fields."""
        outcome = self.outcome
        if outcome.rebound:
            vm.synchronize()  # a failing launch must not rebind fields
        by_role = {"input": inputs, "output": outputs, "state": self.launch.states}
        return outcome.materialize(tensors, by_role, scalars.values)

    def rebound_names(self) -> str:
        """Return the names of the fields that this call or an earlier call rebinds."""
        fields = self.fields or [field for field, _ in self.outcome.rebound]
        return ", ".join(f"{each.name!r} of {type(each.owner).__name__}" for each in fields)


class NumberChanges(NamedTuple):
    """Positions of the Python numbers that changed between calls with the same key.

    changed: numbers with different values in different calls. specialised: numbers with a value
    that Python code has read; programs are specialised to it.
    """

    changed: set[int]
    specialised: set[int]


class KnownEntry(Protocol):
    """Entry with calls that C matches; `capture.call` defines the class."""

    entry: CacheEntry


K = TypeVar("K", bound=KnownEntry)


class CacheEntries(Generic[K]):
    """Entries of a captured function by key, in least-recently-used order.

    matchers: the entries with calls that C matches, the most recent match first.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self.matchers: list[K] = []
        self._entries: dict[Any, tuple[CacheEntry, ...]] = {}
        self._keys: dict[CacheEntry, Any] = {}  # least recently used first
        # includes keys of evicted programs
        self._changes = Memo[Any, NumberChanges](LIMITS.changed_numbers, "capture: changed numbers")

    @property
    def closed(self) -> int:
        """The number of programs of traces without open sizes."""
        return sum(entry.opened is None for entry in list(self._keys))

    def find(self, key: Any, signature: Signature) -> tuple[CacheEntry, ScalarInputs] | None:
        """Return the entry that is valid for a call, with the scalar inputs."""
        for entry in self._entries.get(key, ()):
            scalars = entry.bind(signature)
            if scalars is not None:
                self._touch((entry,))
                return entry, scalars
        return None

    def add(self, key: Any, signature: Signature, entry: CacheEntry) -> list[CacheEntry]:
        """Add an entry, unless another thread has already added a valid one.

        Evict the least recently used entries of the same trace if there are too many. Return the
        evicted entries."""
        with self.lock:
            if self.find(key, signature) is not None:
                return []
            self._touch(each.entry for each in reversed(self.matchers))
            alike = [each for each in self._keys if each.opened is entry.opened]
            dropped = alike[: max(0, len(alike) + 1 - LIMITS.programs)]
            for each in dropped:
                self._forget(each)
            self._entries[key] = (*self._entries.get(key, ()), entry)
            self._keys[entry] = key
        return dropped

    def forget_lapsed(self) -> list[CacheEntry]:
        """Remove and return the entries that refer to objects which only the cache keeps alive.

        Such an entry compares an object by identity, so no later call can match it."""
        with self.lock:
            entries, self._entries = self._entries, {}  # meanwhile other threads find no entry
            loose = [(entry, entry.loosen()) for entry in self._keys]
            lapsed = [entry for entry, references in loose if not entry.tighten(references)]
            self._entries = entries
            for entry in lapsed:
                self._forget(entry)
        return lapsed

    def know(self, matcher: K) -> None:
        """Let C match calls with an entry, and try that first."""
        others = [each for each in self.matchers if each.entry is not matcher.entry]
        # by one assignment, because C reads the list
        self.matchers = [matcher, *others[: LIMITS.matchers - 1]]

    def release_known(self) -> None:
        """Let C match no entry, because entries keep objects alive. All may become known again."""
        for each in self.matchers:
            each.entry.times_known -= 1
        self.matchers = []

    def forget_opened(self, traces: Sequence[object]) -> list[CacheEntry]:
        """Forget the entries of these traces with open sizes. Return them."""
        with self.lock:
            dropped = [entry for entry in self._keys if entry.opened in traces]
            for entry in dropped:
                self._forget(entry)
        return dropped

    def clear(self) -> None:
        with self.lock:
            self.matchers = []
            self._entries.clear()
            self._keys.clear()
            self._changes.clear()

    def changes_of(self, key: Any, signature: Signature) -> NumberChanges:
        """Return the changed numbers of the key, after recording a call with this signature."""
        with self.lock:
            changes = self._changes.get(key, lambda: NumberChanges(set(), set()))
            entries = [each for each in self._entries.get(key, ()) if each.opened is None]
            for entry in entries[-1:]:
                pairs = zip(signature.numbers, entry.scalars.args, strict=True)
                changes.changed.update(i for i, (x, y) in enumerate(pairs) if not is_same(x, y))
            return changes

    def _touch(self, entries: Iterable[CacheEntry]) -> None:
        with self.lock:
            for entry in entries:
                if entry in self._keys:  # the entry may have been evicted meanwhile
                    self._keys[entry] = self._keys.pop(entry)

    def _forget(self, entry: CacheEntry) -> None:
        key = self._keys.pop(entry)
        others = tuple([each for each in self._entries[key] if each is not entry])
        if others:
            self._entries[key] = others
        else:
            del self._entries[key]


def free_numbers(changes: NumberChanges, signature: Signature) -> list[int]:
    """Return the positions of numbers that become inputs of a trace.

    These numbers have changed between calls, and no program is specialised to a value."""
    # `type(x) is float` would be False for a traced number
    if ASKS_CLASS in signature.guards.names:
        return []
    return sorted(changes.changed - changes.specialised)
