"""C functions that repeat Python, by the table in `dispatch.h`: both exist, and give the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import TensorType, f32
from mlvm.eager.capture import cache as cache_module
from mlvm.eager.capture import call as call_module
from mlvm.eager.capture import capture as capture_module
from mlvm.eager.capture import launch as launch_module
from mlvm.eager.capture.guards import checker as checker_module
from mlvm.eager.functions import creation, indexing, random
from mlvm.eager.tensor import apply as apply_module
from mlvm.eager.tensor import constants, operands, primitives, tensor
from mlvm.eager.tensor.apply import alias, alias_in_python, apply, apply_in_python, one_op
from mlvm.eager.tensor.operands import as_operand
from mlvm.eager.tensor.update import apply_into, apply_into_in_python
from mlvm.machines.local import LocalVM
from mlvm.machines.native.extension import EXTENSION
from tests.brief import ROOT, output_of
from tests.trees import outcome
from tests.wired import connect_to

if EXTENSION is None:
    pytest.skip("the native machine was not built", allow_module_level=True)

TREE: Final = import_module("mlvm.eager.tree")  # `mlvm.eager` shows another module of that name
SOURCES: Final = ROOT / "mlvm/machines/native/src"
_ROW: Final = re.compile(r"^ \* +(\S+\.c) +(\w+) +-> (\S+\.py): (\S+)$", re.M)
_METHOD: Final = re.compile(
    r'\{"\w+", (?:\(PyCFunction\)(?:\(void \(\*\)\(void\)\))?)?(\w+), METH_'
)


class Definition(NamedTuple):
    """A row of the table: a C function, and the function in Python that defines it."""

    file: str
    function: str
    path: str
    definition: str


DEFINITIONS: Final = [
    Definition(*row) for row in _ROW.findall((SOURCES / "language/dispatch.h").read_text())
]

OF_C: Final = {
    *("install", "use_templates", "chain_after", "draw_keys", "opaque", "pause_in_python", "call"),
    "region_add_view",
    *(
        "region_remove_view",
        "region_take_views",
        "fast_path_forget",
        "fast_path_forget_places",
        "fast_path_address_of",
    ),
    *("fast_path_is_running", "replay_handles", "replay_learn"),
    *(
        "open_template",
        "traced_steps",
        "open_after",
        "count_open_calls",
    ),
}
"""Functions for Python that fill, change or ask caches of C, which Python does not have."""

_HERE: Final = "machines/native/test_definitions.py: test_the_language_without_the_extension"
ELSEWHERE: Final = {
    **dict.fromkeys(("record", "take", "allocation_finalize"), _HERE),
    **dict.fromkeys(("region_views", "present_arena", "next_key_of"), _HERE),
    "bin_of": "machines/native/test_dispatch.py: test_tensors_of_growing_sizes_share_regions",
    "call_composed": "eager/tensor/test_templates.py: test_values",
    **dict.fromkeys(
        ("outbox_add", "outbox_take"),
        "machines/remote/test_client.py: test_the_outbox_in_c_is_the_one_in_python",
    ),
    **dict.fromkeys(
        ("call_in_family", "apply_in_family"),
        "eager/recording/test_families.py: "
        "test_calls_of_other_numbers_are_as_the_function_makes_them",
    ),
    "call_into": "eager/recording/test_families.py: "
    "test_a_loop_within_a_loss_runs_by_open_templates",
    "run_machine": "machines/native/test_programs.py: "
    "test_the_tests_of_the_reference_machine_pass_on_the_native_one",
    "lanes_run": "eager/transform/test_batch.py: test_no_schedule_changes_a_bit",
    **dict.fromkeys(
        ("lock_acquire", "lock_release", "lock_enter", "lock_exit", "lock_is_owned"),
        "core/test_vm_lock.py: test_another_thread_waits_for_the_last_release",
    ),
    "lock_reinitialize": "core/test_vm_lock.py: test_a_forked_process_frees_the_locks_of_others",
    **dict.fromkeys(
        ("records_begin", "records_end"),
        "machines/test_residuals.py: test_records_end_with_their_program_and_memory_is_kept",
    ),
}
"""Tests other than `test_both_give_the_same` that run both."""


@cache
def _names_in(path: str) -> set[str]:
    """Return the names that a file of Python defines, those in classes with the class."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            names |= {f"{node.name}.{each.name}" for each in functions}
    return names


