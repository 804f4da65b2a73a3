"""The protocol as bytes: a WireVM answers as the VM behind it does, errors included."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena, Regions
from mlvm.core import errors
from mlvm.core.collecting import uncollected
from mlvm.core.machine.frame import Frame
from mlvm.core.program.encoding import Kind, Writer
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, f32, root
from mlvm.core.vm import VM
from mlvm.machines.dry import DryVM
from mlvm.machines.local import LocalVM
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.wire import (
    WireServer,
    WireVM,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
    encode_error,
)
from tests.brief import ROOT, Patch, cases, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import ADD_INTO, f32s, put, straight
from tests.fuzz.mutations import assert_well_refused, framed
from tests.threads import in_threads
from tests.wired import connect_to

PAIR = TensorType(f32, (2,))
LOAD = straight(("load_arg", 0), "halt")
FOREVER = straight(("push_int", 1), ("pop", 1), ("jump", 0))


def wired() -> tuple[VM, WireVM]:
    vm = VM("there")
    return vm, WireVM(vm)


LOCAL_CALLS = {"attached", "is_same", "lock", "memory_limit", "require_open", "stands_for"}
"""What a VM answers on this side of a wire."""


# --- every VM ------------------------------------------------------------------------

EVERY_VM: dict[str, Callable[[], Any]] = {
    "reference": VM, "local": LocalVM, "workers": lambda: LocalVM(workers=2),
    "wire": lambda: WireVM(LocalVM()), "remote": lambda: connect_to(LocalVM()),
}  # fmt: skip
every_vm = pytest.mark.parametrize("make", EVERY_VM.values(), ids=EVERY_VM)


@every_vm
def test_a_tensor_is_read_into_an_array_of_the_caller(make: Callable[[], Any]) -> None:
    vm = make()
    x = put(vm, f32s(1, 2))
    out = np.zeros((2, 2), np.float32)
    assert vm.read(x, out=out[:, 1]).base is out
    assert out.tolist() == [[0, 1], [0, 2]]
    scalar, empty = (vm.alloc_tensor(TensorType(f32, shape)) for shape in ((), (0,)))
    assert vm.read(scalar, out=np.ones((), np.float32)) == 0
    assert vm.read(empty, np.ones(0, np.float32)).size == 0
    before = out.copy()
    fixed = out[:, 0]
    fixed.flags.writeable = False
    for wrong, error, text in (
        (fixed, errors.ArgumentError, "the array is read-only"),
        (np.zeros(2), errors.DTypeError, "expected an array of dtype .*, got float64"),
        (np.zeros(3, np.float32), errors.ShapeError, r"expected an array of shape .*, got \(3,\)"),
        ([0.0, 0.0], errors.DTypeError, "expected an array, got a list"),
        (np.float32(0), errors.DTypeError, "expected an array, got a float32"),
    ):
        refuses(error, rf"read of f32\[2\] with out=: {text}", vm.read, x, out=wrong)
    refuses(errors.HandleError, "", vm.read, 99, out=out[:, 1])
    assert (out == before).all()
    assert vm.read(x).tolist() == [1, 2]
    vm.close()


@every_vm
@cases("dry", False, True)
def test_a_vm_that_is_closed_holds_nothing_and_says_so(make: Callable[[], Any], dry: bool) -> None:
    vm = DryVM("dry") if dry else make()
    arena = Arena(vm, "weights")
    with arena.allocating():
        x, y = ml.ones(3), ml.ones(3) + 1.0
    handle, storage = vm.alloc_tensor(PAIR), vm.alloc_storage(64)
    program = straight(("push_int", 1), ("pop", 1), "halt")
    vm.launch(program)

    def added() -> ml.Tensor:
        with arena.allocating():
            return x + y

    vm.close()
    vm.close()
    refused = (errors.HandleError, errors.MachineError, errors.ConnectionLostError)
    for call in (
        lambda: vm.read(handle), lambda: vm.write(handle, f32s(1, 2)), lambda: vm.launch(program),
        lambda: vm.launch(ADD_INTO, [handle] * 3), lambda: vm.alloc_tensor(PAIR),
        lambda: vm.alloc_storage(8), lambda: vm.tensor_from_storage(storage, PAIR, 0),
        lambda: vm.swap(handle, handle), added, lambda: x.numpy(), lambda: ml.ones(2, device=vm),
    ):  # fmt: skip
        refuses(refused, "closed", call)
    if not isinstance(vm, RemoteVM):
        assert vm.consumed_size_in_mib() == 0
    vm.dealloc_tensor(handle)
    vm.dealloc_storage(storage)
    arena.close()


def test_what_is_attached_ends_with_the_vm_that_is_closed() -> None:
    vm = LocalVM()
    with ml.use(vm):
        reference = weakref.ref(vm.attached(Regions))
    memory = weakref.ref(root(vm.borrow(vm.alloc_tensor(PAIR))))
    vm.close()
    gc.collect()
    assert reference() is None
    assert memory() is None


# --- every call ----------------------------------------------------------------------


def passed(array: Any) -> None:
    vm, wire_vm = wired()
    handle = put(wire_vm, array)
    assert vm.read(handle).tobytes() == array.tobytes()
    copy = wire_vm.read(handle)
    assert copy.tobytes() == array.tobytes()
    copy[...] = 0
    assert vm.read(handle).tobytes() == array.tobytes()
    [output] = wire_vm.launch(LOAD, [handle])
    assert TensorType.of(output) is TensorType.of(array)
    assert output.tobytes() == array.tobytes()
    output[...] = 0  # the caller's own


def test_launch_and_estimate() -> None:
    vm, wire_vm = wired()
    x, y, z = put(vm, f32s(1, 2)), put(vm, f32s(3, 4)), vm.alloc_tensor(PAIR)
    assert wire_vm.launch(ADD_INTO, (z, x, y)) == []
    first, second = wire_vm.launch(straight(("load_arg", 1), ("load_arg", 0), "halt"), [x, z])
    np.testing.assert_array_equal([first, second], [[4, 6], [1, 2]])
    estimate = wire_vm.estimate(Program.of_op("add", 2, {}, 1), (PAIR, PAIR))
    assert estimate == vm.estimate(Program.of_op("add", 2, {}, 1), (PAIR, PAIR))
    assert (estimate.bytes, estimate.flops) == (8, 2)


def test_a_host_function_may_launch_over_the_wire() -> None:
    vm, wire_vm = wired()
    x = put(vm, f32s(1, 2))

    def again(frame: Frame) -> None:
        frame.push(wire_vm.launch(LOAD, [x])[0])

    vm.register("again", again)
    [output] = wire_vm.launch(straight(("push_str", "again"), ("cfunc", 0, 1), "halt"))
    np.testing.assert_array_equal(output, [1, 2])


# --- programs are sent once ----------------------------------------------------------


def calls_of(wire_vm: WireVM, monkeypatch: Patch) -> list[str]:
    """The names of the calls that the WireVM makes from now on."""
    send, names = wire_vm._send, []

    def spy(message: bytes) -> bytes:
        names.append(decode_call(message)[0])
        answer = send(message)
        assert type(message) is type(answer) is bytes  # nothing else passes
        return answer

    monkeypatch.setattr(wire_vm, "_send", spy)
    return names


def test_a_program_is_sent_once_and_dropped_when_it_dies(monkeypatch: Patch) -> None:
    vm = VM()
    server = WireServer(vm)
    wire_vm = WireVM(vm)
    monkeypatch.setattr(wire_vm, "_send", server.answer)
    names = calls_of(wire_vm, monkeypatch)
    x = put(vm, f32s(1))
    for n in range(3):
        program = straight(("push_int", n), ("load_arg", 0), "halt")
        for _ in range(3):
            wire_vm.launch(program, [x])
        wire_vm.estimate(program, [TensorType(f32, (1,))])
        assert len(server._programs) == 1
    once = ["load_program", "launch", "launch", "launch", "estimate"]
    assert names == [*once, "drop_program", *once, "drop_program", *once]


def test_programs_of_the_same_bytes_are_sent_once_and_only_bytes_pass(monkeypatch: Patch) -> None:
    _, wire_vm = wired()
    names = calls_of(wire_vm, monkeypatch)
    x = put(wire_vm, f32s(1))
    one, other = (straight(("load_arg", 0), "halt") for _ in range(2))
    for program in (one, other):
        wire_vm.launch(program, [x])
    del one
    wire_vm.launch(other, [x])
    assert names == ["alloc_tensor", "write", "load_program", "launch", "launch", "launch"]
    del other, program
    wire_vm.launch(straight("halt"))
    assert names[6:] == ["drop_program", "load_program", "launch"]


def test_a_program_refused_is_sent_again(monkeypatch: Patch) -> None:
    _, wire_vm = wired()
    names = calls_of(wire_vm, monkeypatch)
    program = straight(("push_str", object()))
    for _ in range(2):
        refuses(errors.EncodingError, "can be encoded, got <object", wire_vm.launch, program)
    assert names == []


def test_threads_may_share_a_wire() -> None:
    vm, wire_vm = wired()
    x = put(vm, f32s(1, 2))

    def work(_: int) -> None:
        for n in range(50):
            program = straight(("push_int", n), ("pop", 1), ("load_arg", 0), "halt")
            for _ in range(3):
                for each in (program, LOAD):
                    [output] = wire_vm.launch(each, [x])
                    assert output.tolist() == [1, 2]

    in_threads(work, range(4))


def test_both_ends_are_freed_when_nobody_refers_to_them() -> None:
    vm, wire_vm = wired()
    wire_vm.launch(straight("halt"))
    references = weakref.ref(vm), weakref.ref(wire_vm)
    with uncollected():
        del vm, wire_vm
        assert [reference() for reference in references] == [None, None]


# --- errors --------------------------------------------------------------------------


def of_op(name: str, *args: int) -> Callable[[Any], Any]:
    return lambda vm: vm.launch(Program.of_op(name, len(args), {}, 1), args)


def there_and_back(error: Exception) -> Exception:
    return refuses(Exception, "", decode_answer, "name", encode_error(error))


@pytest.mark.parametrize(
    "kind",
    [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.MlvmError)],
)
def test_every_error_of_mlvm(kind: type[errors.MlvmError]) -> None:
    error = kind(*["why", 3, 7][: 3 if issubclass(kind, errors.AssemblyError) else 1])
    if isinstance(error, errors.OpError):
        error.at("add", [PAIR, "Int 3"])
    error.add_note("a note")
    error.add_note("and another")
    again = there_and_back(error)
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


class MyMachineError(errors.MachineError):
    pass


class MyError(Exception):
    pass


class Unwritable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_any_error_becomes_an_answer() -> None:
    error = MyMachineError("mine")
    error.part = 10**5000  # type: ignore[attr-defined]
    error.inner = [Unwritable()]  # type: ignore[attr-defined]
    again = there_and_back(error)
    assert str(again) == "mine"
    assert vars(again)["part"] == "<int too long to write>"
    assert vars(again)["inner"] == "<list that has no text>"
    assert str(there_and_back(Unwritable("x"))) == "<Unwritable that has no text>"
    assert there_and_back(ValueError(10**5000)).args == ("<int too long to write>",)
    error.__notes__ = [5]  # type: ignore[list-item]
    again = there_and_back(error)
    assert type(again) is errors.MachineError
    assert "cannot be encoded: MyMachineError('mine')" in str(again)


def refused_alike(call: Callable[[Any], object], kind: type[errors.MlvmError]) -> None:
    vm, wire_vm = wired()
    texts = []
    for each in (vm, wire_vm):
        caught = refuses(kind, "", call, each)
        assert type(caught) is kind
        texts.append(str(caught))
    if kind is not errors.HandleError:
        assert texts[0][:100] == texts[1][:100]


def test_an_error_leaves_no_cycle() -> None:
    """The failing caller's values are freed at once, not when the collector comes by."""
    _, wire_vm = wired()

    def fail() -> weakref.ref[Program]:
        program = straight("halt")
        with contextlib.suppress(errors.HandleError):
            wire_vm.launch(program, [0])
        return weakref.ref(program)

    with uncollected():
        assert fail()() is None


