"""Every exception mlvm raises on purpose.

    MlvmError
    ├── OpError                an op refuses its operands: op, operand types, reason
    │   ├── ShapeError         (ValueError) the shapes do not fit
    │   │   ├── TransposeError (AttributeError) too few or too many dimensions for x.T or x.mT
    │   │   ├── LengthError    (TypeError) len or iter of a tensor without dimensions
    │   │   └── MaskError      (IndexError) a mask does not cover the first axes of x
    │   ├── DTypeError         (TypeError) a dtype is not allowed, or does not promote
    │   │   └── DLPackError    (AttributeError) what has no DLPack
    │   ├── ArgumentError      (TypeError, ValueError) unknown, missing or impossible attribute
    │   │   └── AxisError      (IndexError) an axis is out of range, or named twice
    │   ├── IndexingError      (IndexError) what stands between x[ and ] does not fit x
    │   ├── NonFiniteError     (FloatingPointError) a result is nan or infinite: `ml.debug.nans`
    │   └── OperandValueError  (ValueError) a value is out of range (a probability)
    │       ├── PositionError  (IndexError) an index or a class is out of range
    │       └── LinAlgError    (numpy.linalg.LinAlgError) a matrix has no inverse, factor, ...
    ├── ProgramError           (ValueError) the verifier refuses a program
    │   └── AssemblyError      text that is not assembly: line, column
    ├── EncodingError          (ValueError) bytes that are no message, or what has no bytes
    ├── MachineError           (RuntimeError) a program goes wrong while it runs
    │   ├── HostFunctionError  a C function reports an error
    │   └── LimitExceededError it takes too many steps, or calls too deep
    ├── UnknownFunctionError   (LookupError) no function of that name in the table
    ├── LibraryError           (OSError)  a shared library that lists no C functions for mlvm
    ├── OutOfMemoryError       (MemoryError) the machine has no such bytes
    ├── HandleError            (LookupError) a handle that names nothing (any more)
    ├── StaleTensorError       (RuntimeError) an eager tensor whose memory was given back
    ├── ArenaError             (ValueError) an arena is used in a way it cannot serve
    │   ├── ArenaBusyError     (RuntimeError) another thread is inside the arena
    │   └── ArenaOverflowError (MemoryError) a request does not fit the arena's capacity
    ├── QueueFullError         (queue.Full) no slot of a queue tensor is free, or was in time
    ├── QueueEmptyError        (queue.Empty) no element of a queue tensor is there, or was in time
    ├── QueueClosedError       (RuntimeError) a queue tensor is closed; for `get` also drained
    ├── CheckError             (AssertionError) what `ml.check` was told to hold does not
    ├── PathError              (KeyError) tensors of a tree come by other paths than the tree's
    ├── WeightsError           (ValueError) a file of tensors that is none, is damaged, or misfits
    ├── ModelError             (ValueError) an ONNX file that is none, is damaged, or is refused
    ├── ExchangeError          (BufferError) that device or stream cannot have the values
    │   └── CopyError          (ValueError) copy=False, and it takes a copy
    ├── GradientError          (TypeError) a gradient that does not exist, or a tape in the way
    ├── GradientMismatchError  (AssertionError) a gradient is not the slope that values show
    ├── CaptureError           (RuntimeError) a function does what a replay could not do again
    │   ├── StaleProgramError  check=n finds a program that is out of date
    │   └── BudgetError        no program is small enough for memory=
    ├── GroupError             (RuntimeError) members of a group of VMs that cannot go on together
    │   └── GroupTimeoutError  (TimeoutError) a member has waited for others as long as it may
    ├── ConnectionLostError    (ConnectionError) the way to a VM elsewhere has ended
    ├── CallTimeoutError       (TimeoutError) a call to a VM elsewhere took longer than it may
    ├── PipelineError          (ValueError) an option, a data set or a transform is impossible
    ├── WorkerDiedError        (RuntimeError) a pipeline's worker ended before its work did
    ├── MissingExtraError      (ImportError) an optional package is not installed
    ├── AddressError           (ValueError) an address that names no place to connect or listen
    └── AccessDeniedError      (PermissionError) a server does not let this client in, or must not

Each also derives from the built-in exception that is named in brackets.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import sys
import threading
from collections.abc import Sequence
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
OURS: Final[dict[str, bool]] = {}  # by the name of a file: is it one of mlvm's?


class MlvmError(Exception):
    """Base of all of mlvm's own exceptions.

    An error of a program says where it happened: the name of the `function`, the `pc` of the
    instruction, and the `step` of the linked code. A step may stand for several instructions.
    `late` tells that it is of an earlier call, which did not wait: who names calls passes it on.

        >>> try: ml.ones(2) + ml.ones(3)
        ... except ml.errors.MlvmError as error: print(error)
        add(f32[2], f32[3]): shapes do not broadcast: axis -1 has lengths 2 and 3
    """

    function: str | None = None
    pc: int | None = None
    step: int | None = None
    late: bool = False


class OpError(MlvmError):
    """An op refuses its operands. `op`, `operands` and `reason` hold the parts of the text.

    A type rule or kernel raises it with the reason alone; whoever called the rule
    adds the op and its operand types with `at`.

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
        """Name the op and the operand types, unless an inner call has done so already. The frames
        beneath are dropped: they are of no use to the caller of the op."""
        if self.op is None and not self.late:
            self.op, self.operands = op, tuple(operands)
        return self.with_traceback(None)

    def __str__(self) -> str:
        if self.op is None:
            return self.reason
        return f"{self.op}({', '.join(map(str, self.operands))}): {self.reason}"


