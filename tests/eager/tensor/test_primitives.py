"""The functions derived from the op table, and their stub."""

from __future__ import annotations

import inspect
import re

import pytest

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.eager import public
from mlvm.eager.tensor import primitives
from mlvm.eager.tensor.op_docs import WITH_WHERE

ELSEWHERE = {"random": ml.random, "decompositions": ml.linalg, "fft": ml.fft}


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_function_with_its_documentation(name: str) -> None:
    op, function = OPS[name], getattr(primitives, name)
    parameters = inspect.signature(function).parameters
    assert function.__name__ == name
    assert (function.__doc__ or "").startswith(op.doc.partition("\n\n")[0])
    for shown in re.findall(r">>> .*", op.doc):
        assert shown in (function.__doc__ or "")
    more = [*([] if op.dynamic else ["out"]), *(["where"] if name in WITH_WHERE else [])]
    assert list(parameters) == [*op.inputs, *op.attributes, *more]
    for attribute in op.attributes.values():
        assert parameters[attribute.name].default == attribute.default


@pytest.mark.parametrize("name", OPS)
def test_every_op_but_internal_ones_is_public(name: str) -> None:
    """It is public straight from the op table, or as a separate function."""
    op = OPS[name]
    if op.traits.public:
        own = name in public.__all__  # which takes its arguments otherwise
        assert (getattr(ml, name) is not getattr(primitives, name)) == own
        assert getattr(ml, name) is public.PRESENT.get(name, getattr(ml, name))
        return
    assert getattr(ml, name, None) is not getattr(primitives, name)
    module = ELSEWHERE.get(op.kernel.__module__.rpartition(".")[2])
    internal = module is None or name in ("split_key", "next_key", "det_vjp")
    assert internal or hasattr(module, name)