@pytest.mark.parametrize("row", DEFINITIONS, ids=lambda row: row.function)
def test_both_exist(row: Definition) -> None:
    source = (SOURCES / row.file).read_text()
    assert re.search(rf"^[\w *]*\b{row.function}\([^;]*?\)\s*\{{", source, re.M)
    assert row.definition in _names_in(row.path)


def test_each_function_of_the_language_that_python_calls_is_in_the_table() -> None:
    sources = (SOURCES / "language").glob("*.c")
    exported = {name for path in sources for name in _METHOD.findall(path.read_text())}
    assert exported - {row.function for row in DEFINITIONS} == OF_C


# --- both run ------------------------------------------------------------------------

Work = Callable[[ml.Tensor], object]
X: Final = np.arange(12, dtype=np.float32).reshape(3, 4)


class Both(NamedTuple):
    """Work on a tensor by the function of C, and by that of Python."""

    in_c: Work
    in_python: Work


def _patched(module: Any, name: str, value: object, work: Work) -> Work:
    """Return the work with a name of a module replaced."""

    def patched(x: ml.Tensor) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, value)
            return work(x)

    return patched


def _without_c(module: Any, work: Work) -> Both:
    return Both(work, _patched(module, "EXTENSION", None, work))


def _key_after(draw: Callable[[], ml.Tensor]) -> Work:
    def drawn(_: ml.Tensor) -> object:
        ml.random.seed(3)
        return [draw() for _ in range(3)]

    return drawn


def _assigned(assign: Callable[[ml.Tensor, Any, Any], object], key: Any, values: Any) -> Work:
    def work(x: ml.Tensor) -> object:
        y = x + 0
        assign(y, key(x), values(x))
        return y

    return work


ADD, TURNED = one_op("add"), one_op("reshape", shape=(4, 3))


def _added(by: Callable[..., object], value: object) -> Work:
    return lambda x: by(ADD, x, ml.asarray(value))


def _updated(by: Callable[..., object], value: object) -> Work:
    def work(x: ml.Tensor) -> object:
        y = x + 0
        by(y, ADD, y, ml.asarray(value))
        return y

    return work


def _captured(x: ml.Tensor) -> object:
    """Call a captured function that updates state, whose old value is needed now and then."""
    total, scale, before = ml.zeros(4), [2.0], []

    @ml.capture
    def step(x: ml.Tensor) -> ml.Tensor:
        nonlocal total
        total += ml.sum(x, axis=0) * scale[0]
        return x + total

    results = []
    for i in range(9):
        scale[0] = 2.0 + (i > 5)
        if i in (4, 7):
            before.append(ml.reshape(total, (2, 2)))
        results.append(step(x if i % 4 else x + i))
    return [*results, *before, total]


def _in_python(work: Work) -> Work:
    for module in (cache_module, call_module, launch_module, capture_module, checker_module):
        work = _patched(module, "EXTENSION", None, work)
    return work


def _remote(native: bool) -> Work:
    def work(x: ml.Tensor) -> object:
        vm = connect_to(LocalVM("there", native=native))
        if not native:
            vm.fast_path = None
        with ml.Arena(vm, "remote").allocating():
            y = ml.asarray(x.numpy())
            for _ in range(40):
                y = y + y * 0.5 - 1
            result = y.numpy()
        vm.close()
        return [result.tolist()]

    return work


