"""Trace a function: run it once on placeholders, and record the launches instead of running them.

In: a function, the arguments, their `Signature`, and which Python numbers may change later. Out: a
`TracedCall`: the flow of recorded calls, and the `CallOutcome`, which locates each result.

After the trace, fields of Modules have the previous values, and no program was launched. An
update that needs a tensor's old value elsewhere raises `RetryAfterCopy`: the caller copies the
tensor, and traces again with a new signature. An operation that a replay could not repeat raises
`CaptureError` with the user's line.

Callers: `Captured` at a cache miss; `measure`, `ml.onnx.save` and `capture(replace=)` by
`trace_once`. No lock is held: a recorder belongs to the thread that created it, and the VM runs no
program.
"""

from __future__ import annotations

import copy
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import ReferenceType

import numpy as np

from mlvm.arena.arena import STALE, Allocation, Arena
from mlvm.arena.placement import rounded
from mlvm.core.errors import CaptureError, DTypeError, ShapeError, brief, with_article
from mlvm.core.locks import cached_property
from mlvm.core.types import NamedType, TensorType, root
from mlvm.eager.capture.dynamic_axes import OpenLength, open_types
from mlvm.eager.capture.guards.guard_set import Field, dict_of, is_mutable
from mlvm.eager.capture.guards.readable import PLAIN
from mlvm.eager.capture.guards.rebinding import (
    NamespaceSnapshot,
    parts_of,
    settled,
    variables_of,
)
from mlvm.eager.capture.guards.signature import Signature, Signatures
from mlvm.eager.functions.remedies import FROM_BODY
from mlvm.eager.recording import recorder
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.copying import (
    ArgumentLeaf,
    Leaf,
    LeafMemo,
    NumberLeaf,
    OutsideLeaf,
    ResultLeaf,
)
from mlvm.eager.tensor.garbage import collect
from mlvm.eager.tensor.number import Number, Numbers, plain
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tensor.values import items_of, members_of
from mlvm.eager.tree import (
    flatten,
    noting_flattened,
    replace,
    unflatten,
    within_containers,
)
from mlvm.step.flow import Flow, Home, Use, Value
from mlvm.step.templates import FlowTemplate, at, frozen, places


class ReturnedTensor(NamedTuple):
    """Location of a tensor that the function returns or assigns to a field.

    `home`: the memory.
    `type`: the type, which differs from the home's type if it is a view.
    `is_view`: whether it is a view of the tensor in the home.
    `argument`: the number of the argument that it is identical to, or None.
    `reached`: the state tensor that it is identical to, or None.
    """

    home: Home
    type: TensorType
    is_view: bool
    argument: int | None
    reached: Tensor | None

    @property
    def whole_output(self) -> int | None:
        """The index of the output that is the result itself; None for views and other tensors."""
        other = self.reached is not None or self.argument is not None or self.is_view
        return None if other or self.home.role != "output" else self.home.index

    def materialize(
        self, arguments: Sequence[Tensor], tensors: Mapping[str, Sequence[Allocation]]
    ) -> Any:
        """Return the tensor for a call with these arguments.

        `tensors` contains the other tensors by role."""
        if self.reached is not None:
            return self.reached
        if self.argument is not None:
            return arguments[self.argument]
        x = tensors[self.home.role][self.home.index].root
        if not self.is_view:
            return x
        view = x.arena.view(x, self.type, Tensor)
        view.tape = None
        return view


class Output(NamedTuple):
    """Tensor that each call allocates for results.

    With a `field` it is allocated in the arena of the tensor that the field refers to, otherwise in
    the current arena."""

    type: TensorType
    field: Field | None

    def alloc(self, current: Arena) -> Tensor:
        arena, field = current, self.field
        if field is not None and isinstance(field.value, Tensor):
            of_field = field.value.arena
            is_open = of_field.__class__ is Arena and not of_field.closed
            arena = of_field if is_open and of_field.vm is current.vm else current
        out = arena.alloc(self.type, Tensor)
        out.tape = None
        return out


