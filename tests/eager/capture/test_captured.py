"""`ml.capture` and `ml.measure`: a replay is the eager step, to the bit, or an error.

What reference models train to is in test_models.py, and what
takes from queues in test_queues.py.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    ArenaOverflowError,
    ArgumentError,
    CaptureError,
    DTypeError,
    HandleError,
    ShapeError,
    StaleTensorError,
)
from mlvm.eager import nn, optim
from tests.brief import Capsys, Fn, Patch, cases, line_with, refuses, run_python
from tests.threads import PATIENCE, in_threads, start, taking_turns
from tests.wired import machine

pytestmark = pytest.mark.usefixtures("weights")

HERE = Path(__file__).name


def cross_entropy(model: Any, images: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
    return ml.mean(ml.softmax_cross_entropy(model(images), labels))


def ones(*shape: int) -> ml.Tensor:
    return ml.ones(shape)


# --- gradients of slices --------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
@cases(
    "part, first, update",
    (lambda x, t: x[t], "embed.out", "slice_add.out"),
    (lambda x, t: x[:, t : t + 2], "embed.out", "slice_add.out"),
    (lambda x, t: ml.unstack(x)[t], "embed.out", "slice_add.out"),
    (lambda x, t: ml.split(x, 20)[t], "embed.out", "slice_add.out"),
    (lambda x, t: ml.take(x, ml.arange(3) % 2 + t, axis=0), "scatter_add.out", "index_add.out"),
)
def test_the_plan_of_many_slices_has_one_gradient(
    part: Any, first: str, update: str, fuse: bool
) -> None:
    def step(w: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
        def loss(x: ml.Tensor) -> ml.Tensor:
            return functools.reduce(
                lambda total, t: total + ml.sum(ml.tanh(part(x, t))), range(18), ml.zeros(())
            )

        w -= ml.grad(loss)(x)
        return loss(w)

    captured, x = ml.capture(step, fuse=fuse), ml.random.normal((20, 20, 30))
    weights, expected = ones(20, 20, 30), ones(20, 20, 30)
    for _ in range(3):
        assert captured(weights, x).item() == step(expected, x).item()
        np.testing.assert_array_equal(weights.numpy(), expected.numpy())
    listed = ml.disassemble(captured.program)
    assert listed.count(f'"{first}"') == 1
    assert listed.count(f'"{update}"') == 17
    rows = 18 * 3 * part(x, 0).nbytes  # what the tanh rules keep, and what they make
    assert captured.plan.nbytes < x.nbytes + rows


# --- arguments ---------------------------------------------------------------------------


# --- what the function finds around it -----------------------------------------------------


class Scales(nn.Module):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return x * self.factor


class Trainer:
    def __init__(self) -> None:
        self.w = ones(2)
        self.optimizer = optim.SGD({"w": self.w}, 1.0)
        self.history: list[float] = []

    @ml.capture
    def step(self) -> Any:
        loss, grads = ml.value_and_grad(lambda p: ml.sum(p["w"] * 0.5))({"w": self.w})
        self.optimizer.update(grads)
        return loss


def test_a_method_is_captured_for_each_instance_with_what_it_reaches() -> None:
    first, second = Trainer(), Trainer()
    assert [float(first.step()) for _ in range(2)] == [1.0, 0.5]
    assert float(second.step()) == 1.0
    assert Trainer.step.signatures == 2
    first.history.append(1.0)  # which no step names
    assert float(first.step()) == 0.0
    assert Trainer.step.signatures == 2
    first.optimizer = optim.SGD({"w": first.w}, 0.5, momentum=0.9)
    assert [float(first.step()) for _ in range(2)] == [-0.5, -0.75]
    assert Trainer.step.signatures == 2  # the program of the other optimizer is gone with it
    Trainer.step.close()


@pytest.mark.filterwarnings("ignore::mlvm.eager.RecompilationWarning")
def test_nothing_is_taken_for_something_that_has_died() -> None:
    """Ids are used again; what a program was recorded with lives as long as it."""

    @ml.capture
    def step(x: ml.Tensor, model: Any) -> ml.Tensor:
        return model(x)

    for i in range(50):
        assert step(ones(1), Scales(float(i))).tolist() == [i]
        assert step(ones(1), lambda x, i=i: x + i).tolist() == [1 + i]
        gc.collect(0)


# --- what is held ----------------------------------------------------------------------------


def test_a_stale_tensor_around_the_function_is_named(batch: ml.Arena) -> None:
    with batch:
        w = ml.ones((7,))

        step = ml.capture(lambda x: x * w)

        step(ones(7))
    for _ in range(2):
        refuses(StaleTensorError, r"f32\[7\] of arena 'batch'", step, ones(7))
    recorded_later = ml.capture(lambda x: x * w)
    refuses(StaleTensorError, r"f32\[7\] of arena 'batch'", lambda: recorded_later(ones(7)))
    with batch:
        x = ml.ones((7,))
    refuses(StaleTensorError, r"f32\[7\] of arena 'batch'", step, x)


def test_what_a_function_keeps_by_itself_is_refused_and_stale() -> None:
    hidden: deque[ml.Tensor] = deque()
    by_a_method = ml.capture(lambda x: hidden.extend([x, x + 1]))
    refuses(CaptureError, "stored in an object that was not found", lambda: by_a_method(ones(2)))
    assert len(hidden) == 2
    for x in hidden:
        refuses(StaleTensorError, "", x.numpy)
        with pytest.raises(StaleTensorError):
            x + 1


def test_what_a_pullback_leaves_in_cycles_is_not_kept() -> None:
    """Its tape ends in one collection, and what the tape had only in the next."""

    def halved(x: ml.Tensor) -> ml.Tensor:
        def again(n: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
            return ml.cond(n < 1, lambda: x, lambda: halve(n - 1, x * 0.5))

        halve = ml.subroutine(again)
        return ml.sum(halve(ml.asarray(1), x))

    step = ml.capture(lambda x: ml.vjp(halved, x)[0])
    assert float(step(ones(4))) == 2.0


def test_what_nobody_refers_to_is_freed_at_once(weights: ml.Arena) -> None:
    def scaling_by(w: ml.Tensor) -> Any:
        return ml.capture(lambda x: x * w)

    with uncollected():
        captured, x = scaling_by(ones(3)), ones(3)
        for _ in range(3):  # a known call keeps no arguments alive, either
            y = captured(x)
        references = weakref.ref(captured), weakref.ref(x)
        del x
        assert references[1]() is None
        del y, captured
        assert references[0]() is None
        assert weights.used == 0


def test_scratch_is_the_plan_and_goes_with_the_captured_function(vm: Any) -> None:
    def step(x: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.softmax(ml.matmul(x, x), axis=-1))

    x, small = ones(40, 40), ones(8, 8)
    ml.capture(step)(x)  # constants and all that
    gc.collect()
    before = vm.consumed_size_in_mib()
    captured = ml.capture(step)
    results = captured(x), captured(small), captured(x)
    assert captured.signatures == 2
    largest = captured.plan.nbytes
    assert vm.consumed_size_in_mib() == before + largest / 2**20
    captured.close()
    assert vm.consumed_size_in_mib() == before
    assert captured.signatures == 0
    assert captured(x).tolist() == results[0].tolist()  # records anew
    assert vm.consumed_size_in_mib() == before + largest / 2**20
    del captured
    gc.collect()
    assert vm.consumed_size_in_mib() == before


def test_a_captured_function_says_nothing_when_python_ends() -> None:
    program = "import importlib as kept, mlvm.eager as ml; step = ml.capture(ml.exp)"
    program += "; step(ml.ones(2)); kept.step = step"
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_vm_may_die_after_what_was_captured_on_it() -> None:
    captured = ml.capture(lambda x: ml.sum(ml.softmax(x, axis=-1)))
    for _ in range(2):
        with ml.Arena(ml.VM(), "weights").allocating():
            assert float(captured(ones(2, 4))) == 2.0
    captured.close()
    captured.close()


# --- what cannot be captured -----------------------------------------------------------------


READS: dict[str, Fn] = {
    "a float": lambda x: x * float(x[0]),
    "an array": lambda x: x.numpy(),
    "a text": lambda x: f"{ml.sum(x):.4f}",
    "a branch": lambda x: x if x[0] > 0 else -x,
    "an error of its own": lambda x: x * (1 // len(PADS[1:])),
    "a body": lambda x: ml.fori_loop(0, 2, lambda i, s: s * float(ml.sum(s)), x),
    "a length of a range": lambda x: list(range(ml.argmax(x))),
    "nonzero": lambda x: ml.nonzero(x),
    "a mask": lambda x: x[x > 0],
    "a host function": lambda x: ml.host_call("host", x),
    "a scratch pad": lambda x: x + PADS[-1].tensor("f32[3]", 0),
}
PADS: list[Any] = []


@pytest.mark.parametrize("nested", [False, True], ids=["", "differentiated"])
@pytest.mark.parametrize("name", READS)
def test_what_a_replay_could_not_do_is_refused_with_its_line(
    name: str, nested: bool, vm: Any, weights: ml.Arena
) -> None:
    fn = READS[name]
    machine(vm).register("host", lambda frame: frame.push(frame.param(0)))
    PADS[:] = [ml.ScratchPad(vm, 64)]
    x = ml.asarray(np.array([1.0, 2.0, 3.0], np.float32))
    w = ones(3)
    ml.random.normal((1,))

    def around(x: ml.Tensor) -> Any:
        nonlocal w
        w += ml.random.uniform(3)
        return ml.grad(lambda y: ml.sum(y * w) + 0.0 * bool(fn(y) is None))(x) if nested else fn(x)

    captured = ml.capture(around)
    usage = vm.consumed_size_in_mib(), weights.used, ml.random.state().tobytes()
    for _ in range(2):
        is_own = name == "an error of its own"
        caught = refuses(ZeroDivisionError if is_own else CaptureError, "", captured, x)
        assert is_own or f"{HERE}:{fn.__code__.co_firstlineno}" in str(caught)
        del caught
        gc.collect()
        assert captured.signatures == 0
        assert w.tolist() == [1, 1, 1]
        now = vm.consumed_size_in_mib(), weights.used, ml.random.state().tobytes()
        assert now == usage
    assert (x + w).tolist() == [2, 3, 4]
    PADS.clear()


def test_keeping_a_tensor_in_an_arena_entered_inside_is_refused(weights: ml.Arena) -> None:
    best: list[Any] = []

    def step(x: ml.Tensor) -> ml.Tensor:
        with weights.allocating():
            best[:] = [x * 2]  # kept here
        return x + 1

    caught = refuses(CaptureError, "stored in arena 'weights'", lambda: ml.capture(step)(ones(3)))
    assert line_with("# kept here", __file__) in str(caught)

    @ml.capture
    def by_keep(x: ml.Tensor) -> ml.Tensor:
        best[:] = [weights.keep(x)]
        return x + 1

    refuses(CaptureError, "stored in arena 'weights'", lambda: by_keep(ones(3)))
    best.clear()


def test_what_an_arena_left_inside_has_ended_is_not_returned(batch: ml.Arena) -> None:
    @ml.capture
    def step(x: ml.Tensor) -> ml.Tensor:
        with batch:
            return x * 2

    refuses(CaptureError, r"was freed: .*f32\[3\] of arena 'batch'", lambda: step(ones(3)))


def test_a_tensor_prints_as_its_type_at_the_recording(capsys: Capsys) -> None:
    w = ones(2)

    @ml.capture
    def step(x: ml.Tensor) -> None:
        y = ml.reshape(x * 2, (1, 3))
        print(x, y, f"{y} {[w]!r} {x!s}")

    for _ in range(2):
        step(ones(3))
    text = "<captured f32[1,3]> [<captured f32[2]>] <captured f32[3]>"
    assert capsys.readouterr().out == f"<captured f32[3]> <captured f32[1,3]> {text}\n"
    assert "1." in repr(w)


def test_pads_lie_over_each_other_and_are_refused_as_arguments(vm: Any) -> None:
    pad = ml.ScratchPad(vm, 64)
    captured = ml.capture(lambda x: x + 1.0)
    captured(ones(4))
    refuses(CaptureError, "scratch pad", lambda: captured(pad.tensor("f32[4]", 0)))


def test_only_functions_are_captured() -> None:
    refuses(CaptureError, "expected a function", ml.capture, 3)  # type: ignore[arg-type]
    for name in ("plan", "program", "planned"):
        refuses(CaptureError, "not been called", getattr, ml.capture(lambda: None), name)


def test_options_are_given_to_the_decorator() -> None:
    @ml.capture(fuse=False)
    def plain(x: ml.Tensor, scale: float = 2.0) -> ml.Tensor:
        """Says what it does."""
        return ml.exp(x) * scale + 1

    @ml.capture()
    def default(x: ml.Tensor) -> ml.Tensor:
        return ml.exp(x) * 2.0 + 1

    @ml.capture(recompute=False)
    def without_recompute(x: ml.Tensor) -> ml.Tensor:
        return x

    assert_type(plain(ml.ones(3)), ml.Tensor)
    if TYPE_CHECKING:
        plain("x")  # type: ignore[arg-type]
        plain.fn(ml.ones(3), scale="y")  # type: ignore[arg-type]
    assert (plain.fuse, plain.recompute, plain.__doc__) == (False, True, "Says what it does.")
    assert (default.fuse, default.recompute, without_recompute.recompute) == (True, True, False)
    assert plain(ml.ones(3)).tolist() == default(ml.ones(3)).tolist()
    with pytest.raises(CaptureError, match="expected a function"):
        ml.capture(fuse=False)(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["fuse", "recompute", "hoist"])
def test_an_option_is_a_bool(option: str) -> None:
    options: dict[str, Any] = {option: "no"}
    capture: Any = ml.capture
    refuses(ArgumentError, f"capture: expected a bool as {option}, got 'no'", capture, **options)
    refuses(ArgumentError, "capture: ", capture, ml.sin, **options)
    refuses(ArgumentError, "measure: ", ml.measure, ml.sin, ml.ones(3), **options)


# --- errors in the middle --------------------------------------------------------------------


def test_ops_that_refuse_types_say_so_at_the_recording() -> None:
    captured = ml.capture(lambda x, y: ml.matmul(x, y))
    refuses(ShapeError, "matmul", lambda: captured(ones(2, 3), ones(2, 3)))
    refuses(DTypeError, "", captured, ml.ones((2, 2), dtype="bool"), ml.ones((2, 2), dtype="bool"))
    assert captured.signatures == 0


def test_a_plan_names_the_file_of_its_function_where_two_have_equal_text() -> None:
    for file in ("first.py", "second.py"):
        names: dict[str, Any] = {"ml": ml}
        exec(compile("def step(x): return ml.sort(x) * 2.0", file, "exec"), names)
        step = ml.capture(names["step"])
        step(ones(3))
        assert {str(line) for line in step.planned.lines.values()} == {f"{file}:1"}


def test_memory_that_is_not_there_leaves_the_function_usable(vm: Any, monkeypatch: Patch) -> None:
    captured = ml.capture(lambda x: ml.sum(ml.softmax(x, axis=-1)))
    x = ones(4, 4)
    alloc = vm.alloc_storage

    def refuse(nbytes: int) -> int:
        raise ml.errors.OutOfMemoryError("none left")

    monkeypatch.setattr(vm, "alloc_storage", refuse)
    refuses(ml.errors.OutOfMemoryError, "", captured, x)
    monkeypatch.setattr(vm, "alloc_storage", alloc)
    assert float(captured(x)) == 4.0


def test_results_that_do_not_fit_their_arena_overflow(vm: Any) -> None:
    small = ml.Arena(vm, "small", capacity=64)
    captured = ml.capture(lambda x: (x + 1, x + 2))
    with small, pytest.raises(ArenaOverflowError, match="small"):
        captured(ones(16))
    assert small.used == 0
    assert [y.tolist() for y in captured(ones(1))] == [[2], [3]]


def test_tensors_of_another_vm_are_refused() -> None:
    other = ml.Arena(ml.VM("other"), "there")
    with other.allocating():
        x = ones(1, 2)
    captured = ml.capture(lambda y: ml.reshape(y, (2,)) + 1)
    for _ in range(3):  # the operand is named as it was passed, also by calls that are replayed
        refuses(HandleError, r"f32\[1,2\] is on the VM other", captured, x)
        captured(ones(1, 2))
    refuses((HandleError, CaptureError), "", lambda: ml.capture(lambda: x + 1)())
    with other.allocating():
        assert captured(x).tolist() == [2, 2]


# --- nesting, threads, VMs ---------------------------------------------------------------------


def test_a_captured_function_is_not_differentiated() -> None:
    captured, x = ml.capture(lambda x: x * 2.0), ml.ones(2)
    for _ in range(3):
        text = "capture the function that takes the gradient"
        refuses(ml.errors.GradientError, text, ml.grad(lambda x: ml.sum(captured(x))), x)
        captured(x)


def test_a_thread_joined_inside_records_on_the_same_vm(vm: Any) -> None:
    scale = ones(2)
    inner = ml.capture(lambda x: ml.exp(x - 1.0) * scale + 2.5)

    def layers() -> list[Any]:
        return list(vars(vm).get("_layers", {}).get("launch", []))

    before = layers()
    results = vars(vm).setdefault("found", [])  # in what no signature looks into

    def work() -> None:
        with ml.Arena(vm, "other").allocating():
            for _ in range(2):
                vars(vm)["found"].append(inner(ones(2) + 0.0).tolist())

    @ml.capture
    def outer(x: ml.Tensor) -> Any:
        y = x + 2.5
        start(work).result(PATIENCE)
        return y * scale

    for _ in range(2):
        assert outer(ones(2)).tolist() == [3.5, 3.5]
    assert results == [[3.5, 3.5]] * 2
    assert inner.signatures == outer.signatures == 1
    assert layers() == before


def test_what_another_thread_makes_meanwhile_is_refused(vm: Any) -> None:
    tensors: list[Any] = []
    other = ml.Arena(vm, "other")

    def work() -> None:
        with other.allocating():
            tensors.append(ones(2) * 3.0)

    def step(x: ml.Tensor) -> Any:
        start(work).result(PATIENCE)
        return x + tensors.pop()  # used here

    caught = refuses(CaptureError, "", lambda: ml.capture(step)(ones(2)))
    assert line_with("# used here", __file__) in str(caught)


def test_a_captured_function_is_closed_beside_calls_on_other_threads(vm: Any) -> None:
    captured = ml.capture(lambda x: ml.sum(ml.softmax(x, axis=-1) * 1.0, axis=-1) * x[:, 0])
    done = threading.Event()

    def work(number: int) -> None:
        arena = ml.Arena(vm, f"thread {number}")
        for i in range(120):
            with arena:
                result = captured(ml.full((3 + i % 2, 4), float(number))).numpy()
                np.testing.assert_allclose(result, number, rtol=1e-5)

    def close() -> None:
        while not done.is_set():
            captured.close()
            assert captured.signatures >= 0

    with taking_turns(1e-5):
        closing = start(close)
        try:
            in_threads(work, range(3))
        finally:
            done.set()
        closing.result(PATIENCE)
    captured.close()


def test_a_function_is_not_measured_inside_a_captured_one() -> None:
    step = ml.capture(lambda x: ml.measure(lambda y: y + 1, x))
    refuses(CaptureError, "measure a function inside a captured function", lambda: step(ones(2)))


@cases(
    "use",
    lambda y: y + 1.0,
    lambda y: y.__iadd__(1.0),
    lambda y: ml.fori_loop(0, 2, lambda i, s: (y.__imul__(2.0), s)[1], y),
    ids=["launched", "updated", "in a body"],
)
def test_what_a_captured_function_does_on_another_vm_is_refused(use: Fn) -> None:
    """A later call would not do it."""
    arena = ml.Arena(ml.VM("other"), "elsewhere")
    with arena.allocating():
        y = ml.ones(3)

    def step(x: ml.Tensor) -> ml.Tensor:
        with arena.allocating():
            use(y)
        return x * 2.0

    message = r"of VM 'other' inside a captured function on VM 'weights'"
    refuses(CaptureError, message, ml.capture(step), ml.zeros(3))


def test_an_error_on_workers_is_gone_with_the_next_good_replay() -> None:
    vm = ml.VM("workers", workers=2)
    with ml.Arena(vm, "weights").allocating():

        @ml.capture
        def step(x: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
            losses = ml.softmax_cross_entropy(ml.exp(x), labels)
            return ml.mean(ml.exp(ml.negative(ml.abs(losses) * 2)) + 1)

        x = ones(2, 3)
        good, bad = ml.asarray(np.array([0, 2])), ml.asarray(np.array([0, 3]))
        expected = step(x, good).tolist()
        refuses(ml.errors.OperandValueError, "", lambda: step(x, bad).numpy())
        assert step(x, good).tolist() == expected
        step.close()
    machine(vm).close()


# --- measuring ---------------------------------------------------------------------------------


def test_what_was_measured_is_printed_in_two_lines() -> None:
    measured = ml.measure(lambda x: ml.sum(ml.sort(x)), ml.TensorType("f32", [1000]))
    assert repr(measured).splitlines() == [
        "eagerly, in an arena: 4,096 bytes",
        f"captured: {measured.plan}",
    ]
    write = r"'f32\[2,4\]'; write ml.TensorType\(\"f32\", \(2, 4\)\)"
    refuses(CaptureError, write, ml.measure, ml.sin, "f32[2,4]")
    refuses(CaptureError, write, ml.measure, lambda x: x, x="f32[2,4]")
    refuses(CaptureError, write, ml.measure, lambda x: x, {"a": ["f32[2,4]"]})


# --- what a captured function is -----------------------------------------------------------------


def test_a_captured_function_can_be_looked_at(tmp_path: Path) -> None:
    def _softmax(x: ml.Tensor) -> ml.Tensor:
        """The softmax, and more."""
        return ml.softmax(x, axis=-1) * 2

    step: Any = ml.capture(_softmax)
    assert (step.__name__, step.__doc__) == ("_softmax", "The softmax, and more.")
    assert "0 programs" in repr(step)
    step(ones(2, 2))
    assert "1 program" in repr(step)
    assert "softmax.out" in ml.disassemble(step.program)
    by_lambda = ml.capture(lambda x: x + 1)
    by_lambda(ones(2, 2))
    for each, title in ((step, "softmax"), (by_lambda, "lambda")):  # which is no private name
        each.plot(tmp_path / "step.svg")
        picture = (tmp_path / "step.svg").read_text()
        assert picture.startswith("<svg")
        assert f">Memory plan of {title}</text>" in picture


def test_a_module_that_is_captured_lends_it_no_fields() -> None:
    model = Scales(1.0)
    model.plan = "mine"  # type: ignore[attr-defined]
    model.fuse = "mine"  # type: ignore[attr-defined]
    captured: Any = ml.capture(model)
    assert captured(ones(1)).tolist() == [1]
    assert captured.plan.nbytes == 0
    assert captured.fuse is True


# --- what runs later, or changes what is given ------------------------------------------------


def in_generator(x: ml.Tensor) -> Iterator[ml.Tensor]:
    for i in range(2):
        yield x * i


async def in_coroutine(x: ml.Tensor) -> ml.Tensor:
    return x * 2


@cases(
    "fn, kind",
    pytest.param(in_generator, "generator", id="generator"),
    pytest.param(lambda x: {"a": [map(abs, [x])]}, "map", id="map"),
    pytest.param(lambda x: iter([x]), "list_iterator", id="iterator"),
    pytest.param(in_coroutine, "coroutine", id="coroutine"),
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_result_that_runs_after_the_call_is_refused(fn: Any, kind: str) -> None:
    """It would be empty from the second call on."""
    captured, x = ml.capture(fn), ml.ones(2)
    for _ in range(2):
        refuses(CaptureError, f"returns a {kind}, which would run after the call", captured, x)
    assert captured.signatures == 0


PUTS: dict[str, Callable[[Any, ml.Tensor], object]] = {
    "a tensor": lambda state, x: state.update(mean=state["mean"] * 0.5 + x),
    "a number": lambda state, x: state.update(count=state["count"] + 1),
    "taken out": lambda state, x: state.pop("mean") + x,
    "inside": lambda state, x: state["parts"][0].append(x),
}


@pytest.mark.parametrize("fn", PUTS.values(), ids=PUTS)
@pytest.mark.parametrize("name", [0, "state"])
def test_a_function_that_changes_a_dict_or_list_it_is_given_is_refused(fn: Any, name: Any) -> None:
    """It gets a copy, so the change would be lost, and no later call would make it."""
    captured, x, mean = ml.capture(fn), ml.ones(2), ml.zeros(2)
    state = {"mean": mean, "count": 0, "parts": ([],)}
    with pytest.raises(CaptureError, match=f"changes argument {name!r}, a dict"):
        captured(state, x) if name == 0 else captured(x=x, state=state)
    assert state == {"mean": mean, "count": 0, "parts": ([],)}


def test_what_a_caller_changes_in_a_result_is_his_own() -> None:
    captured = ml.capture(lambda x: (x + 1.0, np.zeros(2), {1}))
    for _ in range(2):
        _, array, names = captured(ml.ones(2))
        assert (array.tolist(), names) == ([0, 0], {1})
        array += 1
        names.add(2)
