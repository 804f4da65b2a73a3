"""The tests of the layers above pass on VMs at the end of a socket, posts and all: here a few of
them, with `--long` all, each with one of its parameters. All parameters are tried by
`python -m pytest --remote tests/eager tests/arena`."""

from __future__ import annotations

from collections.abc import Sequence

from tests.brief import cases, require_passing

CAPTURE = "tests/eager/capture"
TRANSFORM = "tests/eager/transform"
"""What these tests do is eager code, which other tests run: one of them will do."""

LANES = f"{TRANSFORM}/test_batch.py::test_sentences_of_any_length_go_their_own_way"
FEW = ("tests/eager/tensor", "tests/arena/test_arena.py", f"{CAPTURE}/test_replacing.py")
BUT = ["--long", *[f"--ignore={each}" for each in FEW]]


@cases("folders",
    FEW, ["tests/eager", f"--ignore={CAPTURE}", f"--ignore={TRANSFORM}", *BUT],
    [CAPTURE, "tests/arena", LANES, *BUT],
    ["tests/eager/functions/test_rows.py", "tests/eager/test_refused_calls.py", "--few=60"],
    ids=["few", "eager", "capture", "rows"],
)  # fmt: skip
def test_the_eager_and_arena_tests_pass_on_remote_vms(folders: Sequence[str]) -> None:
    require_passing("--remote", "--few=1", *folders)
