"""Exceptions that mlvm raises on purpose.

    MlvmError
    ├── OpError                the operands of an op are invalid: op, operand types, reason
    │   ├── ShapeError         (ValueError) the shapes do not match
    │   │   ├── TransposeError (AttributeError) too few or too many dimensions for x.T or x.mT
    │   │   ├── LengthError    (TypeError) len or iter of a scalar tensor
    │   │   └── MaskError      (IndexError) the shape of a mask differs from the first axes of x
    │   ├── DTypeError         (TypeError) a dtype is not allowed, or does not promote
    │   │   └── DLPackError    (AttributeError) the object does not support DLPack
    │   ├── ArgumentError      (TypeError, ValueError) unknown, missing or invalid attribute
    │   │   └── AxisError      (IndexError) an axis is out of range, or repeated
    │   ├── IndexingError      (IndexError) an index in x[...] is invalid for x
    │   ├── NonFiniteError     (FloatingPointError) a result is nan or infinite: `ml.debug.nans`
    │   └── OperandValueError  (ValueError) a value is out of range (a probability)
    │       ├── PositionError  (IndexError) an index or a class is out of range
    │       └── LinAlgError    (numpy.linalg.LinAlgError) a matrix has no inverse, factor, ...
    ├── ProgramError           (ValueError) the verifier rejects a program
    │   └── AssemblyError      invalid assembly text: line, column
    ├── EncodingError          (ValueError) invalid bytes, or a value that cannot be encoded
    ├── MachineError           (RuntimeError) a program fails while it runs
    │   ├── HostFunctionError  a C function reports an error
    │   └── LimitExceededError too many instructions, or calls nested too deep
    ├── UnknownFunctionError   (LookupError) no function of that name in the table
    ├── LibraryError           (OSError)  a shared library lists no C functions for mlvm
    ├── OutOfMemoryError       (MemoryError) memory cannot be allocated
    ├── HandleError            (LookupError) a handle that does not exist, or no longer exists
    ├── StaleTensorError       (RuntimeError) use of an eager tensor after it was freed
    ├── ArenaError             (ValueError) invalid use of an arena
    │   ├── ArenaBusyError     (RuntimeError) another thread uses the arena
    │   └── ArenaOverflowError (MemoryError) an allocation exceeds the arena's capacity
    ├── QueueFullError         (queue.Full) no slot of a queue is free, or became free in time
    ├── QueueEmptyError        (queue.Empty) the queue has no element, or got none in time
    ├── QueueClosedError       (RuntimeError) the queue is closed; for `get` also empty
    ├── CheckError             (AssertionError) the condition of `ml.check` is false
    ├── PathError              (KeyError) paths of tensors that the tree does not have
    ├── WeightsError           (ValueError) an invalid or damaged file of tensors
    ├── ModelError             (ValueError) an invalid, damaged or unsupported ONNX file
    ├── ExchangeError          (BufferError) a device or stream that DLPack cannot export to
    │   └── CopyError          (ValueError) copy=False, but a copy is necessary
    ├── GradientError          (TypeError) a gradient that does not exist, or was overwritten
    ├── GradientMismatchError  (AssertionError) a gradient differs from finite differences
    ├── CaptureError           (RuntimeError) a function that cannot be captured
    │   ├── StaleProgramError  check=n finds a program that is out of date
    │   └── BudgetError        no program is small enough for memory=
    ├── GroupError             (RuntimeError) the members of a group cannot continue together
    │   └── GroupTimeoutError  (TimeoutError) a member waited longer than timeout=
    ├── ConnectionLostError    (ConnectionError) the connection to a remote VM was closed
    ├── CallTimeoutError       (TimeoutError) a call to a remote VM exceeded its timeout
    ├── PipelineError          (ValueError) an invalid option, dataset or transform
    ├── WorkerDiedError        (RuntimeError) a worker of a pipeline exited too early
    ├── MissingExtraError      (ImportError) an optional package is not installed
    ├── AddressError           (ValueError) an invalid address
    └── AccessDeniedError      (PermissionError) the server or the client denies access

Each class also derives from the built-in exceptions in brackets.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np

from mlvm.core.memo import memoized
from mlvm.renamed import old_names

_BRIEF: Final = 100
_CALLED_FROM: Final = "called from "
_PACKAGE: Final = str(Path(__file__).parent.parent)
_NUMPY: Final = str(Path(np.__file__).parent)
_NOBODYS: Final = (_PACKAGE, _NUMPY, contextlib.__file__, threading.__file__, "<frozen")
OURS: Final[dict[str, bool]] = {}


class MlvmError(Exception):
    """Base class of mlvm's own exceptions.

    An error in a program has the location as attributes: the name of the `function`, the `pc` of
    the instruction, and the `step` of the linked code. One step may execute several instructions.
    `late` is true if an earlier, asynchronous call failed; callers then re-raise the error
    unchanged.

        >>> try: ml.reshape(ml.ones(6), (4,))
        ... except ml.errors.MlvmError as error: print(error)
        reshape(f32[6]): expected a shape of 6 elements, got (4,) with 4; -1 infers a length
    """

    function: str | None = None
    pc: int | None = None
    step: int | None = None
    late: bool = False


class OpError(MlvmError):
    """Error of an op with invalid operands; `op`, `operands` and `reason` are parts of the text.

    >>> try: ml.ones(2) + ml.ones(3)
    ... except ml.errors.OpError as error: print(error.op, error.operands)
    add (f32[2], f32[3])
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.op: str | None = None
        self.operands: tuple[object, ...] = ()

    def at(self, op: str, operands: Sequence[object]) -> Self:
        """Add the op and the operand types, unless an inner call has already added an op.

        The traceback is dropped: it shows only mlvm's internals.
        """
        if self.op is None and not self.late:
            self.reason = self.reason.removeprefix(f"{op}: ")
            self.op, self.operands = op, (*operands[:8], *["..."] * (len(operands) > 8))
        return self.with_traceback(None)

    def __str__(self) -> str:
        if self.op is None:
            return self.reason
        return f"{self.op}({', '.join(map(str, self.operands))}): {self.reason}"


