"""One file for a training: what it has goes on to the last bit where it was left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    PathError,
    PipelineError,
    ShapeError,
    StaleTensorError,
)
from mlvm.eager import nn
from tests.brief import cases, refuses
from tests.trees import bits


class Net(nn.Module):
    def __init__(self, key: ml.Tensor) -> None:
        keys = ml.random.split(key)
        self.first = nn.Linear(3, 8, key=keys[0])
        self.norm = nn.BatchNorm(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2, key=keys[1])

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return self.head(self.dropout(self.norm(ml.tanh(self.first(x)))))


X = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
POINTS = X, (X.sum(1) > 0).astype(np.int64)


class Averages:
    """An object of a user's class that has a state: a tensor, an array and a number."""

    def __init__(self) -> None:
        self.total, self.counts, self.name = ml.zeros(()), np.zeros(2), "none"

    def state(self) -> dict[str, Any]:
        return {"sums": {"total": self.total, "seen": self.counts}, "name": self.name}

    def load_state(self, state: Any) -> None:
        self.total = ml.asarray(state["sums"]["total"])
        self.counts, self.name = state["sums"]["seen"], state["name"]


def training(seed: int) -> dict[str, Any]:
    model = Net(ml.random.key(seed))
    groups: Any = [("head", {"learning_rate": 0.01 + seed})]
    return {
        "model": model,
        "optimizer": ml.optim.AdamW(model, ml.optim.cosine(0.1, total_steps=40), groups=groups),
        "scale": ml.optim.LossScale(8.0 * 2**seed, growth_interval=3),
        "batches": ml.Pipeline(POINTS, 8, vm=ml.default_vm(), shuffle=True, epochs=None),
        "keys": ml.random,
        "key": ml.random.key(5 + seed),
        "averages": Averages(),
        "step": seed,
        "best": None if seed else 0.25,
        "name": f"run {seed}",
        "history": [] if seed else [0.5, float("inf"), 1e-310],
        "config": {"width": 8, "tags": ["a", {"b": None}], "on": True},
        "split": (np.float64(0.1 + seed), [ml.ones(2) * seed], np.arange(3) * seed),
    }


def steps(state: dict[str, Any], n: int, captured: bool = False) -> list[bytes]:
    model, optimizer, scale = state["model"], state["optimizer"], state["scale"]

    def loss_of(model: Net, x: ml.Tensor, y: ml.Tensor, key: ml.Tensor) -> ml.Tensor:
        x = x + 0.1 * ml.random.normal(x.shape, key=key)
        return scale.scale(ml.softmax_cross_entropy(model(x), y, reduction="mean"))

    def step(x: ml.Tensor, y: ml.Tensor, key: ml.Tensor) -> ml.Tensor:
        loss, grads = ml.value_and_grad(loss_of)(model, x, y, key)
        scale.update(optimizer, scale.unscale(grads))
        return loss

    losses_, run = [], ml.capture(step) if captured else step
    for _ in range(n):
        x, y = state["batches"].get()
        keys = ml.random.split(state["key"])
        state["key"][...] = keys[0]
        loss = run(x, y, keys[1])
        state["averages"].total += loss
        state["step"] += 1
        if state["step"] == 3:
            optimizer.groups[0].learning_rate = 0.02
            optimizer.weight_decay = 0.125
        losses_.append(loss.numpy().tobytes())
    return [*losses_, *[x.numpy().tobytes() for x in model.state().values()]]


@pytest.mark.parametrize("captured", [False, True])
def test_a_training_goes_on_to_the_last_bit(tmp_path: Path, captured: bool) -> None:
    file, state = tmp_path / "training", training(0)
    ml.random.seed(3)
    steps(state, 4, captured)
    ml.save(file, state, {"by": "me"})
    expected = steps(state, 7, captured)
    again = training(1)
    ml.random.seed(77)
    model, history, key = again["model"], again["history"], again["key"]
    assert ml.load(file, into=again) is again
    assert again["model"] is model
    assert again["history"] is history
    assert again["key"] is key
    assert (again["step"], again["best"], again["name"]) == (4, 0.25, "run 0")
    assert history == [0.5, float("inf"), 1e-310]
    assert again["config"] == {"width": 8, "tags": ["a", {"b": None}], "on": True}
    number, [tensor], array = again["split"]
    assert type(number) is np.float64
    assert number == 0.1
    assert tensor.tolist() == [0.0, 0.0]
    assert array.tolist() == [0, 0, 0]
    array += 1
    again["averages"].counts += 1.0
    assert again["optimizer"].groups[0].learning_rate == 0.02
    assert again["optimizer"].weight_decay == 0.125
    assert "learning_rate=<cosine(" in repr(again["optimizer"])
    assert again["averages"].name == "none"
    assert steps(again, 7, captured) == expected
    loaded = ml.load(file)
    assert loaded.metadata == {"by": "me"}
    assert loaded.plain["step"] == 4
    assert loaded.plain["batches/next_index"] == 8
    assert "model/first/kernel" in loaded
    assert [each.name for each in tmp_path.iterdir()] == ["training"]


