"""The command line: `python -m mlvm ops` and `python -m mlvm info`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import numpy as np

from mlvm import __version__
from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.errors import MlvmError, UnknownFunction
from mlvm.core.functions import FunctionTable
from mlvm.core.op import OPS
from mlvm.core.program import Opcode
from mlvm.core.types import DType


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, or 1 for an mlvm error.

    Raises `SystemExit`, with status 2, for bad usage.
    """
    parser = argparse.ArgumentParser(prog="python -m mlvm", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ops = commands.add_parser("ops", help="list the tensor ops, or document the named ones")
    ops.add_argument("names", nargs="*", metavar="OP", help="an op to document in full")
    commands.add_parser("info", help="versions, dtypes and the instruction set")
    options = parser.parse_args(argv)
    try:
        if options.command == "ops":
            print_ops(options.names)
        else:
            print_info()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except MlvmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def print_ops(names: Sequence[str]) -> None:
    """The signature and first line of every op by room, or all about the named ones."""
    for name in names:
        if name not in OPS:
            FunctionTable().slot(name)  # says which names are close
            raise UnknownFunction(f"no op {name!r}: that name is a form of one")
        print(f"{OPS[name].signature}\n\n{OPS[name].doc}\n")
    if names:
        return
    for room in sorted({op.room for op in OPS.values()}):
        print(f"{room}:")
        for op in sorted((op for op in OPS.values() if op.room == room), key=lambda op: op.name):
            print(f"  {op.signature}\n      {op.doc.splitlines()[0]}")


def print_info() -> None:
    """Versions, and what the machine is made of."""
    print(f"mlvm {__version__}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{len(OPS)} ops; dtypes {' '.join(DType.all)}")
    print("instructions:")
    for opcode in Opcode:
        words = " ".join([opcode.text, *opcode.immediates])
        print(f"  {words:32} {opcode.effect:28} {opcode.meaning}")


if __name__ == "__main__":
    raise SystemExit(main())
