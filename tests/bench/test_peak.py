"""Lower bounds of the suite `peak`, and the fresh processes of the suite `cold`."""

from __future__ import annotations

import numpy as np
import pytest

from bench import cold, peak
from tests.brief import Patch


def test_works_count_operands_once_and_two_flops_a_multiply_add(monkeypatch: Patch) -> None:
    monkeypatch.setattr("bench.mixer.noise", lambda *shape: np.empty(shape, np.float32))
    cases = peak.works()
    assert cases["product NN 16x64x32"] == (2 * 16 * 64 * 32, 4 * (16 * 64 + 64 * 32 + 16 * 32))
    assert cases["gelu 16384"] == (0, 2 * 4 * 16384)
    assert set(peak.targets()) <= set(cases)


def test_both_contenders_time_the_same_cases() -> None:
    bounds, calls = peak.prepare_peak(True), peak.prepare_mlvm(True)
    if not bounds:
        pytest.skip("no C compiler")
    assert set(bounds) == set(calls) == set(peak.chosen(True))
    for name in bounds:
        assert min(bounds[name]()["us"], calls[name]()["us"]) > 0


@pytest.mark.parametrize("library", ["mlvm", "onnxruntime"])
def test_a_fresh_process_gives_all_metrics(library: str) -> None:
    if library != "mlvm":
        pytest.importorskip(library)
    metrics = cold.preparing(library)(False)["onnx"]()
    assert set(metrics) == set(cold.SUITE.units)
    assert metrics["whole_ms"] > metrics["first_ms"] > metrics["again_ms"] > 0
