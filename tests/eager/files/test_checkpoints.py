"""Tensors in files: what is saved is loaded, as the format's own library has it, and what is
damaged is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import mlvm.eager as ml
from mlvm.machines.wire import WireVM
from tests.alarms import interrupt_after
from tests.brief import Patch, cases, refuses
from tests.fuzz.mutations import assert_well_refused

DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8", "c8"]
SMALL = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
ARRAYS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, SMALL)),
    max_size=5,
)
TEXTS = st.dictionaries(st.text(max_size=8), st.text(max_size=9), max_size=2)
EXAMPLE = {"a/b": np.arange(6.0).reshape(2, 3), "é": np.array([1, 2], np.uint64), "t": np.True_}


class Unreadable:
    def __array__(self, dtype: object = None, copy: object = None) -> None:
        raise ValueError("not now")


class Centered(ml.nn.Module):
    def __init__(self) -> None:
        self.linear = ml.nn.Linear(2, 3, key=ml.random.key(0))
        self.tied = [self.linear, ml.nn.Linear(3, 2, key=ml.random.key(1))]
        self.mean = ml.nn.buffer(ml.ones(3, dtype=ml.int64))


def bits(tensors: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the form in which two dicts of tensors or arrays are compared: NaNs are equal, and
    -0.0 is not 0.0."""
    named = {name: np.asarray(x) for name, x in tensors.items()}
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in named.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(ARRAYS, TEXTS)
def test_what_is_saved_is_loaded(
    tmp_path: Path, tensors: dict[str, Any], metadata: dict[str, str]
) -> None:
    file = tmp_path / "x.safetensors"
    ml.save(file, {name: ml.asarray(x) for name, x in tensors.items()}, metadata)
    loaded = ml.load(file)
    assert bits(loaded) == bits(tensors)
    assert loaded.metadata == metadata
    assert all(isinstance(x, ml.Tensor) for x in loaded.values())
    first = file.read_bytes()
    ml.save(str(file), loaded, metadata)
    assert file.read_bytes() == first
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]


def test_arrays_of_any_order_are_saved(file: Path) -> None:
    big = np.array([[1, 2, 3], [4, 5, 6]], ">i2")
    ml.save(file, {"big": big, "turned": EXAMPLE["a/b"].T, "jumping": big[:, ::-2]})
    loaded = ml.load(file)
    assert loaded["big"].dtype is ml.int16
    np.testing.assert_array_equal(loaded["big"], big)
    np.testing.assert_array_equal(loaded["turned"], EXAMPLE["a/b"].T)
    np.testing.assert_array_equal(loaded["jumping"], [[3, 1], [6, 4]])


@pytest.mark.local(reason="the VM behind the wire is here")
def test_tensors_may_lie_at_odd_bytes(tmp_path: Path) -> None:
    file, values = tmp_path / "x", np.array([1.5, -2.5], "<f4")
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    file.write_bytes(written(header, b"\7" + values.tobytes()))
    for vm in (ml.VM(), ml.VM(native=False), WireVM(ml.VM())):
        with ml.Arena(vm, "odd").allocating():
            loaded = ml.load(file)
            np.testing.assert_array_equal(loaded["b"] * 2, values * 2)
            model = ml.nn.LayerNorm(2)
            ml.save(file.with_name("y"), model)
            ml.load(file.with_name("y"), into=model)


def test_a_module_is_saved_by_path_and_loaded_into_another(tmp_path: Path) -> None:
    file, one, two = tmp_path / "x", Centered(), Centered()
    one.linear.kernel += 1
    one.mean += 2
    ml.save(file, one, {"epoch": "3"})
    loaded = ml.load(file)
    assert loaded.keys() == {"linear/kernel", "linear/bias", "tied_1/kernel", "tied_1/bias", "mean"}
    assert loaded.metadata == {"epoch": "3"}
    handles = {name: x.handle for name, x in two.state().items()}
    assert ml.load(file, two) is two
    assert bits(two.state()) == bits(one.state())
    assert {name: x.handle for name, x in two.state().items()} == handles

    def rename(name: str) -> str | None:
        return None if name == "mean" else name.removeprefix("linear/")

    assert ml.load(file, rename=rename).keys() == {"kernel", "bias", "tied_1/kernel", "tied_1/bias"}
    part = ml.load(
        file,
        into=ml.nn.Linear(2, 3),
        rename=lambda name: name.rpartition("/")[2] if name.startswith("linear") else None,
    )
    np.testing.assert_array_equal(part.kernel, one.linear.kernel)