class ObjectTemplate:
    """Object that the function creates and returns: each call returns a copy of it.

    template: a copy of the object with leaves. numbers: the positions of the call's numbers in it.
    used: leaves in it for objects from outside. They include containers of the arguments.
    """

    __slots__ = ("numbers", "template", "used")

    def __init__(self, template: Any, numbers: set[int], used: list[Leaf]) -> None:
        self.template, self.numbers, self.used = template, numbers, used

    def materialize(self, leaf: Callable[[Any], Any]) -> Any:
        """Return a new object with the values of a call as leaves."""
        return copy.deepcopy(self.template, LeafMemo(leaf))


class _CallValues(NamedTuple):
    """Values of a call: the results and the Python numbers."""

    results: Sequence[Any]
    numbers: Sequence[Any] | Mapping[int, Any]

    def of(self, leaf: Any) -> Any:
        """Return the value of a leaf or template; leaves of arguments are returned unchanged."""
        if type(leaf) is ObjectTemplate:
            needs = any(type(each) is ArgumentLeaf for each in leaf.used)
            return _Unfinished(leaf, self) if needs else leaf.materialize(self.of)
        if type(leaf) is ResultLeaf:
            return self.results[leaf.value]
        if type(leaf) is ArgumentLeaf:
            return leaf
        return self.numbers[leaf.value] if type(leaf) is NumberLeaf else leaf.value


class _Unfinished(NamedTuple):
    """Object that contains a container of the arguments, before `with_arguments` inserts it."""

    template: ObjectTemplate
    values: _CallValues


class CallOutcome:
    """Outcome of a call: the value that it returns, and the fields that it rebinds.

    Attributes:
        tree: the returned value, with leaves for everything that differs between calls.
        results: the tensors.
        outputs: the results that a call allocates.
        rebound: the fields that the call rebinds, each with the index of the result.
        types: the types of the outputs, unless one belongs to a field.
        single: the index of the output if the value is just this output.
        row: the indices of the outputs if the value is a list or tuple of just these.
        returns_arguments: whether containers among the arguments are part of the value.
        outside: containers and arrays from outside the function that are part of the value.
    """

    def __init__(
        self,
        tree: Any,
        results: list[ReturnedTensor],
        outputs: list[Output],
        rebound: list[tuple[Field, int]],
    ) -> None:
        self.tree, self.results, self.outputs, self.rebound = tree, results, outputs, rebound
        of_fields = any(output.field is not None for output in outputs)
        self.types = None if of_fields else tuple([output.type for output in outputs])
        leaf = results[tree.value] if type(tree) is ResultLeaf else None
        self.single = None if leaf is None or rebound else leaf.whole_output
        self.row: list[int] | None = None
        if type(tree) in (list, tuple) and {ResultLeaf}.issuperset(map(type, tree)):
            row = [results[each.value].whole_output for each in tree]
            self.row = None if None in row or rebound else row
        leaves: list[Any] = []
        replace(leaves.append, tree, (Leaf, ObjectTemplate))
        templates = [each for each in leaves if type(each) is ObjectTemplate]
        leaves += [leaf for each in templates for leaf in each.used]
        self.returns_arguments = any(type(each) is ArgumentLeaf for each in leaves)
        outside = [each.value for each in leaves if type(each) is OutsideLeaf]
        self.outside = [root(x) if issubclass(type(x), np.ndarray) else x for x in outside]
        self.numbers = {each.value for each in leaves if type(each) is NumberLeaf}
        self.numbers.update(*[each.numbers for each in templates])

    @cached_property
    def nbytes(self) -> int:
        """The size of the outputs in an arena in bytes, an int after the trace has finished."""
        return sum([rounded(output.type.nbytes) for output in self.outputs])

    def with_types(
        self,
        convert: Callable[[TensorType], TensorType],
        home: Callable[[Home], Home] = lambda home: home,
    ) -> CallOutcome:
        """Return the outcome with types and homes converted."""
        results = [x._replace(home=home(x.home), type=convert(x.type)) for x in self.results]
        outputs = [x._replace(type=convert(x.type)) for x in self.outputs]
        return CallOutcome(self.tree, results, outputs, self.rebound)

    def named_results(self) -> list[tuple[str, int]]:
        """Return the paths of tensors in the tree, each with the index of the result."""
        leaves, _ = flatten(self.tree, ends=within_containers(ResultLeaf))
        return [(path, leaf.value) for path, leaf in leaves]

    def with_leaves(self, args: Any, kwargs: Any) -> Any:
        """Return the value of a call with these arguments, with a `ResultLeaf` for each result.

        Python numbers have the right class, but not the value of a call."""
        values = _CallValues([*map(ResultLeaf, range(len(self.results)))], defaultdict(int))
        value = replace(values.of, self.tree, (Leaf, ObjectTemplate))
        return self.with_arguments(value, args, kwargs)

    def materialize(
        self,
        arguments: Sequence[Tensor],
        tensors: Mapping[str, Sequence[Allocation]],
        numbers: Sequence[Any],
    ) -> Any:
        """Return the value of a call from arguments, tensors by role, and numbers.

        Rebind the fields. `with_arguments` inserts containers of the arguments."""
        results = [result.materialize(arguments, tensors) for result in self.results]
        for field, number in self.rebound:
            field.set(results[number])
        return replace(_CallValues(results, numbers).of, self.tree, (Leaf, ObjectTemplate))

    def with_arguments(self, value: Any, args: Any, kwargs: Any) -> Any:
        """Insert the containers among the call's arguments into the value, and return it."""

        def container_of(leaf: ArgumentLeaf) -> Any:
            part: Any = {**dict(enumerate(args)), **kwargs}
            for key in leaf.value:
                part = dict(items_of(part))[key] if isinstance(part, dict) else part[key]
            return part

        def finished(part: ArgumentLeaf | _Unfinished) -> Any:
            if isinstance(part, ArgumentLeaf):
                return container_of(part)
            of = part.values.of
            return part.template.materialize(
                lambda leaf: container_of(leaf) if type(leaf) is ArgumentLeaf else of(leaf)
            )

        return replace(finished, value, (ArgumentLeaf, _Unfinished))


