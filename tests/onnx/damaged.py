"""Files that are damaged: they load with a typed error, or into what runs or gives one."""

from __future__ import annotations

import random

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.onnx import load
from mlvm.onnx.wire import decode
from tests.onnx import backend
from tests.onnx.making import attribute, constant, encoded


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


def with_odd_attribute(data: bytes, draw: random.Random) -> bytes:
    """Return the file with an attribute of another kind or value, or without it."""
    message = decode(data)
    nodes = [node for node in message.graph.node if node.attribute]
    if not nodes:
        return data
    node = draw.choice(nodes)
    old = draw.choice(node.attribute)
    rest = [each for each in node.attribute if each is not old]
    pair = constant("t", np.ones(2, np.float32))
    odd = draw.choice([0, 1, -1, 1 << 62, 0.5, "x", "", [], [1, 2], [-1], [0.5], ["x"], pair, None])
    node.attribute = rest if odd is None else [*rest, attribute(old.name, odd)]
    return encoded(message)


def run(count: int, seed: int) -> None:
    """Load the given number of damaged files, and call the models. Raises what is no
    `MlvmError`."""
    small = [each for each in backend.frozen().values() if len(each.model) < 900]
    draw = random.Random(seed)
    for i in range(count):
        case = small[i % len(small)]
        data = draw.choice((mutation, with_odd_attribute))(case.model, draw)
        try:
            net = load(data)
            net(*[ml.asarray(x) for x in case.sets[0][0]])
        except MlvmError:
            continue
        except BaseException:
            print(f"{case.name}, damaged: {data!r}")
            raise