def test_tensors_go_to_the_current_arena_and_to_a_dry_one_as_types(file: Path) -> None:
    ml.save(file, EXAMPLE)
    arena = ml.Arena(ml.VM(), "weights")
    with arena.allocating():
        assert all(x.arena is arena for x in ml.load(file).values())
    with ml.Arena(ml.DryVM(), "types").allocating():
        types = {name: str(x.type) for name, x in ml.load(file).items()}
    assert types == {"a/b": "f64[2,3]", "é": "u64[2]", "t": "bool[]"}


def written(header: object, data: bytes) -> bytes:
    head = header if isinstance(header, str) else json.dumps(header)
    return len(head.encode()).to_bytes(8, "little") + head.encode() + data


def entry(dtype: object, shape: object, start: object, stop: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_halves_are_read_as_f32(file: Path) -> None:
    halves = np.array([0, -0.0, 1.5, 65504, 6e-8, np.inf, -np.inf, np.nan], np.float16)
    upper = np.array([0, 0x8000, 0x3FC0, 0x7F7F, 1, 0x7F80, 0xFF80, 0x7FC1], "<u2")
    header = {"h": entry("F16", [2, 4], 0, 16), "b": entry("BF16", [8], 16, 32)}
    file.write_bytes(written(header, halves.tobytes() + upper.tobytes()))
    loaded = ml.load(file)
    assert bits({"h": loaded["h"]}) == bits({"h": halves.astype(np.float32).reshape(2, 4)})
    assert loaded["b"].dtype is ml.float32
    expected = upper.astype(np.uint32) << 16
    assert loaded["b"].numpy().view(np.uint32).tolist() == expected.tolist()
    loaded_halves = ml.load(file, keep_halves=True)
    assert [x.dtype for x in loaded_halves.values()] == [ml.float16, ml.bfloat16]
    np.testing.assert_array_equal(loaded_halves["h"].numpy(), halves.reshape(2, 4))
    assert loaded_halves["b"].numpy().view(np.uint32).tolist() == expected.tolist()
    ml.save(file, loaded_halves)
    assert bits(ml.load(file)) == bits(loaded)
    assert file.read_bytes().endswith(upper.tobytes() + halves.tobytes())


def test_the_format_is_that_of_its_own_library(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.numpy")
    both = {str(i): np.ones((i, 2), dtype) for i, dtype in enumerate(DTYPES)}
    ours, other = tmp_path / "ours", tmp_path / "theirs"
    ml.save(ours, both, {"who": "me"})
    theirs.save_file(both, other, {"who": "me"})
    assert ours.read_bytes() == other.read_bytes()
    assert bits(theirs.load_file(ours)) == bits(both)
    assert bits(ml.load(other)) == bits(both)


# --- what is refused -----------------------------------------------------------------


def test_names_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    ml.save(file, ml.nn.Linear(2, 3))
    refuses(
        ml.errors.PathError, f"{file}: .*would both become 'x'", ml.load, file, rename=lambda _: "x"
    )
    unnamed: Any = lambda _: 3  # noqa: E731
    refuses(
        ml.errors.PathError, "rename: expected a name or None for '", ml.load, file, rename=unnamed
    )
    unnamed = "x"
    refuses(
        ml.errors.ArgumentError,
        "expected rename as a function of a name, got 'x'",
        ml.load,
        file,
        rename=unnamed,
    )


@cases(
    "tensors, metadata, error, reason",
    (
        {"z": np.zeros(1, "c16")},
        None,
        ml.errors.WeightsError,
        "z: the format does not support c128",
    ),
    (
        {"__metadata__": np.zeros(1)},
        None,
        ml.errors.WeightsError,
        "expected a name other than __metadata__",
    ),
    ({3: np.zeros(1)}, None, ml.errors.WeightsError, "3 is not a valid name"),
    ({"\ud800": np.zeros(1)}, None, ml.errors.WeightsError, "not UTF-8"),
    ({"x": np.zeros(1)}, {"a": 1}, ml.errors.WeightsError, "got 'a': 1"),
    ({"x": np.zeros(1)}, ["a"], ml.errors.ArgumentError, "mapping from str to str"),
    ({"x": 3j}, None, ml.errors.DTypeError, "expected a tensor, an array, .* as x, got 3j"),
    ({"x": np.array("a")}, None, ml.errors.DTypeError, "no dtype for"),
    ({"x": np.ma.array([1.0], mask=[True])}, None, ml.errors.DTypeError, "x is a masked array"),
    ({"x": Unreadable()}, None, ml.errors.DTypeError, "x: .* cannot be read: not now"),
    ([np.zeros(1)], None, ml.errors.DTypeError, "expected a Module or a dict of tensors"),
    (3, None, ml.errors.DTypeError, "expected a Module or a dict of tensors"),
    (
        {"f": len},
        None,
        ml.errors.DTypeError,
        "expected .*, a number, a str, None, or an object .* as f, got",
    ),
    ({"a": {"b": b"x"}}, None, ml.errors.DTypeError, "as a/b, got"),
    ({"c": ml.nn.Linear}, None, ml.errors.DTypeError, "as c, got"),
    ({"a/b": 1, "a": {"b": 2, "c": np.ones(1)}}, None, ml.errors.PathError, "two values have"),
)
def test_what_cannot_be_saved(
    tmp_path: Path, tensors: Any, metadata: Any, error: type[Exception], reason: str
) -> None:
    refuses(error, reason, ml.save, tmp_path / "x", tensors, metadata)
    assert list(tmp_path.iterdir()) == []


def test_an_array_is_read_once(tmp_path: Path) -> None:
    class Growing:
        size = 1

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[Any, Any]:
            self.size += 1
            return np.ones(self.size)

    ml.save(tmp_path / "x", {"x": Growing(), "y": np.zeros(2)})
    assert ml.load(tmp_path / "x")["x"].shape == (2,)


def test_tensors_of_pytorch_are_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "trained": torch.ones(2, requires_grad=True),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "turned": torch.tensor([1 + 2j]).conj(),
    }
    ml.save(tmp_path / "x", tensors)
    loaded = ml.load(tmp_path / "x")
    assert {name: x.tolist() for name, x in loaded.items()} == {
        "trained": [1, 1],
        "half": [1.5],
        "turned": [1 - 2j],
    }
    with pytest.raises(ml.errors.DTypeError, match="x: the values of this"):
        ml.save(tmp_path / "x", {"x": torch.zeros(2, device="meta")})


def test_arrays_in_a_modules_fields_are_named_since_they_are_not_saved(tmp_path: Path) -> None:
    model = Centered()
    model.linear.offset = np.zeros(3)  # type: ignore[attr-defined]
    model.statistics = {"std": (np.ones(3), 1.5)}  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=r"ml\.nn\.buffer\(ml\.asarray\(x\)\)") as caught:
        ml.save(tmp_path / "x", model)
    named = {str(each.message).partition(" ")[0] for each in caught}
    assert named == {"linear/offset", "statistics/std/0"}
    assert {each.filename for each in caught} == {__file__}