class TracedCall(NamedTuple):
    """Recorded calls of a function, with the outcome and the conditions of the trace.

    Attributes:
        record: the recorder, which knows states and queues.
        flow: the calls and the values of results.
        outcome: the value that the function returns, and the fields that it rebinds.
        numbers: the computation on Python numbers and sizes that may differ in a later call.
        free: the positions of these numbers among the signature's numbers.
        flattened: the ids of Modules of which the function has read all children, not only some
            fields.
        template: in a trace with dynamic sizes, the source of the flow.
        notes: what the observer of a recording has noted during the trace.
    """

    record: recorder.Recorder
    flow: Flow
    outcome: CallOutcome
    numbers: Numbers
    free: Sequence[int]
    flattened: Set[int]
    template: FlowTemplate | None = None
    notes: object = None

    def frozen(self) -> TracedCall:
        """Return the call with placeholders for everything that depends on dynamic sizes."""
        template, home = FlowTemplate.of(self.flow)
        outcome = self.outcome.with_types(frozen, home)
        return self._replace(flow=template.frozen, outcome=outcome, template=template)

    def places(self) -> set[int]:
        """Return the formula indices in the frozen types of results and in returned numbers."""
        return self._places_of_types() | self.outcome.numbers

    def _places_of_types(self) -> set[int]:
        outcome = self.outcome
        return places([x.type for x in outcome.results] + [x.type for x in outcome.outputs])

    def at(self, values: Sequence[Any], flow: Flow | None = None) -> TracedCall:
        """Return the call for these values of all formulas.

        Without a flow, the result contains the frozen flow, from which only homes may be read."""
        assert self.template is not None
        return self._replace(
            flow=flow or self.flow,
            outcome=self.outcome.with_types(lambda type: at(type, values)),
            numbers=self.numbers.at(values, self.template.places | self._places_of_types()),
        )

    def named_results(self) -> list[tuple[str, Use]]:
        """Return the uses of the tensors that the function returns, by path."""
        results = self.outcome.results
        return [
            (path, Use(self.flow.results[n], results[n].type))
            for path, n in self.outcome.named_results()
        ]


def code_for_type(x: object) -> str | None:
    """Return the code for a type given as text, such as "f32[2,4]"; otherwise None."""
    with suppress(DTypeError, ShapeError):
        type = TensorType.parse(x) if isinstance(x, str) else None
        return None if type is None else f'ml.TensorType("{type.dtype.name}", {type.shape})'
    return None


