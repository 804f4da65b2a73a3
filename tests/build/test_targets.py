"""C from `mlvm build` compiles for other systems by `zig cc`, where ziglang is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.build.build import NATIVE
from mlvm.machines.native import extension

pytestmark = [
    pytest.mark.skipif(extension.EXTENSION is None, reason="there are no native kernels"),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="there is no ziglang"),
]
MADE: Final = {
    "aarch64-macos": ("step", b"\xcf\xfa\xed\xfe\x0c\0\0\1"),
    "wasm32": ("step.wasm", b"\0asm"),
    "x86_64-windows": ("made/command.o", b"\x64\x86"),
}
"""What is made for a target, and what that begins with. A first link for Windows takes minutes."""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training step with products, reductions, a loop, records and a draw."""
    model = ml.nn.Linear(4, 3, key=ml.random.key(0))
    optimizer = ml.optim.Adam(model, 1e-2)

    def loss_of(model: ml.nn.Linear, x: ml.Tensor) -> ml.Tensor:
        y = ml.while_loop(lambda y: ml.sum(y * y) < 9, lambda y: y * 2 + 1, model(x))
        drawn = ml.random.bernoulli((2, 3), p=0.5, key=ml.random.key(1))
        return ml.mean(ml.softmax(drawn * ml.gelu(y)))

    @ml.capture
    def train(x: ml.Tensor) -> ml.Tensor:
        loss, gradients = ml.value_and_grad(loss_of)(model, x)
        optimizer.update(gradients)
        return loss

    train(ml.ones((2, 4)))
    file = tmp_path_factory.mktemp("targets") / "step.mlvm"
    train.save(file)
    return file


@pytest.mark.parametrize("target", MADE)
def test_it_compiles_without_warnings(step: Path, target: str) -> None:
    folder = step.parent / target
    options = ["--target", target, "--threads", "2", "--weights", "embed"]
    assert main(["build", str(step), "-o", str(folder), *options]) == 0
    name, begins = MADE[target]
    make = ["make", "-s", "-j2", f"ZIG={sys.executable} -m ziglang", "OPTIMIZE=-O0 -Werror"]
    subprocess.run([*make, "libstep.a", name], cwd=folder, check=True)
    assert (folder / name).read_bytes().startswith(begins)


def test_a_step_too_large_for_its_addresses_does_not_compile(step: Path) -> None:
    folder = step.parent / "large"
    options = ["-o", str(folder), "--target", "wasm32", "--records", str(1 << 33)]
    assert main(["build", str(step), *options]) == 0
    make = ["make", "-s", f"ZIG={sys.executable} -m ziglang", "made/tables.o"]
    done = subprocess.run(make, cwd=folder, capture_output=True, text=True)
    assert "the step needs more memory than the address space" in done.stderr


def test_instruction_sets_are_found(tmp_path: Path) -> None:
    """Zig's runtime library tells nothing of the processor: the program asks that itself."""
    sets = ("plain", "avx2", "avx512", "avx512_bf16", "neon")
    queries = "".join([f'printf("%d", processor_has("{name}"));' for name in sets])
    main = f'#include "processor.h"\n#include <stdio.h>\nint main(void) {{ {queries} }}'
    (tmp_path / "main.c").write_text(main)
    plan = NATIVE / "src" / "plan"
    zig = [sys.executable, "-m", "ziglang", "cc", f"-I{plan}", "main.c", str(plan / "processor.c")]
    subprocess.run([*zig, "-o", "main"], cwd=tmp_path, check=True)
    output = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout
    here = dict(extension.EXTENSION.simd_sets()) if extension.EXTENSION else {}
    assert output == "".join([str(int(here.get(name, False))) for name in sets])