class ShapeError(OpError, ValueError):
    """Error of operands with shapes that do not match each other or the op.

    >>> try: ml.ones(2) + ml.ones(3)
    ... except ml.errors.ShapeError as error: print(error)
    add(f32[2], f32[3]): shapes do not broadcast: expected equal sizes or 1 on axis -1, got 2 and 3
    """


class TransposeError(ShapeError, AttributeError):
    """Error of `x.T` unless x has exactly 2 dimensions, and `x.mT` if it has fewer.

    It is an `AttributeError`, so `hasattr(x, "T")` is False for these tensors.

    >>> try: ml.ones(3).T
    ... except ml.errors.TransposeError as error: print(error)
    T(f32[3]): expected 2 dimensions for T, got 1; use mT to swap the last two axes
    """


class LengthError(ShapeError, TypeError):
    """Error of `len(x)` or `iter(x)` for a scalar tensor.

    >>> try: len(ml.ones(()))
    ... except ml.errors.LengthError as error: print(error)
    len(f32[]): a scalar tensor has no length; use x.size
    """


class MaskError(ShapeError, IndexError):
    """Error of a mask with a shape that differs from the first axes of the indexed tensor.

    >>> try: ml.ones(3)[ml.asarray([True])]
    ... except ml.errors.MaskError as error: print(error.reason)
    expected a mask with the first axes of (3,), got shape (1,)
    """


class DTypeError(OpError, TypeError):
    """Error of an operand with an unsupported dtype, or two dtypes that do not promote.

    >>> try: ml.ones(2) & ml.ones(2)
    ... except ml.errors.DTypeError as error: print(error.reason.partition(';')[0])
    dtype f32 is not allowed
    """


class DLPackError(DTypeError, AttributeError):
    """Error of `from_dlpack` for an object without `__dlpack__` and `__dlpack_device__`.

    >>> try: ml.from_dlpack('text')
    ... except ml.errors.DLPackError as error: print(error)
    from_dlpack(): expected an object with __dlpack__, got a str; use ml.asarray
    """


class ArgumentError(OpError, TypeError, ValueError):
    """Error of an attribute that is unknown, missing or out of range, or has a wrong type.

    >>> try: ml.sum(ml.ones(2), dim=0)
    ... except ml.errors.ArgumentError as error: print(error)
    sum(): dim= is not supported; use axis=
    """


