"""The debugger: what its commands print is what the eager function computes."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.program.encoding import Kind, Writer
from mlvm.eager.runs.debugger import Debugger
from mlvm.eager.runs.execution import Execution
from mlvm.eager.runs.expressions import Expression
from mlvm.eager.runs.ops import op_program
from mlvm.eager.runs.repro import Repro
from tests.brief import Capsys, cases, refuses, run_python

w = ml.asarray(np.random.default_rng(0).normal(size=(3, 3)), dtype="f32")


def step(x: ml.Tensor, kept: dict[str, list[Any]] | None) -> ml.Tensor:
    """A step that keeps its values by name, when it runs eagerly."""

    def keep(name: str, value: ml.Tensor) -> None:
        if kept is not None:
            kept.setdefault(name, []).append(value.numpy())

    q = ml.tanh(x @ w)
    keep("q", q)
    k = ml.softmax(
        q * 3.0,
        axis=-1,
    )
    keep("k", k)

    def body(i: ml.Tensor, a: ml.Tensor) -> ml.Tensor:
        b = a @ w
        keep("b", b)
        c = b / (1.0 + ml.max(ml.abs(b)))
        keep("c", c)
        return c

    r = ml.fori_loop(0, 4, body, k)
    s = ml.cond(ml.sum(r) > 0.0, lambda r: r * 2.0, lambda r: r - 1.0, r)
    t: ml.Tensor = ml.sum(s, axis=0)
    keep("t", t)
    u = ml.log(t - 100.0)
    keep("u", u)
    return u


X = ml.asarray(np.random.default_rng(1).normal(size=(2, 3)), dtype="f32")


def kept_eagerly() -> dict[str, list[Any]]:
    kept: dict[str, list[Any]] = {}
    step(X, kept)
    return kept


def debugger() -> tuple[Debugger, io.StringIO]:
    return debugged(lambda x: step(x, None), X)


def printed(pdb: Debugger, out: io.StringIO, command: str) -> str:
    """Return what a command prints."""
    before = len(out.getvalue())
    pdb.onecmd(command)
    return out.getvalue()[before:]


def values_in(text: str) -> Any:
    """Return the elements of a printed tensor, without the line before it."""
    head, _, rest = text.partition("\n")
    elements = rest if re.search(r": \w+\[[\d,]*\]$", head) else text
    found = re.findall(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)", elements)
    return np.array(found, np.float32)


def test_a_script_of_200_commands_agrees_with_an_eager_run() -> None:
    kept, draw = kept_eagerly(), random.Random(0)
    pdb, out = debugger()
    counts = {"right": 0, "not computed": 0}
    moves = ["s", "n", "rs", "rn", "r", "s", "s", "rs", "goto 5", "goto 33", "c", "rc", "b c", "cl"]
    for _ in range(100):
        printed(pdb, out, draw.choice(moves))
        name = draw.choice([*kept])
        text = printed(pdb, out, f"p {name}")
        done = [op for op in pdb.execution.executed[: pdb.execution.position] if name in op.names]
        if not done:
            assert text.startswith(f"error: {name} is computed after position")
            counts["not computed"] += 1
            continue
        expected = kept[name][len(done) - 1].reshape(-1)
        assert np.array_equal(values_in(text), expected, equal_nan=True), (name, text)
        counts["right"] += 1
    assert min(counts.values()) >= 10, counts


def test_a_breakpoint_in_a_loop_stops_at_each_turn() -> None:
    kept = kept_eagerly()
    pdb, out = debugger()
    printed(pdb, out, "b b")
    for i in range(4):
        assert "breakpoint: name b" in printed(pdb, out, "c")
        assert np.array_equal(values_in(printed(pdb, out, "p b")), kept["b"][i].reshape(-1))
        assert f"loop turn {i}" in printed(pdb, out, "bt")
    assert "the end" in printed(pdb, out, "c")
    for i in reversed(range(4)):
        printed(pdb, out, "rc")
        assert np.array_equal(values_in(printed(pdb, out, "p b")), kept["b"][i].reshape(-1))
    assert printed(pdb, out, "rc").startswith("[0]")


@cases(
    "condition, name",
    ("any(isnan(u))", "u"),
    ("any(isnan(result))", "u"),
    ("max(abs(b)) < 0.5 and sum(k) > 0", "b"),
    ("all(c[0, :2] == %0[0, :2] * 0 + c[0, :2])", "c"),
)
def test_a_condition_stops_after_the_op_that_makes_it_true(condition: str, name: str) -> None:
    pdb, out = debugger()
    printed(pdb, out, f"b {condition}")
    text = printed(pdb, out, "c")
    assert f"breakpoint: condition {condition}" in text
    position = pdb.execution.position
    op = pdb.execution.executed[position - 1]
    assert name in op.names
    printed(pdb, out, f"goto {pdb.execution.length}")
    printed(pdb, out, "rc")
    assert condition in out.getvalue().rpartition("breakpoint")[2]


def with_source(source: str, folder: Path) -> Any:
    """Return the function `step` that the source defines, in a file of its own."""
    file = folder / "source.py"
    file.write_text(f"import mlvm.eager as ml\n{source}")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["step"]


def debugged(step: Any, *args: Any) -> tuple[Debugger, io.StringIO]:
    """Return a debugger of a call, and what it prints."""
    program, inputs = op_program(ml.capture(step), args, {})
    out = io.StringIO()
    return Debugger(Execution(program, inputs), stdin=io.StringIO(), stdout=out), out


NAMING = """
@ml.subroutine
def doubled(x):
    return x * 2.0