class ShapeError(OpError, ValueError):
    """The operands' shapes do not fit each other or the op.

    >>> try: ml.ones(2) + ml.ones(3)
    ... except ml.errors.ShapeError as error: print(error)
    add(f32[2], f32[3]): shapes do not broadcast: axis -1 has lengths 2 and 3
    """


class TransposeError(ShapeError, AttributeError):
    """x.T is for 2 dimensions, and x.mT for 2 or more: `hasattr` says so too.

    >>> try: ml.ones(3).T
    ... except ml.errors.TransposeError as error: print(error)
    T(f32[3]): T is for 2 dimensions; mT swaps the last two
    """


class LengthError(ShapeError, TypeError):
    """A tensor without dimensions has no length, and nothing to iterate over.

    >>> try: len(ml.ones(()))
    ... except ml.errors.LengthError as error: print(error)
    len(f32[]): a tensor without dimensions has no length
    """


class MaskError(ShapeError, IndexError):
    """A mask does not have the lengths of the first axes of what it chooses from.

    >>> try: ml.ones(3)[ml.asarray([True])]
    ... except ml.errors.MaskError as error: print(error.reason)
    a mask of shape (1,) does not cover the first axes of (3,)
    """


class DTypeError(OpError, TypeError):
    """An operand's dtype is not allowed here, or two dtypes do not promote.

    >>> try: ml.ones(2) & ml.ones(2)
    ... except ml.errors.DTypeError as error: print(error.reason.partition(';')[0])
    dtype f32 is not allowed
    """


class DLPackError(DTypeError, AttributeError):
    """`from_dlpack` takes what has `__dlpack__` and `__dlpack_device__`.

    >>> try: ml.from_dlpack('text')
    ... except ml.errors.DLPackError as error: print(error)
    from_dlpack(): a str has no __dlpack__; see asarray
    """


class ArgumentError(OpError, TypeError, ValueError):
    """An attribute is unknown, missing, of the wrong kind or out of range.

    >>> try: ml.sum(ml.ones(2), dim=0)
    ... except ml.errors.ArgumentError as error: print(error)
    sum(): there is no dim=; use axis=
    """


class AxisError(ArgumentError, IndexError):
    """An axis is out of range, or one of several is named twice. As numpy's `AxisError`.

    >>> try: ml.sum(ml.ones(2), axis=1)
    ... except ml.errors.AxisError as error: print(error)
    sum(f32[2]): axis 1 is out of range for 1 dimensions
    """


class IndexingError(OpError, IndexError):
    """An index in x[...] is out of range, of the wrong kind, or one too many.

    >>> try: ml.ones(2)[5]
    ... except ml.errors.IndexingError as error: print(error)
    getitem(f32[2], 5): index 5 is out of range for length 2
    """


