"""`python -m bench plan`: rectangles that are cut into pieces, and files of buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from bench import __main__ as command
from bench import plan
from bench.plan import CAPACITY, INSTANCES, MINIMALLOC, Input, by_mlvm, instance, rectangle
from mlvm.arena.planner import Block
from tests.brief import Capsys, Patch, cases, refuses


@cases("pinwheels", False, True)
def test_the_pieces_of_a_rectangle_need_all_of_it_at_each_moment(pinwheels: bool) -> None:
    for seed in range(10):
        blocks, smallest = rectangle(seed, 20 + seed, pinwheels=pinwheels)
        assert smallest == CAPACITY
        assert 20 + seed <= len(blocks) <= 24 + seed
        used = np.zeros(max(each.end for each in blocks), int)
        for each in blocks:
            used[each.start : each.end] += each.nbytes
        assert (used == CAPACITY).all()
        assert rectangle(seed, 20 + seed, pinwheels=pinwheels).blocks == blocks


def test_the_metrics_of_several_inputs() -> None:
    """Of two inputs, the blocks of the second need one byte more than is said to be enough."""

    def inputs() -> Iterator[Input]:
        yield Input([Block(8, 0, 2), Block(8, 1, 3)], 16)
        yield Input([Block(8, 0, 2), Block(8, 1, 3)], 15)

    metrics = plan.measured(partial(by_mlvm, 1), inputs)
    assert metrics.keys() == plan.SUITE.units.keys()
    assert metrics["optimal"] == 0.5
    assert metrics["ratio"] == (1 + 16 / 15) / 2


def test_without_a_search_no_node_is_visited() -> None:
    blocks, smallest = rectangle(3, 60, pinwheels=True)
    large, none = by_mlvm(0, Input(blocks, smallest))
    small, some = by_mlvm(1, Input(blocks, smallest))
    assert large > small == smallest
    assert none == 0 < some


def test_files_are_cases_with_the_capacity_of_their_name(folder: Path, monkeypatch: Patch) -> None:
    for name in ("a.64.csv", "b.csv"):
        Path(name).write_text("id,lower,upper,size\n0,0,4,16\n1,2,5,16\n")
    assert [each.smallest for each in instance(Path("a.64.csv"))] == [64]
    assert [each.smallest for each in instance(Path("b.csv"))] == [32]
    monkeypatch.setenv(INSTANCES, str(folder))
    rounds = plan.preparing(partial(by_mlvm, 1))(True)
    assert [*rounds] == ["guillotine", "pinwheels", "a.64", "b"]
    assert rounds["b"]()["optimal"] == 1


def test_minimalloc_is_optional(capsys: Capsys, monkeypatch: Patch, folder: Path) -> None:
    """A program that fails has placed nothing; one that writes a row for each buffer has."""
    monkeypatch.delenv(MINIMALLOC, raising=False)
    assert plan.preparing(plan.by_minimalloc, MINIMALLOC)(True) == {}
    assert "no program is given by --minimalloc, skipped" in capsys.readouterr().err
    each = Input([Block(8, 0, 2)], 8)
    for script, size in (("exit 3", float("inf")), ("cp ${2#--input=} ${3#--output=}", 8)):
        Path("solver").write_text(f"#!/bin/sh\n{script}\n")
        Path("solver").chmod(0o755)
        monkeypatch.setenv(MINIMALLOC, str(folder / "solver"))
        assert plan.by_minimalloc(each) == (size, 0)


@cases("option", "--instances nosuch", "--minimalloc nosuch")
def test_paths_that_are_not_there(option: str, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "plan", *option.split()])
    assert refuses(SystemExit, "", command.main).code == 2
    assert f"error: {option.split()[0]}: " in capsys.readouterr().err
