"""Damaged recordings: bytes of files are changed, cut, added or exchanged.

Each is opened, compared, replayed and verified. Any of these may raise an `MlvmError` or `OSError`,
and `verify` accepts none. Every other program is a forger's: frames of the log are changed, and the
chain of digests is computed anew. Its recordings may be accepted, but must not raise other errors.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.eager.runs.diff import diff
from mlvm.eager.runs.log import LogWriter, read_log
from mlvm.eager.runs.replay import Replay, open_run
from mlvm.eager.runs.run import Run
from mlvm.eager.runs.verification import verify
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.fuzz.kills import steps
from tests.fuzz.mutations import mutated

PROGRAMS: Final = 20_000


def fuzz(programs: int, seed: int, first: int) -> tuple[Outcomes, str | None]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ml.runs.record(folder / "whole", every=2):
            for _ in steps(8, 9, (3, 2))():
                pass
        shutil.copytree(folder / "whole", folder / "copy")
        attempt = partial(damaged, open_run(folder / "whole"), folder / "copy", seed)
        return outcomes_of(range(first, first + programs), attempt)


def damaged(whole: Run, copy: Path, seed: int, number: int) -> str:
    """Damage a copy of the recording, use it, and undo the damage."""
    rng = random.Random(f"{seed} {number}")
    is_forged = bool(number % 2)
    path = forge(rng, copy / "log") if is_forged else damage(rng, copy)
    try:
        return used(whole, copy, rng, number, is_forged=is_forged)
    finally:
        path.write_bytes((whole.folder / path.relative_to(copy)).read_bytes())


def used(whole: Run, copy: Path, rng: random.Random, number: int, *, is_forged: bool) -> str:
    """Open, compare, replay and verify a damaged recording; return the outcome."""
    try:
        run = open_run(copy)
        chosen = rng.randrange(len(run.steps)) if run.steps else 0
        with suppress(MlvmError, OSError):
            diff(whole, run)
        with suppress(MlvmError, OSError):
            Replay(run).replay(chosen)
        verified = verify(Replay(run), steps=1, seed=number)
    except (MlvmError, OSError) as error:
        return f"{'forged: ' if is_forged else ''}{type(error).__name__}"
    if verified.is_accepted and not is_forged:
        raise Wrong("verify accepts a damaged recording")
    accepted = "accepted" if verified.is_accepted else "not accepted"
    return f"{'forged: ' if is_forged else ''}{accepted}"


def damage(rng: random.Random, folder: Path) -> Path:
    """Change some file of a recording, and return its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice([*files, folder / "log"])
    before = data = path.read_bytes()
    while data == before:
        data = rng.choice((mutated, mutated, mutated, _zeroed))(before, rng)
    path.write_bytes(data)
    return path


def _zeroed(data: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.choices(range(len(data) + 1), k=2))
    return data[:start] + bytes(end - start) + data[end:]


def forge(rng: random.Random, log: Path) -> Path:
    """Change values in frames of a log, and chain the frames anew. Return the path."""
    values = [*read_log(log).values]
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(values))
        values[at] = _changed(rng, values[at])
    if rng.random() < 0.2:
        del values[rng.randrange(len(values))]
    if rng.random() < 0.2:
        values.insert(rng.randrange(len(values) + 1), rng.choice(values))
    log.unlink()
    writer = LogWriter(log)
    for value in values:
        writer.append(value)
    writer.close()
    return log


def _changed(rng: random.Random, value: Any) -> Any:
    """Return a value with one part changed."""
    if isinstance(value, (tuple, list)) and value and rng.random() < 0.95:
        parts = [*value]
        at = rng.randrange(len(parts))
        parts[at] = _changed(rng, parts[at])
        if rng.random() < 0.05:
            del parts[at]
        return type(value)(parts)
    if isinstance(value, dict) and value and rng.random() < 0.95:
        name = rng.choice([*value])
        return {**value, name: _changed(rng, value[name])}
    others = [0, -1, 1, 7, 2**40, 2**127, 0.5, float("nan"), "", "f32[2]", "..", None, True, []]
    return rng.choice([*others, [[]], {}, (0, 0), [(0, 0, 0)], "cell", "step", {"mlvm": 3}])
