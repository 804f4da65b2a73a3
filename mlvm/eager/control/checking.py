"""`check`: conditions that are verified while a program runs."""

from __future__ import annotations

import numpy as np

from mlvm.core.errors import ArgumentError, CheckError, DTypeError, brief
from mlvm.core.memo import memoized
from mlvm.core.program.program import Program
from mlvm.core.types import bool_
from mlvm.eager.recording.recorder import current_recorder
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.reading import launch_for_values
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.wrapper import public
from mlvm.machines.checks import CHECK


@public
def check(condition: Tensor | bool | np.bool_, message: str) -> None:
    """Raise `CheckError` with the message where a condition is False: bool[...], or a bool.

    In a captured function, including branches and loops, the program performs the check in each
    call. The error contains the user's line as a note. Updates after the failed check do not
    happen; updates before it remain. Gradients are not affected by a check.

    Raises `DTypeError` for a condition that is not a bool, and `ArgumentError` for a message that
    is not a string.

        >>> x = ml.asarray([1.0, 2.0])
        >>> ml.check(x > 0.0, "x is positive")
        >>> step = ml.capture(lambda x: ml.check(ml.all(x > 1.0), "x is above 1"))
        >>> try: step(x)
        ... except ml.errors.CheckError as error: print(error)
        x is above 1

    Invalid calls:
        ml.check(True, 3)  # ArgumentError
        ml.check(False, "never")  # CheckError
        ml.check(v, "floats")  # DTypeError
    """
    if not isinstance(message, str):
        raise ArgumentError(f"expected a str as message, got {brief(message)}")
    if isinstance(condition, (bool, np.bool_)):
        if not condition:
            raise CheckError(message)
        return
    if not isinstance(condition, Tensor) or condition.dtype is not bool_:
        raise DTypeError(f"expected a bool or a tensor of bools, got {described(condition)}")
    record = current_recorder()
    if record is not None:
        record.check(condition, message)
    else:
        launch_for_values(_program(message), current_arena().vm, (condition,))


@memoized(1024)
def _program(message: str) -> Program:
    return Program.of_op(CHECK, 1, {"message": message}, 0)