def test_the_mode_of_a_file_stays_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "x", tmp_path / "link"
    link.symlink_to(file)
    for value in (1, 2):
        ml.save(link, {"x": np.array([value])})
        assert link.is_symlink()
        assert ml.load(file)["x"].tolist() == [value]
        file.chmod(0o640)
    assert file.stat().st_mode & 0o777 == 0o640
    ml.save(file, {})
    assert file.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in file.parent.iterdir()] == ["x"]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    ml.save(tmp_path / ("x" * 255), EXAMPLE)
    assert bits(ml.load(tmp_path / ("x" * 255))) == bits(EXAMPLE)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    file: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    ml.save(file, EXAMPLE)
    with ml.Arena(ml.VM(), "gone"):
        stale = ml.zeros(2)
    refuses(ml.errors.StaleTensorError, "", ml.save, file, {"x": stale})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refuses(OSError, "No space left", ml.save, file, {})
    assert bits(ml.load(file)) == bits(EXAMPLE)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    refuses(FileNotFoundError, "nowhere/x", ml.save, tmp_path / "nowhere" / "x", EXAMPLE)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("pipe", "not a regular file"),
        ("nothing", "No such file"),
        ("\0", "null"),
    ):
        refuses(OSError, reason, ml.load, tmp_path / name)
    (tmp_path / "loop").symlink_to("loop")
    names = ("pipe", "", ".", "/", "a\0b", "\ud800", "loop")
    for name in names:
        with pytest.raises(OSError, match=r"not a regular file|null|surrogates|symbolic links"):
            ml.save(tmp_path / name if name in ("pipe", "loop") else name, EXAMPLE)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["loop", "pipe"]
    for call in (lambda: ml.load(3), lambda: ml.save(3, {})):  # type: ignore[call-overload,arg-type]
        refuses(ml.errors.ArgumentError, "a str or a path, got 3", call)
    with pytest.raises(ml.errors.DTypeError, match="expected a Module or a dict as into=, got "):
        ml.load(tmp_path / "x", into=[])