Undone: TypeAlias = Callable[[BaseException | None], bool]
"""Function of the error of a trace, or None: whether to undo changes of lists, dicts and names."""


def if_refused(error: BaseException | None) -> bool:
    """Undo the changes if eager code would not raise this error."""
    return isinstance(error, (CaptureError, recorder.RetryAfterCopy))


def if_failed(error: BaseException | None) -> bool:
    """Undo the changes because the caller traces the call again."""
    return error is not None


def always(_: BaseException | None) -> bool:
    """Undo the changes because the trace is not a call."""
    return True


def trace_once(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    lengths: Callable[[Signature], Sequence[OpenLength]] = lambda _: (),
) -> tuple[TracedCall, Signature]:
    """Trace a call with these sizes dynamic; types may replace tensors as arguments.

    Raises the errors of `capture`, and `CaptureError` for a type given as text."""
    for _, x in flatten((args, kwargs), None, ends=within_containers(str))[0]:
        code = code_for_type(x)
        if code is not None:
            raise CaptureError(f"expected a TensorType, got the text {x!r}; write {code}")
    return trace_call(fn, args, kwargs, Signatures(fn), lengths)


def trace_call(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    signatures: Signatures,
    lengths: Callable[[Signature], Sequence[OpenLength]] = lambda _: (),
) -> tuple[TracedCall, Signature]:
    """Trace a call in the current arena with these lengths dynamic, and repeat it after a copy."""
    arena = current_arena()
    while True:
        signature, _ = signatures.of(arena.vm, args, kwargs)
        try:
            opened = lengths(signature)
            return trace(fn, args, kwargs, arena, signature, (), opened, always), signature
        except recorder.RetryAfterCopy as error:
            make_exclusive(error.x)


def trace(
    fn: Any,
    args: Any,
    kwargs: Any,
    arena: Arena,
    signature: Signature,
    free: Sequence[int],
    lengths: Sequence[OpenLength] = (),
    undone: Undone = if_refused,
) -> TracedCall:
    """Call the function while a recorder is active, and return the traced call.

    The old values of fields that the function rebinds are restored; `undone` decides whether all
    other changes are undone. The signature's numbers that are `free` are also recorded. With
    dynamic `lengths` the traced call has a template instead of a flow."""
    snapshot = NamespaceSnapshot(signature.guards)
    sizes = [each.size_in(signature) for each in lengths]
    numbers = Numbers([signature.numbers[i] for i in free], arena.vm, sizes)
    with ExitStack() as stack:
        if undone(None):
            stack.enter_context(_keeping_draws())
            snapshot.note_contents(signature.guards)
        placeholders: list[Any] = stack.enter_context(numbers.recording())
        types = open_types(lengths, signature, [placeholders.pop() for _ in lengths][::-1])
        record = stack.enter_context(recorder.recording_of(arena.vm, signature.inputs, types))
        del types
        lent: list[Any] = [*signature.numbers]
        for i in reversed(free):
            lent[i] = placeholders.pop()
        snapshot.lend(signature.guards.numbers, lent)
        number_arguments = lent[len(signature.guards.numbers) :][::-1]
        del lent
        flattened: set[int] = set()

        def placeholder(x: Any) -> Any:
            if issubclass(type(x), Tensor):
                return x if signature.is_reached(x) else record.placeholder(x)
            if issubclass(type(x), TensorType):
                return record.placeholder_of(x)
            if issubclass(type(x), NamedType):
                raise CaptureError(
                    f"a captured function: expected a tensor, got the type {x}, whose sizes have "
                    f"names; such types are for ml.measure, as in ml.measure(step, x)."
                    f"at({min(x.names)}=32)"
                )
            return number_arguments.pop() if type(x) in (int, float) else x

        try:
            for field, x in signature.fields:
                field.set(placeholder(x))
            inputs = [
                replace(placeholder, each, (Tensor, TensorType, NamedType, int, float))
                for each in (args, kwargs)
            ]
            before = replace(lambda x: x, inputs)
            with noting_flattened(flattened):
                tree = fn(*inputs[0], **inputs[1])
            record.require_no_caught_read()
            _require_unchanged(before, inputs)
            if signature.guards.reads_ids:
                snapshot.require_no_id([*map(record.placeholder, signature.tensors)])
            results = _Results(record, signature, inputs)
            del inputs, before
            replace(_refuse_deferred, tree, (Iterator, Awaitable))
            for field, x in signature.fields:
                if field.value is placeholder(x):  # the field was not rebound
                    field.set(x)
            tree = results.tree_of(tree)
            rebound = [(field, results.leaf(x, field).value) for field, x in snapshot.rebound()]
            snapshot.settle_numbers()
        except BaseException as error:
            snapshot.settle_numbers()
            snapshot.restore(failed=True)
            if undone(error):
                snapshot.undo()
            snapshot.find(record.escaped_tensors())
            if isinstance(error, KeyError) and isinstance((error.args or ("",))[0], Tensor):
                frame = traceback.extract_tb(error.__traceback__)[-1]
                raise CaptureError(
                    f"{frame.filename}:{frame.lineno}: a dict finds a tensor by identity, not by "
                    f"its value. For table[n], write ml.stack([*table.values()])[n] if the keys "
                    f"are 0, 1, 2, ..., or else ml.where(n == key, x, y)"
                ) from error
            raise
        snapshot.restore(failed=False)
        if undone(None):
            snapshot.undo()
        outcome = CallOutcome(tree, results.results, results.outputs, rebound)
        call = TracedCall(
            record, Flow(record.calls, results.values), outcome, numbers, free, flattened
        )
        if lengths:
            if record.outside.queues:
                raise CaptureError(
                    "a program with dynamic sizes cannot take elements of a queue; capture with "
                    "dynamic_axes=False"
                )
            call = call.frozen()
        else:
            numbers.see_kept()
        del results, outcome
        _refuse_escaped(record, snapshot)
    if lengths:  # drop the types of the trace first: they refer to the numbers of the trace
        record.drop_flow()
        numbers.types.clear()
        numbers.see_kept()
    return call