class AxisError(ArgumentError, IndexError):
    """Error of an axis that is out of range or duplicated; it corresponds to numpy's `AxisError`.

    >>> try: ml.sum(ml.ones(2), axis=1)
    ... except ml.errors.AxisError as error: print(error)
    sum(f32[2]): axis 1 is out of range for 1 dimensions; expected -1 to 0
    """


class IndexingError(OpError, IndexError):
    """Error of an index in `x[...]` that is out of range, of the wrong type, or one too many.

    >>> try: ml.ones(2)[5]
    ... except ml.errors.IndexingError as error: print(error)
    getitem(f32[2], 5): index 5 is out of range for length 2
    """


class NonFiniteError(OpError, FloatingPointError):
    """Error of a nan or infinite result, or a division of an integer by 0, inside `ml.debug.nans`.

    >>> with ml.debug.nans():
    ...     try: ml.log(ml.asarray([1.0, -1.0]))
    ...     except ml.errors.NonFiniteError as error: print(error)
    log(f32[2]): the result, f32[2], is nan at [1]; the operands are finite
    """


class OperandValueError(OpError, ValueError):
    """Error of an operand with a value that the op does not support.

    >>> try: ml.random.key(-1)
    ... except ml.errors.OperandValueError as error: print(error)
    key(): expected a seed as an int from 0 to 2**64 - 1, got -1
    """


class LinAlgError(OperandValueError, np.linalg.LinAlgError):
    """Error of a singular or indefinite matrix, or an iteration that did not converge.

    It derives from numpy's error of the same name, so code that catches numpy's error catches it.

        >>> try: ml.linalg.inv(ml.zeros((2, 2)))
        ... except ml.errors.LinAlgError as error: print(error)
        inv(f32[2,2]): a matrix is singular
    """


