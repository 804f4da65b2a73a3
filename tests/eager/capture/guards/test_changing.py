"""The warning that a captured function makes program after program, and what it says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from mlvm.eager import nn
from mlvm.eager.capture.capture_limits import LIMITS
from mlvm.eager.capture.guards.changing import Changing
from mlvm.eager.capture.guards.guard_set import GuardSet
from tests.brief import Fn, Patch, line_with, refuses

pytestmark = pytest.mark.usefixtures("weights")

SETTINGS = {"mode": "a"}


def warned(captured: Any, call: Callable[[int], object], calls: int = 20) -> tuple[int, str]:
    """At which call the one warning was issued, and its text. It is about the line of the call."""
    events = []
    for i in range(calls):
        with warnings.catch_warnings(record=True, action="always") as caught:
            call(i)
        events += [(i + 1, each) for each in caught]
    [(at, warning)] = events
    assert warning.category is ml.RecompilationWarning
    assert Path(warning.filename).name == Path(__file__).name
    line = Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert "captured(" in line or "step(" in line
    return at, str(warning.message)


def test_an_argument_of_other_types() -> None:
    captured = ml.capture(lambda x, y: x + y, dynamic_axes=False)
    at, text = warned(captured, lambda i: captured(ml.ones((i + 1, 2)), ml.ones(2)))
    assert at == 8
    sizes = ", ".join(f"f32[{i},2]" for i in range(1, 9))
    assert text.endswith(
        f"has recorded its 8th program, which takes time and memory: argument 'x' was {sizes}. "
        f"Open the axis by name, ml.capture(step, dynamic_axes={{'x': {{0: 'n'}}}}), or pad it "
        f"to one of a few lengths: ml.Pipeline(data, n, pad=0, pad_to=[64, 128])."
    )
    assert "'test_an_argument_of_other_types.<locals>.<lambda>'" in text


def test_values_in_nested_arguments() -> None:
    captured = ml.capture(lambda tree, **more: tree["x"][0] * 2)
    x = ml.ones(2)
    at, text = warned(captured, lambda i: captured({"x": [x], "name": f"n{i}"}, how=(i % 2, "b")))
    assert text.endswith(". Pass values that change as tensors, or keep them constant.")
    assert at == 8
    assert "argument 'tree'['name'] was 'n0', 'n1', " in text
    assert "argument 'how'[0] was 0, 1" in text
    assert "argument 'tree'['x']" not in text


def test_fields_globals_variables_and_items(monkeypatch: Patch) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            self.w, self.mode, self.unread = ml.ones(2), "m", 0

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            return x * self.w if self.mode else x

    layer, options, around = Layer(), {"rate": 0.0}, "0"

    step = ml.capture(lambda x: layer(x) * options["rate"] * len(around) * len(SETTINGS["mode"]))

    def field(i: int) -> None:
        layer.mode = f"m{i}"

    def item(i: int) -> None:
        options["rate"] = i / 2

    def variable(i: int) -> None:
        nonlocal around
        around = f"v{i}"

    def of_global(i: int) -> None:
        monkeypatch.setitem(SETTINGS, "mode", f"g{i}")

    rows: list[tuple[Fn, str]] = [
        (field, "field 'mode' of Layer was 'm0', 'm1', 'm2'"),
        (item, "item 'rate' of a dict was 0.0, 0.5, 1.0"),
        (variable, "variable 'around' was 'v0', 'v1'"),
        (of_global, "item 'mode' of a dict was 'g0', 'g1'"),
    ]
    for change, expected in rows:
        step.close()  # forgets, and may warn again
        at, text = warned(step, lambda i: [change(i), step(ml.ones(2))])  # noqa: B023
        assert at == 8
        assert expected in text


def test_what_is_the_same_tensor() -> None:
    captured = ml.capture(lambda *xs: sum(x + 1 for x in xs))
    a, b, c, d = (ml.ones(2) for _ in range(4))
    patterns = [(a, b, c, d), (a, a, c, d), (a, b, a, d), (a, b, c, a), (a, b, b, d), (a, b, c, b)]
    patterns += [(a, b, c, c), (a, a, a, d)]
    at, text = warned(captured, lambda i: captured(*patterns[i]), calls=8)
    assert at == 8
    assert "arguments 0 and 1 were two, one tensor" in text


def test_a_recording_without_a_program_does_not_count() -> None:
    captured = ml.capture(lambda x, view, sizes: ml.exp(view, out=x) * len(sizes))
    x = ml.ones(2)

    def call(i: int) -> None:
        captured(x, ml.reshape(x, (2,)), [1] * i)  # x has to move before it is recorded

    assert warned(captured, call)[0] == 8


def test_threads_record_while_one_of_them_warns() -> None:
    """To describe an argument runs Python. So another thread may issue the warning meanwhile."""
    changing, look = Changing(lambda x: x), GuardSet(lambda x: x)

    class Warns(dict[str, int]):
        def items(self) -> Any:
            for _ in range(LIMITS.warning - 1):
                changing.add(changing.describe(ml.default_vm(), look, (), {}), "f", look)
            with pytest.warns(ml.RecompilationWarning):
                changing.add(changing.describe(ml.default_vm(), look, (), {}), "f", look)
            return super().items()

    changing.add(changing.describe(ml.default_vm(), look, (Warns(a=1),), {}), "f", look)


def test_explain_names_causes_from_the_first_retrace() -> None:
    options = {"rate": 1.0}
    captured = ml.capture(lambda x, mode="a": x * options["rate"])
    name = "'test_explain_names_causes_from_the_first_retrace.<locals>.<lambda>'"
    assert captured.explain() == f"{name} was not called yet"
    captured(ml.ones(2))
    assert captured.explain() == f"{name} was traced once"
    options["rate"] = 2.0
    captured(ml.ones(2))  # the first retrace
    captured(ml.ones(2), "b")
    captured(ml.ones((2, 3)), "b")
    title, *lines = captured.explain().splitlines()
    assert title == f"{name} was traced 4 times"
    first = line_with("# the first retrace", __file__)
    assert lines[0].endswith(f"{first}): item 'rate' of a dict was 1.0, and is 2.0")
    assert lines[1].endswith("argument 'mode' was not given, and is 'b'")
    assert lines[2].endswith("argument 'x' was f32[2], and is f32[2,3]")


def test_a_failed_trace_is_explained() -> None:
    step = ml.capture(lambda x, ends=True: x if ends and ml.sum(x) > 0 else x + 1)
    refuses(CaptureError, "", step, ml.ones(2))
    assert step.explain().startswith("the last trace of '")
    refuses(
        CaptureError,
        "has no program: its trace raised CaptureError: .*: cannot read",
        lambda: step.plan,
    )
    step(ml.ones(2), False)
    assert "raised" not in step.explain()


def test_explain_tells_tensors_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.w = ml.ones(2)

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            return x * self.w

    model = Model()
    captured = ml.capture(model)
    for _ in range(3):
        captured(ml.ones(2))
        model.w = ml.ones(2)
    assert re.search(r"trace 2 \(.*\): field 'w' of Model was f32\[2\] at 0x", captured.explain())


def test_explain_names_the_context_that_changed() -> None:
    captured = ml.capture(lambda x: ml.sum(x * 2))
    x, other = ml.ones(2), ml.VM(name="v2")
    captured(x)
    with ml.default_dtype("f64"):
        captured(x)
    with ml.autocast("bf16"):
        captured(x)
    with ml.Arena(other, "there").allocating():
        captured(x.to_device(other))
    lines = captured.explain().splitlines()[1:]
    here = x.arena.vm.name
    expected = [
        "the default dtype was f32, and is f64",
        "autocast was off, and is bf16",
        f"the VM was {here}, and is v2",
    ]
    assert [line.partition("): ")[2] for line in lines] == expected
    other.close()


def test_explain_names_arguments_that_share_memory() -> None:
    captured = ml.capture(lambda a, b: ml.sum(a[0]) + ml.sum(b))
    x, y = ml.ones((2, 2)), ml.ones((2, 2))
    view = ml.reshape(x, (2, 2))
    calls: list[tuple[Any, ml.Tensor, str]] = [
        (x, x, ""),
        (x, y, "arguments 'a' and 'b' were one tensor, and are two"),
        (view, y, "argument 'a' was not a view, and is a view"),
        (view, x, "arguments 'a' and 'b' were two, and are views of one tensor"),
        ([x], y, "argument 'a' was f32[2,2], and is a list of 1"),
        ((x,), y, "argument 'a' was a list of 1, and is a tuple of 1"),
        ([x, x], y, "argument 'a' was a tuple of 1, and is a list of 2"),
    ]
    for a, b, _ in calls:
        captured(a, b)
    lines = captured.explain().splitlines()[1:]
    assert len(lines) == len(calls) - 1
    for line, (_, _, expected) in zip(lines, calls[1:], strict=True):
        assert line.partition("): ")[2].startswith(expected)


@pytest.mark.filterwarnings("ignore")
def test_explain_names_the_line_that_needs_a_size() -> None:
    captured = ml.capture(lambda x: sum(x[i] for i in range(len(x))))
    for n in (2, 3, 4, 5):
        captured(ml.ones(n))
    assert re.search(
        r"test_changing.py:\d+ needs the value of a size, .* ml.fori_loop", captured.explain()
    )
