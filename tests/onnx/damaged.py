"""Files that are damaged: they load with a typed error, or into what runs or gives one."""

from __future__ import annotations

import random

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.onnx import load
from tests.onnx import backend


def mutation(data: bytes, draw: random.Random) -> bytes:
    """The bytes, damaged in one place or a few."""
    mutant = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place, count = draw.randrange(len(mutant)), draw.randint(1, 9)
        match draw.randrange(8):
            case 0 | 1 | 2 | 3:
                mutant[place] = draw.randrange(256)
            case 4 | 5:
                del mutant[place + 1 : place + count]
            case 6:
                mutant[place:place] = draw.randbytes(count)
            case 7:
                del mutant[place + 1 :]
    return bytes(mutant)


def run(count: int, seed: int) -> None:
    """Load the given number of damaged files, and call the models. Raises what is no
    `MlvmError`."""
    small = [each for each in backend.frozen().values() if len(each.model) < 900]
    draw = random.Random(seed)
    for i in range(count):
        case = small[i % len(small)]
        data = mutation(case.model, draw)
        try:
            net = load(data)
            net(*[ml.asarray(x) for x in case.sets[0][0]])
        except MlvmError:
            continue
        except BaseException:
            print(f"{case.name}, damaged: {data!r}")
            raise
