"""The page of a step and of a script: what its data say, and that a browser shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.arena.recording import Recording
from mlvm.core.program.assembly import assemble, disassemble
from mlvm.core.program.program import Opcode
from mlvm.machines.wire import WireVM
from mlvm.show.page import (
    MOST_ALIKE,
    Step,
    in_script,
    session_page,
    step_page,
)
from mlvm.show.report import short
from mlvm.show.session import ScriptSession, all_recorded
from mlvm.show.vm_trace import TimeSpan, VMTrace
from mlvm.step.compile import Planned, on_planned
from mlvm.step.saved import SavedStep
from tests.brief import cases

HERE = Path(__file__)
NASTY = "</script><script>alert('1')</script><!-- &amp; \u2028 \ud800 \""


def data_of(page: str) -> Any:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def line_with(text: str) -> str:
    """The `file:line`, as pages show it, of this file's only line that ends with the text."""
    lines = HERE.read_text("utf-8").splitlines()
    [number] = [n for n, line in enumerate(lines, 1) if line.endswith(text)]
    return short(f"{HERE}:{number}")


def items(data: Any, columns: Any) -> list[dict[str, Any]]:
    """The rows of columns, with texts in the place of their numbers."""
    texts = {"name", "type", "line", "about"}
    return [
        {k: data["strings"][x] if k in texts else x for k, x in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`step.mlvm`: a step with a loop, saved after one call."""
    with ml.Arena(ml.VM("saving"), "weights").allocating():
        w = ml.ones((8, 8))

        @ml.capture
        def step(x: ml.Tensor) -> ml.Tensor:
            y = ml.matmul(x, w)  # first
            z = ml.fori_loop(0, 3, lambda i, y: ml.sin(ml.matmul(y, w)), y)
            return ml.sum(ml.matmul(z, y))  # last

        step(ml.ones((8, 8)))
        path = tmp_path_factory.mktemp("show") / "step.mlvm"
        step.save(path)
        step.close()
    return path


def test_a_step_has_its_plan_and_its_program(saved: Path) -> None:
    planned = SavedStep.from_bytes(saved.read_bytes()).planned
    assert main(["show", str(saved), "-o", str(saved.with_name("page.html"))]) == 0
    data = data_of(saved.with_name("page.html").read_text("utf-8"))
    [view], [program] = data["views"], data["programs"]
    [pane], [calls] = view["panes"], view["lanes"]
    assert (pane["capacity"], pane["bound"]) == (planned.plan.nbytes, planned.plan.lower_bound)
    blocks = items(data, pane["blocks"])
    assert [
        (b["type"], b["offset"], b["nbytes"], b["start"], b["end"], b["name"]) for b in blocks
    ] == [(str(x.type), x.offset, x.nbytes, x.start, x.end, x.op) for x in planned.lifetimes]

    code = planned.program.main.code
    assert "".join(f"{row}\n" for row in program["rows"]) == disassemble(planned.program)
    assert len(program["at"]) == len(code)
    first = next(b for b in blocks if b["line"] == line_with("ml.matmul(x, w)  # first"))
    assert code[first["pc"]].opcode is Opcode.cfunc
    call = program["at"][first["pc"]]
    assert "matmul" in " ".join(program["rows"][call - 1 : call + 1])  # alone, or in a chain
    assert data["sources"][str(data["strings"].index(first["line"]))].endswith("# first")
    quoted = {data["strings"][x] for x in program["quoted"].values()}
    assert {line_with("ml.matmul(x, w)  # first"), line_with("# last")} <= quoted
    loads = [pc for pc, each in enumerate(code) if each.opcode is Opcode.load_arg]
    notes = [program["notes"][str(program["at"][pc])] for pc in loads]
    assert "input 0: f32[8,8]" in notes
    assert any(re.fullmatch(r"scratch at [\d,]+: f32\[8,8\]", note) for note in notes)

    spans = items(data, calls["spans"])
    assert [span["pc"] for span in spans] == list(planned.moments)
    assert [(x["start"], x["end"]) for x in spans] == [(i, i + 1) for i in range(len(spans))]
    names = [span["name"] for span in spans]
    assert any("sin" in name for name in names)
    assert not any(name.endswith(".out") for name in names)
    assert max(b["end"] for b in blocks) <= view["last"] == len(spans)


def test_lines_of_files_that_changed_since_are_not_quoted(saved: Path) -> None:
    planned = SavedStep.from_bytes(saved.read_bytes()).planned
    step = Step(planned.program, planned.recording(), planned.moments, planned.lines, ())
    assert any(data_of(step_page(step, "step"))["sources"].values())
    assert not any(data_of(step_page(step, "step", before=0.0))["sources"].values())


@cases("line, quoted",
    ("a.py:2", "b = 2"), ("a.py:9", ""), ("a.py:x", ""), ("a.txt:1", ""), ("none.py:1", ""),
)  # fmt: skip
def test_lines_of_python_are_quoted(line: str, quoted: str, saved: Path, tmp_path: Path) -> None:
    for name in ("a.py", "a.txt"):
        (tmp_path / name).write_text("a = 1\n  b = 2\n")
    planned = SavedStep.from_bytes(saved.read_bytes()).planned
    lines = {("main", 0): f"{tmp_path}/{line}"}
    recording = Recording("plan", moments=1)
    data = data_of(step_page(Step(planned.program, recording, (), lines, ()), "step"))
    assert list(data["sources"].values()) == [quoted]


def test_no_text_ends_the_script(saved: Path) -> None:
    planned = SavedStep.from_bytes(saved.read_bytes()).planned
    recording, lines = planned.recording(), dict.fromkeys(planned.lines, NASTY)
    for each in recording.lifetimes:
        each.op = each.place = NASTY
    text = json.dumps(NASTY)
    program = assemble(f".func main 0 *\n    push_str {text}\n    pop 1\n    halt\n")
    page = step_page(Step(program, recording, (), lines, [NASTY]), NASTY)
    assert page.count("</script>") == page.count("<script") == 2
    assert "alert('1')</" not in page
    data = data_of(page)
    assert data["views"][0]["name"] == NASTY
    assert text in data["programs"][0]["rows"][1]
    assert {b["name"] for b in items(data, data["views"][0]["panes"][0]["blocks"])} == {NASTY}
    assert json.loads(in_script([NASTY])) == [NASTY]
    assert f"<title>{html.escape(NASTY)}</title>" in page


def test_large_constants_are_not_listed() -> None:
    elements = " ".join(["1"] * 100)
    text = f".const few f32[2] 1 2\n.const many f32[100] {elements}\n.func main 0 *\n    halt\n"
    page = step_page(Step(assemble(text), Recording("plan"), (), {}, ()), "constants")
    rows = data_of(page)["programs"][0]["rows"]
    assert rows[:2] == [".const few f32[2] 1 2", ".const many f32[100] ... ; 100 elements"]


@pytest.fixture(scope="module")
def session() -> tuple[ScriptSession, list[Planned]]:
    """A local VM that runs ops, a captured step and takes from a queue, and one behind a wire."""
    planned: list[Planned] = []
    on_planned.append(planned.append)
    with all_recorded() as session:
        vm = ml.VM("here")
        batch = ml.Arena(vm, "batch")
        batches = ml.QueueTensor(vm, ["f32[4]"], 1, name="batches")

        def produce() -> None:
            for _ in range(3):
                batches.put([np.ones(4, np.float32)])
            batches.close()

        with batch:
            step = ml.capture(lambda x: ml.sum(ml.exp(ml.matmul(x, x))))
            x = ml.ones((4, 4))
            y = ml.tanh(x)  # eager
            step(y)
            loop = ml.capture(lambda x: ml.while_loop(lambda x: ml.max(x) > 0.5, ml.sin, x))
            loop(y)
        threading.Timer(0.05, produce).start()
        for element in batches:
            del element
        with ml.Arena(WireVM(ml.VM("there")), "elsewhere"):
            ml.sqrt(ml.ones(3))
    on_planned.remove(planned.append)
    return session, planned


def test_a_session_has_arenas_vms_and_waits(session: tuple[ScriptSession, list[Planned]]) -> None:
    recorded, planned = session
    steps = [Step(x.program, x.recording(), x.moments, x.lines, ()) for x in planned]
    data = data_of(session_page(recorded, steps, "script.py"))
    assert len(steps) == 2
    whole, plan, _ = data["views"]
    assert plan["name"] == f"captured step 1, {line_with('ml.sum(ml.exp(ml.matmul(x, x))))')}"
    panes = {pane["name"]: items(data, pane["blocks"]) for pane in whole["panes"]}
    lanes = {lane["name"]: items(data, lane["spans"]) for lane in whole["lanes"]}
    assert {"batch on here", "batches on here"} < set(panes)
    assert not any("captured" in name for name in panes)  # what stands in while it is recorded
    [tanh] = [block for block in panes["batch on here"] if block["name"] == "tanh"]
    assert (tanh["type"], tanh["line"]) == ("f32[4,4]", line_with("# eager"))
    program = data["programs"][tanh["program"]]
    assert program["name"] == "tanh"
    assert "cfunc" in program["rows"][program["at"][tanh["pc"]]]

    run = lanes["VM here"]
    [ran] = [span for span in run if span["name"] == "tanh"]
    assert (ran["program"], ran["pc"], ran["line"]) == (tanh["program"], tanh["pc"], tanh["line"])
    assert tanh["start"] <= ran["start"] < ran["end"] <= tanh["end"] <= whole["last"]
    assert "f32[4,4], f32[4,4]" in ran["about"]
    [launch] = [span for span in run if span["name"] == "launch: captured step 1"]
    inside = [x for x in run if x["program"] == launch["program"] and x is not launch]
    assert [x["pc"] for x in inside] == list(planned[0].moments)
    assert {x["row"] for x in inside} == {1}
    assert "exp" in " ".join(x["name"] for x in inside)  # alone, or in a chain
    assert all(launch["start"] <= x["start"] < x["end"] <= launch["end"] for x in inside)

    sines = [span for span in run if span["name"] == "sin"]
    assert len(sines) > 1
    [pc] = {span["pc"] for span in sines}  # the only sine of a program with jumps
    program = data["programs"][sines[0]["program"]]
    assert "sin" in program["rows"][program["at"][pc] - 1]

    [there] = [spans for name, spans in lanes.items() if name.startswith("VM") and spans is not run]
    assert {"launch: full", "launch: sqrt", "alloc_storage"} <= {span["name"] for span in there}
    waits = lanes["queue batches: waits for an element"]
    assert waits[0]["end"] - waits[0]["start"] > 20_000  # microseconds
    assert all(span["end"] >= span["start"] >= 0 for spans in lanes.values() for span in spans)


def test_a_session_says_what_it_has_forgotten() -> None:
    with all_recorded(tensors=8, spans=10) as session:
        vm = ml.VM("m")
        weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
        with weights.allocating():
            w = ml.ones(100)
        with batch:
            large = ml.ones(1000)
        del large
        for _ in range(20):
            with batch:
                ml.sin(ml.ones(3))
    data = data_of(session_page(session, [], "script.py"))
    [view] = data["views"]
    panes = {pane["name"]: pane for pane in view["panes"]}
    assert [*panes][:2] == ["batch on m", "weights on m"]  # by what was most in use
    pane = panes["batch on m"]
    assert (pane["most"], pane["bound"], pane["forgotten"]) == (4032, 128, 41 - len(blocks(pane)))
    assert 0 < pane["since"] == pane["used"]["at"][0]
    assert panes["weights on m"]["forgotten"] == panes["weights on m"]["since"] == 0
    [lane] = view["lanes"]
    assert lane["forgotten"] == 42 - 10
    assert lane["since"] == lane["spans"]["start"][0] > 0
    assert view["since"] == min(pane["since"], lane["since"])
    del w


def blocks(pane: Any) -> list[Any]:
    return list(zip(*pane["blocks"].values(), strict=True))


def test_many_vms_of_one_name_share_lanes_and_panes() -> None:
    with all_recorded() as session:
        for _ in range(MOST_ALIKE + 1):
            with ml.Arena(ml.VM("v"), "a"):
                ml.ones(3)
    [view] = data_of(session_page(session, [], "script.py"))["views"]
    panes = {pane["name"]: len(blocks(pane)) for pane in view["panes"]}
    assert panes == {f"{name} on v: 17 arenas": 17 for name in ("a", "constants")}
    assert [(each["name"], len(each["spans"]["start"])) for each in view["lanes"]] == [
        ("VM v: 17 VMs", 17)
    ]


def test_a_captured_result_is_linked_to_the_call_that_wrote_it() -> None:
    planned: list[Planned] = []
    on_planned.append(planned.append)
    with all_recorded() as session, ml.Arena(ml.VM("here"), "batch"):
        step = ml.capture(lambda x: (ml.exp(x), x @ x))
        _, y = step(ml.ones((4, 4)))
        y += 1.0
    on_planned.remove(planned.append)
    steps = [Step(x.program, x.recording(), x.moments, x.lines, ()) for x in planned]
    data = data_of(session_page(session, steps, "script.py"))
    [pane] = [pane for pane in data["views"][0]["panes"] if pane["name"] == "batch on here"]
    by_name = {each["name"]: each for each in items(data, pane["blocks"])}
    assert list(by_name) == ["full", "exp", "matmul"]
    for name in ("exp", "matmul"):
        program = data["programs"][by_name[name]["program"]]
        assert program["name"] == "captured step 1"
        assert f'"{name}.out"' in program["rows"][program["at"][by_name[name]["pc"]] - 1]


def test_a_script_may_trace_its_vm_itself(tmp_path: Path) -> None:
    vm = ml.VM("here")
    with all_recorded() as session, ml.Arena(vm, "batch"):
        x = ml.ones(3)
        with vm.profile(tmp_path / "trace.json"):
            x = x + x
            with pytest.raises(ml.errors.MachineError, match="here already has an instrument"):
                vm.profile(tmp_path / "other.json").__enter__()
        x = x * x
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [each["name"] for each in events if each["ph"] == "X"] == ["add.out"]
    [trace] = session.traces
    assert [span.name for span in trace.spans] == ["full.out", "add.out", "multiply.out"]
    assert not {"launch", "write", "instrumented"} & set(vars(vm))
    assert vm.functions.instrument is None


# --- in a browser ------------------------------------------------------------------------


def browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    places = Path.home().glob(".cache/ms-playwright/chromium*/chrome-linux*/chrome")
    executable = next(filter(None, map(shutil.which, names)), None) or next(map(str, places), None)
    return executable or pytest.skip("there is no Chromium")


PROBE = """<pre id="probe"></pre><script>
const tell = (text) => { document.getElementById("probe").textContent += text + "\\n" };
window.addEventListener("error", (event) => tell("error: " + event.message));
const byId = (id) => document.getElementById(id), canvas = byId("canvas");
const point = (type, x, y) => {
  const box = canvas.getBoundingClientRect();
  const at = { clientX: box.left + x, clientY: box.top + y };
  canvas.dispatchEvent(new PointerEvent(type, { ...at, pointerId: 1, bubbles: true }));
};
const said = (id) => byId(id).innerText.replaceAll("\\n", " | ");
const marked = () => [...document.querySelectorAll(".marked")].map((row) => row.innerText.trim());
const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
setTimeout(() => {
  tell("start: " + said("details"));
  point("pointermove", 200, canvas.clientHeight - 120);
  tell("tip: " + said("tip"));
  point("pointerdown", 200, canvas.clientHeight - 120);
  point("pointerup", 200, canvas.clientHeight - 120);
  tell("details: " + said("details"));
  tell("marked: " + marked().join(" | "));
  press("Escape");
  tell("nothing: " + marked().length);
  const row = [...document.querySelectorAll(".row")].find((row) => row.innerText.includes("sin"));
  row.click();
  tell("chosen: " + said("details"));
  for (const key of "wwssad0t]][f") press(key);
  byId("search").value = "matmul f32[8,8]";
  byId("search").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  byId("search").dispatchEvent(new Event("input"));
  setTimeout(() => { tell("found: " + said("found")); tell("at: " + location.hash); }, 300);
}, 100);
</script></body>"""


def probed(page: str, probe: str, tmp_path: Path) -> dict[str, str]:
    """Return the lines that the probe writes of the page in a browser."""
    chromium = browser()
    (tmp_path / "probed.html").write_text(page.replace("</body>", probe), encoding="utf-8")
    done = subprocess.run(
        [
            *(
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--window-size=1300,900",
            ),
            *("--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom"),
            f"--user-data-dir={tmp_path / 'profile'}",
            (tmp_path / "probed.html").as_uri() + "#select=0.-1",  # which is nothing
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "probe" not in done.stdout:
        pytest.skip(f"{chromium} shows no page here: {done.stderr[-200:]}")
    assert "CONSOLE" not in done.stderr, done.stderr
    [probe] = re.findall(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    fields = dict(line.split(": ", 1) for line in html.unescape(probe).splitlines())
    assert "error" not in fields
    return fields


TABLE_PROBE = """<pre id="probe"></pre><script>
window.addEventListener("error", (event) => tell("error: " + event.message));
const tell = (text) => { document.getElementById("probe").textContent += text + "\\n" };
setTimeout(() => {
  for (const row of document.querySelectorAll("#details tr"))
    tell([...row.cells].map((cell) => cell.innerText).join(": "));
}, 100);
</script></body>"""


def test_a_browser_sums_time_by_op(tmp_path: Path) -> None:
    """A call that other calls ran in counts what it took itself."""
    session, trace = ScriptSession(10), VMTrace("here")
    start = session.began
    for name, began, ended in (("launch", 0, 10), ("exp", 1, 5), ("sin", 6, 8), ("exp", 20, 24)):
        trace.spans.add(TimeSpan(name, 1, start + began * 1000, start + ended * 1000, {}))
    trace.rows[1] = "here"
    session.traces.append(trace)
    session.ended = start + 30_000
    fields = probed(session_page(session, [], "script.py"), TABLE_PROBE, tmp_path)
    assert fields == {
        "time by op": "calls: time: share", "exp": "2: 8.0 µs: 57.1 %",
        "launch": "1: 4.0 µs: 28.6 %", "sin": "1: 2.0 µs: 14.3 %",
    }  # fmt: skip


def test_a_browser_shows_it(saved: Path, tmp_path: Path) -> None:
    assert main(["show", str(saved), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    fields = probed(page, PROBE, tmp_path)
    assert fields["start"].startswith("step.mlvm | ")
    assert "peak use 832 bytes; plan of 832 bytes" in fields["start"]
    first = next(x for x in SavedStep.from_bytes(saved.read_bytes()).planned.lifetimes)
    line = line_with("ml.matmul(x, w)  # first")
    assert fields["tip"].startswith(f"{first.op}: f32[8,8] | size 256 bytes | address ")
    assert f"line {line} | y = ml.matmul(x, w)  # first" in fields["tip"]
    assert f"ends with moment {first.end - 1} | lasts {first.end - first.start} m" in fields["tip"]
    assert fields["details"].startswith(f"{first.op}: f32[8,8] | size | 256 bytes | address | ")
    assert fields["marked"].startswith("load_arg ")
    assert re.search(r'push_str "[\w.]+" \| cfunc \d 0 ', fields["marked"])
    assert "matmul" in fields["marked"]
    assert fields["nothing"] == "0"
    assert "sin" in fields["chosen"].split(" | ")[0]
    assert re.match(r"\d+ found", fields["found"])
    assert "search=matmul" in fields["at"]
