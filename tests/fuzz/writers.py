"""Writers of files with a full disk, in a read-only folder, and killed in the middle.

    python -m tests.fuzz writers
    python -m tests.fuzz writers --only save --cuts 40

Every function and command that writes files writes an older version of them. Then a newer one is
written, and fails: after some bytes of a file (the disk is full, or the process is killed there),
when it is flushed to the disk, or since the folder is read-only. After each failure every file is
complete, the older version or the newer one, and readable; a failure is an `OSError` or an
`MlvmError`; and a writer that was not killed leaves no temporary file. Needs a POSIX system.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np

import mlvm.eager as ml
from mlvm.__main__ import main as command_of_mlvm
from mlvm.core.errors import MlvmError
from mlvm.eager.runs.repro import Repro
from mlvm.machines.files import write_array, write_file, write_files
from mlvm.machines.gpu import tiles
from mlvm.machines.gpu.kernels import Facts
from mlvm.step.saved import SavedStep
from models.training import checkpoint
from tests.fuzz.command import Wrong, outcomes_of, parser_of, told
from tests.threads import in_child

SIZES: Final = 50, 20_000
"""Elements of the older and of the newer version."""
_NOBODY: Final = 65534


class Failed(MlvmError):
    """A command ended with an exit status other than 0."""


@dataclass(frozen=True)
class Writer:
    """Writer of files.

    write: write the files for tensors of n elements into a folder
    read: raise an error if a file is damaged
    appends: whether it adds rows to its files, so that an earlier version is a part of a later one
    varies: whether its files differ from run to run, so that only `read` can tell whether they are
        complete
    """

    write: Callable[[Path, int], object]
    read: Callable[[Path], object] = lambda folder: None
    appends: bool = False
    varies: bool = False


def _x(n: int) -> Any:
    return ml.arange(n, dtype=ml.float32) / 3


def _captured(n: int) -> Any:
    x = ml.asarray(np.arange(n, dtype=np.float32))
    step = ml.capture(lambda y: ml.sum(x) + y)
    step(ml.ones(3))
    return step


def _run(*words: object) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = command_of_mlvm([str(word) for word in words])
    if status:
        raise Failed(stderr.getvalue())


def _save_onnx(folder: Path, n: int, external: bool) -> None:
    w = ml.asarray(np.arange(n, dtype=np.float32))
    ml.onnx.save(lambda x: x * w, [ml.ones(n)], folder / "m.onnx", external=external)


def _load_onnx(folder: Path) -> None:
    model = ml.onnx.load(folder / "m.onnx")
    [weight] = model.weights.values()
    np.testing.assert_array_equal(weight.numpy(), np.arange(weight.size))


def _log(folder: Path, n: int) -> None:
    with ml.ScalarLog(folder) as log:
        for step in range(n // 20):
            log.add("train", step, loss=step / 3, rate=1 / (step + 1))


def _traced(folder: Path, n: int) -> None:
    vm = ml.VM("traced")
    with vm.profile(folder / "t.json"), ml.Arena(vm, "a"):
        for _ in range(n // 50):
            ml.ones(2) + 1


def _plotted(folder: Path, n: int) -> None:
    arena = ml.Arena(ml.VM("plotted"), "plotted")
    with ml.record(arena), arena:
        for _ in range(n // 50):
            ml.ones(2) + 1
    arena.plot(folder / "a.svg")


def _write_script(file: Path, n: int) -> None:
    file.write_text(
        "import mlvm.eager as ml\nwith ml.Arena(ml.VM('v'), 'a'):\n"
        f"    for _ in range({n // 50}): ml.ones(2) + 1\n"
    )


def _write_buffers(file: Path, n: int) -> None:
    rows = [f"b{i},{i % 7},{i % 7 + 2},{i + 1}" for i in range(n // 50)]
    file.write_text("\n".join(["id,lower,upper,size", *rows]))


def _record(folder: Path, n: int) -> None:
    with ml.runs.record(folder):
        _captured(n)(ml.ones(3))


_MAKES: Final[dict[str, Callable[[Path, int], object]]] = {
    "py": _write_script,
    "csv": _write_buffers,
    "run": _record,
    "mlvm": lambda file, n: _captured(n).save(file),
    "onnx": lambda file, n: ml.onnx.save(lambda x: x * 2 + 1, [ml.ones(n)], file),
}


def _input(kind: str, folder: Path, n: int) -> Path:
    """The file of a kind that a command reads, which is made once."""
    file = folder.parent / f"{n}.{kind}"
    if not file.exists():
        _MAKES[kind](file, n)
    return file


def _tiles(folder: Path, n: int) -> None:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        for i in range(1 + n // 1000):
            facts: Any = Facts(*[f"device {i}"] * len(Facts._fields))  # type: ignore[arg-type]
            tiles.keep(facts, ml.float32, tiles.Tile(64, 64, 8, 4, 4, 4))
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _train(folder: Path, n: int) -> None:
    from models.training.train import main

    words = ["--model", "mlp", "--epochs", "1" if n == SIZES[0] else "2", "--quiet"]
    words += ["--save", str(folder / "c.safetensors"), "--json", str(folder / "r.json")]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = main([*words, "--plot", str(folder)])
    if status:
        raise Failed(stderr.getvalue())


def _load_training(folder: Path) -> None:
    checkpoint.load(folder / "c.safetensors")
    json.loads((folder / "r.json").read_text("utf-8"))
    for plot in folder.glob("*.svg"):
        ElementTree.parse(plot)


WRITERS: Final = {
    "write_file": Writer(lambda folder, n: write_file(folder / "f.txt", "line\n" * n)),
    "write_files": Writer(
        lambda folder, n: write_files({folder / name: f"{n}\n" * n for name in "abc"})
    ),
    "write_array": Writer(
        lambda folder, n: write_array(folder / "a.npy", np.arange(n)),
        lambda folder: np.load(folder / "a.npy"),
    ),
    "save": Writer(
        lambda folder, n: ml.save(folder / "w.safetensors", {"x": _x(n)}, {"n": str(n)}),
        lambda folder: ml.load(folder / "w.safetensors"),
    ),
    "checkpoint": Writer(
        lambda folder, n: checkpoint.save(folder / "c", {"x": np.arange(n)}, {"n": str(n)}),
        lambda folder: checkpoint.load(folder / "c"),
    ),
    "onnx.save": Writer(lambda folder, n: _save_onnx(folder, n, False), _load_onnx),
    "onnx.save external": Writer(lambda folder, n: _save_onnx(folder, n, True), _load_onnx),
    "Captured.save": Writer(
        lambda folder, n: _captured(n).save(folder / "s.mlvm"),
        lambda folder: SavedStep.from_bytes((folder / "s.mlvm").read_bytes()),
    ),
    "Captured.plot": Writer(lambda folder, n: _captured(n).plot(folder / "s.svg")),
    "Arena.plot": Writer(_plotted),
    "VM.trace": Writer(_traced),
    "ScalarLog": Writer(_log, appends=True),
    "tiles": Writer(_tiles),
    "mlvm run": Writer(
        lambda folder, n: _run(
            *("run", _input("mlvm", folder, n), "--arg", "f32[3] 1 2 3"),
            *("--out", folder / "out", "--trace", folder / "t.json"),
        )
    ),
    "Captured.save_repro": Writer(
        lambda folder, n: _captured(n).save_repro(folder / "r.mlvm", ml.ones(3)),
        lambda folder: Repro.from_bytes((folder / "r.mlvm").read_bytes()),
    ),
    "Measured.plot": Writer(
        lambda folder, n: ml.measure(lambda x: ml.exp(ml.sin(x)), ml.ones(n)).plot(folder / "m.svg")
    ),
    "mlvm plan": Writer(
        lambda folder, n: _run(
            *("plan", _input("csv", folder, n), "--effort", "1"),
            *("--out", folder / "planned.csv", "--plot", folder / "planned.svg"),
        )
    ),
    "mlvm replay": Writer(
        lambda folder, n: _run("replay", _input("run", folder, n), "--save", folder / "saved"),
        lambda folder: ml.load(folder / "saved" / "state.safetensors"),
    ),
    "mlvm memory": Writer(
        lambda folder, n: _run("memory", _input("py", folder, n), "--out", folder)
    ),
    "mlvm show": Writer(
        lambda folder, n: _run("show", _input("py", folder, n), "-o", folder / "page.html")
    ),
    "mlvm onnx": Writer(
        lambda folder, n: _run(
            *("onnx", _input("onnx", folder, n), "--plan", "--out", folder / "out"),
            *("--save", folder / "step.mlvm"),
        )
    ),
    "mlvm build": Writer(
        lambda folder, n: _run("build", _input("mlvm", folder, n), "-o", folder / "built"),
    ),
    "models.train": Writer(_train, _load_training, varies=True),
}


# --- failures -----------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(cut: int) -> Iterator[None]:
    """Let no file grow beyond `cut` bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (cut, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def failing_flush(_: int) -> Iterator[None]:
    """Let `fsync` fail, as on a disk that is found to be full or broken only then."""
    before = os.fsync

    def fails(_: Any) -> None:
        raise OSError(5, "Input/output error")

    os.fsync = fails  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = before


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write into the folder and the folders in it."""
    folders = [folder, *(each for each in folder.rglob("*") if each.is_dir())]
    modes = [each.stat().st_mode for each in folders]
    for each in folders:
        each.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for each, mode in zip(folders, modes, strict=True):
            each.chmod(mode)


def killed(work: Callable[[], object], cut: int) -> bool:
    """Do the work in another process, which is killed where a file would exceed `cut` bytes. Return
    whether it was."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (cut, cut))
        with contextlib.redirect_stdout(io.StringIO()):
            work()

    status = in_child(limited, seconds=60)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        raise Wrong("a killed writer did not end")
    return os.WIFSIGNALED(status)


# --- what must be true --------------------------------------------------------------------

Contents = dict[str, bytes]


def contents(folder: Path) -> Contents:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if not file.name.startswith((".mlvm-", "events.out"))
    }