def test_a_file_is_read_by_its_parts(tmp_path: Path) -> None:
    file, state = tmp_path / "training", training(0)
    steps(state, 2)
    ml.save(file, state)
    model = Net(ml.random.key(9))
    ml.load(file, into={"model": model}, where="model")
    for path, x in state["model"].state().items():
        np.testing.assert_array_equal(model.state()[path].numpy(), x.numpy())
    prefix = "model/"
    other = Net(ml.random.key(9))
    head = other.head.kernel.numpy()
    ml.load(
        file,
        into=other,
        rename=lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None,
        where=lambda path, x: not path.startswith("head"),
    )
    np.testing.assert_array_equal(other.head.kernel.numpy(), head)
    np.testing.assert_array_equal(other.norm.mean.numpy(), state["model"].norm.mean.numpy())
    part: dict[str, Any] = {"batches": state["batches"], "step": 0}
    position = state["batches"].state()
    assert ml.load(file, into=part, where="step")["step"] == 2
    assert state["batches"].state() == position
    assert list(ml.load(file, where="key")) == ["key"]
    assert ml.load(file, where="step").plain == {"step": 2}
    assert list(ml.load(file, where=lambda path, x: path == "model/head/bias")) == [
        "model/head/bias"
    ]
    refuses(ArgumentError, "no tensor matches 'stop'; exp", ml.load, file, into=part, where="stop")
    refuses(ArgumentError, "no tensor matches 'x'; expected: ", ml.load, file, where="x")


def test_a_part_of_a_model_of_few_bits(tmp_path: Path) -> None:
    layer, other = (ml.nn.Linear(64, 8, key=ml.random.key(seed)) for seed in (0, 1))
    quantized: list[Any] = [ml.quantize(x, "i4") for x in (layer, other)]
    model, another = quantized
    ml.save(tmp_path / "bias", model, where="bias")
    weight = another.weight.numpy()
    ml.load(tmp_path / "bias", into=another, where="bias")
    np.testing.assert_array_equal(another.weight.numpy(), weight)
    another.load_state(model.state())
    np.testing.assert_array_equal(another.weight.numpy(), model.weight.numpy())
    assert another.weight.dtype is ml.int4


def test_a_part_of_a_model_is_saved(tmp_path: Path) -> None:
    file, model = tmp_path / "head", Net(ml.random.key(0))
    ml.save(file, model, where="head")
    assert set(ml.load(file)) == {"head/kernel", "head/bias"}
    other = Net(ml.random.key(1))
    refuses(PathError, "missing tensors 'first/kernel'", ml.load, file, into=other)
    first = other.first.kernel.numpy()
    assert ml.load(file, into=other, where="head") is other
    np.testing.assert_array_equal(other.head.kernel.numpy(), model.head.kernel.numpy())
    np.testing.assert_array_equal(other.first.kernel.numpy(), first)
    refuses(ArgumentError, "no tensor matches 'tail'", ml.save, file, model, where="tail")


def test_an_optimizer_alone_is_saved_and_loaded(tmp_path: Path) -> None:
    file, model = tmp_path / "x", nn.Linear(2, 3)
    one, two = ml.optim.Adam(model, 0.25), ml.optim.Adam(model, 0.5)
    one.update({"kernel": ml.ones((2, 3)), "bias": ml.ones(3)})
    ml.save(file, one)
    assert ml.load(file, into=two) is two
    assert two.learning_rate == 0.25
    assert two.betas == one.betas
    for path, x in one.state().items():
        np.testing.assert_array_equal(two.state()[path].numpy(), x.numpy())
    ml.save(file, one.state())
    two.load_state(ml.load(file))
    scheduled = ml.optim.Adam(model, ml.optim.constant(0.125))
    ml.save(file, one)
    ml.load(file, into=scheduled)
    assert "learning_rate=<constant(0.125)>" in repr(scheduled)
    grouped = ml.optim.Adam(model, 0.5, groups=[("bias", {})])
    refuses(PathError, "has 2 groups, but the file has 1 group", ml.load, file, into=grouped)