def nested(i, s):
    inner = ml.fori_loop(0, 2, lambda i, s: s + 1.0, s)
    return inner * 1.5
lin = ml.nn.Linear(3, 3)
opt = ml.optim.SGD(lin, 0.1)
total = ml.zeros(3)
def helper(t, n=0):
    t = t + 1.0
    u = helper(t, n - 1) if n else t
    return ml.tanh(t)
def step(x):
    y = x * 2.0
    {}
    return {}
"""


@cases(
    "statement, names",
    ("y = ml.fori_loop(0, 3, lambda i, s: s * 2.0, x); z = y * 5.0", "y z"),
    ("y = ml.fori_loop(0, 0, lambda i, s: s * 2.0, x)", "y"),
    ("z = ml.while_loop(lambda s: ml.max(s) < 99.0, lambda s: s * 2.0, x)", "y z"),
    ("z = ml.map(lambda row: row * 2.0, x); y = doubled(x * 3.0)", "y z"),
    ("x = ml.cond(ml.sum(x) > 0.0, lambda r: r * 2.0, lambda r: r - 1.0, x)", "x"),
    ("y = ml.fori_loop(0, 3, nested, x)", "y"),
    ("s = ml.fori_loop(0, 3, lambda i, s: ml.cond(i > 1, ml.sin, lambda s: s * 3.0, s), x)", "s"),
    ("z = ml.cond(ml.max(x) > 0.0, lambda r: ml.fori_loop(0, 2, nested, r), ml.sin, x)", "z"),
    ("y[0] = 5.0; z = y; y = x", "y z"),
    ("y += 1.0; ml.multiply(y, 2.0, out=y); x *= y", "x y"),
    ("for i in range(3): y[i] = x[i] * 3.0", "y"),
    ("total[...] = total + y", "total"),
    ("z = helper(x * 2.0); t = helper(helper(z)); u = x", "t u y z"),
    ("z = y = helper(x, 2)", "y z"),
    ("z = [x + 1.0, x + 2.0]; z[0] = z[1]; d = {'u': x}; d['u'] += 1.0", "z[0] z[1] d['u']"),
    ("a, b = ml.cond(ml.sum(x) > 0.0, lambda r: (r * 2.0, r), lambda r: (r, r - 1.0), x)", "a b"),
    ("a, b = ml.scan(lambda c, row: (c + row, c), x[0], x)", "a b y"),
    ("z = ml.capture(helper)(y); r = (lambda y: y * 3.0)(z); v = y.reshape(3, 1)", "r v y z"),
    ("z = ml.vmap(lambda y: y * 2.0)(x); g = ml.grad(lambda y: ml.sum(y * y))(x)", "g y z"),
    ("loss, g = ml.value_and_grad(lambda m: ml.sum(m(x)))(lin); opt.update(g)", "loss lin.kernel"),
)
def test_names_have_the_values_of_variables(statement: str, names: str, tmp_path: Path) -> None:
    results = f"[{', '.join(names.split())}]"
    step = with_source(NAMING.format(statement, results), tmp_path)
    pdb, out = debugged(step, ml.copy(X[0]))
    printed(pdb, out, "c")
    for name, value in zip(names.split(), step(ml.copy(X[0])), strict=True):
        text = printed(pdb, out, f"p {name}")
        assert np.array_equal(values_in(text), value.numpy().reshape(-1)), (name, text)


def test_breakpoints_of_names_stop_at_assignments_and_reads(tmp_path: Path) -> None:
    source = (
        "def step(x):\n    sum = x * 2.0\n    sum[0] = 7.0\n    y = ml.sum(sum)\n    return y * x"
    )
    pdb, out = debugged(with_source(source, tmp_path), ml.copy(X[0]))
    for name, positions in (("sum", [1, 2]), ("x", [3]), ("y", [3]), ("all(sum[:1] == 7)", [2])):
        for command in ("cl", "goto 0", f"b {name}"):
            printed(pdb, out, command)
        stops = [printed(pdb, out, "c").split("\n")[-4:][0] for _ in range(len(positions) + 1)]
        assert [int(text[1]) for text in stops] == [*positions, 4], stops


def test_next_passes_loops_and_return_leaves_them() -> None:
    pdb, out = debugger()
    printed(pdb, out, "b b")
    printed(pdb, out, "c")
    printed(pdb, out, "cl")
    assert "loop turn" in printed(pdb, out, "bt")
    printed(pdb, out, "r")
    assert "loop turn" not in printed(pdb, out, "bt")
    after = pdb.execution.position
    printed(pdb, out, "rn")
    assert "loop turn" not in printed(pdb, out, "bt")
    printed(pdb, out, "n")
    assert pdb.execution.position == after


def test_lines() -> None:
    pdb, out = debugger()
    assert pdb.execution.length
    line = next(op.line for op in pdb.execution.executed if "t" in op.names)
    assert line is not None
    assert line.text == "t: ml.Tensor = ml.sum(s, axis=0)"
    stop = printed(pdb, out, f"until {line.number}")
    assert f"test_debugger.py:{line.number} in step" in stop
    assert f"-> {'':4}{line.text}" in printed(pdb, out, "l")
    printed(pdb, out, f"b test_debugger.py:{line.number}")
    printed(pdb, out, "goto 0")
    assert printed(pdb, out, "c").startswith("breakpoint: line test_debugger.py")
    where = printed(pdb, out, "w")
    assert line.text in where
    assert where.startswith(f"last: %{pdb.execution.position - 1} = ")


def test_summary_names_place_writer_and_reader() -> None:
    pdb, out = debugger()
    printed(pdb, out, "b k")
    printed(pdb, out, "c")
    text = printed(pdb, out, "summary k")
    for part in ("f32[2,3]", "min ", "nans 0", "scratch at byte", "written by %", "next read by %"):
        assert part in text
    assert "nans 3" in printed(pdb, out, f"goto {pdb.execution.length}") + printed(
        pdb, out, "summary u"
    )


def test_the_arena_is_drawn(tmp_path: Path) -> None:
    pdb, out = debugger()
    printed(pdb, out, "goto 3")
    text = printed(pdb, out, "arena")
    assert re.match(r"moment \d+: \d+ tensors?, [\d,]+ of [\d,]+ bytes of scratch\n", text)
    assert "#" in text
    picture = tmp_path / "arena.svg"
    assert printed(pdb, out, f"arena {picture}") == f"picture  {picture}\n"
    assert picture.read_text().startswith("<svg")


@cases(
    "command, error",
    ("nothing", "unknown command 'nothing'"),
    ("p", "expected an expression, got ''"),
    ("p nothing", "no value is named nothing"),
    ("p %999", "expected an input, state, constant or result"),
    ("p %0.7", "expected an input, state, constant or result"),
    ("p input 7", "expected an input, state, constant or result"),
    ("p q +", "invalid syntax"),
    ("p open('x')", "size, got open"),
    ("p q.__class__", "no value is named q.__class__"),
    ("p (lambda: 0)()", "expected names, numbers, functions"),
    ("p [x for x in q]", "expected names, numbers, functions"),
    ("p x + input", "no value is named input"),
    ("p x[:, 9]", "index 9 is out of range for length 3"),
    ("p ~x", "dtype f32 is not allowed; it must be integer or bool"),
    ("p x + ones", "no value is named ones"),
    ("p x[[0]]", "integers and slices"),
    ("p max(x, 7)", "axis 7 is out of range"),
    ("p " + "(" * 5000, "expected an expression"),
    ("p " + "-" * 200 + "x", "nested at most 100 deep"),
    ("p " + "-" * 9000 + "x", "expected an expression"),
    ("p " + "x+" * 6000 + "x", "too many levels"),
    ("summary nothing+1", "expected a name or reference"),
    ("until q", "expected a line"),
    ("until", "until: expected a line, got ''"),
    ("until nothing.py:3", "no op has the line nothing.py:3"),
    ("goto -1", "expected a position"),
    ("goto 9999", "expected a position from 0 to 46, got 9999"),
    ("b tahn", "no value or op is named tahn (did you mean 'tanh'?)"),
    ("b nothing", "no value or op is named nothing; info and l show names"),
    ("b arcsin", "no value or op is named arcsin"),
    ("b any(isnan(nothing))", "no value is named nothing"),
    ("b x[0] > nothing[0]", "no value is named nothing"),
    ("b 4711", "no op has the line"),
    ("b nothing.py:3", "no op has the line nothing.py:3; there are ops at tests"),
    ("goto 99999999999999999999999999", "expected a position"),
    ("cl 7", "expected the number of a breakpoint"),
    ("b open('x')", "size, got open"),
    ("b 1 +", "invalid syntax"),
    ("h nothing", "unknown command 'nothing'"),
    ("result", "no op with a result was executed"),
    ("arena /nothing/there.svg", "No such file"),
    ("arena /nothing/there.txt", "expected a name that ends in .svg"),
)
def test_wrong_commands_print_one_error(command: str, error: str) -> None:
    pdb, out = debugger()
    text = printed(pdb, out, command)
    assert text.startswith("error: ")
    assert error in text
    assert pdb.failed == 1
    assert not pdb.onecmd("s")


def test_help_describes_each_command() -> None:
    pdb, out = debugger()
    text = printed(pdb, out, "h")
    for name in [each[3:] for each in dir(pdb) if each.startswith("do_")]:
        if name not in ("EOF", "help"):
            assert re.search(rf"^{name}\b|^{name[0]}\({name[1:]}", text, re.MULTILINE), name
    assert printed(pdb, out, "help next").startswith("n(ext)")


def test_an_op_that_fails_is_reported() -> None:
    def checked(x: ml.Tensor) -> ml.Tensor:
        y = x + 1.0
        ml.check(ml.all(y > 0.0), "y is positive")
        return y

    pdb, out = debugged(checked, ml.asarray([-2.0]))
    assert printed(pdb, out, "c").startswith("error: y is positive")
    assert values_in(printed(pdb, out, "p y"))[0] == -1.0
    assert "machine.check" in printed(pdb, out, "w")


@cases(
    "text, value",
    ("1 + 2 * 3", 7),
    ("-x[1]", -2.0),
    ("x[-1] ** 2", 9.0),
    ("not any(isnan(x)) and max(x) >= 3", True),
    ("0 < min(x) < 2 or 0 > 1", True),
    ("argmax(x) / size(x)", np.float32(2 / 3)),
    ("x[2] * 0.1", np.float32(3.0) * np.float32(0.1)),
    ("x @ x + sum(x[2:] // 2 % 2, axis=0) + ~0", 14.0),
    ("norm(x[:2])", np.sqrt(np.float32(5.0))),
)
def test_expressions(text: str, value: Any) -> None:
    arrays = {"x": np.array([1.0, 2.0, 3.0], np.float32)}
    assert Expression(text).value(lambda name: arrays[name]) == value


# --- the command line and the method -------------------------------------------------------


def test_the_method_runs_commands(capsys: Capsys) -> None:
    captured = ml.capture(lambda x: ml.sin(x) * 2.0)
    captured.debug(ml.ones(2), commands=["s", "p %0", "q", "p %1"])
    text = capsys.readouterr().out
    assert "%0: f32[2]" in text
    assert "%1:" not in text


SCRIPT = """
import sys
import mlvm.eager as ml
w = ml.asarray([[1.0, 2.0], [3.0, 4.0]])
@ml.capture
def step(x):
    h = x @ w
    return ml.sqrt(h - 5.0)
