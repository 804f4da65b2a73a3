"""Arrays and lists of numbers as operands and as indices: taken as `asarray` takes them.

Only where that is a copy within this process. To a VM elsewhere values go by `asarray` alone, so
that a line which sends them shows it; and in a captured function, whose later calls would all get
the values of the first, it is refused as `asarray` is.
"""

from __future__ import annotations

from mlvm.core.errors import DTypeError, OpError
from mlvm.eager.context import current_arena
from mlvm.eager.creation import asarray
from mlvm.eager.tensor import OneOp, Tensor


def taken(array: object, call: OneOp | None = None) -> Tensor:
    """A tensor of an array's values, or of a list's, in the current arena: an operand of `call`.

    Raises `DTypeError` on a VM elsewhere, and what `asarray` raises.
    """
    try:
        return _taken(array)
    except OpError as error:
        if call is None:
            raise
        raise error.at(call.op.name, (type(array).__name__,)) from None


def _taken(array: object) -> Tensor:
    vm = current_arena().vm.stands_for
    if not hasattr(vm, "storage_over"):  # of `LocalVMProtocol`, which takes long to be asked
        raise DTypeError(
            f"the values of this {type(array).__name__} are here and {vm.name} is elsewhere; "
            f"send them with asarray"
        )
    return asarray(array)


Tensor._taken = staticmethod(taken)