class NonFiniteError(OpError, FloatingPointError):
    """A result is nan or infinite, or an integer is divided by 0, inside `ml.debug.nans`.

    >>> with ml.debug.nans():
    ...     try: ml.log(ml.asarray([1.0, -1.0]))
    ...     except ml.errors.NonFiniteError as error: print(error)
    log(f32[2]): the result, f32[2], is nan at [1]; the operands are finite
    """


class OperandValueError(OpError, ValueError):
    """An operand holds a value the op has no meaning for.

    >>> try: ml.random.key(-1)
    ... except ml.errors.OperandValueError as error: print(error)
    key(): expected a seed as an int from 0 to 2**64 - 1, got -1
    """


class LinAlgError(OperandValueError, np.linalg.LinAlgError):
    """A matrix has no such result: it is singular, or not positive definite, or an iteration does
    not converge. Code that catches numpy's error of that name catches this one too.

        >>> try: ml.linalg.inv(ml.zeros((2, 2)))
        ... except ml.errors.LinAlgError as error: print(error)
        inv(f32[2,2]): a matrix is singular
    """


class PositionError(OperandValueError, IndexError):
    """An index tensor holds a position that is out of range, or a class that there is not.

    >>> try: ml.take(ml.ones(2), ml.asarray([5]))
    ... except ml.errors.PositionError as error: print(error)
    take(f32[2], i64[1]): index 5 at position [0] is out of range for length 2
    """

    def __init__(self, reason: str, position: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.position = position


class ProgramError(MlvmError, ValueError):
    """A program is malformed. The text names `function`, `pc` and instruction.

    >>> try: ml.program_of(ml.nonzero, ml.ones(2))
    ... except ml.errors.ProgramError as error: print(error)
    program_of: a program that returns values is not concatenated
    """


class AssemblyError(ProgramError):
    r"""Text that is not assembly. `line` and `column` count from 1.

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
    """Bytes that break the format, or a value that the format has no bytes for.

    >>> from mlvm.core.program.encoding import open_message
    >>> try: open_message(b'none')
    ... except ml.errors.EncodingError as error: print(error)
    a header has 16 bytes; there are 4
    """


class MachineError(MlvmError, RuntimeError):
    """A program does what the machine cannot: a wrong kind of value, a missing parameter.

    >>> try: ml.use('cpu')
    ... except ml.errors.MachineError as error: print(error)
    ml.use: expected a VM, got 'cpu'
    """


class HostFunctionError(MachineError):
    """A C function reported an error, or misused its frame. The text names the function."""


class LimitExceededError(MachineError):
    r"""A launch took more steps than allowed, or its calls went too deep.

    >>> from mlvm.core.program.assembly import assemble
    >>> endless = assemble('.func main 0 *\nagain:\n    jump again')
    >>> try: ml.VM().launch(endless, max_steps=100)
    ... except ml.errors.LimitExceededError as error: print(error)
    the launch takes more than the steps it is allowed
    """


class UnknownFunctionError(MlvmError, LookupError):
    """No function of that name is registered.

    >>> try: ml.call('nothing')
    ... except ml.errors.UnknownFunctionError as error: print(error)
    no function 'nothing'
    """


class LibraryError(MlvmError, OSError):
    """A shared library cannot be loaded, or does not list its functions as `mlvm.h` says.

    >>> try: ml.VM().register_library('none.so')
    ... except ml.errors.LibraryError as error: print(str(error).split()[:3])
    ['no', 'library', 'at']
    """


class OutOfMemoryError(MlvmError, MemoryError):
    """A storage is larger than the memory there is.

    >>> try: ml.zeros(2**50)
    ... except ml.errors.OutOfMemoryError as error: print(str(error).partition(';')[0])
    cannot allocate 4,503,599,627,370,496 bytes
    """


class HandleError(MlvmError, LookupError):
    """A handle names nothing: never issued, or its tensor or storage has ended.

    >>> try: ml.VM().read(99)
    ... except ml.errors.HandleError as error: print(error)
    tensor handle 99 names nothing in this VM: never issued, or ended long ago
    """


class StaleTensorError(MlvmError, RuntimeError):
    """A tensor was used after its arena was reset, rewound, freed or closed.

    >>> with ml.Arena(ml.VM('mine'), 'batch'): x = ml.ones(2)
    >>> try: x + 1.0
    ... except ml.errors.StaleTensorError as error: print(error)
    this f32[2] of arena 'batch' ended: its arena was reset; read it or copy it before
    """


class ArenaError(MlvmError, ValueError):
    """An arena was given an impossible size, or used out of order.

    >>> try: ml.Arena(ml.VM(), 'batch', capacity=-1)
    ... except ml.errors.ArenaError as error: print(error)
    arena 'batch': expected a capacity >= 0, got -1
    """


class ArenaBusyError(ArenaError, RuntimeError):
    """Another thread is inside the arena, which serves one thread at a time.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> try:
    ...     with ml.Arena(ml.VM(), "batch") as batch, ThreadPoolExecutor(1) as other:
    ...         other.submit(batch.reset).result()
    ... except ml.errors.ArenaBusyError as error: print(error)
    arena 'batch' is entered by thread 'MainThread'; it serves one thread at a time: give each its \
own arena
    """


class ArenaOverflowError(ArenaError, MemoryError):
    """A request does not fit what is left of an arena's capacity.

    >>> try:
    ...     with ml.Arena(ml.VM(), "batch", capacity=64): ml.ones(100)
    ... except ml.errors.ArenaOverflowError as error: print(error)
    arena 'batch': f32[100] asks for 448 bytes; 64 of 64 are left
    """


class QueueFullError(MlvmError, queue.Full):
    """No slot of the queue tensor is free, or none was in time.

    >>> import numpy as np
    >>> queue = ml.QueueTensor(ml.VM(), ['f32[]'], 1)
    >>> array = np.ones((), np.float32)
    >>> queue.put_nowait([array])
    >>> try: queue.put_nowait([array])
    ... except ml.errors.QueueFullError as error: print(str(error).partition(':')[0])
    no slot is free
    """


class QueueEmptyError(MlvmError, queue.Empty):
    """No element is in the queue tensor, or none was in time.

    >>> queue = ml.QueueTensor(ml.VM(), ['f32[]'], 1)
    >>> try: queue.get_nowait()
    ... except ml.errors.QueueEmptyError as error: print(str(error).partition(':')[0])
    no element waits
    """


class QueueClosedError(MlvmError, RuntimeError):
    """The queue tensor is closed; for `get` also drained. As `queue.ShutDown` of Python 3.13.

    >>> queue = ml.QueueTensor(ml.VM(), ['f32[]'], 1)
    >>> queue.close()
    >>> try: queue.get()
    ... except ml.errors.QueueClosedError as error: print(error)
    queue 'queue' is closed
    """


class CheckError(MlvmError, AssertionError):
    """A condition does not hold that `ml.check` was told to check.

    >>> try: ml.check(ml.ones(3) < 1.0, "losses are below 1")
    ... except ml.errors.CheckError as error: print(error)
    losses are below 1: 3 of 3 are False, the first at [0]
    """


class PathError(MlvmError, KeyError):
    """Tensors or arrays are given by path, and the tree has other paths.

    >>> try: ml.nn.Dropout(0.5).load_state({'bias': ml.ones(1)})
    ... except ml.errors.PathError as error: print(error)
    load_state: unknown tensor 'bias'; got bias
    """

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class WeightsError(MlvmError, ValueError):
    """A file of tensors is none, is damaged, holds what no tensor can be, or cannot hold one.

    >>> with open('damaged', 'wb') as file: _ = file.write(b'none')
    >>> try: ml.load('damaged')
    ... except ml.errors.WeightsError as error: print(str(error).rpartition(': ')[2])
    its 4 bytes end within the header
    """


class ModelError(MlvmError, ValueError):
    """An ONNX file is none, is damaged, or asks for what mlvm does not run.

    >>> with open('damaged.onnx', 'wb') as file: _ = file.write(b'none')
    >>> try: ml.onnx.load('damaged.onnx')
    ... except ml.errors.ModelError as error: print(str(error).partition(': ')[2])
    no ONNX file, or a damaged one: field 13 of Model has the wire type 6
    """


class ExchangeError(MlvmError, BufferError):
    """Values are asked for through DLPack where or as they cannot be had.

    >>> try: ml.ones(2).__dlpack__(dl_device=(2, 0))
    ... except ml.errors.ExchangeError as error: print(error)
    f32[2] is to be had on (1, 0), the processor, not (2, 0)
    """


class CopyError(ExchangeError, ValueError):
    """`copy=False` was asked for, and the values cannot be had without a copy.

    >>> try: ml.asarray([1.0], copy=False)
    ... except ml.errors.CopyError as error: print(error)
    asarray: the values of a list are copied into a VM, which copy=False forbids
    """


class GradientError(MlvmError, TypeError):
    """There is no such gradient, or an update in place would destroy one.

    >>> try: ml.grad(lambda x: x)(ml.ones(2))
    ... except ml.errors.GradientError as error: print(error)
    expected a float scalar to differentiate, got f32[2]; take ml.sum or ml.mean, or see ml.vjp
    """


class GradientMismatchError(MlvmError, AssertionError):
    """A gradient differs from the quotient of finite differences.

    >>> try: ml.testing.check_gradients(ml.relu, ml.zeros(1))
    ... except ml.errors.GradientMismatchError as error: print(str(error).partition(':')[0])
    order 1, argument 0[0]
    """


class CaptureError(MlvmError, RuntimeError):
    """A captured function does what a replay could not do again; the text names the line.

    >>> try: ml.capture(lambda x: float(x))(ml.ones(()))
    ... except ml.errors.CaptureError as error: print(str(error).split(': ')[1][:42])
    a value is read inside a captured function
    """


class StaleProgramError(CaptureError):
    """A program of a captured function no longer is what the function computes: `capture(check=n)`
    has traced it again. The text names the line and the value that changed.

    >>> issubclass(ml.errors.StaleProgramError, ml.errors.CaptureError)
    True
    """


class BudgetError(CaptureError):
    """No program of a captured function is small enough for its `memory=`.

    `smallest` is the number of bytes of the smallest that was found.

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
    """VMs of a group cannot go on together: they call different things, or one has ended.

    >>> try: ml.parallel.group('friends')
    ... except ml.errors.GroupError as error: print(error)
    group: expected threads:N, processes:N, ray:N, mpi or auto, got 'friends'
    """


class GroupTimeoutError(GroupError, TimeoutError):
    """A member has waited for others longer than `timeout=` allows. The text names those.

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
    """The way to a VM elsewhere has ended, and with it all that was made there.

    >>> try: ml.connect('unix:nowhere')
    ... except ml.errors.ConnectionLostError as error: print(error)
    no server at unix:nowhere: No such file or directory
    """


class CallTimeoutError(MlvmError, TimeoutError):
    """A call to a VM elsewhere took longer than its client lets it take; the VM can be used on.

    >>> from mlvm.core.program.assembly import assemble
    >>> from mlvm.machines.remote.server import Server
    >>> for_ever = assemble(".func main 0 *\\nagain:\\n    jump again\\n    halt\\n")
    >>> with Server("127.0.0.1:0", secret="between you and me") as server:
    ...     with ml.connect(str(server.address), secret="between you and me") as vm:
    ...         vm.call_timeout = 0.1
    ...         try: vm.launch(for_ever, max_steps=10**15)
    ...         except ml.errors.CallTimeoutError as error: print(str(error).rpartition(": ")[2])
    a call takes longer than its timeout of 0.1 seconds
    """


class PipelineError(MlvmError, ValueError):
    """A pipeline has an impossible option, a false data set, or a transform without batches.

    >>> try: ml.Pipeline([1.0], batch_size=0)
    ... except ml.errors.PipelineError as error: print(error)
    pipeline: expected batch_size as an integer >= 1, got 0
    """


class WorkerDiedError(MlvmError, RuntimeError):
    """A worker of a pipeline ended before its work did: killed, or by its own doing.

    >>> class Numbers:
    ...     def __len__(self): return 10
    ...     def __getitem__(self, indices): return (indices,)
    >>> def leave(arrays, random):
    ...     if len(arrays[0]) > 1: raise SystemExit
    ...     return arrays
    >>> try: ml.Pipeline(Numbers(), 4, vm=ml.VM(), workers=1, transform=leave).get()
    ... except ml.errors.WorkerDiedError as error: print(error)
    a worker was ended by SystemExit()
    """


class MissingExtraError(MlvmError, ImportError):
    """An optional package is not installed, or not whole; the text says what to install.

    >>> from mlvm.core.extras import extra
    >>> try: extra('fortune', 'luck')
    ... except ml.errors.MissingExtraError as error: print(error)
    fortune is not installed: pip install "mlvm[luck]"
    """


class AddressError(MlvmError, ValueError):
    """An address is written wrongly, or must not be listened on so.

    >>> try: ml.connect('nowhere')
    ... except ml.errors.AddressError as error: print(error)
    an address: expected HOST:PORT, [IPV6]:PORT, :PORT (this host alone) or unix:PATH, got 'nowhere'
    """


class AccessDeniedError(MlvmError, PermissionError):
    """A server refuses a client, or a client a server, before the first call; the text says why.

    >>> try: ml.connect(':7000', secret='sesame')
    ... except ml.errors.AccessDeniedError as error: print(error)
    a secret has at least 16 bytes; this one has 6
    """


__all__ = [n for n, x in [*globals().items()] if isinstance(x, type) and issubclass(x, MlvmError)]


def brief(value: object) -> str:
    """Return the value as text for a message.

    It is the first line of its `repr`, cut short; of a function its name and parameters.
    """
    if isinstance(value, (str, bytes)):
        value = value[: 4 * _BRIEF]  # of which more than is shown
    try:
        text = repr(value)
        if isinstance(value, FunctionType):
            text = f"{value.__name__}{inspect.signature(value)}"
    except ValueError:  # Python writes no ints of thousands of digits
        text = f"<{type(value).__name__} too long to write>"
    except Exception:  # a user's __repr__
        text = f"<{type(value).__name__} that has no text>"
    first = text.partition("\n")[0][:_BRIEF]
    return text if text == first else f"{first}..."


def takes(fn: object, count: int) -> bool:
    """Return whether `fn` is a function that can be called with `count` arguments by position."""
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
    """Return the innermost place in Python that led here outside of mlvm, numpy, `contextlib` and
    `threading`, which are no lines of the user. Takes half a microsecond."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = OURS.get(code.co_filename)
        if not (is_ours(code.co_filename) if ours is None else ours):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def is_ours(file: str) -> bool:
    """Return whether a file is mlvm's, numpy's, `contextlib` or `threading`."""
    ours = OURS.get(file)
    if ours is None:
        ours = OURS[file] = file.startswith(_NOBODYS)
    return ours


def line_of(place: Place) -> str:
    """Return the place as `file:line`."""
    code, offset = place
    return _line_of(code.co_filename, code.co_linetable, code, offset)


@memoized(4096)
def _line_of(file: str, table: bytes, code: CodeType, offset: int) -> str:
    """Return the line, cached by `file` and `table` too: equal code objects may differ in both."""
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return f"{file}:{next(lines, None) or code.co_firstlineno}"


def user_line() -> str | None:
    """The innermost line of Python outside of mlvm that led here, as `file:line`."""
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
    """Tell an error of any class where a program raised it: by attributes, and for people by two
    notes, `text` and the `line` of Python that called the program."""
    for name, value in (("function", function), ("pc", pc), ("step", step)):
        with contextlib.suppress(AttributeError):  # a class with fixed `__slots__`
            setattr(error, name, value)
    error.add_note(f"at {text}")
    if line:
        error.add_note(f"{_CALLED_FROM}{line}")


def notes_of(error: BaseException) -> list[str]:
    """The error's notes, without those that name a line of Python."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if not note.startswith(_CALLED_FROM)]


if not TYPE_CHECKING:  # else a type checker would allow any name
    __getattr__ = old_names(__name__, "ml.errors", globals())