@contextmanager
def _keeping_draws() -> Iterator[None]:
    """Restore the state of NumPy's global random generator after the block."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


class _Results:
    """Tensors that a traced function returns, and tensors that it assigns to fields."""

    def __init__(
        self, record: recorder.Recorder, signature: Signature, inputs: Sequence[Any]
    ) -> None:
        self.results: list[ReturnedTensor] = []
        self.values: list[Value] = []
        self.outputs: list[Output] = []
        self._record = record
        self._signature = signature
        self._arguments = {id(record.placeholder(x)): i for i, x in enumerate(signature.tensors)}
        self._leaves: dict[int, tuple[ResultLeaf, Tensor]] = {}  # by the id of the tensor
        self._containers = _paths_of({**dict(enumerate(inputs[0])), **inputs[1]})
        self._outside = signature.guards.reached()

    def tree_of(self, tree: Any) -> Any:
        """Return the value that the function returned, with leaves in it.

        Containers that it created are part of the tree. Other objects that it created become
        templates. If two parts share an object, the whole value becomes a template."""

        def ends(part: Any) -> bool | None:
            is_plain = issubclass(type(part), (dict, list, tuple)) and not dict_of(part)
            if is_plain and issubclass(type(part), dict):
                is_plain = not any(issubclass(type(key), Tensor) for key, _ in items_of(part))
            if not is_plain or id(part) in self._outside or id(part) in self._containers:
                return True
            inner.append(part)
            return None

        inner: list[Any] = []
        pairs, structure = flatten(tree, None, ends=ends)
        created = _Created(self._outside, self._containers)
        for part in inner:
            created.add(part, is_inner=True)
        for _, part in pairs:
            created.add(part)
        if created.is_shared:
            return self._template(tree)
        return unflatten(structure, [self._part(each) for _, each in pairs])

    def _part(self, part: Any) -> Any:
        if issubclass(type(part), Tensor):
            return self.leaf(part)
        if type(part) is Number:
            return NumberLeaf(part.place) if part.recorded else plain(part)
        if id(part) in self._containers:
            return ArgumentLeaf(self._containers[id(part)])
        if id(part) in self._outside:
            return OutsideLeaf(part) if is_mutable(part) else part
        if is_mutable(part.__self__ if type(part) is MethodType else part):
            return self._template(part)
        return settled(part, set())

    def _template(self, part: Any) -> ObjectTemplate:
        """Return the template of an object.

        Raises `CaptureError` if it cannot be copied."""
        numbers: set[int] = set()

        def leaf(x: Any) -> Any:
            if issubclass(type(x), (OutsideLeaf, ArgumentLeaf)):
                return x
            each = self._part(x)
            if type(each) is NumberLeaf:
                numbers.add(each.value)
            return each

        leaves: dict[int, Leaf] = {k: ArgumentLeaf(path) for k, path in self._containers.items()}
        leaves |= {k: OutsideLeaf(x) for k, x in self._outside.items() if is_mutable(x)}
        memo = LeafMemo(leaf, leaves)
        try:
            template = copy.deepcopy(part, memo)
        except CaptureError:
            raise
        except Exception as error:  # an error of the object's own code
            raise CaptureError(
                f"a captured function returns {with_article(type(part).__name__)} that it "
                f"creates, but later "
                f"calls cannot copy it ({brief(str(error))}); return its contents, or create it "
                f"outside"
            ) from error
        return ObjectTemplate(template, numbers, memo.used)

    def leaf(self, x: Tensor, field: Field | None = None) -> ResultLeaf:
        """Return the leaf for a tensor.

        Raises `CaptureError` if no launch can create the tensor."""
        if id(x) not in self._leaves:
            self._leaves[id(x)] = ResultLeaf(len(self.results)), x
            self.results.append(self._result(x))
        leaf = self._leaves[id(x)][0]
        home = self.results[leaf.value].home
        if field is not None and home.role == "output":
            output = self.outputs[home.index]
            self.outputs[home.index] = output._replace(field=output.field or field)
        return leaf

    def _result(self, x: Tensor) -> ReturnedTensor:
        if x.handle == STALE:
            raise CaptureError(f"a captured function returns a tensor that was freed: {x.stale()}")
        value = self._record.value_of(x)
        self.values.append(value)
        home = value.home
        if home is not None and (
            home.role == "element" or home in self._record.outside.queue_homes
        ):
            raise CaptureError(
                f"a captured function returns {with_article(x.type)} in the slot of a "
                f"queue, which will be "
                f"reused; return ml.copy(x)"
            )
        if home is None or home.role == "scratch":
            home = value.home = home or Home("output", 0, x.root.type)
            home.role, home.index = "output", len(self.outputs)
            self.outputs.append(Output(x.root.type, None))
        reached = x if self._signature.is_reached(x) else None
        return ReturnedTensor(home, x.type, x.base is not None, self._arguments.get(id(x)), reached)


class _Created:
    """Objects that a function creates and returns, in addition to those from `outside`.

    is_shared: whether two parts of the value contain the same object.
    """

    def __init__(self, outside: dict[int, Any], arguments: Container[int]) -> None:
        self.is_shared = False
        self._outside, self._arguments = outside, arguments
        self._owners: dict[int, int] = {}
        self._arrays: dict[int, Any] = {}  # by the id of the array that owns the memory
        self._count = 0

    def add(self, part: Any, *, is_inner: bool = False) -> None:
        """Add a part of the value, with everything in it unless it `is_inner`, a container.

        Raises `CaptureError` for a function or class that later calls would share."""
        self._count += 1
        pending = [part]
        while pending:
            x = pending.pop()
            if issubclass(type(x), np.ndarray) and id(root(x)) in self._outside:
                self._outside[id(x)] = x  # a view of an array from outside
            kind = type(x)
            if kind in PLAIN or kind is Number or issubclass(kind, Tensor) or self._is_known(x):
                continue
            owner = self._owners.get(id(x))
            if owner is not None:
                is_copied = is_mutable(x) and not issubclass(type(x), tuple)
                self.is_shared |= owner != self._count and is_copied
                continue
            self._owners[id(x)] = self._count
            self._require_no_state(x)
            if issubclass(type(x), np.ndarray) and self._arrays.setdefault(id(root(x)), x) is not x:
                raise CaptureError(
                    "a captured function returns two arrays that share memory; in later calls they "
                    "would be separate copies. Return one of them"
                )
            if "<locals>" in type(x).__qualname__:
                pending.append(type(x))
            pending += () if is_inner else parts_of(x)

    def _is_known(self, x: Any) -> bool:
        return id(x) in self._outside or id(x) in self._arguments

    def _require_no_state(self, x: Any) -> None:
        """Raise `CaptureError` for an object with state that a template cannot copy."""
        state = any(is_mutable(y) and not self._is_known(y) for y in variables_of(x))
        if state or (issubclass(type(x), ReferenceType) and x() is not None):
            raise CaptureError(
                f"a captured function returns {with_article(type(x).__name__)} that it creates; "
                f"later calls would return the same {type(x).__name__}, with the same variables. "
                f"Return the values of the variables, or create it outside"
            )


def _paths_of(named: dict[Any, Any]) -> dict[int, tuple[Any, ...]]:
    """Return the paths of dicts and lists in these values, by id."""
    paths: dict[int, tuple[Any, ...]] = {}
    pending: list[tuple[tuple[Any, ...], Any]] = [((name,), x) for name, x in named.items()]
    while pending:
        path, part = pending.pop()
        if issubclass(type(part), (dict, list)):
            paths.setdefault(id(part), path)
        if issubclass(type(part), (dict, list, tuple)):
            items = items_of(part) if issubclass(type(part), dict) else enumerate(members_of(part))
            pending += [((*path, key), each) for key, each in items]
    return paths


def _refuse_escaped(record: recorder.Recorder, snapshot: NamespaceSnapshot) -> None:
    """Raise `CaptureError` if a tensor of the trace, or a placeholder, outlives the call.

    Only the result may contain it, because later calls would not update any other reference. Names
    that refer to such a tensor are restored."""
    # collecting a gradient's tape turns saved tensors into garbage, which the second round collects
    for _ in range(2):
        if record.escaped_tensors():
            collect()
    escaped = record.escaped_tensors()
    if not escaped:
        return
    x, where, was = snapshot.find(escaped) or (escaped[0], "an object that was not found", None)
    line = record.line_of(x)
    remedy = f"assign it to a field of a Module that contains {with_article(x.type)}"
    if isinstance(was, Tensor) and was.type is x.type:
        remedy = f"update the old tensor in place (old[...] = new), or {remedy}"
    elif where.startswith("field "):
        zeros = f"ml.nn.buffer(ml.zeros({x.type.shape}, dtype=ml.{x.dtype.long_name}))"
        remedy = f"initialize the field with a buffer of this type before the call: {zeros}"
    if x.arena not in (record.arena, record.placeholders.arena):
        where = f"arena {x.arena.name!r}"
    remedy = FROM_BODY if record.is_of_body(x) else f"Return it instead, or {remedy}"
    what = (
        f"{line}: {with_article(x.type)} created in"
        if line
        else f"{with_article(x.type)} passed to"
    )
    raise CaptureError(
        f"{what} a captured function was stored in {where}; later calls would not update it. "
        f"{remedy}"
    )


def _require_unchanged(before: Sequence[Any], after: Sequence[Any]) -> None:
    """Raise `CaptureError` if the function has changed a list or dict in the arguments.

    The function got copies of them, and later calls would not change any."""
    (args, kwargs), (args_now, kwargs_now) = before, after
    old = {**dict(enumerate(args)), **kwargs}
    new = {**dict(enumerate(args_now)), **kwargs_now}
    for name, argument in old.items():
        if not _is_same_tree(argument, new[name]):
            raise CaptureError(
                f"a captured function changes argument {name!r}, "
                f"{with_article(type(argument).__name__)}; "
                f"later calls would not repeat this. Return a new {type(argument).__name__} instead"
            )


def _is_same_tree(before: Any, after: Any) -> bool:
    """Return whether two trees have the same structure and identical leaves."""
    if type(before) is not type(after) or not issubclass(type(before), (dict, list, tuple)):
        return before is after
    if issubclass(type(before), dict):
        old, new = dict(items_of(before)), dict(items_of(after))
        same = old.keys() == new.keys()
        return same and all(_is_same_tree(x, new[key]) for key, x in old.items())
    parts, others = [*members_of(before)], [*members_of(after)]
    return len(parts) == len(others) and all(map(_is_same_tree, parts, others))


def _refuse_deferred(result: object) -> NoReturn:
    raise CaptureError(
        f"a captured function returns {with_article(type(result).__name__)}, which would "
        f"run after the call; "
        f"return a list or tuple"
    )