class PositionError(OperandValueError, IndexError):
    """Error of an index tensor with an index or a class that is out of range.

    >>> try: ml.take(ml.ones(2), ml.asarray([5]))
    ... except ml.errors.PositionError as error: print(error)
    take(f32[2], i64[1]): index 5 at position [0] is out of range for length 2
    """

    def __init__(self, reason: str, position: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.position = position


class ProgramError(MlvmError, ValueError):
    """Error of an invalid program. The text names `function`, `pc` and instruction.

    >>> try: ml.program_of(ml.nonzero, ml.ones(2))
    ... except ml.errors.ProgramError as error: print(error)
    program_of: a program that returns values cannot be concatenated; write to an operand instead
    """


class AssemblyError(ProgramError):
    r"""Error of invalid assembly text. `line` and `column` count from 1.

    >>> from mlvm.core.program.assembly import assemble
    >>> try: assemble('.func main 0 *\n    leap')
    ... except ml.errors.AssemblyError as error: print(error.line, error.column)
    2 5
    """

    def __init__(self, reason: str, line: int, column: int) -> None:
        super().__init__(reason, line, column)
        self.line = line
        self.column = column

    def __str__(self) -> str:
        reason, line, column = self.args
        return f"line {line}, column {column}: {reason}"


class EncodingError(MlvmError, ValueError):
    """Error of bytes that violate the format, or a value that the format cannot encode.

    >>> from mlvm.core.program.encoding import open_message
    >>> try: open_message(b'none')
    ... except ml.errors.EncodingError as error: print(error)
    expected a header of 16 bytes, got 4; the data is damaged: write or send it again
    """


class MachineError(MlvmError, RuntimeError):
    """Error of a running program: a value of the wrong kind, or a missing parameter.

    >>> try: ml.use('cpu')
    ... except ml.errors.MachineError as error: print(error)
    ml.use: expected a VM, got 'cpu'
    """


class HostFunctionError(MachineError):
    """Error that a C function reported, or wrong use of a frame. The text names the function."""


class LimitExceededError(MachineError):
    r"""Error of a launch with too many instructions, or with calls nested too deep.

    >>> from mlvm.core.program.assembly import assemble
    >>> endless = assemble('.func main 0 *\nagain:\n    jump again')
    >>> try: ml.VM().launch(endless, max_steps=100)
    ... except ml.errors.LimitExceededError as error: print(error)
    the launch exceeded its limit of instructions; raise max_steps=
    """


class UnknownFunctionError(MlvmError, LookupError):
    """Error of a call to a function name that is not registered.

    >>> try: ml.host_call('nothing')
    ... except ml.errors.UnknownFunctionError as error: print(error)
    no function 'nothing'
    """


class LibraryError(MlvmError, OSError):
    """Error of a shared library that cannot be loaded, or does not list functions as in `mlvm.h`.

    >>> try: ml.VM().register_library('none.so')
    ... except ml.errors.LibraryError as error: print(str(error).split()[:3])
    ['expected', 'a', 'shared']
    """


class OutOfMemoryError(MlvmError, MemoryError):
    """Error of an allocation that exceeds the available memory.

    >>> try: ml.zeros(2**50)
    ... except ml.errors.OutOfMemoryError as error: print(str(error).partition(';')[0])
    cannot allocate 4,503,599,627,370,496 bytes
    """


class HandleError(MlvmError, LookupError):
    """Error of a handle that was never created, or that was freed with a tensor or storage.

    >>> try: ml.VM().read(99)
    ... except ml.errors.HandleError as error: print(error)
    tensor handle 99 does not exist in this VM: it was never created, or freed long ago
    """


class StaleTensorError(MlvmError, RuntimeError):
    """Error of the use of a tensor after the arena was reset, rewound or closed, or has freed it.

    >>> with ml.Arena(ml.VM('mine'), 'batch'): x = ml.ones(2)
    >>> try: x + 1.0
    ... except ml.errors.StaleTensorError as error: print(error)
    use of a freed tensor: f32[2] of arena 'batch' was freed: the arena was reset; copy it out \
first, for example with weights.keep(x)
    """


class ArenaError(MlvmError, ValueError):
    """Error of an invalid arena size, or an invalid use of an arena.

    >>> try: ml.Arena(ml.VM(), 'batch', capacity=-1)
    ... except ml.errors.ArenaError as error: print(error)
    arena 'batch': capacity: expected a size from 0 to 2**63 - 1 bytes, as an int or a text such \
as '64 MiB' (units: B, K, M, G, T, KiB ... TiB, kB ... TB), got -1
    """


class ArenaBusyError(ArenaError, RuntimeError):
    """Error of an arena that another thread uses; only one thread at a time can use an arena.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> try:
    ...     with ml.Arena(ml.VM(), "batch") as batch, ThreadPoolExecutor(1) as other:
    ...         other.submit(batch.reset).result()
    ... except ml.errors.ArenaBusyError as error: print(error)
    arena 'batch' is in use by thread 'MainThread'; only one thread at a time can use an arena: \
create one arena per thread
    """


class ArenaOverflowError(ArenaError, MemoryError):
    """Error of an allocation that exceeds the free bytes of an arena with a fixed capacity.

    >>> try:
    ...     with ml.Arena(ml.VM(), "batch", capacity=64): ml.ones(100)
    ... except ml.errors.ArenaOverflowError as error: print(error)
    arena 'batch': f32[100] needs 448 bytes; 64 of 64 bytes are free; raise capacity= or free \
tensors
    """


class QueueFullError(MlvmError, queue.Full):
    """Error of a queue tensor without a free slot, at the call or until the timeout.

    >>> import numpy as np
    >>> queue = ml.QueueTensor(ml.VM(), ['f32[]'], 1)
    >>> array = np.ones((), np.float32)
    >>> queue.put_nowait([array])
    >>> try: queue.put_nowait([array])
    ... except ml.errors.QueueFullError as error: print(str(error).partition(':')[0])
    no slot is free
    """


class QueueEmptyError(MlvmError, queue.Empty):
    """Error of a queue tensor without an element, at the call or until the timeout.

    >>> queue = ml.QueueTensor(ml.VM(), ['f32[]'], 1)
    >>> try: queue.get_nowait()
    ... except ml.errors.QueueEmptyError as error: print(str(error).partition(':')[0])
    no element is ready
    """


class QueueClosedError(MlvmError, RuntimeError):
    """Error of a queue tensor that is closed; for `get` also empty.

    It corresponds to `queue.ShutDown` of Python 3.13.

    >>> queue = ml.QueueTensor(ml.VM(), ['f32[]'], 1)
    >>> queue.close()
    >>> try: queue.get()
    ... except ml.errors.QueueClosedError as error: print(error)
    queue 'queue' is closed
    """


class CheckError(MlvmError, AssertionError):
    """Error of `ml.check` for a condition that is false.

    >>> try: ml.check(ml.ones(3) < 1.0, "losses are below 1")
    ... except ml.errors.CheckError as error: print(error)
    losses are below 1: 3 of 3 are False, the first at [0]
    """


class PathError(MlvmError, KeyError):
    """Error of tensors or arrays given by paths that differ from the paths of the tree.

    >>> try: ml.nn.Dropout(0.5).load_state({'bias': ml.ones(1)})
    ... except ml.errors.PathError as error: print(error)
    load_state: unknown tensor 'bias'; got bias
    """

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class WeightsError(MlvmError, ValueError):
    """Error of a file that is not a file of tensors, is damaged, or has unsupported contents.

    >>> with open('other', 'wb') as file: _ = file.write(b'none')
    >>> try: ml.load('other')
    ... except ml.errors.WeightsError as error: print(error)
    load: other: it is neither a safetensors file nor a GGUF file; check the path
    """


class ModelError(MlvmError, ValueError):
    """Error of an ONNX file that is invalid, damaged, or uses features that mlvm does not support.

    >>> with open('damaged.onnx', 'wb') as file: _ = file.write(b'none')
    >>> try: ml.onnx.load('damaged.onnx')
    ... except ml.errors.ModelError as error: print(str(error).partition(': ')[2])
    not an ONNX file, or damaged: field 13 of Model: unknown wire type 6; export or download the \
file again
    """


class ExchangeError(MlvmError, BufferError):
    """Error of a DLPack request for a device or stream that cannot be served.

    >>> try: ml.ones(2).__dlpack__(dl_device=(2, 0))
    ... except ml.errors.ExchangeError as error: print(error)
    f32[2]: expected dl_device=(1, 0), the processor, got (2, 0)
    """


class CopyError(ExchangeError, ValueError):
    """Error of `copy=False` where the values can only be copied.

    >>> try: ml.asarray([1.0], copy=False)
    ... except ml.errors.CopyError as error: print(error)
    asarray: the values of a list must be copied into a VM; omit copy=False
    """


class GradientError(MlvmError, TypeError):
    """Error of a gradient that does not exist, or that an in-place update would destroy.

    >>> try: ml.grad(lambda x: x)(ml.ones(2))
    ... except ml.errors.GradientError as error: print(error)
    expected a float scalar to differentiate, got f32[2]; take ml.sum or ml.mean, or see ml.vjp
    """


class GradientMismatchError(MlvmError, AssertionError):
    """Error of a gradient that differs from the quotient of finite differences.

    >>> try: ml.testing.check_gradients(ml.relu, ml.zeros(1))
    ... except ml.errors.GradientMismatchError as error: print(str(error).partition(':')[0])
    order 1, argument 0[0]
    """


class CaptureError(MlvmError, RuntimeError):
    """Error of a captured function that a replay could not repeat; the text names the line.

    >>> try: ml.capture(lambda x: float(x))(ml.ones(()))
    ... except ml.errors.CaptureError as error: print(str(error).split(': ')[1].split(';')[0])
    cannot read a tensor's value inside a captured function, which `float(x)` needs
    """


class StaleProgramError(CaptureError):
    """Error of a captured program that computes something else than the Python function does now.

    With `capture(check=n)` the function is traced again after n calls, and compared. The text names
    the line and the value that changed.

    >>> issubclass(ml.errors.StaleProgramError, ml.errors.CaptureError)
    True
    """


class BudgetError(CaptureError):
    """Error of a captured function: even the smallest program needs more bytes than `memory=`.

    `smallest` is the number of bytes of the smallest program that was found.

    >>> try: ml.capture(lambda x: ml.sum(ml.sort(x)), memory=64)(ml.ones(100))
    ... except ml.errors.BudgetError as error: print(error.smallest)
    448
    """

    def __init__(self, reason: str, smallest: int = 0) -> None:
        super().__init__(reason)
        self.smallest = smallest

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.smallest)


