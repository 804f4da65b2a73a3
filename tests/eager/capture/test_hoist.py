"""Values that depend on weights alone are computed once, and again exactly after a write to
them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.writes import written
from mlvm.core.observe import observe
from mlvm.core.ops import half
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.eager.capture.hoisted import HoistCache
from mlvm.eager.tree import load, named_tensors
from mlvm.machines.wire import WireVM
from mlvm.step.flow import Call
from mlvm.step.saved import LoadedStep, SavedStep
from tests.brief import refuses

VMS: dict[str, Callable[[], Any]] = {
    "native": lambda: ml.VM(),
    "reference": lambda: ml.VM(native=False),
    "workers": lambda: ml.VM(workers=2),
    "wire": lambda: WireVM(ml.VM()),
}
_BEHIND_A_WIRE = pytest.mark.local(reason="the wire needs a VM of this process behind it")
KINDS = [pytest.param(kind, marks=_BEHIND_A_WIRE if kind == "wire" else ()) for kind in VMS]


class Model(ml.nn.Module):
    """Weights that are converted, transposed and scaled before they are used."""

    def __init__(self) -> None:
        self.w = ml.random.normal((6, 4), key=ml.random.key(1))
        self.b = ml.zeros(6)
        self.norm = ml.nn.BatchNorm(6)

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        w = ml.astype(ml.astype(self.w, "f64").T * 2.0, "f32")
        return self.norm(x @ w + ml.exp(self.b))


def calls(captured: Any) -> int:
    return ml.disassemble(captured.program).count("cfunc")


def launched_by_hand(model: Model) -> None:
    vm, w = model.w.arena.vm, model.w
    vm.launch(Program.of_op("negative.out", 2, {}, 0), [w.handle, w.handle])


KEPT: list[ml.Tensor] = []


def swapped(model: Model) -> None:
    other = model.w + 1.0
    KEPT.append(other)  # or its memory, now that of w, would be given to others
    model.w.arena.vm.swap(model.w.handle, other.handle)


def moved_there_and_back(model: Model) -> None:
    for _ in range(3):  # into memory that it has had before
        view = model.w.reshape(4, 6)
        model.w += 1.0
        del view


def loaded(model: Model) -> None:
    tensors = dict(named_tensors(model))
    load(tensors, {name: np.asarray(x) + 0.25 for name, x in tensors.items()}, "a file")


def in_a_listing(model: Model) -> None:
    program = ml.program_of(lambda: model.w.__iadd__(1.0))
    model.w.arena.vm.launch(program)


def trained(model: Model) -> None:
    def loss(model: Model, x: ml.Tensor) -> ml.Tensor:
        return ml.sum(model(x))

    def step(x: ml.Tensor) -> None:
        grads = ml.grad(loss)(model, x)
        model.w -= 0.1 * grads["w"] if isinstance(grads, dict) else 0.1 * grads.w

    ml.capture(step)(ml.ones((2, 4)))


WRITES: dict[str, Callable[[Model], object]] = {
    "an update": lambda m: m.w.__iadd__(1.0),
    "an update of a part": lambda m: m.w.__setitem__((0, slice(1, 3)), 5.0),
    "a buffer's update": lambda m: m.norm.var.__imul__(4.0),
    "the VM's write": lambda m: m.w.arena.vm.write(m.w.handle, np.ones((6, 4), "f4")),
    "a launch": launched_by_hand,
    "a swap": swapped,
    "a move": moved_there_and_back,
    "a load": loaded,
    "another tensor": lambda m: m.__setattr__("w", m.w * 2.0),
    "a listing": in_a_listing,
    "a captured update": lambda m: ml.capture(lambda: m.w.__iadd__(1.0))(),
    "training": trained,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_call_uses_what_was_written(kind: str) -> None:
    with ml.use(VMS[kind]()):
        model = Model().eval()
        plain = ml.capture(lambda x: model(x), hoist=False)
        step = ml.capture(lambda x: model(x))
        x = ml.random.normal((3, 4), key=ml.random.key(2))
        before = None
        for name, write in WRITES.items():
            for _ in range(2):  # the second is told in C
                assert np.array_equal(step(x), plain(x)), name
                assert np.array_equal(step(x), model(x)), name
            now = np.asarray(step(x))
            assert before is None or not np.array_equal(now, before), name
            before = now
            write(model)
            assert np.array_equal(step(x), model(x)), name
        assert calls(step) < calls(plain)
        assert step.plan.hoisted_nbytes > 0 == plain.plan.hoisted_nbytes
        assert f"{step.plan.hoisted_nbytes:,} bytes are computed before the first launch" in str(
            step.plan
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", ["an update", "the VM's write", "a move", "training"])
def test_weights_that_change_before_each_call_are_used_as_they_are(
    kind: str, write: str, tmp_path: Path
) -> None:
    with ml.use(VMS[kind]()):
        model, x = Model().eval(), ml.random.normal((3, 4), key=ml.random.key(2))
        step = ml.capture(lambda x: model(x))
        plain = ml.capture(lambda x: model(x), hoist=False)
        plain(x)
        hits = []
        for stays in (0, 0, 0, 0, 1, 0, 1, 1, 0):
            if not stays:
                WRITES[write](model)
            result = step(x)
            hits.append(calls(step) < calls(plain))
            assert np.array_equal(result, model(x))
            assert np.array_equal(result, plain(x))
        assert hits == [True, True, False, False, True, False, True, True, False]
        assert step.plan.hoisted_nbytes > 0
        assert step.plan.nbytes == plain.plan.nbytes
        assert step.signatures == 1
        step.save(tmp_path / "step.mlvm")  # with what is computed ahead
        saved = SavedStep.from_bytes((tmp_path / "step.mlvm").read_bytes())
        assert saved.states[0].shape == (4, 6)
        [y] = LoadedStep(saved, ml.VM(native=False))(np.asarray(x))
        assert np.allclose(y, np.asarray(result), rtol=1e-5)


def test_weights_that_stay_for_some_calls_need_no_second_program() -> None:
    model, x = Model().eval(), ml.ones((3, 4))
    step = ml.capture(lambda x: model(x))
    plain = ml.capture(lambda x: model(x), hoist=False)
    plain(x)
    for _ in range(4):
        model.w += 1.0
        for _ in range(3):
            assert np.array_equal(step(x), model(x))
            assert calls(step) < calls(plain)


@pytest.mark.skipif(not ml.VM().native, reason="binds no programs")
def test_programs_stay_bound_where_nothing_ahead_needs_scratch_memory() -> None:
    vm = ml.VM()
    with ml.use(vm):
        w, x = noise((260, 260)), noise((3, 260))
        step, update = ml.capture(lambda x: x @ w), ml.capture(lambda: w.__imul__(0.5))
        out = [step(x), update()]
        freed = []
        observe(vm, dealloc_storage=lambda proceed, handle: freed.append(proceed(handle)))
        update()
        out.append(step(x))
        assert "packed_" in ml.disassemble(step.program)
        assert not freed
        del out


@pytest.mark.local(reason="only a VM of this process lends its memory")
def test_what_is_borrowed_may_be_written() -> None:
    model, x = Model().eval(), ml.ones((3, 4))
    step = ml.capture(lambda x: model(x))
    step(x)
    model.w.arena.vm.borrow(model.w.handle)[...] = 3.0  # type: ignore[attr-defined]
    assert np.array_equal(step(x), model(x))


@pytest.mark.local(reason="only VMs of this process share memory")
@pytest.mark.parametrize("before", [False, True])
def test_what_is_shared_may_be_written_elsewhere(before: bool) -> None:
    others = ml.VM()
    with ml.use(ml.VM()):
        model, x = Model().eval(), ml.ones((3, 4))
        vm, w = model.w.arena.vm, model.w.handle
        handle = vm.share(w, others) if before else -1  # type: ignore[attr-defined]
        step = ml.capture(lambda x: model(x))
        assert np.array_equal(step(x), model(x))
        handle = handle if before else vm.share(w, others)  # type: ignore[attr-defined]
        for k in range(2):
            others.write(handle, np.full((6, 4), k, "f4"))
            assert np.array_equal(step(x), model(x))
            assert step.planned.hoisted is None  # nothing is computed ahead in vain


def test_a_weight_that_has_ended_is_refused() -> None:
    arena = ml.Arena(ml.VM(), "weights")
    with ml.use(arena.vm), arena.allocating():
        model = Model().eval()
    with ml.use(arena.vm):
        step, x = ml.capture(lambda x: model(x)), ml.ones((3, 4))
        step(x)
        arena.reset()
        refuses(ml.errors.StaleTensorError, "was reset", step, x)


def test_programs_of_one_function_share_it_and_close_gives_it_back() -> None:
    vm = ml.VM()
    with ml.use(vm):
        model = Model().eval()
        step = ml.capture(lambda x: model(x), dynamic_axes=False)
        inputs = [ml.ones((n, 4)) for n in range(1, 5)]
        outs = [step(x) for x in inputs]
        step.close()
        before = vm.consumed_size_in_mib()
        outs = [step(x) for x in inputs]
        assert step.signatures == 4
        assert vm.consumed_size_in_mib() > before
        [hoisted] = vm.attached(HoistCache).values
        assert hoisted._arena.capacity == hoisted._arena.used == step.plan.hoisted_nbytes
        assert "hoisted values of <lambda>" in hoisted._arena.report()
        del outs, hoisted
        step.close()
        assert vm.consumed_size_in_mib() == before


def test_functions_over_one_model_share_it_until_the_last_ends() -> None:
    vm = ml.VM()
    with ml.use(vm):
        model = Model().eval()
        first, second = (ml.capture(lambda x: model(x)) for _ in range(2))
        x = ml.ones((2, 4))
        results = [step(x).numpy() for step in (first, second)]
        assert len(vm.attached(HoistCache).values) == 1
        first.close()
        model.w += 1.0
        results += [second(x).numpy(), model(x).numpy()]
        second.close()
        assert not vm.attached(HoistCache).values
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[2], results[3])
    assert not np.array_equal(results[0], results[2])


def test_what_is_shared_keeps_no_other_weight_alive() -> None:
    with ml.use(ml.VM()):
        w, x, others = ml.ones(3), ml.ones(3), [ml.ones(3)]
        reference = weakref.ref(others[0])
        first = ml.capture(lambda x: x * ml.exp(w) + others[0])
        second = ml.capture(lambda x: x * ml.exp(w))
        first(x)
        second(x)
        assert len(w.arena.vm.attached(HoistCache).values) == 1
        del first
        others.clear()
        assert reference() is None


def test_what_takes_far_more_than_it_is_made_of_stays() -> None:
    row, mask = ml.ones(3000), ml.ones(3000, dtype="u8")

    def wide(x: ml.Tensor) -> ml.Tensor:
        return x * ml.sum(ml.exp(ml.broadcast_to(row * 2.0, (8, 3000)) * 2.0), axis=0)

    step = ml.capture(wide)
    assert np.array_equal(step(row), wide(row))
    assert step.plan.hoisted_nbytes == 12032
    step = ml.capture(lambda x: x * ml.astype(mask, "f64"))
    step(row.astype("f64"))
    assert step.plan.hoisted_nbytes == 0  # eight times as much
    step = ml.capture(lambda x: x * ml.astype(mask, "f32"))
    step(row)
    assert step.plan.hoisted_nbytes == 12032


def test_inside_loops_and_branches() -> None:
    w = ml.random.normal((5, 5), key=ml.random.key(3))

    def looped(x: ml.Tensor) -> ml.Tensor:
        def body(i: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
            x = ml.cond(ml.sum(x) > 0.0, lambda x: x @ (w.T * 0.1), lambda x: x + w[0], x)
            return x + ml.tanh(w)

        return ml.fori_loop(0, 3, body, x)

    step, plain = ml.capture(looped), ml.capture(looped, hoist=False)
    x = ml.random.normal((5, 5), key=ml.random.key(4))
    for _ in range(2):
        assert np.array_equal(step(x), looped(x))
        assert np.array_equal(plain(x), looped(x))
        w *= 1.5
    assert step.plan.hoisted_nbytes == 2 * 128 + 64
    assert calls(step) < calls(plain)


def test_what_a_program_may_write_to() -> None:
    one = Program.of_op("add.out", 3, {}, 0)
    assert written(one) == frozenset({0})
    assert written(Program.of_op("add", 2, {}, 1)) == frozenset()
    assert written(Program.of_op("mine", 2, {}, 0)) == frozenset({0, 1})
    assert written(Program.of_op("machine.check", 1, {"message": ""}, 0)) == frozenset()
    other = 'push_int 9|load_global|load_arg 0|push_str "copy.out"|cfunc 2 0'
    code: dict[str, set[int] | None] = {
        'load_arg 1|get 0|load_arg 2|push_str "add.out"|cfunc 3 0': {1},
        'load_arg 0|set 0|push_str "x"|cfunc * *': {0},
        "load_arg 3|call f": {3},
        other: None,
    }
    function = '.func f 1 0|get -1|get -1|push_str "exp.out"|cfunc 2 0|return 0'
    for text, expected in code.items():
        program = assemble(f".func main 0 *|{text}|halt|{function}".replace("|", "\n"))
        assert written(program) == (None if expected is None else frozenset(expected)), text


# --- weights in panels ---------------------------------------------------------------


def noise(shape: tuple[int, ...], dtype: str = "f32") -> ml.Tensor:
    x = ml.random.normal(shape, key=ml.random.key(len(shape)))
    return ml.astype(x, dtype)


def in_a_loop(x: ml.Tensor, w: ml.Tensor) -> ml.Tensor:
    def body(i: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
        return ml.cond(i > 0, lambda x: x @ w, ml.tanh, x)

    return ml.fori_loop(0, 2, body, x)


Product = Callable[[ml.Tensor, ml.Tensor], ml.Tensor]
PACKED: dict[str, tuple[Product, tuple[int, ...], tuple[int, ...], str]] = {
    "rows": (lambda x, w: ml.relu(x @ w) + x, (3, 260), (260, 260), "f32"),
    "blocks": (lambda x, w: x @ w, (50, 720), (720, 100), "f32"),
    "transposed": (
        lambda x, w: ml.matmul(x, w, transpose_x=True, transpose_y=True) - w[0, 0],
        *((2, 720, 20), (97, 720), "f32"),
    ),
    "bf16": (lambda x, w: x @ w, (9, 721), (721, 100), "bf16"),
    "pairs": (
        lambda x, w: ml.gelu(ml.matmul(x, w, transpose_y=True)),
        *((40, 272), (260, 272), "bf16"),
    ),
    "windows": (
        lambda x, w: ml.relu(ml.conv2d(x, w, stride=2)),
        *((1, 9, 9, 100), (3, 3, 100, 75), "f32"),
    ),
    "pixels": (lambda x, w: ml.conv2d(x, w) + 1.0, (2, 3, 4, 260), (1, 1, 260, 270), "f32"),
    "made": (lambda x, w: x @ (w * 2.0).T, (3, 260), (260, 260), "f32"),
    "loop": (in_a_loop, (3, 260), (260, 260), "f32"),
}


@pytest.mark.skipif(not ml.VM().native, reason="numpy packs nothing")
@pytest.mark.parametrize("case", PACKED)
def test_weights_are_packed_once_and_no_bit_changes(case: str, tmp_path: Path) -> None:
    fn, rows, weights, dtype = PACKED[case]
    vm = ml.VM(threads=2)
    with ml.Arena(vm, "panels").allocating():
        x, w = noise(rows, dtype), noise(weights, dtype)
        step, plain = ml.capture(lambda x: fn(x, w)), ml.capture(lambda x: fn(x, w), hoist=False)
        for _ in range(2):
            result = step(x).numpy()
            assert np.array_equal(result, plain(x).numpy())
            assert np.array_equal(result, fn(x, w).numpy())
            w += w
        step(x)
        result = vm.read(step(x).handle)  # its weights have stayed
        assert "packed_" in ml.disassemble(step.program)
        assert w.nbytes <= step.plan.hoisted_nbytes <= 1.4 * w.nbytes
        step.save(tmp_path / "step.mlvm")
        saved = SavedStep.from_bytes((tmp_path / "step.mlvm").read_bytes())
        argument = vm.read(x.handle)
    [again], [reference] = (
        LoadedStep(saved, ml.VM(native=native))(argument) for native in (True, False)
    )
    assert np.array_equal(again, result)
    if dtype == "bf16":
        result, reference = half.widened(result), half.widened(reference)
    error = np.abs(np.subtract(result, reference, dtype="f8")).max()
    assert error <= np.abs(result).max() * (0.02 if dtype == "bf16" else 1e-5)


def test_what_is_not_worth_packing_stays() -> None:
    w = noise((260, 260))
    codes, thin, wide = w.astype("u8"), noise((200, 8)), noise((8, 9000))

    def update(x: ml.Tensor) -> ml.Tensor:
        nonlocal w
        w += 1.0
        return x @ w

    fns: dict[str, tuple[Callable[[ml.Tensor], ml.Tensor], int]] = {
        "a row": (lambda x: x @ w, 1),
        "many rows": (lambda x: x @ w, 300),
        "a small weight": (lambda x: x @ w[:, :250], 3),
        "far more than it is made of": (lambda x: x @ codes.astype("f64"), 3),
        "a weight that is written": (update, 3),
        "far more, of weights alone": (lambda x: ml.sum(x * ml.exp(w[0])) + thin @ wide, 3),
    }
    for name, (fn, rows) in fns.items():
        step = ml.capture(fn)
        step(ml.ones((rows, 260), dtype="f64" if "far more than" in name else "f32"))
        assert "packed_" not in ml.disassemble(step.program), name


def test_recorded_calls_stay_only_where_a_write_reaches_a_source() -> None:
    weights, x = noise((300, 300)), ml.ones((300, 300))
    angles = ml.capture(lambda x: x * ml.cos(ml.arange(300) * 0.01))
    scaled = ml.capture(lambda x: x * ml.cos(weights))
    for step in (angles, scaled):
        before = _recorded_calls()
        step(x)
        assert step.plan.hoisted_nbytes > 0
        assert (_recorded_calls() > before) == (step is scaled)


def _recorded_calls() -> int:
    gc.collect()
    return sum(type(each) is Call for each in gc.get_objects())