# --- bytes that are no message -------------------------------------------------------


def of_fields(kind: Kind, *texts: str) -> bytes:
    writer = Writer()
    for text in texts:
        writer.text(text)
    return writer.message(kind)


def error_message(
    name: str, args: Sequence[Any] = (), parts: Mapping[str, Any] | None = None
) -> bytes:
    writer = Writer()
    writer.text(name)
    writer.sequence(args, Writer.value)
    writer.mapping(parts or {}, Writer.value)
    writer.sequence(["a note"], Writer.text)
    return writer.message(Kind.error)


def test_mutations_of_errors() -> None:
    error = errors.ShapeError("they do not fit").at("add", [PAIR])
    error.add_note("here")
    data = encode_error(error)
    parts = [(data, bytes), (data[16:], framed(Kind.error))]
    assert_well_refused(parts, partial(decode_answer, "name"), errors.MlvmError)


@cases("name", "launch", "estimate", "read", "name")
def test_mutations_of_answers(name: str) -> None:
    results = {"launch": [f32s(1), np.array(True)], "estimate": (3, 4), "read": f32s(1, 2)}
    data = encode_answer(name, results.get(name, "vm"))
    parts = [(data, bytes), (data[16:], framed(Kind.answer))]
    assert_well_refused(parts, partial(decode_answer, name), errors.EncodingError)