step.save_repro(sys.argv[1], ml.asarray([[1.0, 1.0]]))
step(ml.asarray([[1.0, 1.0]]))
step.save(sys.argv[2])
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("repro")
    script, repro, saved = (folder / name for name in ("script.py", "bug.mlvm", "step.mlvm"))
    script.write_text(SCRIPT)
    ran = run_python(script, repro, saved)
    assert ran.returncode == 0, ran.stderr
    return repro, saved


def test_a_repro_is_run_and_verified(files: tuple[Path, Path]) -> None:
    ran = run_python("-m", "mlvm", "run", files[0], "--print")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith("verified: the recorded digests of 1 output and 2 states\n")
    ran = run_python("-m", "mlvm", "run", files[0], "--arg", "f32[] 1")
    assert ran.returncode == 1
    assert "a repro contains the inputs; omit --arg" in ran.stderr


def test_a_repro_with_another_result_or_state_is_not_verified(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    repro = Repro.from_bytes(files[0].read_bytes())
    theirs = repro.versions.replace("numpy ", "numpy 1")
    for i, name in enumerate(("output 0", "state w")):
        digests = [*repro.digests]
        digests[i] = bytes(16)
        other = tmp_path / "other.mlvm"
        other.write_bytes(repro._replace(digests=tuple(digests), versions=theirs).to_bytes())
        ran = run_python("-m", "mlvm", "run", other)
        assert ran.returncode == 1
        assert f"{name} of the call: expected the recorded digests, got" in ran.stderr
        assert "; it was recorded with numpy 1" in ran.stderr


def test_a_repro_without_digests_of_states_is_verified(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    repro, writer = Repro.from_bytes(files[0].read_bytes()), Writer()
    repro.program.write(writer)
    writer.sequence(repro.inputs, Writer.array)
    writer.sequence(repro.digests[:1], Writer.blob)
    (tmp_path / "old.mlvm").write_bytes(writer.message(Kind.repro))
    ran = run_python("-m", "mlvm", "run", tmp_path / "old.mlvm")
    assert ran.stdout.endswith("verified: the recorded digests of 1 output\n")


def test_the_command_debugs_a_repro_and_a_saved_step(files: tuple[Path, Path]) -> None:
    repro, saved = files
    commands = ["b any(isnan(result))", "c", "p h", "bt"]
    options = [text for command in commands for text in ("--command", command)]
    ran = run_python("-m", "mlvm", "debug", repro, *options)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "breakpoint: condition any(isnan(result))" in ran.stdout
    assert "h = %0: f32[1,2]\n[[4., 6.]]" in ran.stdout
    ran = run_python("-m", "mlvm", "debug", saved, "--arg", "f32[1,2] 1 1", "--command", "c")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith("the end\n")
    ran = run_python("-m", "mlvm", "debug", repro, "--command", "p nothing")
    assert ran.returncode == 1
    assert ran.stdout.endswith("error: no value is named nothing; info and l show names\n")
    ran = run_python("-m", "mlvm", "debug", saved)
    assert ran.returncode == 1
    assert "needs 1 argument, got 0" in ran.stderr
    ran = run_python("-m", "mlvm", "debug", repro)  # stdin is at its end
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("[0]")


PRINTING = """
import sys
import mlvm.eager as ml
@ml.capture
def step(x):
    y = x * 2.0
    ml.debug.print("y {}", y)
    ml.debug.watch(y, "y")
    return y
step.save_repro(sys.argv[1], ml.ones(2))
print("saved", len(ml.debug.watched("y")))
step(ml.ones(2))
step.save(sys.argv[2])
"""


def test_commands_take_files_with_prints(tmp_path: Path) -> None:
    script, repro, saved = (tmp_path / name for name in ("script.py", "bug.mlvm", "step.mlvm"))
    script.write_text(PRINTING)
    ran = run_python(script, repro, saved)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("saved 0\n")  # save_repro shows nothing
    for file in (repro, saved):
        for command in (("check",), ("memory", "--out", tmp_path), ("show",)):
            ran = run_python("-m", "mlvm", *command, file)
            assert (ran.returncode, ran.stderr) == (0, ""), command
        ran = run_python("-m", "mlvm", "build", file, "-o", tmp_path / "built")
        assert ran.returncode == 1
        assert "expected a step without ml.debug.print and ml.debug.watch" in ran.stderr


def test_the_path_of_a_repro_is_checked_before_the_call() -> None:
    calls: list[None] = []

    @ml.capture
    def step(x: ml.Tensor) -> ml.Tensor:
        calls.append(None)
        return x

    refuses(OSError, "No such file", step.save_repro, "/nothing/bug.mlvm", X)
    assert not calls


def test_a_script_is_no_repro(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = run_python("-m", "mlvm", "debug", script)
    assert ran.returncode == 1
    assert "it is a Python script: use python" in ran.stderr


def test_inputs_states_and_numbers_have_names_in_info(tmp_path: Path) -> None:
    source = """
inner = ml.ones(2)
def step(x):
    def body(i, s):
        h = s * inner
        return h
    y = ml.fori_loop(0, 3, body, x)
    return y * 7.0
"""
    pdb, out = debugged(with_source(source, tmp_path), np.ones(2, np.float32))
    text = printed(pdb, out, "info")
    assert re.search(r"input 0 +f32\[2\] +x\n", text)
    assert re.search(r"state \d +f32\[2\] +inner\n", text)
    assert re.search(r"state \d +f32\[\] +the number 7.0\n", text)
    printed(pdb, out, f"goto {pdb.execution.length}")
    assert printed(pdb, out, "summary h").endswith("read by no later op\n")


def test_a_repro_names_a_path() -> None:
    refuses(ml.errors.ArgumentError, "expected a path", ml.capture(ml.sum).save_repro, 3, X)
