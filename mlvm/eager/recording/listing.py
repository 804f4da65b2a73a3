"""`program_of`: the launches of an eager call as one program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mlvm.arena.arena import Arena
from mlvm.core.observe import observed
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.types import Array
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.wrapper import hinted
from mlvm.step.concatenate import Launch, concatenate


@hinted
def program_of(fn: Callable[..., Any], *args: Any) -> Program:
    """Call `fn(*args)` on the current VM, and return the launches as one program.

    The program refers to tensors by handle. Tensors that `fn` allocates are stored in an
    arena of the program, and live as long as the program. Another launch therefore repeats the
    computation as long as the arguments live. Values that Python copied in are the values of this
    call. Raises `ProgramError` for a call if the result shape depends on values.

        >>> "sin.out" in ml.disassemble(ml.program_of(ml.sin, ml.zeros(2)))
        True

    Invalid calls:
        ml.program_of(ml.nonzero, v)  # ProgramError
    """
    arena = Arena(current_arena().vm, "program_of")
    launches: list[Launch] = []

    def launch(
        proceed: Callable[..., list[Array]],
        program: Program,
        handles: Sequence[TensorHandle] = (),
        **options: Any,
    ) -> list[Array]:
        launches.append((program, tuple(handles)))
        return proceed(program, handles, **options)

    with observed(arena.vm, launch=launch), arena.allocating():
        fn(*args)
    program = concatenate(launches)
    weakref.finalize(program, arena.close).atexit = False
    return program
