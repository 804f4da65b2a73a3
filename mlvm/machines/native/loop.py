"""Binding of the loop in C: input, and callbacks to Python.

`NativeLoop` has the signature of `mlvm.core.machine.run.run`. It prepares a linked program once and
runs it in C (`machine/loop.c`). The reference loop handles everything that the C loop does not
support, and raises all errors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from mlvm.core.collecting import uncollected
from mlvm.core.errors import OpError
from mlvm.core.machine import link
from mlvm.core.machine import run as reference
from mlvm.core.machine.callee import OUT, Fused, OpFresh, OpInto, Value, WritesInto
from mlvm.core.machine.functions import Binding, FunctionTable
from mlvm.core.machine.fused import Chain, Workspace
from mlvm.core.machine.link import CallDetails, LinkedCode, Step
from mlvm.core.machine.run import Scheduler, State
from mlvm.core.machine.verify import verify
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.program.program import STAR, Function, Variant
from mlvm.core.protocol import TensorHandle
from mlvm.core.sizes import MAX_TERM
from mlvm.core.store import Cache, FreeStore
from mlvm.core.types import Array, TensorType
from mlvm.machines.native._native import ANYWHERE, FastPath, KernelCall, Pool, Program, steps
from mlvm.machines.native.host import host_of
from mlvm.machines.native.kernels import NativeKernel
from mlvm.machines.native.types import Type, native_type

if TYPE_CHECKING:
    from mlvm.core.vm import VM

_STEPS: Final = steps()
_CODES: Final = {getattr(link, name): code for name, code in _STEPS.items() if hasattr(link, name)}
"""Codes of the loop in C, by linker code."""


NativeStep = tuple[int, int, Any, Any]


def call_of(
    kernel: object,
    types: Sequence[TensorType],
    attributes: Attributes,
    are_inferred: bool = False,
) -> KernelCall | None:
    """Return the call that the loop runs instead of a native kernel, or None for other kernels.

    The caller caches the call if it has just inferred the result type."""
    if are_inferred and isinstance(kernel, NativeKernel):
        return kernel.plan(types, attributes, are_inferred=True)
    call = getattr(kernel, "call", None)
    return None if call is None else call(types, attributes)


class CallSite:
    """Call in a program with parameters on the stack."""

    __slots__ = ("binding", "details")

    def __init__(self, binding: Binding, details: CallDetails) -> None:
        self.binding = binding
        self.details = details

    def resolve(
        self, types: Sequence[Type]
    ) -> tuple[KernelCall | None, Type | None, tuple[int, ...]]:
        """Resolve the call for parameters of these types.

        Return the kernel call and the type of a result to allocate. For each written parameter,
        also return `ANYWHERE`, or a bit set of the parameters that it may alias exactly. Without a
        call, the loop runs `perform`."""
        tensor_types = [type.tensor_type for type in types]
        callee, attributes = self.binding.callee, self.details.attributes
        nothing = None, None, ()
        if callee.nresults is None or self.details.nresults not in (STAR, callee.nresults):
            return nothing
        try:
            inferred = callee.infer(tensor_types, attributes)
        except OpError:
            return nothing
        if isinstance(callee, OpFresh) and inferred is not None and inferred[0] is not None:
            call = call_of(callee.fill, [inferred[0], *tensor_types], attributes)
            return call, native_type(inferred[0]), ()
        if isinstance(callee, WritesInto):
            written = range(callee.writes(attributes))
            checked = self.details.may_alias or self.details.unproven
            over = [self._over(i, tensor_types) if checked else ANYWHERE for i in written]
            return call_of(callee.kernel, tensor_types, attributes), None, tuple(over)
        return nothing

    def _over(self, out: int, types: Sequence[TensorType]) -> int:
        """Return the bit set of the parameters that result `out` may alias exactly.

        These parameters have the type of the result, and the op may overwrite them.
        """
        callee, attributes = self.binding.callee, self.details.attributes
        allowed: Sequence[int] = ()
        if isinstance(callee, OpInto):
            allowed = range(1, 1 + callee.op.in_place)
        elif isinstance(callee, Fused):
            chain: Chain = attributes["chain"]
            allowed = [j for j in range(chain.outputs, len(types)) if chain.may_replace(out, j)]
        return sum(1 << j for j in allowed if j < len(types) and types[j] is types[out])

    def perform(self, params: list[Value]) -> Sequence[Value]:
        """Call the function as the reference loop does."""
        return reference.call(self.binding, params, self.details, self.binding.call)


class Helper:
    """Callbacks of the loop: the free store, types, and pending signals."""

    def __init__(self, store: FreeStore) -> None:
        self._store = store

    def check_signals(self) -> None:
        """Do nothing: entering Python raises exceptions sent by other threads."""

    def type_of(self, array: Array) -> Type:
        return native_type(TensorType.of(array))

    def load(self, handle: int) -> Array:
        return self._store.entry(handle).array

    def store(self, handle: int, array: Array) -> None:
        self._store.replace(handle, array)


class Prepared:
    """Linked program in the form that the loop in C runs.

    called: functions except main, which owns this object and must not be kept alive.
    triples: steps, starts and ends of each function, shared by programs that are bound in the same
        way.
    """

    __slots__ = ("called", "program", "triples", "version")

    def __init__(
        self, main: LinkedCode, operands: Sequence[Array], functions: FunctionTable
    ) -> None:
        types: dict[int, TensorType] = {}
        self.called: list[LinkedCode] = []
        self.triples: list[tuple[list[NativeStep], list[int], list[int]]] = []
        self.version = functions.version
        like, main.like = main.like, None
        if like is not None and like[0].version == self.version:
            prepared, changed = like
            steps = prepared.triples[0][0].copy()
            for i in changed:
                steps[i] = self._step(main.steps[i], types)
            self.called = prepared.called
            self.triples = [(steps, main.starts, main.ends), *prepared.triples[1:]]
        else:
            for code in chain([main], self.called):  # `_step` appends to `called`
                steps = [self._step(step, types) for step in code.steps]
                self.triples.append((steps, code.starts, code.ends))
        # The types of arguments are needed only if a step loads an argument.
        codes = (main, *self.called)
        loads = any(step[0] == link.LOAD_ARG for code in codes for step in code.steps)
        argument_types = [native_type(TensorType.of(x)) for x in operands] if loads else []
        self.program = Program(self.triples, tuple(argument_types), self.version)

    def _step(self, step: Step, types: dict[int, TensorType]) -> NativeStep:
        """Translate a step; `types` caches types of arrays by `id`."""
        code, value, number, rest = step
        if code == link.CALL_ON_ARGS:
            attributes = rest or NO_ATTRIBUTES
            for x in number:
                if id(x) not in types:
                    types[id(x)] = TensorType.of(x)
            call = call_of(value.callee.kernel, [types[id(x)] for x in number], attributes)
            if call is not None:
                return _STEPS["RUN"], 0, call, number
            return _STEPS["BACK"], 0, partial(value.kernel, *number, **attributes), None
        native = _CODES.get(code, _STEPS["UNKNOWN"])
        if code == link.CALL:
            return native, number, CallSite(value, rest), host_of(value, rest)
        if code == link.CALL_FUNCTION:
            if not any(value is code for code in self.called):
                self.called.append(value)
            index = next(i for i, code in enumerate(self.called, 1) if code is value)
            return native, index, number, None
        if code == link.PUSH and isinstance(value, np.ndarray):
            return native, 0, value, native_type(TensorType.of(value))
        return native, number, 0 if value is None else value, None


def _prepare(
    main: LinkedCode, operands: Sequence[Array], functions: FunctionTable
) -> Prepared | Literal[False]:
    """Prepare a program for the loop in C; False if it contains an invalid or too large number."""
    try:
        with uncollected():
            return Prepared(main, operands, functions)
    except (OverflowError, TypeError):
        return False


class NativeLoop:
    """Loop of a VM in C; kernels share the threads of `pool`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._helper: Helper | None = None

    def __call__(
        self,
        main: LinkedCode,
        operands: tuple[Array, ...],
        store: FreeStore,
        functions: FunctionTable,
        max_steps: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> list[Value]:
        """Run as `mlvm.core.machine.run.run`, which handles observed or scheduled programs."""
        prepared = main.prepared
        watched = functions.instrument is not None or scheduler is not None
        if prepared.__class__ is not Prepared or watched or max_steps is not None:
            if isinstance(prepared, Patched):
                return self._run_patched(prepared, watched, store, functions, max_steps, scheduler)
            if watched or (max_steps is not None and max_steps < 0):
                return reference.run(main, operands, store, functions, max_steps, scheduler)
            if prepared is None:
                prepared = main.prepared = _prepare(main, operands, functions)
            if not prepared:
                return reference.run(main, operands, store, functions, max_steps)
        if self._helper is None:
            self._helper = Helper(store)
        steps_left = -1 if max_steps is None else min(max_steps, MAX_TERM)
        ended = prepared.program.run(self._pool, self._helper, operands, steps_left)
        if ended is None:
            return []
        if isinstance(ended, list):
            return ended
        try:
            return _resume(ended, [main, *prepared.called], operands, store, functions)
        finally:  # the traceback of an error would keep the error alive
            del ended

    def _run_patched(
        self,
        patched: Patched,
        watched: bool,
        store: FreeStore,
        functions: FunctionTable,
        *more: Any,
    ) -> list[Value]:
        """Run a variant of a program that is prepared except for the integers.

        The original program handles all exceptional cases.
        """
        owner = patched.variant.patched
        is_nested = owner.busy  # in a signal handler or a finalizer
        try:
            owner.busy = True
            program = None
            if not (watched or is_nested or more[0] is not None):
                program = patched.activate(functions)
            if program is not None:
                self._helper = self._helper or Helper(store)
                ended = program.run(self._pool, self._helper, patched.operands, -1)
        finally:
            owner.busy = is_nested
        if program is None:
            return self(*patched.full(functions), store, functions, *more)
        if ended is None:
            return []
        if isinstance(ended, list):
            return ended
        main, operands = patched.full(functions)
        try:
            return _resume(ended, [main], operands, store, functions)
        finally:  # the traceback of an error would keep the error alive
            del ended

    def bind_variant(
        self,
        program: Variant,
        operands: tuple[Array, ...],
        functions: FunctionTable,
        workspace: Workspace,
    ) -> LinkedCode:
        """Return code that runs a variant of a program on these arrays."""
        function = Function("main", 0, STAR, ())
        return LinkedCode(function, [], [], [], prepared=Patched(program, operands, workspace))


class Patched:
    """Variant of a program, on the arrays of a launch."""

    __slots__ = ("__weakref__", "_full", "operands", "variant", "workspace")

    def __init__(self, variant: Variant, operands: tuple[Array, ...], workspace: Workspace) -> None:
        self.variant, self.operands, self.workspace = variant, operands, workspace
        self._full: tuple[int, LinkedCode, tuple[Array, ...]] | None = None

    def activate(self, functions: FunctionTable) -> Program | None:
        """Return the C program with the integers of the variant, bound to these arrays.

        Return None if it must be linked as an ordinary program.
        """
        program: Program | None = self.variant.patched.activate(self, int(functions.version))
        return program

    def full(self, functions: FunctionTable) -> tuple[LinkedCode, tuple[Array, ...]]:
        """Return the linked program, with the arrays as types."""
        if self._full is None or self._full[0] != int(functions.version):
            program, types = self.variant.full()
            arrays = tuple(map(TensorType.over, types, self.operands))
            code = link.link(program, functions, verify(program, functions, types))
            code = link.bind(code, arrays, self.workspace, checked=True)
            self._full = int(functions.version), code, arrays
        return self._full[1:]


def _state(ended: tuple[Any, ...], codes: list[LinkedCode]) -> tuple[State, BaseException | None]:
    """Convert the final state of the C loop to the reference loop's; also return the error."""
    stack, frames, function, pc, base, nparams, steps_left, since, error = ended
    callers = [(codes[i], *rest) for i, *rest in frames]
    spared = None if steps_left < 0 else steps_left
    return State(stack, callers, codes[function], pc, base, nparams, spared, since), error


def _resume(
    ended: tuple[Any, ...],
    codes: list[LinkedCode],
    operands: tuple[Array, ...],
    store: FreeStore,
    functions: FunctionTable,
) -> list[Value]:
    """Continue in the reference loop from the state of the C loop, or raise the error.

    The program's first function is main.
    """
    state, error = _state(ended, codes)
    if error is None:
        return reference.run(codes[0], operands, store, functions, state=state)
    try:
        if isinstance(error, Exception):  # an interrupt has no location
            error = reference.explain(error, state)
        raise error
    finally:  # otherwise the traceback would keep the error alive
        del ended, error, state


def bound_code(
    vm: VM, program: Any, args: tuple[TensorHandle, ...], cache: Cache
) -> tuple[LinkedCode | None, tuple[Array, ...]]:
    """Return the code that was bound to these handles, and the arrays.

    Return None before the first launch on them. The cache is cleared when a handle may refer to a
    different array, starting before the look-up.
    """
    number = id(cache)  # a call on the next line could switch to a thread that clears the cache
    vm._store.caches[number] = cache
    linked = vm._linked.get(id(program))
    return (None, ()) if linked is None else linked.bound.get(args, (None, ()))


def open_fast_path(vm: VM, pool: Pool) -> FastPath:
    """Open the fast path of eager and captured calls to a VM (`language/dispatch.c`, `replay.c`).
    It refers to the VM weakly, because the VM may refer to it."""
    vm_of = weakref.ref(vm)
    helper = Helper(weakref.proxy(vm._store))

    def find(handle: int, fast_path: FastPath) -> tuple[Array, TensorType] | None:
        vm = vm_of()
        if vm is None:
            return None
        entry = vm._store.entry(handle)
        vm._store.caches[id(fast_path)] = fast_path  # cleared when handles change
        return entry.array, entry.type

    def prepare(
        _: object, name: str, types: Sequence[TensorType], attributes: Attributes
    ) -> KernelCall | None:
        vm = vm_of()
        if vm is None:
            return None
        callee = vm.functions.binding(name + OUT).callee
        return (
            call_of(callee.kernel, types, attributes, True) if isinstance(callee, OpInto) else None
        )

    def bound(
        program: Any, handles: tuple[TensorHandle, ...], cache: Cache
    ) -> tuple[Any, ...] | None:
        vm = vm_of()
        code, arrays = (None, ()) if vm is None else bound_code(vm, program, handles, cache)
        prepared = None if code is None else code.prepared
        if code is None or not isinstance(prepared, Prepared):
            return None

        def resume(ended: tuple[Any, ...]) -> object:
            vm = vm_of()
            assert vm is not None  # it runs
            try:
                return _resume(ended, [code, *prepared.called], arrays, vm._store, vm.functions)
            finally:  # the traceback of an error would keep the error alive
                del ended

        return prepared.program, helper, resume, handles, arrays

    return FastPath(find, prepare, bound, vm.lock, pool)
