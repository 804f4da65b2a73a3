"""Tests of the layers above pass on a device: here few of them, the others by
`python -m pytest --device opencl:0 tests/eager tests/arena`."""

from __future__ import annotations

from tests.brief import output_of


def test_the_arena_tests_pass_on_a_device(device: str) -> None:
    options = ["--device", device, "--few=1", "-q", "-p", "no:cacheprovider"]
    output_of("-m", "pytest", *options, "tests/arena", timeout=1800)
