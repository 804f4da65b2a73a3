"""The numerical programs compute the same with each library, in small sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench import science
from bench.science import PROGRAMS
from tests.brief import cases

NAMES = {program.run: name for name, program in PROGRAMS.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # its forward mode warns
@cases("name", *NAMES.values())
@cases("library", "mlvm", "jax", "torch")
def test_a_program_has_the_results_of_numpy(library: str, name: str) -> None:
    pytest.importorskip(library)
    if library == "torch" and PROGRAMS[name].run in science.TOO_SLOW:
        pytest.skip("PyTorch needs minutes")
    run: Any = getattr(science, f"by_{library}")(name, True)
    science.check(name, [np.asarray(x) for x in run()], science.reference(name, True))


def test_other_results_are_noticed() -> None:
    expected = science.reference("jacobi_2d 150", True)
    with pytest.raises(ValueError, match="result 0 differs"):
        science.check("jacobi_2d 150", [expected[0] + 1, expected[1]], expected)