def test_a_captured_function_loads_nothing(file: Path) -> None:
    ml.save(file, {"x": np.ones(2)})
    with pytest.raises(ml.errors.CaptureError, match=r"cannot load a file .* Load it outside"):
        ml.capture(lambda x: x + ml.load(file)["x"])(ml.ones(2))
    refuses(ml.errors.CaptureError, "", ml.capture(lambda x: ml.save(file, {"x": x})), ml.ones(2))


def test_a_file_of_another_library_says_whose_it_is(tmp_path: Path) -> None:
    for file, content, text in (
        ("old.pt", b"\x80\x02}q\x00.", "torch.save, .*safetensors.torch.save_file"),
        ("new.pt", b"PK\3\4" + bytes(26) + b"model/data.pkl", "torch.save"),
        ("x.npy", b"\x93NUMPY\x01\x00", r"ml\.asarray\(numpy\.load\(file\)\)"),
        ("x.npz", b"PK\3\4" + bytes(26) + b"x.npy", r"numpy\.load"),
        ("x.h5", b"\x89HDF\r\n\x1a\n", "HDF5"),
        ("x.mlvm", b"MLVM" + bytes(9), "python -m mlvm run"),
        ("x.onnx", b"\x08\x0a\x12\x04mlvm", r"ml\.onnx\.load\(file\)"),
    ):
        (tmp_path / file).write_bytes(content)
        refuses(ml.errors.WeightsError, f"{file}: .*{text}", ml.load, tmp_path / file)


def test_a_name_that_promises_another_format_is_refused(tmp_path: Path) -> None:
    for ending, text in (("gguf", ""), ("pt", ""), ("onnx", "ml.onnx.save"), ("mlvm", "Captured")):
        message = rf"that ends in .safetensors, got .*{ending}.*{text}.*: write \"x\.safetensors\""
        refuses(ml.errors.ArgumentError, message, ml.save, tmp_path / f"x.{ending}", {"x": [1.0]})
    assert not [*tmp_path.iterdir()]


def test_a_file_whose_header_is_as_long_as_a_pickle_begins_is_loaded(file: Path) -> None:
    for n in range(400, 640, 8):
        ml.save(file, {"x": np.ones(2)}, {"text": "-" * n})
        if file.read_bytes()[:2] == b"\x80\x02":
            break
    assert file.read_bytes()[:8] == (640).to_bytes(8, "little")
    np.testing.assert_array_equal(ml.load(file)["x"], np.ones(2))


