"""An error from inside a model says in which layer it was."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import MlvmError, PositionError
from mlvm.eager import nn
from mlvm.machines.wire import decode_answer, encode_error
from tests.brief import cases, refuses


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        self.hidden = nn.Linear(width, 8)
        self.out = nn.Linear(8, width)

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return self.out(ml.relu(self.hidden(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        self.mlp = Mlp(width)

    def forward(self, x: ml.Tensor) -> ml.Tensor:
        return x + self.mlp(x)

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return self.forward(x)


class Net(nn.Module):
    """The third block takes another width."""

    def __init__(self) -> None:
        self.words = nn.Embedding(5, 4)
        self.blocks = {"all": [Block(4), Block(4), Block(3)], "none": None}
        self.again = self
        self.teacher = nn.buffer(nn.Sequential(Block(4)))

    def __call__(self, i: ml.Tensor, blocks: int = 3) -> ml.Tensor:
        x = self.teacher(self.words(i))
        for block in self.blocks["all"][:blocks]:  # type: ignore[index]
            x = block(x)
        return x


class Tree(nn.Module):
    """As `Net`, without itself in a field, so that it is a tree."""

    def __init__(self) -> None:
        net = Net()
        self.words, self.blocks, self.teacher = net.words, net.blocks, nn.buffer(net.teacher)

    __call__: Any = Net.__call__


def line_in(function: Any, text: str) -> str:
    """The file and line of that text in a function."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"test_layer.py:{first + number}"


IN_HIDDEN = f"in blocks/all/2/mlp/hidden, {line_in(Mlp, 'return self.out')}"
I = ml.asarray([0, 4])  # noqa: E741


def notes(call: Callable[[], object]) -> list[str]:
    caught = refuses(MlvmError, "", call)
    return getattr(caught, "__notes__", [])


@pytest.mark.filterwarnings("ignore:matmul")  # buffers stay f32
@cases(
    "call",
    lambda model: model(I),
    lambda model: ml.capture(lambda i: model(i))(I),
    lambda model: ml.grad(lambda model: ml.sum(model(I)))(model),
    lambda model: ml.capture(lambda i: ml.grad(lambda m: ml.sum(m(i)))(model))(I),
    lambda model: model.astype(ml.float64)(I),
    lambda model: ml.measure(lambda i: model(i), I),
)
def test_an_error_names_the_layer(call: Callable[[Any], object]) -> None:
    assert notes(lambda: call(Tree()))[0] == IN_HIDDEN


def test_a_model_that_contains_itself_has_paths_too() -> None:
    assert notes(lambda: Net()(I))[0] == IN_HIDDEN


def test_a_layer_alone_and_no_layer_have_no_path() -> None:
    assert notes(lambda: nn.Linear(2, 3)(ml.ones(4))) == []
    assert notes(lambda: ml.ones(3) + ml.ones(2)) == []


def test_a_layer_in_a_buffer_and_one_that_is_no_part() -> None:
    model: Any = Tree()
    model.teacher[0].mlp.out = nn.Linear(7, 4)
    place = line_in(Mlp, "return self.out")
    assert notes(lambda: model(I))[0] == f"in teacher/layers_0/mlp/out, {place}"

    class Halving(nn.Module):
        def __init__(self) -> None:
            self.inner = Mlp(4)

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            return self.inner.astype(ml.float64)(x)

    assert notes(lambda: Halving()(ml.ones(3))) == [f"in Mlp/hidden, {place}"]


@pytest.mark.local(reason="an error from elsewhere names the line alone")
def test_a_value_that_is_refused_when_a_program_runs_again() -> None:
    model = Tree()
    step = ml.capture(lambda i: model(i, 2))
    step(I)
    caught = refuses(PositionError, "", step, ml.asarray([0, 7]))
    place = line_in(Net, "self.words(i)")
    assert caught.__notes__[-1].endswith(f"{place}, in words")
    assert notes(lambda: model(ml.asarray([7])))[0] == f"in words, {place}"


def test_an_error_that_was_caught_keeps_nothing_alive() -> None:
    """To ask a frame for its variables makes a copy of them, until Python 3.12."""
    alive: list[weakref.ref[Any]] = []

    class Trying(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(2, 3)

        def __call__(self, x: ml.Tensor) -> bool:
            y: Any = x + 1.0
            alive.append(weakref.ref(y))
            try:
                self.linear(y[:1])
            except MlvmError:
                del y
            return alive[0]() is None

    assert Trying()(ml.ones(3))
    assert sys.getrefcount(alive[0]) > 0


def test_an_error_of_a_machine_elsewhere_is_not_of_the_layer_that_reads_it() -> None:
    class Reader(nn.Module):
        def __call__(self, content: bytes) -> None:
            decode_answer("read", content)

    class Reading(nn.Module):
        def __init__(self) -> None:
            self.part = Reader()

        def __call__(self, content: bytes) -> None:
            self.part(content)

    assert notes(lambda: Reading()(encode_error(PositionError("elsewhere")))) == []


def test_an_error_under_a_debugger_leaves_variables_alone() -> None:
    class Traced(nn.Module):
        def __call__(self, x: int) -> int:
            y = x + 1
            return x + y

    def trace(frame: Any, event: str, _: Any) -> Any:
        refuses(MlvmError, "", lambda: vector + matrix)
        return trace

    vector, matrix, layer, before = ml.ones(3), ml.ones((2, 2)), Traced(), sys.gettrace()
    sys.settrace(trace)
    try:
        assert layer(3) == 7
    finally:
        sys.settrace(before)
