"""The share of this processor's peak that products, convolutions, GELU and training steps reach.

One thread. `us` is the time of one call. The contender `peak` reports a lower bound of that time,
by the roofline model (Williams et al., CACM 52, 2009). It is flops over the peak rate of
multiply-adds, or bytes over the rate of a copy in a working set of that size, whichever is larger.
`peak.c` measures both rates in the same rounds. So the ratio `over mlvm` is the share reached, at
most 1.

Bytes are those of operands and results, once each; GELU counts bytes alone. A step counts the
products of its dense layers, so activations, norms and the optimizer count as lost.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bench import convolutions, products
from bench.environment import has_avx512
from bench.harness import SIMD, Contender, Contest, Round, Suite, microseconds, say
from bench.mixer import mlvm_replay, products_of
from bench.sizes import MIXERS

F32: Final = 4
"""Bytes of an element."""
GELU_ELEMENTS: Final = (1 << 14, 1 << 22)
"""Elements of the tensors that GELU is timed on: one in the second-level cache, one in memory."""
ROUND_US: Final = 1e4
"""The least time of a round."""

Call = Callable[[], object]


class Work(NamedTuple):
    """The least that a case must do."""

    flops: float
    nbytes: float


def works() -> dict[str, Work]:
    """Return each case, with its floating-point operations and bytes."""
    cases = {}
    for name, shape in products.CASES.items():
        m, k, n = shape.rows, shape.inner, shape.columns
        cases[f"product {name}"] = Work(2 * m * k * n, F32 * (m * k + k * n + m * n))
    for name, layer in convolutions.LAYERS.items():
        operands = sum(math.prod(x.shape) for x in convolutions.operands(layer))
        cases[f"convolution {name}"] = Work(layer.flops, F32 * operands)
    for n in GELU_ELEMENTS:
        cases[f"gelu {n}"] = Work(0, 2 * F32 * n)
    for name, size in MIXERS.items():
        factors = [(x.shape, y.shape, out.size) for x, y, out in products_of(size)]
        flops = sum(2.0 * x[-1] * size for x, _, size in factors)
        nbytes = F32 * sum(math.prod(x) + math.prod(y) + size for x, y, size in factors)
        cases[f"step {name}"] = Work(flops, nbytes)
    return cases


def chosen(quick: bool) -> dict[str, Work]:
    """Return the cases of a run: the quick ones take less than a millisecond each."""
    return {
        name: w for name, w in works().items() if not quick or (w.flops < 1e6 and w.nbytes < 2e6)
    }


def prepare_mlvm(quick: bool) -> Mapping[str, Round]:
    """Return a round of each case on one thread of mlvm."""

    @lru_cache(maxsize=1)  # one case at a time is in memory
    def call_of(case: str) -> tuple[Call, int]:
        call = _call_of(case)
        call()
        once = min(microseconds(call) for _ in range(3))
        return call, max(1, math.ceil(ROUND_US / 10 / once if quick else ROUND_US / once))

    def timed(case: str) -> Mapping[str, float]:
        call, times = call_of(case)
        return {"us": microseconds(lambda: [call() for _ in range(times)]) / times}

    return {case: partial(timed, case) for case in chosen(quick)}


def _call_of(case: str) -> Call:
    """Build the call that a case times."""
    kind, _, name = case.partition(" ")
    if kind == "product":
        multiply, _ = products.in_machine(products.CASES[name])
        return lambda: multiply(1)
    if kind == "convolution":
        return convolutions.mlvm(convolutions.LAYERS[name], False)[0]
    if kind == "gelu":
        return _gelu(int(name))
    return mlvm_replay(MIXERS[name])


def _gelu(elements: int) -> Call:
    """Return a program that applies GELU to a tensor, into another one."""
    from mlvm.arena.arena import Arena
    from mlvm.core.program.assembly import assemble
    from mlvm.core.types import TensorType
    from mlvm.machines.local import LocalVM

    vm = LocalVM()
    arena = Arena(vm, "gelu")
    x, out = (arena.alloc(TensorType("f32", (elements,))) for _ in range(2))
    vm.write(x.handle, np.linspace(-4, 4, elements, dtype=np.float32))
    program = assemble(
        '.func main 0 *\nload_arg 0\nload_arg 1\npush_str "gelu.out"\ncfunc 2 0\nhalt\n'
    )
    return lambda: vm.launch(program, [out.handle, x.handle])


def prepare_peak(quick: bool) -> Mapping[str, Round]:
    """Return the lower bound of each case, from rates that are measured in each round."""
    library = _library()
    if library is None:
        say("peak: no C compiler (cc), so the processor's rates are unknown")
        return {}
    library.flops_per_second.restype = library.bytes_per_second.restype = ctypes.c_double

    @cache
    def buffer(nbytes: int) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(nbytes)

    def bound(work: Work) -> Mapping[str, float]:
        nbytes = max(4096, int(work.nbytes))
        flop_rate = library.flops_per_second()
        byte_rate = library.bytes_per_second(buffer(nbytes), ctypes.c_int64(nbytes))
        return {"us": 1e6 * max(work.flops / flop_rate, work.nbytes / byte_rate)}

    return {case: partial(bound, work) for case, work in chosen(quick).items()}


def _library() -> ctypes.CDLL | None:
    """Compile and load `peak.c`; None without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc").split()[-1])
    if compiler is None:
        return None
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
    if os.environ.get(SIMD) == "avx2":
        flags[1] = "-march=haswell"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peak.so"
        source = Path(__file__).with_suffix(".c")
        done = subprocess.run([compiler, *flags, source, "-o", file], capture_output=True)
        return None if done.returncode else ctypes.CDLL(str(file))


def targets() -> dict[str, float]:
    """Return the shares asked for: 0.90 of products of 512 and more rows, 0.80 of the step
    `cifar`."""
    large = {f"product {name}": 0.9 for name, shape in products.CASES.items() if shape.rows >= 512}
    return {**large, "step cifar": 0.8} if has_avx512() else {"step cifar": 0.8}


SUITE: Final = Suite(
    module="bench.peak",
    contenders=(
        Contender("mlvm", "mlvm", prepare_mlvm),
        Contender("peak", "numpy", prepare_peak),
    ),
    units={"us": "us"},
    contests=(Contest("share of the peak", "us", ("mlvm",), ("peak",), targets()),),
    rounds=7,
    quick_rounds=1,
    timeout=300,
)