KEYS: Final[list[Callable[[ml.Tensor], Any]]] = [
    lambda x: 1, lambda x: -1, lambda x: 3, lambda x: (slice(None, None, 2), 1),
    lambda x: (None, ..., slice(1, 3)), lambda x: slice(2, 0, -1), lambda x: x > 4,
    lambda x: (1, 2, 3), lambda x: "a",
]  # fmt: skip
VALUES: Final[list[Callable[[ml.Tensor], Any]]] = [
    lambda x: 7, lambda x: 2.5, lambda x: x[0, 0], lambda x: x[:, :1], lambda x: True,
    lambda x: [1, 2, 3, 4, 5],
]  # fmt: skip


def _read(index: Any) -> Work:
    return lambda x: x[index].item()


def _listed(index: Any) -> Work:
    return lambda x: x[index].tolist()


def _values_at(index: Any) -> Work:
    return lambda x: [str(x[index].numpy().dtype), x[index].numpy().tolist()]


def _nothing(*_: object) -> None:
    return None


def _keyed(by: Callable[[ml.Tensor, Any], object], key: Any) -> Work:
    return lambda x: by(x, key(x))


def _constant(make: Callable[[Any], object], value: object) -> Work:
    return lambda _: make(value)


def _as_operand(by: Callable[[Any, ml.Tensor], object], value: object) -> Work:
    return lambda x: by(value, x)


def _checked(ends: bool) -> Work:
    """Check two tensors, of which one is freed before if `ends` is True."""

    def work(x: ml.Tensor) -> object:
        arena = ml.Arena(x.arena.vm, "freed")
        with arena.allocating():
            y = ml.asarray(X)
        if ends:
            arena.reset()
        return TREE.require_live([x, y])

    return work


def _reshaped(by: Callable[..., object]) -> Work:
    return lambda x: by(TURNED, x, TensorType(f32, (4, 3)))


def _both() -> Iterator[tuple[str, Both]]:
    """Yield the name of a C function, and a case."""
    for y in (1.0, np.ones((2, 2), np.float32), np.ones(4)):
        yield "apply", Both(_added(apply, y), _added(apply_in_python, y))
        yield "apply_into", Both(_updated(apply_into, y), _updated(apply_into_in_python, y))
    yield "alias", Both(_reshaped(alias), _reshaped(alias_in_python))
    yield "view_as_python", _without_c(tensor, tensor.untracked)
    for key in KEYS:
        yield "subscript", Both(_keyed(ml.Tensor.__getitem__, key), _keyed(indexing.getitem, key))
        for values in VALUES:
            in_c = _assigned(ml.Tensor.__setitem__, key, values)
            yield "assign_subscript", Both(in_c, _assigned(indexing.setitem, key, values))
    for index in ((1, 2), 0):
        yield (
            "scalar",
            Both(_read(index), _patched(tensor, "_scalar", _nothing, _read(index))),
        )
        values = _values_at(index)
        yield "array", Both(values, _patched(tensor, "_array", _nothing, values))
        yield "nested", Both(_listed(index), _patched(tensor, "_nested", _nothing, _listed(index)))
    for name, function in _DYNAMIC.items():
        python = _patched(apply_module, "_DYNAMIC_IN_C", {}, function)
        yield name, Both(function, python)
    for value in (2.5, 7, -1, float("nan"), 1e300):
        yield (
            "number",
            _without_c(constants, _constant(lambda x: constants.constant(x, f32), value)),
        )
        yield "filled", _without_c(creation, _constant(lambda x: ml.full((2, 3), x), value))
    yield "copied", _without_c(tensor, lambda _: tensor.from_array(X[::2]))
    for numbers in ([1, 2], [1, 2.5], [2**62, 1], [2**70], [True, 2], [], ["a"], [1, [2]]):
        yield "listed", _without_c(operands, _constant(operands.tensor_of, numbers))
    for given in (2.5, 7, True, 2**70, X, [1, 2], "a", None):
        yield "operand", Both(_as_operand(operands.operand, given), _as_operand(as_operand, given))
    for ends in (False, True):
        yield "are_alive", _without_c(TREE, _checked(ends))
    drawn = _key_after(random._draw)
    for name in ("checklist_holds", "exclusive", "pattern_match", "replay_run"):
        yield name, Both(_captured, _in_python(_captured))
    for name in ("post", "run_launches"):
        yield name, Both(_remote(True), _remote(False))
    yield "next_key", Both(drawn, _patched(random, "_next_in_c", lambda *_: None, drawn))