@cases(
    "header, reason",
    ("[]", "expected a JSON object"),
    ("{", "expected a header in JSON"),
    ('{"x\ud7ff": NaN}', "expected dtype"),
    ({"__metadata__": {"a": 1}}, "expected metadata from str to str"),
    ({"x": 3}, "x: expected dtype, shape and offsets"),
    ({"x": entry("F32", [], 0, None)}, "x: expected a shape and offsets of integers"),
    ({"x": entry(["F32"], [2], 0, 8)}, "x: expected dtype"),
    ({"x": {"dtype": "F32", "shape": [], "data_offsets": [0]}}, "x: expected dtype"),
    ({"x": entry("F8_E8M0", [8], 0, 8)}, "x: expected one of the dtypes .*, got F8_E8M0"),
    ({"x": entry("F32", [-1], 0, 4)}, "expected a shape and offsets of integers"),
    ({"x": entry("F32", [1.0], 0, 4)}, "expected a shape and offsets of integers"),
    ({"x": entry("F32", [True], 0, 4)}, "expected a shape and offsets of integers"),
    ({"x": entry("F32", [2], 0, 4)}, r"x: expected the bytes of F32 of shape \(2,\), got 4"),
    ({"x": entry("BF16", [3], 0, 8)}, r"x: expected the bytes of BF16 of shape \(3,\), got 8"),
    ({"x": entry("F32", [0, 2**63], 0, 0)}, "x: expected at most \\d+ bytes, got f32 of shape"),
    ({"x": entry("F32", [2**61, 0], 0, 0)}, "x: expected at most \\d+ bytes, got f32 of shape"),
    (
        {"x": entry("F16", [0, 2**31, 2**30], 0, 0)},
        "x: expected at most \\d+ bytes, got f32 of shape",
    ),
    ({"x": entry("F8_E5M2", [2**63], 0, 0)}, "x: expected at most \\d+ bytes, got f8e5m2 of shape"),
    ('{"\\u001b[31m\\n": 3}', r"\\x1b\[31m\\n: expected dtype"),
    ({"x": entry("U8", [1] * 70, 0, 1)}, "x: expected at most 64 dimensions, got 70"),
    ({"x": entry("F32", [1], 4, 8)}, "x: expected an offset of 0 .*, got bytes 4 to 8"),
    ({"x": entry("U8", [9], 0, 9)}, "expected 9 bytes of data, got 8"),
    ({"x": entry("U8", [4], 0, 4)}, "expected 4 bytes of data, got 8"),
    (
        {"x": entry("U8", [8], 0, 8), "y": entry("U8", [4], 4, 8)},
        "y: expected an offset of 8 after the previous tensor, got bytes 4 to 8",
    ),
    ({"x": entry("BOOL", [8], 0, 8)}, "x: expected bools as 0 or 1"),
    (
        '{"x": {"dtype": "U8", "dtype": "I8"}}',
        "expected distinct names in the header, got dtype twice",
    ),
)
def test_impossible_headers(file: Path, header: object, reason: str) -> None:
    file.write_bytes(written(header, bytes(range(8))))
    refuses(ml.errors.WeightsError, f"{file}: .*{reason}", ml.load, file)


def test_a_name_that_stands_twice_is_found_in_a_long_header(file: Path) -> None:
    names = [*range(100_000), 99_999]
    file.write_bytes(written("{" + ", ".join(f'"{name}": 0' for name in names) + "}", b""))

    def load() -> None:
        refuses(
            ml.errors.WeightsError,
            "expected distinct names in the header, got 99999 twice",
            ml.load,
            file,
        )

    assert not interrupt_after(10, load)


def test_a_tensor_of_an_unknown_dtype_can_be_left_out(file: Path) -> None:
    header = {"x": entry("F8_E5M2", [4], 0, 4), "y": entry("U8", [4], 4, 8)}
    file.write_bytes(written(header, bytes(8)))
    assert ml.load(file, rename=lambda name: name if name == "y" else None).keys() == {"y"}


def test_a_header_that_is_longer_than_the_format_has_it(file: Path) -> None:
    with file.open("wb") as stream:
        stream.write((100_000_000).to_bytes(8, "little"))
        stream.truncate(100_000_008)  # a hole, which takes no room
    refuses(ml.errors.WeightsError, "expected a header of at most 100000000 bytes", ml.load, file)


