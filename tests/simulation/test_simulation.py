"""Simulated groups and servers: a few worlds, and the defects that they find."""

from __future__ import annotations

import pytest

pytest.importorskip("greenlet")
pytest.importorskip("threadpoolctl")

from tests import simulate
from tests.brief import with_long
from tests.simulation.defects import DEFECTS


def test_no_world_breaks_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", str(with_long(12, 200))]) == 0, capsys.readouterr().out


def test_a_member_that_has_not_begun_a_run_answers() -> None:
    """Two members wait in a run that a third has not begun: it waits for the last, which stopped.

    Only the last one is to blame.
    """
    simulate.prepare()
    assert simulate.one(18601)[:2] == ("4 members by tcp, stopped member 2", [])


def test_a_seed_does_the_same_each_time() -> None:
    simulate.prepare()
    first = [simulate.one(seed) for seed in (4, 5, 6)]
    assert first == [simulate.one(seed) for seed in (4, 5, 6)]
    assert len({digest for _, _, digest in first}) == 3


@pytest.mark.parametrize("name", with_long(["bits"], list(DEFECTS)))
def test_a_defect_is_found(name: str) -> None:
    simulate.prepare()
    assert simulate.first_wrong(name, 1000) is not None