class GroupError(MlvmError, RuntimeError):
    """Error of a group of VMs: the members call different collectives, or some have exited.

    >>> try: ml.parallel.group('friends')
    ... except ml.errors.GroupError as error: print(error)
    group: expected threads:N, processes:N, ray:N, mpi or auto, got 'friends'
    """


class GroupTimeoutError(GroupError, TimeoutError):
    """Error of a group member that waited longer than `timeout=`.

    The text names the members that it waited for.

    >>> def member(rank, vm):
    ...     if rank: time.sleep(0.1)  # or a process that was stopped
    ...     ml.parallel.barrier(timeout=0.01)
    >>> import time
    >>> with ml.parallel.Group(2) as group:
    ...     try: group.run(member)
    ...     except ml.errors.GroupTimeoutError as error: print(error)
    member 0 (vm0) has waited 0.01 s in barrier() for member 1 (vm1)
    """


class ConnectionLostError(MlvmError, ConnectionError):
    """Error of a closed connection to a remote VM; all tensors there are lost.

    >>> try: ml.connect('unix:nowhere')
    ... except ml.errors.ConnectionLostError as error: print(error)
    no server at unix:nowhere: No such file or directory; check the address, or start the server
    """


class CallTimeoutError(MlvmError, TimeoutError):
    """Error of a call to a remote VM that exceeded the client's timeout; the VM remains usable.

    >>> from mlvm.core.program.assembly import assemble
    >>> from mlvm.machines.remote.server import Server
    >>> for_ever = assemble(".func main 0 *\\nagain:\\n    jump again\\n    halt\\n")
    >>> with Server("127.0.0.1:0", secret="between you and me") as server:
    ...     with ml.connect(str(server.address), secret="between you and me") as vm:
    ...         vm.call_timeout = 0.1
    ...         try: vm.launch(for_ever, max_steps=10**15)
    ...         except ml.errors.CallTimeoutError as error: print(str(error).rpartition(": ")[2])
    a call exceeded the timeout of 0.1 seconds
    """


