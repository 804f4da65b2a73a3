from collections.abc import Callable, Mapping, Sequence
from typing import Any

sources: str

class KernelCall:
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
        parts: Sequence[KernelCall] = ...,
        rows: Sequence[str] = ...,
        patches: Sequence[int] = ...,
    ) -> None: ...
    def run(self, pool: Pool, *arrays: Any) -> bool: ...
    def described(
        self,
    ) -> tuple[list[int], list[float], tuple[KernelCall, ...], list[str], list[int]]: ...

class Pool:
    threads: int

    def __init__(
        self, threads: int = ..., pinned: bool = ..., worth_sharing: float = ...
    ) -> None: ...

class Type:
    tensor_type: Any
    def __init__(
        self, tensor_type: object, nbytes: int, size: int, dtype: int, shape: tuple[int, ...]
    ) -> None: ...

class Caller:
    def __init__(self, host: tuple[Any, ...]) -> None: ...
    def __call__(self, params: Sequence[Any]) -> list[Any]: ...

PUSH_RECORD: int
READ_RECORD: int
READ_RECORD_ROWS: int
ADD_RECORDS: int

class Records:
    nbytes: int

    def __init__(self, more: Callable[[int], Any]) -> None: ...
    def begin(self) -> Any: ...
    def end(self, mark: Any, /) -> None: ...

class Program:
    straight: int
    work: float

    def __init__(self, functions: list[Any], arguments: tuple[Type, ...], version: Any) -> None: ...
    def activate(self, calls: list[KernelCall], operands: tuple[Any, ...]) -> None: ...
    def run(self, pool: Pool, helper: object, operands: tuple[Any, ...], left: int) -> Any: ...

def open_program(
    rows: list[tuple[int, int, tuple[int, ...]]], nargs: int, types: tuple[Type, ...], version: Any
) -> Program: ...

class Formulas:
    def input(self) -> int: ...
    def constant(self, value: float) -> int: ...
    def step(self, name: str, a: int, b: int) -> int: ...
    def evaluate(self, values: list[int]) -> None: ...
    def hold(self, guards: tuple[float, ...]) -> bool: ...
    def write(self, calls: list[KernelCall]) -> None: ...

class Lanes:
    def __init__(
        self,
        code: Any,
        at: Any,
        heavy: Any,
        width: int,
        sizes: Any,
        lent: Any,
        segments: list[Any],
        sites: list[Any],
        shared: int,
        params: Any,
        returned: Any,
    ) -> None: ...
    def run(
        self,
        pool: Pool,
        helper: object,
        count: int,
        args: Any,
        results: Any,
        sums: Any,
        shared: Any,
    ) -> None: ...
    def forget(self) -> None: ...
    def forget_rows(self) -> None: ...

def lane_steps() -> dict[str, int]: ...

class Checklist:
    def __init__(self, missing: object, reads: tuple[Any, ...]) -> None: ...
    def holds(self) -> bool: ...

class Pattern:
    def __init__(
        self,
        tensor_class: type,
        arena_class: type,
        parts: tuple[Any, ...],
        apart: tuple[Any, ...],
    ) -> None: ...
    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Any]) -> Any: ...

class Replay:
    def __init__(self, operands: tuple[Any, ...], states: list[Any], check: Any) -> None: ...
    def handles(self, inputs: list[Any], outputs: list[Any], scratch: tuple[int, ...]) -> Any: ...
    def run(self, arena: Any, inputs: list[Any], types: tuple[Any, ...]) -> Any: ...
    def learn(
        self, arena: Any, inputs: list[Any], outputs: list[Any], program: Any, handles: Any
    ) -> None: ...

def exclusive(tensors: list[Any]) -> bool: ...

class Lock:
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *_: object) -> None: ...

class FastPath:
    observed: bool
    instrumented: bool
    closed: bool
    prepare: Any

    def is_running(self) -> bool: ...
    def __init__(
        self,
        find: object = ...,
        prepare: object = ...,
        bound: object = ...,
        lock: object = ...,
        pool: Pool = ...,
        outbox: Outbox = ...,
        flush: object = ...,
    ) -> None: ...
    def forget(self) -> None: ...
    def clear(self) -> None: ...

class Outbox:
    def __init__(self, ours: dict[str, bool], place: object) -> None: ...
    def add(self, message: bytes, place: Any) -> bool: ...
    def take(self, done: int, /) -> tuple[bytes, list[Any]]: ...
    def __len__(self) -> int: ...

class Bound:
    def __init__(self, call: KernelCall, arrays: tuple[Any, ...]) -> None: ...

class AllocationFields: ...
class RegionFields: ...
class ArenaFields: ...
class CallFields: ...

def apply(call: Any, *operands: Any) -> Any: ...
def install(**lent: object) -> None: ...

MLVM_ABI_VERSION: int
MLVM_ANY: int
ANYWHERE: int
MOST_HANDLES: int
MOST_PARAMETERS: int
MOST_SMALL: int
CHAIN_MOST_AXES: int
CHAIN_MOST_OPERANDS: int
LINE_ADD: int
LINE_SUBTRACT: int
LINE_SUBTRACT_FROM: int
LINE_MULTIPLY: int
LINE_DIVIDE: int
LINE_DIVIDE_BY: int
CHAIN_VALUE: tuple[str, ...]
HALVES_VALUE: tuple[str, ...]
RECURRENT_CELLS: tuple[str, ...]
COPY_UNIT: int
RANGE_UNIT: int
DRAW_UNIT: int
REDUCTION_WIDEST: int
ROWS_TOGETHER: int
ROWS_OF_WORK: int
GATHER: int
LINES: int
MOST_RUNS: int
WHOLE: int
REPEATED: int
SPREAD: int
MOST_ITEM: int
LINK_BYTES: int
TEMPORARY: int
SCALAR: int
WRITTEN: int
BLOCK_BYTES: int
AS_IT_IS: int
PIECES: int
ENTIRE: int
LATER: int

def dtypes() -> dict[str, int]: ...
def simd() -> str: ...
def limit_made(most: int | None, /) -> int: ...
def simd_sets() -> dict[str, bool]: ...
def simd_refused(name: str, /) -> bool: ...
def choose_simd(name: str) -> bool: ...
def code_after(elements: int) -> int: ...
def kernel_call(
    kernel: str,
    nparams: int,
    units: int,
    work: float,
    names: tuple[str, ...],
    integers: Mapping[str, int],
    floats: tuple[float, ...],
    scratch: int,
    shared: int,
    parts: tuple[Any, ...],
    rest: Sequence[int],
    rows: Sequence[str],
    /,
) -> Any: ...
def kernels() -> dict[str, tuple[str, tuple[str, ...]]]: ...
def steps() -> dict[str, int]: ...
def rows() -> dict[str, float]: ...
def run_launches(
    pool: Pool, buffer: memoryview, start: int, end: int, bound: dict[bytes, Bound]
) -> tuple[int, int]: ...
def search_offsets(*arguments: Any) -> tuple[int, int]: ...
def accumulate(array: Any, nbytes: int, kind: int, keys: Any, /) -> bytes: ...
def place_best_fit(
    count: int, sequence: Any, size: Any, start: Any, end: Any, offsets: Any, /
) -> None: ...
