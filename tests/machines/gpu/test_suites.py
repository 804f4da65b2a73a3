"""Tests of the layers above pass on a device: here few of them, the others by
`python -m pytest --device opencl:0 tests/eager tests/arena`."""

from __future__ import annotations

from tests.brief import require_passing


def test_the_arena_tests_pass_on_a_device(device: str) -> None:
    require_passing("--device", device, "--few=1", "tests/arena")
