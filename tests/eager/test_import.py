"""`import mlvm.eager` leaves modules for later, and behaves as if it did not."""

from __future__ import annotations

import pickle
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.eager import public
from tests.brief import output_of

pytestmark = pytest.mark.local(reason="it is of files")

ROOMS = [
    "mlvm.eager.capture",
    "mlvm.eager.control",
    "mlvm.eager.files",
    "mlvm.eager.functions.fft",
    "mlvm.eager.functions.linalg",
    "mlvm.eager.nn",
    "mlvm.eager.optim",
    "mlvm.eager.parallel",
    "mlvm.eager.recording",
    "mlvm.input",
    "mlvm.machines.dry",
    "mlvm.machines.gpu",
    "mlvm.machines.remote",
    "mlvm.machines.workers",
    "mlvm.parallel",
    "mlvm.show",
    "mlvm.step",
]
"""What many programs do not use."""

LIBRARIES = [
    "asyncio",
    "concurrent.futures",
    "difflib",
    "html",
    "http",
    "logging",
    "mmap",
    "multiprocessing",
    "numpy.fft",
    "numpy.random",
    "socket",
    "ssl",
    "subprocess",
    "unicodedata",
]


def run(code: str) -> list[str]:
    """Return the words that the code prints in a separate process."""
    return output_of("-c", code).split()


def test_what_many_programs_do_not_use_is_not_imported() -> None:
    before = {*run("import sys, numpy, typing_extensions; print(*sys.modules)")}
    imported = {*run("import sys, mlvm.eager; print(*sys.modules)")} - before
    assert not imported & {*ROOMS, *LIBRARIES}


def test_a_program_that_uses_none_of_it_imports_none() -> None:
    code = """if True:
        import sys, mlvm.eager as ml
        value, g = ml.value_and_grad(lambda x: ml.sum(x @ x))(ml.ones((2, 2)))
        print(value, *sys.modules)"""
    assert not {*run(code)} & {*ROOMS, *LIBRARIES} - {"numpy.random"}


@pytest.mark.parametrize("name", public.LATER)
def test_each_name_is_there_when_it_is_asked_for(name: str) -> None:
    module = import_module(public.LATER[name])
    if name in public.SHOWN:
        assert vars(getattr(ml, name))["__wrapped__"] is module
    else:
        value = getattr(module, public.PLACES[name][1])
        assert unwrap(getattr(ml, name)) is unwrap(value)
    assert getattr(ml, name) is getattr(ml, name)
    assert name in dir(ml)


def test_a_folder_that_is_imported_later_is_no_name_of_the_language() -> None:
    code = """if True:
        import mlvm.eager as ml
        import mlvm.eager.capture.capture, mlvm.eager.nn.linear, mlvm.eager.files.checkpoints
        print(ml.capture.__name__, hasattr(ml.nn, "__wrapped__"), hasattr(ml, "files"))"""
    assert run(code) == ["capture", "True", "False"]


METHODS_AND_NAMES = """
import sys
import mlvm.eager as ml

vm = ml.VM("lent")
arena = ml.Arena(vm, "step")
with vm.profile(sys.argv[1]), arena.allocating():
    x = ml.ones((2, 3))[0] + 1.0
print(x.tolist(), "used" in arena.report())
arena.plot(sys.argv[2])

for module in (ml, ml.errors, ml.nn, ml.optim, ml.parallel, ml.random, ml.testing, ml.tree):
    names = [name for name in dir(module) if not name.startswith("__")]
    assert names == sorted(module.__all__), set(names) ^ set(module.__all__)
    for name in ("TYPE_CHECKING", "annotations", "host", "math", "tensor"):
        assert not hasattr(module, name), name
from mlvm.eager import *
assert {*ml.__all__} <= {*dir()}
"""


def test_methods_that_upper_floors_add_and_no_names_but_public_ones(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    assert output_of("-c", METHODS_AND_NAMES, trace, picture) == "[2.0, 2.0, 2.0] True\n"
    assert trace.stat().st_size
    assert picture.read_text().startswith("<svg")


def test_a_pickle_finds_a_name_in_a_new_process() -> None:
    values: list[Any] = [
        ml.load,
        ml.add,
        ml.silu,
        ml.nn.Linear,
        ml.linalg.solve,
        ml.fft.rfft,
        ml.capture,
    ]
    names = pickle.dumps(values)
    code = f"import pickle; print(*[each.__name__ for each in pickle.loads({names!r})])"
    assert run(code) == [value.__name__ for value in values]
