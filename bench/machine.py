"""Cost of the machine's instructions, beside Lua's and CPython's as a scale, and futures.

`instruction` is one instruction of a long straight program; for Lua and CPython one iteration of an
empty loop. `call` is a call of an empty function of the same language and its return.
`cfunc_python` is a call of an empty Python function from the machine (or from Lua), `cfunc_c` that
of an empty C function (for CPython, a built-in). `futures` is two independent chains of products of
f32[1024,1024], each with one BLAS thread: on a VM with two workers, and with none.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROOT, Contender, Round, Suite, microseconds

LENGTH = 4  # products in a chain


def times(quick: bool) -> int:
    """Return the number of instructions or calls in a round."""
    return 1_000 if quick else 20_000


def per_op(work: Callable[[], object], n: int) -> Round:
    """Time work that does something n times, for each time."""
    return lambda: {"us_per_op": microseconds(work) / n}


def prepare_mlvm(quick: bool) -> Mapping[str, Round]:
    from mlvm.core.program.assembly import assemble
    from mlvm.machines.local import LocalVM as VM

    n = times(quick)
    vm = VM()
    vm.register("nothing_in_python", lambda frame: None, nparams=0, nresults=0)

    def launched(body: str, repeat: int, head: str = "") -> Round:
        program = assemble(f"{head}\n.func main 0 *\n{body * repeat}halt\n")
        return per_op(lambda: vm.launch(program), n)

    cases = {
        "instruction": launched("push_int 1\npop 1\n", n // 2),
        "call": launched("call empty\n", n, ".func empty 0 0\nreturn 0\n"),
        "cfunc_python": launched('push_str "nothing_in_python"\ncfunc 0 0\n', n),
        "futures": futures_round(VM(workers=2)),
    }
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        if library is not None:
            vm.register_library(library)
            cases["cfunc_c"] = launched('push_str "nothing"\ncfunc 0 0\n', n)
    return cases


def prepare_no_workers(quick: bool) -> Mapping[str, Round]:
    from mlvm.machines.local import LocalVM as VM

    return {"futures": futures_round(VM())}


def futures_round(vm: Any) -> Round:
    """Time two chains of products that do not depend on each other."""
    from mlvm.arena.arena import Allocation, Arena
    from mlvm.core.program.program import Program
    from mlvm.core.types import TensorType

    square = TensorType("f32", (1024, 1024))
    matmul = Program.of_op("matmul.out", 3, {}, 0)
    arena = Arena(vm, "futures")
    factor, *chains = [[arena.alloc(square) for _ in range(2)] for _ in range(3)]
    rng = np.random.default_rng(0)
    for x in (*factor, *chains[0], *chains[1]):
        vm.write(x.handle, rng.standard_normal(square.shape, np.float32) / 32)

    def work() -> None:
        for _ in range(LENGTH):
            for chain, by in zip(chains, factor, strict=True):
                chain.reverse()
                into: list[Allocation] = [chain[1], chain[0], by]
                vm.launch(matmul, [x.handle for x in into])
        vm.synchronize()

    return lambda: {"ms": microseconds(work) / 1e3}


def compiled(folder: Path) -> Path | None:
    """Return the library of the C example, which has an empty function; None without a compiler."""
    from mlvm.machines.c_functions import include_dir

    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = ROOT / "examples" / "c" / "functions.c", folder / "example.so"
    flags = ["-O2", "-shared", "-fPIC", f"-I{include_dir()}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library


def prepare_lua(quick: bool) -> Mapping[str, Round]:
    import lupa

    n = times(quick)
    lua = lupa.LuaRuntime()
    empty_loop = lua.eval("function(n) for i = 1, n do end end")
    calls = lua.eval("function(n) local function f() end for i = 1, n do f() end end")
    back = lua.eval("function(f, n) for i = 1, n do f() end end")
    return {
        "instruction": per_op(lambda: empty_loop(n), n),
        "call": per_op(lambda: calls(n), n),
        "cfunc_python": per_op(lambda: back(empty, n), n),
    }


def empty() -> None:
    """Do nothing: only the call is timed."""


def prepare_cpython(quick: bool) -> Mapping[str, Round]:
    n = times(quick)
    builtin = (1).__index__

    def loop() -> None:
        for _ in range(n):
            pass

    def calls() -> None:
        for _ in range(n):
            empty()

    def builtins() -> None:
        for _ in range(n):
            builtin()

    return {
        "instruction": per_op(loop, n),
        "call": per_op(calls, n),
        "cfunc_c": per_op(builtins, n),
    }


SUITE = Suite(
    module="bench.machine",
    contenders=(
        Contender("mlvm", "mlvm", prepare_mlvm),
        Contender("mlvm-no-workers", "mlvm", prepare_no_workers),
        Contender("lua", "lupa", prepare_lua),
        Contender("cpython", "sys", prepare_cpython),
    ),
    units={"us_per_op": "us", "ms": "ms"},
    targets={("futures", "ms", "mlvm", "mlvm-no-workers"): 1.7},
    limits={
        ("instruction", "us_per_op", "mlvm"): 0.01,
        ("call", "us_per_op", "mlvm"): 0.03,
        ("cfunc_c", "us_per_op", "mlvm"): 0.1,
    },
    rounds=15,
)