_DYNAMIC: Final[dict[str, Work]] = {
    "chosen_in_python": lambda x: primitives.boolean_index(x, x > 0.5),
    "positions": lambda x: [
        ml.argwhere(ml.astype(x - 1.0, dtype))
        for dtype in ("f32", "bf16", "f64", "int8", "int64", "bool", "c64")
    ],
}

CASES: Final = [pytest.param(both, id=f"{name}-{i}") for i, (name, both) in enumerate(_both())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("both", CASES)
def test_both_give_the_same(both: Both) -> None:
    arena = ml.Arena(ml.VM(native=True), "both")
    with arena.allocating():
        x = ml.asarray(X)
        expected = outcome(lambda: both.in_python(x))
        for _ in range(3):  # the last one by the short way
            assert outcome(lambda: both.in_c(x)) == expected


def test_each_function_of_the_table_has_a_test_that_runs_both() -> None:
    assert {name for name, _ in _both()} | ELSEWHERE.keys() == {row.function for row in DEFINITIONS}
    for place in ELSEWHERE.values():
        path, test = place.split(": ")
        assert f"def {test}(" in (ROOT / "tests" / path).read_text()


@pytest.mark.parametrize(
    ("file", "name", "module", "limit"),
    [
        ("language/dispatch.c", "MOST_SPARE", "arena.placement", "MOST_SPARE"),
        ("language/posts.c", "GATHERED", "machines.remote.outbox", "GATHERED"),
        ("language/templates.c", "MOST_CHAINED", "eager.tensor.template_kernels", "MOST_CHAINED"),
        ("machine/value.c", "ALIGNMENT", "core.types", "ALIGNMENT"),
        ("plan/lanes.h", "MOST_FRAMES_DEEP", "core.machine.run", "MAX_DEPTH"),
        ("plan/loop.h", "MOST_DEPTH", "core.machine.run", "MAX_DEPTH"),
        ("plan/pool.c", "MOST_THREADS", "machines.native.extension", "MOST_THREADS"),
    ],
)
def test_limits_of_c_are_those_of_python(file: str, name: str, module: str, limit: str) -> None:
    found = re.search(rf"\b{name} = (\d+)(?: << (\d+))?[, ]", (SOURCES / file).read_text())
    assert found is not None
    expected = getattr(import_module(f"mlvm.{module}"), limit)
    assert int(found[1]) << int(found[2] or 0) == expected


PROGRAM: Final = """
import gc
import mlvm.eager as ml
from mlvm.eager.tensor.context import current_arena
arena = ml.Arena(ml.VM(native=False), "both")
with arena.allocating():
    x = ml.asarray([[1.0, 2.0], [3.0, 4.0]])
    ml.random.seed(5)
    for _ in range(4):
        views = [x[0], ml.reshape(x, (4,)), x.mT]
        print(len(x.region.views), current_arena() is arena, arena.used, arena.high_water)
        y = x * 2
        y[0] = ml.random.next_key()[0] % 7
        x += y
        print([v.tolist() for v in views], x.tolist(), len(x.region.views))
        del views[0], y
        gc.collect()
        print(len(x.region.views), arena.used, len(arena.live()))
        print(ml.grad(lambda x: ml.sum(x[0] * x * 2))(x).tolist(), arena.used)
"""


def test_the_language_without_the_extension() -> None:
    without = "import sys\nsys.modules['mlvm.machines.native._native'] = None\n"
    assert output_of("-c", PROGRAM) == output_of("-c", without + PROGRAM)