def _with_header(content: bytes) -> Callable[[bytes], bytes]:
    start = 8 + int.from_bytes(content[:8], "little")
    return lambda header: len(header).to_bytes(8, "little") + header + content[start:]


def test_mutations(file: Path) -> None:
    none = np.zeros((0, 3), np.uint8)
    ml.save(file, {**EXAMPLE, "none": none, "n": 3, "l": ["a", 0.5]}, {"who": "me"})
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")

    def read(damaged: bytes) -> None:
        file.write_bytes(damaged)
        ml.load(file)

    files = [(content, bytes), (content[8:start], _with_header(content))]
    assert_well_refused(files, read, ml.errors.WeightsError)


KILLED = """
import os, signal, sys, numpy as np, mlvm.eager as ml
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
ml.save(sys.argv[1], {"x": ml.ones(1000)})
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no signals here")
def test_what_a_killed_process_began_to_write_is_removed_by_the_next(
    file: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(file)]
    assert subprocess.run(command, timeout=60, check=False).returncode < 0
    [draft] = tmp_path.glob(".mlvm-*")
    other = tmp_path / ".mlvm-of-somebody"
    other.write_bytes(b"mine")
    ml.save(file, {"x": ml.ones(2)})
    assert draft.exists()  # it could be one that is being written
    for each in (draft, other):
        os.utime(each, (0, 0))
    with draft.open("rb") as reader:
        fcntl = pytest.importorskip("fcntl")
        fcntl.flock(reader, fcntl.LOCK_EX)
        ml.save(file, {"x": ml.ones(2)})
        assert draft.exists()
    ml.save(file, {"x": ml.ones(2)})
    assert not draft.exists()
    assert other.exists()
    assert ml.load(file)["x"].tolist() == [1, 1]


@dataclass
class Pair:
    left: Any
    right: Any


@dataclass(slots=True)
class Slotted:
    layer: Any


class Plain:
    def __init__(self, layer: Any) -> None:
        self.within = {"layer": layer}


class Holding(ml.nn.Module):
    def __init__(self, content: Any) -> None:
        self.linear = ml.nn.Linear(2, 2)
        self.content: Any = content
        self.inner: Any = None


OF_THIS_FILE = ml.nn.Linear(2, 2)


@cases(
    "obj",
    Pair(1, ml.nn.Linear(2, 2)),
    Slotted(ml.nn.Linear(2, 2)),
    deque([ml.nn.Linear(2, 2)]),
    (ml.nn.Linear(2, 2) for _ in range(2)),
    Plain(ml.nn.Linear(2, 2)),
    partial(ml.nn.Linear(2, 2), ml.ones((1, 2))),
    ml.nn.Linear(2, 2).__call__,
    {1: deque([ml.nn.Linear(2, 2)])},
    lambda x: OF_THIS_FILE(x),
    [lambda x: OF_THIS_FILE(x), ml.nn.Linear(2, 2)],
    ids=lambda obj: type(obj).__name__,
)
def test_a_module_that_is_hidden_in_a_field_is_warned_of(tmp_path: Path, obj: Any) -> None:
    text = f"content at inner is a {type(obj).__name__}, in which a (Linear|Module that)"
    model = Holding([])
    model.inner = Holding(obj)
    with pytest.warns(ml.NoEffectWarning, match=text) as caught:
        ml.optim.SGD(model, 0.1)
    assert [each.filename for each in caught] == [__file__]
    with pytest.warns(ml.NoEffectWarning, match=text):
        ml.save(tmp_path / "model", {"model": model, "step": 1})


def test_what_hides_no_parameters_is_not_warned_of(tmp_path: Path) -> None:
    model = Holding(None)
    fields = model.linear, Pair(1, model.linear), model.linear.__call__, lambda x: model(x)
    value: Any
    for value in (*fields, deque([ml.nn.ReLU()]), Plain(model), ml.tanh, np, iter([])):
        model.content = value
        ml.optim.SGD(model, 0.1)
        ml.save(tmp_path / "model", model)
