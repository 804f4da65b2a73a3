"""Methods that upper floors add to classes of lower ones are there after `import mlvm.eager`
alone."""

from __future__ import annotations

from pathlib import Path

from tests.brief import run_python

CODE = """
import sys
import mlvm.eager as ml

vm = ml.VM("lent")
arena = ml.Arena(vm, "step")
with vm.trace(sys.argv[1]), arena.allocating():
    x = ml.ones((2, 3))[0] + 1.0
print(x.tolist(), "used" in arena.report())
arena.plot(sys.argv[2])
"""


def test_methods_that_upper_floors_add(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    done = run_python("-c", CODE, trace, picture)
    assert (done.stdout, done.stderr) == ("[2.0, 2.0, 2.0] True\n", "")
    assert trace.stat().st_size
    assert picture.read_text().startswith("<svg")
