from collections.abc import Sequence
from typing import Any

class Plan:
    kernel: str
    nparams: int
    units: int
    work: float
    scratch: int
    shared: int

    def __init__(
        self,
        kernel: str,
        nparams: int,
        ints: Sequence[int] = ...,
        floats: Sequence[float] = ...,
        units: int = ...,
        work: float = ...,
        scratch: int = ...,
        shared: int = ...,
        parts: Sequence[Plan] = ...,
    ) -> None: ...
    def run(self, pool: Pool, *arrays: Any) -> bool: ...

class Pool:
    threads: int

    def __init__(self, threads: int = ..., pinned: bool = ...) -> None: ...

def simd() -> str: ...
def choose_simd(name: str) -> bool: ...
def kernels() -> list[str]: ...
def row(name: str) -> int: ...
def rows() -> list[str]: ...