def test_a_rate_that_has_fallen_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    def start() -> tuple[list[ml.optim.Plateau], ml.optim.Optimizer]:
        rates = [ml.optim.Plateau(0.1, factor=0.5, patience=1), ml.optim.Plateau(1.0, patience=0)]
        groups: Any = [("a", {"learning_rate": ml.optim.warmup(rates[1], 2)})]
        params = {"a": ml.ones(1), "b": ml.ones(1)}
        return rates, ml.optim.SGD(params, rates[0], groups=groups)

    rates, optimizer = start()
    for loss in (1.0, 2.0, 3.0, 4.0):
        rates[0].update(loss)
    rates[1].update(1.0)
    for wrapped in (
        lambda optimizer: optimizer,
        lambda optimizer: ml.optim.MultiSteps(optimizer, 2),
    ):
        ml.save(tmp_path / "file", {"optimizer": wrapped(optimizer)})
        again, its = start()
        ml.load(tmp_path / "file", into={"optimizer": wrapped(its)})
        for rate, expected in zip(again, rates, strict=True):
            assert [*map(float, rate.state().values())] == [*map(float, expected.state().values())]
        assert its.learning_rate == optimizer.learning_rate == np.float32(0.05)
        with pytest.raises(PathError, match=r"unknown tensors .*'optimizer/schedules/0/best'"):
            ml.load(tmp_path / "file", into={"optimizer": wrapped(ml.optim.SGD(ml.ones(1), 0.1))})


def test_global_keys_are_set_from_a_tensor(tmp_path: Path) -> None:
    ml.save(tmp_path / "keys", {"keys": ml.random.state()})
    x = ml.random.normal(3)
    ml.random.set_state(ml.load(tmp_path / "keys")["keys"])
    np.testing.assert_array_equal(ml.random.normal(3).numpy(), x.numpy())


def test_the_keys_of_each_vm_of_a_training_go_on(tmp_path: Path) -> None:
    """Wherever it is saved and loaded."""
    one, other = [ml.Arena(ml.VM(name), "weights") for name in ("one", "other")]
    here = ml.Arena(ml.VM("here"), "here")

    def build() -> dict[str, Any]:
        with one.allocating():
            model = nn.Linear(2, 2)
        with other.allocating():
            return {"keys": ml.random, "model": model, "average": ml.ones(2)}

    def drawn() -> list[Any]:
        draws = []
        for arena in (one, other, here):
            with arena.allocating():
                draws.append(ml.random.normal(3).tolist())
        return draws

    ml.random.seed(1)
    state, again = build(), build()
    for i, arena in enumerate((one, other, here)):
        with arena.allocating():
            ml.random.seed(3 + i)
    for place, also in ((here, here), (one, here), (here, one), (other, other)):
        with place.allocating():
            ml.save(tmp_path / "file", state)
        expected = drawn()
        with also.allocating():
            ml.load(tmp_path / "file", into=again)
        outside = 3 if place is also is here else 2
        assert drawn()[:outside] == expected[:outside]


@pytest.mark.parametrize("rows", [1, 2])
def test_keys_of_a_file_of_one_vm_are_for_all(tmp_path: Path, rows: int) -> None:
    """A file as it was written before keys were those of several VMs."""
    there = ml.Arena(ml.VM("there"), "there")
    with there.allocating():
        x = ml.ones(2)
    words = np.asarray([[7, 5], [8, 6]], np.uint64)[:rows]
    ml.save(tmp_path / "file", {"x": x, "keys": words if rows > 1 else words[0]})
    ml.load(tmp_path / "file", into={"x": x, "keys": ml.random})
    assert ml.random.state().tolist() == words[-1].tolist()
    with there.allocating():
        assert ml.random.state().tolist() == [7, 5]
    ml.save(tmp_path / "bad", {"keys": np.zeros((2, 3), np.uint64)})
    with pytest.raises(ShapeError, match=r"'keys': expected u64\[2\], got u64\[2,3\]"):
        ml.load(tmp_path / "bad", into={"keys": ml.random})