def test_mutations_of_calls(vm: VM) -> None:
    server = WireServer(vm)
    x = put(vm, f32s(1, 2))
    storage = vm.alloc_storage(64)
    server.answer(encode_call("load_program", [1, LOAD]))
    calls: dict[str, list[Any]] = {
        "write": [x, f32s(3, 4)], "load_program": [2, ADD_INTO], "launch": [1, [x], 10],
        "estimate": [1, [PAIR]], "swap": [x, x], "tensor_from_storage": [storage, PAIR, 8],
    }  # fmt: skip
    parts = [(encode_call(*call)[16:], framed(Kind.call)) for call in calls.items()]
    before = vm.consumed_size_in_mib()

    def answered(data: bytes) -> None:
        decode_answer("drop_program", server.answer(data))

    assert_well_refused(parts, answered, errors.MlvmError)
    assert vm.consumed_size_in_mib() == before


# --- the page -----------------------------------------------------------------------

PAGE = (ROOT / "docs" / "wire.md").read_text("utf-8")


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose first line starts so."""
    table = PAGE[PAGE.index(f"\n\n| {head} |") + 2 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def test_the_page_lists_every_tag() -> None:
    tags = "".join(re.findall("`(.)`", "".join(row[0] for row in rows("tag"))))
    examples: list[Any] = [None, True, False, 1, 1.0, "s", (), [], {}, f32, PAIR]
    letters = ""
    for example in examples:
        writer = Writer()
        writer.value(example)
        letters += chr(writer.message(Kind.call)[16])
    assert letters == tags


test_rows = claims("wire", globals())


def error_text(error: Exception, kind: type[Exception]) -> None:
    again = there_and_back(error)
    assert type(again) is kind
    raise AssertionError(str(again))


def fails_alike(fail: Callable[..., object]) -> None:
    """A call that goes wrong raises the same error of a VM and of one behind a wire."""
    vm, wire_vm = wired()
    x, y, ended = put(vm, f32s(1, 2)), put(vm, f32s(1, 2, 3)), put(vm, f32s(9))
    vm.dealloc_tensor(ended)
    vm.register("divide by zero", lambda frame: frame.push(1 // 0))
    others = x, y, ended, vm.alloc_storage(64)
    local, far = (refuses(Exception, "", fail, each, *others) for each in (vm, wire_vm))
    assert type(local) not in (TypeError, NameError, AttributeError)
    assert type(far) is type(local)
    assert (str(far), repr(vars(far))) == (str(local), repr(vars(local)))
