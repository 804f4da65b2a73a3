"""Every case of every op on each machine, against the oracle of the case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.op import OPS
from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import from_array
from mlvm.machines.native import extension
from mlvm.machines.wire import WireVM
from tests.brief import refuses, with_long
from tests.cases import CASES, Case
from tests.cases.evaluate import evaluate
from tests.core.programs import put
from tests.walks.crossing import assert_expected, crossed

FUNCTIONS = FunctionTable()
PLANNERS: dict[str, Any] = {}
if extension.EXTENSION is not None:
    from mlvm.machines.native.planner import PLANNERS
    from tests.machines.native.planners import native


def wired(name: str, *inputs: Any, **attributes: Any) -> Array:
    """The op's result from a VM behind the byte encoding of the protocol."""
    vm, bound = WireVM(VM("behind")), OPS[name].bind(attributes)
    handles = [put(vm, x) for x in inputs]
    [result] = vm.launch(Program.of_op(name, len(handles), bound, 1), handles)
    return result


def captured(name: str, *inputs: Any, **attributes: Any) -> Array:
    """The op's result from the second call of a captured function."""
    call = one_op(name, **attributes)
    function = ml.capture(lambda *xs: apply(call, *xs))
    tensors = [from_array(x) for x in inputs]
    function(*tensors)
    return np.array(values_of(function(*tensors)))


MACHINES: Final[dict[str, Callable[..., Array]]] = {"reference": evaluate, "wire": wired}


@pytest.mark.parametrize("machine", MACHINES)
@crossed()
def test_an_op_computes_what_its_oracle_does(name: str, case: Case, machine: str) -> None:
    """`evaluate` hands in read-only inputs and an `out` that shows what is left unwritten."""
    result = MACHINES[machine](name, *case.inputs, **case.attributes)
    assert result.flags.c_contiguous
    # Sums of products are those of numpy's BLAS, whose order depends on the processor.
    tight = machine == "reference" and OPS[name].traits.precision != "half"
    assert_expected(name, case, result, 1e-6 if tight and result.dtype == np.float32 else None)


@pytest.mark.filterwarnings("ignore::mlvm.eager.PrecisionWarning")
@pytest.mark.parametrize("machine", ["captured"])
@crossed(lambda name, case: case.inputs and not OPS[name].dynamic, few=with_long(True, False))
def test_a_captured_op_computes_what_its_oracle_does(name: str, case: Case, machine: str) -> None:
    assert_expected(name, case, captured(name, *case.inputs, **case.attributes))


@pytest.mark.parametrize("machine", ["native"])
@crossed(lambda name, case: name in PLANNERS)
def test_native_kernels_have_the_same_bits_on_any_number_of_threads(
    name: str, case: Case, machine: str
) -> None:
    results = [
        native(name, *case.inputs, threads=threads, **case.attributes) for threads in (1, 2, 3, 5)
    ]
    assert_expected(name, case, results[0])
    assert len({result.tobytes() for result in results}) == 1


@crossed(first=True)
def test_both_forms_of_an_op_agree(name: str, case: Case) -> None:
    """`x` makes what `x.out` writes, of the type that both announce."""
    fresh_form = FUNCTIONS.binding(name).callee
    attributes = fresh_form.bind(case.attributes)
    operands: list[Any] = list(case.inputs)
    types = [TensorType.of(x) for x in operands]
    with np.errstate(all="ignore"):
        [fresh] = fresh_form.call(operands, attributes)
        assert isinstance(fresh, np.ndarray)
        [announced] = fresh_form.infer(types, attributes) or ()
        if OPS[name].dynamic:
            assert announced is None
            return
        assert announced is TensorType.of(fresh)
        into = FUNCTIONS.binding(f"{name}.out").callee
        out = np.empty_like(fresh)
        assert tuple(into.call([out, *operands], attributes)) == ()
    assert into.infer([announced, *types], attributes) == ()
    assert out.tobytes() == fresh.tobytes()


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_cases_and_refuses_what_none_takes(name: str) -> None:
    """Each op has documentation, too, and refuses an unknown attribute and too few tensors."""
    assert CASES.get(name), f"no case of {name} in tests/cases"
    assert OPS[name].doc
    refuses(ArgumentError, "colour", evaluate, name, colour=3)
    op = OPS[name]
    if op.inputs and not op.variadic:
        refuses(ShapeError, rf"{name}\(\): expected {len(op.inputs)} tensors?", op.infer, [], {})


def test_every_case_is_of_an_op() -> None:
    assert set(CASES) <= set(OPS)