class PipelineError(MlvmError, ValueError):
    """Error of a pipeline with an invalid option, dataset or transform.

    >>> try: ml.Pipeline([1.0], batch_size=0)
    ... except ml.errors.PipelineError as error: print(error)
    pipeline: expected batch_size as an integer >= 1, got 0
    """


class WorkerDiedError(MlvmError, RuntimeError):
    """Error of a pipeline: a worker exited or was killed before it finished.

    >>> class Numbers:
    ...     def __len__(self): return 10
    ...     def __getitem__(self, indices): return (indices,)
    >>> def leave(arrays, random):
    ...     if len(arrays[0]) > 1: raise SystemExit
    ...     return arrays
    >>> try: ml.Pipeline(Numbers(), 4, vm=ml.VM(), workers=1, transform=leave).get()
    ... except ml.errors.WorkerDiedError as error: print(error)
    a worker was stopped by SystemExit(); correct the dataset or transform
    """


class MissingExtraError(MlvmError, ImportError):
    """Error of a missing or incomplete optional package; the text states how to install it.

    >>> from mlvm.core.extras import extra
    >>> try: extra('fortune', 'luck')
    ... except ml.errors.MissingExtraError as error: print(error)
    fortune is not installed: pip install "mlvm[luck]"
    """


class AddressError(MlvmError, ValueError):
    """Error of an address that is malformed, or that the server must not listen on.

    >>> try: ml.connect('nowhere')
    ... except ml.errors.AddressError as error: print(error)
    an address: expected HOST:PORT, [IPV6]:PORT, :PORT (this host alone) or unix:PATH, got 'nowhere'
    """


class AccessDeniedError(MlvmError, PermissionError):
    """Error of a server that rejects a client, or a client that rejects a server.

    It is raised before the first call; the text states the reason.

    >>> try: ml.connect(':7000', secret='sesame')
    ... except ml.errors.AccessDeniedError as error: print(error)
    a secret: expected at least 16 bytes, got 6
    """


__all__ = [n for n, x in [*globals().items()] if isinstance(x, type) and issubclass(x, MlvmError)]


