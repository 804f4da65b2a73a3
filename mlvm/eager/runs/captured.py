"""Methods of captured functions that need programs as ops: `save_repro` and `debug`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from mlvm.core.errors import ArgumentError, brief
from mlvm.eager.capture.capture import Captured, capture
from mlvm.machines.files import require_writable, write_file

__all__ = ["Captured", "capture"]


def save_repro(
    step: Captured[..., Any], path: str | os.PathLike[str], /, *args: Any, **kwargs: Any
) -> None:
    """Write a call with these arguments to a file that runs without the Python source.

    The file contains the program op by op, the present state, the inputs, and digests of the
    results and the new state.

    `python -m mlvm run FILE` runs the call without further arguments, and reports whether results
    and state have the recorded digests. `python -m mlvm debug FILE` steps over the ops. The state
    does not change, and `ml.debug.print` and `watch` show nothing here.

    Raises the errors of a call, `CaptureError` for a function that reads a queue,
    `ArgumentError` for any value but a path, and `OSError`.

    Invalid calls:
        ml.capture(ml.sum).save_repro(3, v)  # ArgumentError
        ml.capture(lambda x: float(x)).save_repro("bug.mlvm", ml.ones(()))  # CaptureError
    """
    from mlvm.eager.runs.repro import repro_of

    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f'save_repro: expected a path, got {brief(path)}; write save_repro("bug.mlvm", x)'
        )
    require_writable(path)
    _require_instance('save_repro("bug.mlvm", instance, ...)', step, args, kwargs)
    write_file(path, repro_of(step, args, kwargs).to_bytes())


def _require_instance(what: str, step: Captured[..., Any], args: Any, kwargs: Any) -> None:
    """Raise `TypeError` for wrong arguments; Python does not pass the instance of a method."""
    try:
        inspect.signature(step.fn).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error}; for a method write {step.name}.{what}") from None
    except ValueError:  # a function in C without a signature
        return


def debug(
    step: Captured[..., Any], /, *args: Any, commands: Sequence[str] | None = None, **kwargs: Any
) -> None:
    """Debug a call with these arguments: step over ops and print tensors.

    The debugger steps forwards and backwards. The commands are similar to pdb's; `h` lists them.
    See docs/runs.md.

    The call runs on the current VM's functions with the current state, which does not change.
    `commands` replace the commands that a user types.

    Raises the errors that a call raises before the launch, and `CaptureError` for a function that
    reads a queue.

    Invalid calls:
        ml.capture(lambda x: float(x)).debug(ml.ones(()))  # CaptureError
    """
    from mlvm.eager.runs.debugger import Debugger
    from mlvm.eager.runs.execution import Execution, vm_like
    from mlvm.eager.runs.ops import op_program
    from mlvm.eager.tensor.context import current_arena

    _require_instance("debug(instance, ...)", step, args, kwargs)
    program, inputs = op_program(step, args, kwargs)
    vm = vm_like(current_arena().vm, program)
    Debugger(Execution(program, inputs, vm=vm)).run(commands)


Captured.save_repro = save_repro
Captured.debug = debug
