"""Old public names are deprecated aliases of the new ones."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core import errors
from mlvm.core.program.encoding import Kind, Writer
from mlvm.core.vm import VM
from mlvm.eager import public
from mlvm.machines.wire import WireVM, decode_answer
from mlvm.renamed import ATTRIBUTES, KEYWORDS, MODULES, NAMES
from tests.brief import ROOT, cases, refuses

FUNCTIONS, ERRORS = NAMES["ml"].items(), NAMES["ml.errors"].items()


def warned(old: str, new: str) -> Any:
    return pytest.warns(DeprecationWarning, match=rf"^{old} is now {new}; `python -m mlvm migrate")


@pytest.mark.parametrize(("old", "new"), FUNCTIONS)
def test_functions(old: str, new: str) -> None:
    with warned(f"ml.{old}", f"ml.{new}"):
        assert getattr(ml, old) is getattr(ml, new)
    assert old not in dir(ml)
    room, _ = public.PLACES[new]
    with warned(f"ml.{old}", f"ml.{new}"):  # as in a pickle of the function
        assert pickle.loads(f"c{room}\n{old}\n.".encode()).__name__ == new


OLD_MODULES = {
    "mlvm.eager.capture.captured": "Captured Measured capture measure",
    "mlvm.eager.functions.windows": "fold unfold",
    "mlvm.eager.optim.rules": "Adadelta Adagrad Adam AdamW Lion NAdam RAdam RMSProp SGD",
}


@cases("module", *MODULES)
def test_pickles_with_the_old_name_of_a_module(module: str) -> None:
    space = ml.optim if module == "mlvm.eager.optim.rules" else ml
    for name in OLD_MODULES[module].split():
        assert pickle.loads(f"c{module}\n{name}\n.".encode()) is getattr(space, name)
    with pytest.raises(AttributeError, match="other"):
        pickle.loads(f"c{module}\nother\n.".encode())


def test_the_pickle_of_an_optimizer() -> None:
    optimizer = ml.optim.AdamW(ml.nn.Linear(2, 3), 0.25)
    data = pickle.dumps(optimizer, protocol=0).replace(b"optim.update_rules", b"optim.rules")
    assert b"mlvm.eager.optim.rules" in data
    assert type(pickle.loads(data)) is ml.optim.AdamW


@pytest.mark.parametrize(("old", "new"), ERRORS)
def test_errors(old: str, new: str) -> None:
    kind = getattr(errors, new)
    for module in (errors, ml.errors):
        with warned(f"ml.errors.{old}", f"ml.errors.{new}"):
            assert getattr(module, old) is kind
    with warned(f"ml.errors.{old}", f"ml.errors.{new}"):
        assert pickle.loads(f"cmlvm.core.errors\n{old}\n.".encode()) is kind
    assert old not in dir(ml.errors)


@pytest.mark.parametrize(("old", "new"), ERRORS)
def test_errors_of_a_server_with_old_names(old: str, new: str) -> None:
    writer = Writer()
    writer.text(old)
    writer.sequence(("why",), Writer.value)
    writer.mapping({}, Writer.value)
    writer.sequence((), Writer.text)
    refuses(getattr(errors, new), "why", decode_answer, "read", writer.message(Kind.error))


def test_the_classes_of_errors_end_in_error() -> None:
    names = [
        name for name, x in vars(errors).items() if isinstance(x, type) and name in errors.__all__
    ]
    assert all(name.endswith("Error") for name in names)
    assert {*NAMES["ml.errors"].values()} <= {*names}


def test_an_old_name_catches() -> None:
    with warned("ml.errors.StaleTensor", "ml.errors.StaleTensorError"):
        try:
            raise errors.StaleTensorError("freed")
        except ml.errors.StaleTensor:  # type: ignore[attr-defined]
            pass


def test_a_name_warns_once_at_each_line() -> None:
    with warnings.catch_warnings(record=True, action="default") as caught:
        for _ in range(3):
            pair = ml.nll, ml.nll  # type: ignore[attr-defined]
            pair = ml.l1, ml.nll  # type: ignore[attr-defined]
    names = [str(each.message).partition(" ")[0] for each in caught]
    assert names == ["ml.nll", "ml.l1", "ml.nll"]
    assert pair == (ml.l1_loss, ml.nll_loss)
    assert {each.filename for each in caught} == {__file__}
    assert caught[0].lineno + 1 == caught[1].lineno


def test_an_old_name_in_a_captured_function() -> None:
    step = ml.capture(lambda x: ml.l1(x, x + 1.0))  # type: ignore[attr-defined]
    with warned("ml.l1", "ml.l1_loss"):
        step(ml.zeros(2))
    assert (step(ml.zeros(2)).tolist(), step.signatures) == ([1.0, 1.0], 1)


@cases("space", {}, {"__name__": "program"}, {"__name__": None})
@cases("code", "from mlvm.eager import nll", "import mlvm.eager as ml; ml.nll", "ml.VM().trace")
def test_a_use_warns_once_in_any_program(code: str, space: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        exec(code, {**space, "ml": ml})
    assert [each.category for each in caught] == [DeprecationWarning]


def test_inspection_does_not_warn() -> None:
    with warnings.catch_warnings(action="error"):
        for kind in (ml.VM, ml.optim.SGD, ml.optim.Plateau, ml.optim.MultiSteps):
            assert pydoc.render_doc(kind)
        assert "profile" in dict(inspect.getmembers(ml.VM()))


@cases("name", "nosuch", "StaleTensors", "capture_")
def test_other_names_are_missing(name: str) -> None:
    for module in (ml, errors, ml.errors):
        refuses(AttributeError, name, getattr, module, name)


def plateau(**options: Any) -> Any:
    return ml.optim.Plateau(1.0, **options).min_rate


def search(**options: Any) -> Any:
    w = ml.asarray([3.0])
    loss_of = lambda w: ml.sum(w**2)  # noqa: E731
    return ml.optim.LBFGS(w, 1.0).search(lambda: ml.value_and_grad(loss_of)(w), **options).item()


def record(**options: Any) -> Any:
    arena = ml.Arena(ml.VM(), "arena")
    with ml.record(arena, **options) as recording, arena:
        for _ in range(9):
            ml.sum(ml.ones(3))
    return len(recording.lifetimes)


def forget(**options: Any) -> Any:
    arena = ml.Arena(ml.VM(), "arena")
    with ml.record(arena) as recording, arena:
        ml.sum(ml.ones(3))
    recording.forget(**options)
    return len(recording.lifetimes)


def captured(**options: Any) -> Any:
    return repr(ml.capture(lambda x: x * 2.0, **options)(ml.ones(3)))


def of_class(**options: Any) -> Any:
    step = ml.Captured(lambda x: x * 2.0, fuse=True, recompute=True, **options)
    return step(ml.ones(3)).tolist()


def measured(**options: Any) -> Any:
    return ml.measure(lambda x: x * 2.0, ml.ones(3), **options).plan.nbytes


@pytest.fixture
def plotted(tmp_path: Any) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        axes: Any = {"dynamic_axes": {"x": ("n",)}, "max_sizes": {"n": 9}}
        step: Any = ml.capture(lambda x: ml.sum(ml.sort(x)), **axes)
        step(ml.ones(3))
        step.plot(tmp_path / "x.svg", **options)
        return (tmp_path / "x.svg").read_text()

    return call


CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("Captured", of_class, {"lengths": {"x": ("n",)}, "at_most": {"n": 9}}),
    ("LBFGS.search", search, {"most": 2}),
    ("Plateau", plateau, {"least": 0.5}),
    ("Recording.forget", forget, {"most": 0}),
    ("capture", captured, {"lengths": {"x": ("n",)}, "at_most": {"n": 9}}),
    ("measure", measured, {"lengths": {"x": ("n",)}, "at_most": {"n": 9}}),
    ("record", record, {"most": 2}),
]


@pytest.mark.parametrize(("name", "call", "options"), CALLS, ids=[name for name, *_ in CALLS])
def test_keywords(name: str, call: Any, options: dict[str, Any]) -> None:
    assert options.keys() == KEYWORDS[name].keys()
    new = {KEYWORDS[name][old]: value for old, value in options.items()}
    for old in options:
        rest = {x: value for x, value in new.items() if x != KEYWORDS[name][old]}
        with warned(f"{old}= of {name}", f"{KEYWORDS[name][old]}="):
            assert call(**rest, **{old: options[old]}) == call(**new)
        both = {**new, old: options[old]}
        refuses(
            errors.ArgumentError,
            f"got both {KEYWORDS[name][old]}= and the old name {old}=",
            call,
            **both,
        )


def test_an_invalid_call_with_an_old_keyword_does_not_warn() -> None:
    arena = ml.Arena(ml.VM(), "arena")
    record: Any = ml.record
    refuses(errors.ArgumentError, "too many positional", lambda: record(arena, 5, most=1))
    search: Any = ml.optim.LBFGS(ml.ones(2), 1.0).search
    refuses(errors.ArgumentError, "too many positional", lambda: search(len, 20, most=3))


def test_the_keyword_of_a_plot(plotted: Callable[..., Any]) -> None:
    with warned("lengths= of Captured.plot", "sizes="):
        assert plotted(lengths={"n": 2}) == plotted(sizes={"n": 2})
    assert {*KEYWORDS} == {"Captured.plot", *[name for name, *_ in CALLS]}


def test_the_learning_rate_of_an_optimizer() -> None:
    optimizer = ml.optim.SGD({"w": ml.ones(2)}, 0.1)
    assert optimizer.learning_rate == 0.1
    optimizer.learning_rate = ml.optim.exponential(1.0, 0.5)
    optimizer.update({"w": ml.ones(2)})
    assert (type(optimizer.learning_rate), optimizer.learning_rate) == (float, 0.5)
    steps = ml.optim.MultiSteps(optimizer, 1)
    for each in (optimizer, steps):
        name = "Optimizer" if each is optimizer else "MultiSteps"
        with warned(f"{name}.rate", f"{name}.learning_rate"):
            assert each.rate == 0.5  # type: ignore[union-attr]
    steps.learning_rate = 0.25
    assert optimizer.learning_rate == steps.learning_rate == 0.25
    assert copy.copy(optimizer).learning_rate == 0.25


def test_the_rate_of_a_pickled_plateau() -> None:
    plateau = ml.optim.Plateau(1.0, min_rate=0.5)
    data = pickle.dumps(plateau)
    old = data.replace(b"\x8c\x08min_rate", b"\x8c\x05least")
    assert old != data
    head, frame, rest = old[:2], old[2:11], old[11:]
    assert frame[:1] == b"\x95"
    again = pickle.loads(head + b"\x95" + len(rest).to_bytes(8, "little") + rest)
    assert again.min_rate == 0.5
    with warned("Plateau.least", "Plateau.min_rate"):
        again.least = 0.25
    assert (again.min_rate, again.rate.item()) == (0.25, 1.0)
    with warned("Plateau.least", "Plateau.min_rate"):
        del again.least
    assert not hasattr(again, "min_rate")


def test_a_profile_of_a_vm(tmp_path: Any) -> None:
    vm = ml.VM()
    with warned("VM.trace", "VM.profile"), vm.trace(tmp_path / "trace.json"):
        ml.ones(2, device=vm)
    assert "full" in (tmp_path / "trace.json").read_text()
    assert {*ATTRIBUTES} == {
        "Model", "MultiSteps", "Optimizer", "Plan", "Plateau", "QuantizationErrors", "VM"
    }  # fmt: skip


def test_the_plan_and_the_table_of_quantization() -> None:
    plan: Any = ml.measure(lambda x: x + 1.0, ml.ones(2)).plan._replace(hoisted_nbytes=8)
    with warned("Plan.ahead", "Plan.hoisted_nbytes"):
        assert plan.ahead == 8
    model = ml.nn.Sequential(ml.nn.Linear(32, 2), ml.nn.LayerNorm(2))
    errors: Any = ml.quantization_errors(model, ml.quantize(model, "i8"))
    with warned("QuantizationErrors.left", "QuantizationErrors.unquantized"):
        assert errors.left == errors.unquantized != []


def test_memory_used_is_in_bytes() -> None:
    for vm in (ml.VM(), ml.DryVM(), WireVM(VM())):
        before = vm.memory_used()
        x = ml.zeros((3, 1000), device=vm)
        assert vm.memory_used() == vm.consumed_size_in_mib() * 2**20 >= before
        assert (type(vm.memory_used()), x.nbytes) == (int, 12000)
    vm = ml.VM()
    handle = vm.alloc_storage(1001)
    assert vm.memory_used() == vm.consumed_size_in_mib() * 2**20 > 1000
    vm.dealloc_storage(handle)


ALIASES = """absolute:abs arccos:acos arccosh:acosh arcsin:asin arcsinh:asinh arctan:atan
arctan2:atan2 arctanh:atanh bf16:bfloat16 bitwise_not:bitwise_invert c128:complex128 c64:complex64
concatenate:concat conjugate:conj cumprod:cumulative_prod cumsum:cumulative_sum f16:float16
f32:float32 f4e2m1:float4_e2m1fn f64:float64 f8e4m3:float8_e4m3fn f8e5m2:float8_e5m2 i16:int16
i2:int2 i32:int32 i4:int4 i64:int64 i8:int8 invert:bitwise_invert left_shift:bitwise_left_shift
power:pow right_shift:bitwise_right_shift transpose:permute_dims true_divide:divide u16:uint16
u2:uint2 u32:uint32 u4:uint4 u64:uint64 u8:uint8"""


@pytest.mark.parametrize("pair", ALIASES.split())
def test_names_of_numpy_are_the_functions_themselves(pair: str) -> None:
    name, _, of_standard = pair.partition(":")
    assert getattr(ml, name) is getattr(ml, of_standard)
    assert name in dir(ml)


def test_each_type_prints_as_its_alias() -> None:
    kinds = [
        x for name, x in vars(ml).items() if isinstance(x, type(ml.float32)) and name != "bool"
    ]
    assert all(getattr(ml, kind.name) is kind for kind in kinds)


def test_transpose_reverses_the_axes() -> None:
    x = ml.zeros((2, 3, 4))
    assert (ml.transpose(x).shape, ml.transpose(x, (1, 0, 2)).shape) == ((4, 3, 2), (3, 2, 4))
    assert ml.vmap(ml.transpose)(x).shape == (2, 4, 3)


def test_the_page_has_a_row_for_each_name() -> None:
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \|$", (ROOT / "docs" / "renamed.md").read_text(), re.M)
    assert rows == [
        (text.format(owner, old), text.format(owner, new))
        for text, table in (("{}.{}", NAMES), ("{}.{}", ATTRIBUTES), ("{}({}=)", KEYWORDS))
        for owner, names in table.items()
        for old, new in names.items()
    ]