def brief(value: Any) -> str:
    """Return the value as a short text for a message.

    The text is the first line of `repr(value)`, truncated; for a function, the name and parameters.
    """
    if issubclass(type(value), (str, bytes)):
        value = value[: 4 * _BRIEF]  # repr is truncated anyway
    try:
        text = repr(value)
        if isinstance(value, FunctionType):
            text = f"{value.__name__}{inspect.signature(value)}"
    except ValueError:  # Python raises for ints with thousands of digits
        text = f"<{type(value).__name__} too long to write>"
    except Exception:  # a user's __repr__
        text = f"<{type(value).__name__} that has no text>"
    first = text.partition("\n")[0][:_BRIEF]
    return text if text == first else f"{first}..."


def shortened(text: str, most: int) -> str:
    """Return a text of more than `most` characters truncated to this length, with "..."."""
    return text if len(text) <= most else f"{text[:most]}..."


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names as text, and the number of further names.

    >>> listed(["x", "y"], 2), listed(["x", "y", "z"], 2)
    ('x, y', 'x, y and 1 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean 'axis'?)" for the name that is most similar, or "" if none is.

    >>> did_you_mean("axes", ["axis", "dtype"])
    " (did you mean 'axis'?)"
    """
    from difflib import get_close_matches  # imported only for an error

    similar = get_close_matches(name, names, 1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


def with_article(noun: object) -> str:
    """Return a type or a class name with an indefinite article: "an f32[2]", "a float", "an int".

    >>> with_article("i8"), with_article("u8"), with_article("ndarray")
    ('an i8', 'a u8', 'an ndarray')
    """
    text = str(noun)
    article = "an" if re.match(r"[aeio]|f\d|ndarray", text, re.IGNORECASE) else "a"
    return "None" if text == "NoneType" else f"{article} {text}"


def counted(count: int, noun: str) -> str:
    """Return a number with a noun: "1 result", "2 results"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def takes(fn: object, count: int) -> bool:
    """Return whether `fn` can be called with `count` positional arguments."""
    if not callable(fn):
        return False
    with contextlib.suppress(ValueError):  # a built-in function without a signature
        parameters = inspect.signature(fn)
        try:
            parameters.bind(*range(count))
        except TypeError:
            return False
    return True


Place: TypeAlias = tuple[CodeType, int]
"""A place in Python code: the code object, and an offset in it."""


def user_place() -> Place | None:
    """Return the innermost Python location of the caller's own code, or None.

    Frames of mlvm, numpy, `contextlib` and `threading` are skipped. A call takes half a
    microsecond.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = OURS.get(code.co_filename)
        if not (is_ours(code.co_filename) if ours is None else ours):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def is_ours(file: str) -> bool:
    """Return whether a file belongs to mlvm, numpy, `contextlib` or `threading`."""
    ours = OURS.get(file)
    if ours is None:
        ours = OURS[file] = file.startswith(_NOBODYS)
    return ours


def line_of(place: Place) -> str:
    """Return the location as `file:line`."""
    code, offset = place
    return _line_of(code.co_filename, code.co_linetable, code, offset)


@memoized(4096)
def _line_of(file: str, table: bytes, code: CodeType, offset: int) -> str:
    """Return the line. `file` and `table` are cache keys, as equal code may differ in them."""
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return f"{file}:{next(lines, None) or code.co_firstlineno}"


def user_line() -> str | None:
    """Return the innermost line of the caller's own Python code as `file:line`, or None."""
    place = user_place()
    return line_of(place) if place is not None else None


def locate(
    error: Exception,
    text: str,
    *,
    function: str,
    pc: int,
    step: int | None = None,
    line: str | None = None,
) -> None:
    """Attach the location in a program to an error of any class.

    The location becomes attributes of the error. Two notes show it to people: `text`, and the
    `line` of Python that called the program.
    """
    for name, value in (("function", function), ("pc", pc), ("step", step)):
        with contextlib.suppress(AttributeError):  # a class with fixed `__slots__`
            setattr(error, name, value)
    error.add_note(f"at {text}")
    if line:
        error.add_note(f"{_CALLED_FROM}{line}")


def notes_of(error: BaseException) -> list[str]:
    """Return the error's notes, without those that name a line of Python."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if not note.startswith(_CALLED_FROM)]


if not TYPE_CHECKING:  # otherwise type checkers would allow any name
    __getattr__ = old_names(__name__, "ml.errors", globals())
