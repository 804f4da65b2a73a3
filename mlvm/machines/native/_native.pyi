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

class Type:
    tensor_type: Any
    def __init__(self, tensor_type: object, nbytes: int, size: int, dtype: int) -> None: ...

class Program:
    straight: int
    work: float

    def __init__(self, functions: list[Any], arguments: tuple[Type, ...]) -> None: ...
    def run(
        self, pool: Pool, helper: object, functions: object, operands: tuple[Any, ...], left: int
    ) -> Any: ...

def simd() -> str: ...
def choose_simd(name: str) -> bool: ...
def kernels() -> list[str]: ...
def row(name: str) -> int: ...
def rows() -> list[str]: ...
