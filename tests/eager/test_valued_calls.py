"""Each row of the tables of functions, layers, models, tensors and transformations in
tests/cases/claims has its value, or raises its error."""

from __future__ import annotations

import copy as copy
import operator as operator
import pickle as pickle
import sys as sys
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import notes_of
from mlvm.core.op import OPS as OPS
from mlvm.eager import optim as optim
from mlvm.eager.nn import init as init
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tree import named_leaves as named_leaves
from tests.brief import ROOT, refuses
from tests.cases.claim_tests import claims
from tests.cases.tables import sections
from tests.eager.nn import checks

X = np.array([[1.5, -2.0, 3.0], [0.25, 4.0, -1.0]], np.float32)
Y = np.array([2.0, 0.5, -3.0], np.float32)
Z = np.array([[1 + 2j, -0.5j, 3], [0.25 - 1j, 2j, -1 - 1j]])
t, x = ml.asarray, ml.asarray(X)


def words(halves: ml.Tensor) -> list[int]:
    """Return the bits of a tensor of halves."""
    return values_of(halves).view(np.uint16).ravel().tolist()


SPACE: dict[str, Any] = vars(checks) | globals()
test_functions = claims("functions", SPACE)
test_layers = claims("layers", SPACE)
test_models = claims("models", SPACE)
test_tensors = claims("tensors", SPACE)
test_transforms = claims("transforms", SPACE)


def test_a_wrong_row_names_its_file_and_line() -> None:
    section, *_ = sections("claims/tensors.txt")
    [note] = notes_of(refuses(NameError, "", section.check, {}))
    file, number, row = note.split(":", 2)
    assert (ROOT / file).read_text("utf-8").splitlines()[int(number) - 1] == row.strip()