@cases(
    "change, error, text",
    ({"step": ...}, PathError, "unknown value 'step'; got "),
    ({"more": 1, "w": ml.ones(1)}, PathError, "missing tensor 'w'; missing value 'more'"),
    ({"step": ml.ones(1)}, PathError, "missing tensor 'step'; unknown value 'step'"),
    ({"model": {"kernel": 1}}, PathError, "unknown tensors 'model/.*; missing value 'model'"),
    ({"key": ml.ones(2)}, DTypeError, r"tensor 'key': expected f32\[2\], got u64\[2\]"),
    (
        {"model": nn.Linear(2, 4)},
        ShapeError,
        r"tensor 'model/kernel': expected f32\[2,4\], got f32\[2,3\]",
    ),
    ({"array": np.zeros(3)}, ShapeError, r"tensor 'array': expected f64\[3\], got f64\[2\]"),
    (
        {"batches": ml.Pipeline(POINTS, 8, vm=ml.VM(), epochs=0)},
        PipelineError,
        "epoch as an integer",
    ),
)
def test_a_structure_that_differs_is_refused_and_stays_as_it_is(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], text: str
) -> None:
    def build() -> dict[str, Any]:
        batches = ml.Pipeline(POINTS, 8, vm=ml.VM(), epochs=3)
        model = nn.Linear(2, 3)
        return {"model": model, "key": ml.random.key(0), "array": np.ones(2), "batches": batches}

    file, saved = tmp_path / "x", {**build(), "step": 3}
    for _ in range(4):
        saved["batches"].get()
    ml.save(file, saved)
    other = {**build(), "step": 1, **change}
    other = {name: x for name, x in other.items() if x is not ...}
    before = {name: x for name, x in other.items() if name != "model"}
    kernel = other["model"].kernel.numpy() if isinstance(other["model"], nn.Linear) else None
    refuses(error, text, ml.load, file, into=other)
    assert {name: x for name, x in other.items() if name != "model"} == before
    if kernel is not None:
        np.testing.assert_array_equal(other["model"].kernel.numpy(), kernel)


def test_a_stale_part_leaves_all_others(tmp_path: Path) -> None:
    with ml.Arena(ml.VM(), "gone"):
        stale = ml.zeros(2)
    ml.save(tmp_path / "x", {"a": ml.ones(2), "gone": ml.ones(2), "n": 3})
    state: dict[str, Any] = {"a": ml.zeros(2), "gone": stale, "n": 1}
    refuses(StaleTensorError, "", ml.load, tmp_path / "x", into=state)
    assert state["a"].tolist() == [0.0, 0.0]
    assert state["n"] == 1


def test_plain_values_that_are_damaged(tmp_path: Path) -> None:
    for text in ("[1]", "{", "[" * 100_000):
        ml.save(tmp_path / "x", {"a": np.zeros(1)}, {"mlvm.plaim": text})
        content = (tmp_path / "x").read_bytes().replace(b"mlvm.plaim", b"mlvm.plain")
        (tmp_path / "x").write_bytes(content)
        refuses(
            ml.errors.WeightsError,
            "expected the plain values as a JSON object by path",
            ml.load,
            tmp_path / "x",
        )
    message = "'mlvm.plain' is reserved for plain values"
    refuses(ml.errors.ArgumentError, message, ml.save, tmp_path / "x", {}, {"mlvm.plain": ""})


@pytest.mark.local(reason="the members are here")
@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_weights_in_parts_are_saved_whole(tmp_path: Path, shard: Any) -> None:
    def make(vm: object) -> Any:
        model = nn.Linear(2, 3, key=ml.random.key(0))
        optimizer = ml.optim.Adam(model, 0.1)
        state = {"model": model, "optimizer": optimizer}

        def improve(x: ml.Tensor) -> None:
            loss_and_grad = ml.parallel.value_and_grad(lambda m: ml.sum(ml.square(m(x))))
            optimizer.update(loss_and_grad(model)[1])

        def step(x: ml.Tensor) -> bool:
            improve(x)
            file = tmp_path / str(ml.parallel.rank())
            ml.save(file, state)
            whole = {path: np.asarray(y) for path, y in ml.load(file).items()}
            improve(x)
            ml.load(file, into=state)
            now = {f"model/{path}": y for path, y in model.state().items()}
            now |= {f"optimizer/{path}": y for path, y in optimizer.state().items()}
            return bits(now) == bits({path: whole[path] for path in now})

        return step

    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(make, group, shard=shard)
        assert step(ml.ones((4, 2)))
    assert set(ml.load(tmp_path / "0")) == {
        *("model/kernel", "model/bias", "optimizer/count"),
        *(
            f"optimizer/{name}/{path}"
            for name in ("gradient_sum", "square_sum")
            for path in ("kernel", "bias")
        ),
    }


def test_what_contains_itself_is_refused(tmp_path: Any) -> None:
    values: list[Any] = [1]
    values.append(values)
    with pytest.raises(ml.errors.DTypeError, match="contains itself"):
        ml.save(tmp_path / "a.safetensors", {"values": values})
