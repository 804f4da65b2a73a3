"""Repro: a captured call as one file, with program, state, inputs and digests.

`step.save_repro(path, *args)` writes it; `python -m mlvm run` runs and verifies it, and
`python -m mlvm debug` steps over the ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlvm.core.errors import brief
from mlvm.core.program.encoding import Kind, Reader, Writer, damaged, open_message
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.eager.capture.capture import Captured
from mlvm.eager.runs.execution import vm_like
from mlvm.eager.runs.ops import OpProgram, op_program
from mlvm.eager.tensor.context import current_arena
from mlvm.machines import printing
from mlvm.machines.digest import digest
from mlvm.machines.versions import versions
from mlvm.step.saved import LoadedStep

_DIGEST: int = 16


class Repro(NamedTuple):
    """Program of a call op by op, with the inputs.

    `digests`: digests of the results, followed by digests of the states after the call, which older
        files lack.
    `versions`: the versions that determine these bits; "" in older files.
    """

    program: OpProgram
    inputs: tuple[Array, ...]
    digests: tuple[bytes, ...]
    versions: str = ""

    def to_bytes(self) -> bytes:
        """Encode it as docs/wire.md describes; `from_bytes` reads it back."""
        writer = Writer()
        self.program.write(writer)
        writer.sequence(self.inputs, Writer.array)
        writer.sequence(self.digests, Writer.blob)
        writer.text(self.versions)
        return writer.message(Kind.repro)

    @staticmethod
    def from_bytes(data: bytes) -> Repro:
        """Decode a repro. Raises `EncodingError` for bytes that `to_bytes` did not write."""
        _, reader = open_message(data, Kind.repro)
        program = OpProgram.read(reader)
        inputs = tuple(reader.sequence(Reader.array))
        digests = tuple(reader.sequence(Reader.blob))
        recorded = reader.text() if reader.remaining else ""
        reader.end()
        types = tuple(map(TensorType.of, inputs))
        if types != program.step.inputs:
            raise damaged(f"expected inputs {brief(program.step.inputs)}, got {brief(types)}")
        lengths = [len(each) for each in digests]
        counts = len(program.step.results), len(program.step.results) + len(program.step.states)
        if {*lengths} - {_DIGEST} or len(lengths) not in counts:
            raise damaged(
                f"expected one digest of {_DIGEST} bytes per result and state, got lengths "
                f"{lengths}"
            )
        return Repro(program, inputs, digests, recorded)

    def run(self, vm: VMProtocol) -> list[Array]:
        """Run the program on a VM, and return the results, then the states after the call."""
        step = LoadedStep(self.program.step, vm)
        try:
            return [*step(*self.inputs), *step.states()]
        finally:
            step.close()

    def differing(self, arrays: Sequence[Array]) -> list[str]:
        """Return the names of the arrays that `run` returned and that have other digests."""
        count, states = len(self.program.results), self.program.states
        names = [f"output {i}" for i in range(count)]
        names += [f"state {name or i}" for i, name in enumerate(states)]
        rows = zip(names, arrays, self.digests, strict=False)
        return [name for name, array, recorded in rows if digest(array) != recorded]


def repro_of(captured: Captured[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Repro:
    """Return the repro of a call with the present state, which is not changed.

    Raises the errors of `op_program`, and errors of the program.
    """
    program, inputs = op_program(captured, args, kwargs)
    repro = Repro(program, tuple(inputs), ())
    vm = current_arena().vm
    if not program.op_names().isdisjoint((printing.PRINT, printing.WATCH)):
        vm = vm_like(vm, program, is_silent=True)
    return repro._replace(digests=tuple(map(digest, repro.run(vm))), versions=versions())
