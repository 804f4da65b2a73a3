"""Small runs of `python -m tests.fuzz language`, and that it notices what it looks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import mlvm.eager as ml
from tests.brief import Capsys, Patch, cases, refuses
from tests.fuzz.__main__ import main
from tests.fuzz.command import Outcomes
from tests.fuzz.language import fuzzing
from tests.fuzz.language.making import make
from tests.fuzz.language.source import built_by
from tests.fuzz.language.trying import Found, require_same
from tests.fuzz.language.world import World, tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::mlvm.eager.PrecisionWarning"),
    pytest.mark.filterwarnings("ignore::mlvm.eager.NoEffectWarning"),
]


def test_programs_in_the_eager_language(capsys: Capsys) -> None:
    options = ["--programs", "6", "--seed", "0", "--first", "100", "--memory", "0"]
    status, output = main(["language", *options]), capsys.readouterr().out
    assert status == 0, output
    counts = {what: int(n) for n, what in re.findall(r"^ +(\d+)  (.+)$", output, re.MULTILINE)}
    assert sum(counts.values()) == 6
    assert counts["same"] > 4


def test_a_program_is_made_again_from_its_numbers() -> None:
    texts = [make(7, number).text() for number in range(4)]
    assert [make(7, number).text() for number in range(4)] == texts
    assert len(set(texts)) == 4


def test_programs_cover_the_language() -> None:
    missing = {"ml.grad(", "ml.value_and_grad(", "ml.vjp(", ".update(", "nonlocal", "out="}
    missing |= {"ml.random.", "ml.dropout(", "'f64'", "'i32'", "'bool'", "np.float32(", "Box("}
    control = "cond", "switch", "while_loop", "fori_loop", "scan", "map", "subroutine"
    missing |= {f"ml.{each}(" for each in control}
    missing |= {"ml.reshape(", "ml.concat(", "ml.where(", "ml.sum(", "[::-1]", "@", "for _ in"}
    for number in range(80):
        text = make(1, number).text()
        missing = {each for each in missing if each not in text}
        if not missing:
            break
    assert not missing


class Wrong:
    """A step that does not do what it should. It is made like `Captured`."""

    def __init__(self, step: Callable[..., Any], **options: bool) -> None:
        self.step = step

    def __call__(self, *args: Any) -> Any:
        return self.step(*args)


class WrongBit(Wrong):
    def __call__(self, *args: Any) -> Any:
        return [ml.copy(x) + 1e-7 if is_float(x) else x for x in super().__call__(*args)]


class WithoutUpdate(Wrong):
    def __call__(self, *args: Any) -> Any:
        before = [(x, ml.copy(x)) for x in args if isinstance(x, ml.Tensor) and x.base is None]
        result = super().__call__(*args)
        for x, old in before:
            ml.copy(old, out=x)
        return result


class AnotherError(Wrong):
    def __call__(self, *args: Any) -> Any:
        raise ml.errors.ShapeError("no")


class Refusal(Wrong):
    def __call__(self, *args: Any) -> Any:
        raise ml.errors.CaptureError("no")


class RawError(Wrong):
    def __call__(self, *args: Any) -> Any:
        raise ZeroDivisionError


class Keeper(Wrong):
    results: ClassVar[list[Any]] = []

    def __call__(self, *args: Any) -> Any:
        result = super().__call__(*args)
        self.results.append(result)
        return result


def is_float(x: Any) -> bool:
    return isinstance(x, ml.Tensor) and x.dtype.is_float


@cases("wrong, reason",
    (WrongBit, "result[0] is"), (WithoutUpdate, "] is"), (AnotherError, "raises ShapeError"),
    (Refusal, "raises CaptureError"), (RawError, "ZeroDivisionError"),
    (Keeper, "when all was dropped"),
)  # fmt: skip
def test_a_wrong_replay_is_found_cut_down_and_printed(
    wrong: type[Wrong], reason: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ml, "capture", wrong)
    _, failure = fuzzing.fuzz(100, seed=0)
    Keeper.results.clear()
    assert failure is not None
    assert reason in failure
    program, _, rest = failure.partition(": ")[2].partition("\n\nrequire_same(build)\n")
    assert len(program.splitlines()) < 50
    refuses((Found, ZeroDivisionError), "", lambda: require_same(built_by(program)))
    Keeper.results.clear()
    again = re.search(r"language --seed 0 --first (\d+) --programs 1", rest)
    assert again is not None
    monkeypatch.undo()
    assert fuzzing.failure_of(make(0, int(again[1]))) is None
    require_same(built_by(program))


def test_a_plan_that_fusion_made_larger_is_found(monkeypatch: Patch) -> None:
    class Larger(ml.Captured[..., Any]):
        def __init__(self, fn: Any, *, fuse: bool = True, recompute: bool = True) -> None:
            super().__init__(fn, fuse=fuse, recompute=recompute)

        @property
        def plan(self) -> Any:
            return super().plan._replace(nbytes=100 + 100 * self.fuse)

    monkeypatch.setattr(ml, "capture", Larger)
    _, failure = fuzzing.fuzz(5, seed=0)
    assert failure is not None
    assert "200 bytes, and 100 unfused" in failure


def test_the_old_value_of_what_is_updated_may_end_sooner() -> None:
    """Its memory stays where it is in eager code; a captured call's results are of its arena."""

    def build() -> World:
        w = tensor("f32", (2,), 0)

        def step() -> ml.Tensor:
            before = ml.reshape(w, (2, 1))
            w[...] = w * 2.0
            return before

        return World(step, lambda i: (), lambda: [w], resets=True)

    assert require_same(build) == "same"


def test_too_many_refused_programs_are_a_failure() -> None:
    outcomes = Outcomes({"same": 96, "refused: a value is read": 4})
    assert fuzzing.too_many_refused(outcomes) is None
    outcomes["refused: a value is read"] += 5
    text = "9 of 105 programs are refused by a CaptureError"
    assert fuzzing.too_many_refused(outcomes) == text