def check(writer: Writer, folder: Path, old: Contents, new: Contents, what: str) -> None:
    """Raise `Wrong` unless each file is the old one or a complete new one."""
    now = contents(folder)
    for name in old.keys() - now.keys():
        raise Wrong(f"{what}: {name} is lost")
    for name, data in now.items():
        before, after = old.get(name), new.get(name, b"")
        if writer.appends:
            if not data.startswith(before or b"") or not data.endswith(b"\n"):
                raise Wrong(f"{what}: {name} has half a row, or lacks earlier ones")
        elif writer.varies:
            continue
        elif data != before and data[-12:] != after[-12:] and len(data) != len(after):
            raise Wrong(f"{what}: {name} has {len(data)} bytes, not {len(before or b'')} or all")
    try:
        writer.read(folder)
    except Exception as error:
        raise Wrong(f"{what}: damaged: {error}") from error


def attempt(name: str, cuts: int, kills: bool) -> str:
    """Let a writer fail in each way."""
    writer, (small, large) = WRITERS[name], SIZES
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
        Path(root).chmod(0o755)
        folder, model = Path(root, "folder"), Path(root, "model")
        for each in (folder, model):
            each.mkdir()
        writer.write(folder, small)
        old = contents(folder)
        writer.write(model, small)
        writer.write(model, large)
        new = contents(model)
        sizes = sorted({len(data) for data in new.values()})
        points = {0, 1, *(size - 1 for size in sizes)}
        points |= {int(p) for p in np.linspace(0, sizes[-1], cuts, endpoint=False)}

        def fails(failure: Any, what: str) -> None:
            try:
                with failure:
                    writer.write(folder, large)
            except (OSError, MlvmError):
                drafts = [each.name for each in folder.rglob(".mlvm-*")]
                if drafts:
                    raise Wrong(f"{name}, {what}: {drafts} are left") from None
            check(writer, folder, old, new, f"{name}, {what}")
            _restore(folder, old)

        for cut in sorted(points):
            fails(full_disk(cut), f"a disk full after {cut} bytes")
            if kills:
                killed(lambda: writer.write(folder, large), cut)
                check(writer, folder, old, new, f"{name}, killed after {cut} bytes")
                _restore(folder, old)
        fails(failing_flush(0), "a failing flush")
        if not writer.appends:
            fails(read_only(folder), "a read-only folder")
        writer.write(folder, large)
        check(writer, folder, new if not writer.appends else old, new, f"{name}, after all")
    return "ok"


def _restore(folder: Path, old: Contents) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()
    for name, data in old.items():
        (folder / name).write_bytes(data)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--only", choices=WRITERS, nargs="*", default=[*WRITERS], help="writers")
    parser.add_argument("--cuts", type=int, default=8, help="places where a write fails")
    parser.add_argument("--no-kills", action="store_true", help="kill no process")
    options = parser.parse_args(argv)
    names = options.only
    attempts = lambda i: attempt(names[i], options.cuts, not options.no_kills)  # noqa: E731
    return told(*outcomes_of(range(len(names)), attempts))
