"""Frame of a Python host function: parameters and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mlvm.core.errors import MachineError
from mlvm.core.machine.callee import UserFunction, Value, describe, is_tensor
from mlvm.core.memory import HOST, Memory
from mlvm.core.op import Attributes
from mlvm.core.types import Array, TensorType


class Frame:
    """Interface of a host function to the machine: parameters, attributes and results.

    attributes: attributes of the call.
    results: values pushed so far.
    """

    __slots__ = ("_lent", "_memory", "_name", "_params", "attributes", "results")

    def __init__(
        self, name: str, params: Sequence[Value], attributes: Attributes, memory: Memory = HOST
    ) -> None:
        self._memory = memory
        self._name = name
        self._params = params
        self._lent: list[Array] = []
        self.attributes = attributes
        self.results: list[Value] = []

    @property
    def nparams(self) -> int:
        """The number of parameters of the call."""
        return len(self._params)

    def param(self, i: int) -> Value:
        """Return parameter i, from 0: an array (the tensor's own memory), an int or a str.

        Raises `MachineError` if i is out of range.
        """
        if not isinstance(i, int) or not 0 <= i < len(self._params):
            raise MachineError(
                f"{self._name}: parameter {i!r} does not exist; the call has {self.nparams}"
            )
        value = self._params[i]
        if is_tensor(value):
            value = value.view()  # the caller may change the shape of this view
            self._lent.append(value)
        return value

    def new_tensor(self, type: TensorType) -> Array:
        """Allocate a tensor of zeros, for use as a result."""
        if not isinstance(type, TensorType):
            raise MachineError(f"{self._name}: expected a TensorType, got {type!r}")
        array = self._memory.new(type)
        self._lent.append(array)
        return array

    def push(self, value: Value) -> None:
        """Push a result.

        A parameter or new tensor is pushed without a copy; any other array is copied. Raises
        `MachineError` unless the value is an array, an int or a str.
        """
        if isinstance(value, np.generic):  # numpy's scalar arithmetic returns these
            value = np.asarray(value)
        if self._memory.is_array(value):
            if any(value is lent for lent in self._lent) and value.flags.c_contiguous:
                value = value.view()
            else:
                value = self._memory.copy(value)
        elif isinstance(value, bool) or not isinstance(value, (int, str)):
            raise MachineError(
                f"{self._name}: expected a result as an array, an int or a str, got a "
                f"{type(value).__name__}"
            )
        self.results.append(value)

    def lend(self, array: Array) -> None:
        """Push an array without a copy; the memory must live as long as the array.

        Raises `MachineError` for an array that the machine cannot use without a copy.
        """
        if not isinstance(array, np.ndarray) or not array.flags.carray:
            raise MachineError(f"{self._name}: expected a writable, contiguous array; copy it")
        TensorType.of(array)
        self.results.append(array)


HostFunction = Callable[[Frame], None]


class PythonFunction(UserFunction):
    """Host function in Python, which is called with a `Frame`."""

    def __init__(
        self,
        name: str,
        fn: HostFunction,
        nparams: int | None,
        nresults: int | None,
        reads: slice | None = None,
    ) -> None:
        super().__init__(name, nparams, nresults, reads)
        self.fn = fn

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        frame = Frame(self.name, params, attributes, self.memory)
        types = None
        if self.result is not None and all(map(is_tensor, params)):
            operands = [TensorType.of(x) for x in params if is_tensor(x)]
            types = self.result_types(operands, attributes)
        self.fn(frame)
        self.check_results(len(frame.results))
        if types is not None:
            self._check_types(types, frame.results)
        return frame.results

    def _check_types(self, types: Sequence[TensorType], results: Sequence[Value]) -> None:
        if [TensorType.of(x) if is_tensor(x) else None for x in results] == [*types]:
            return
        expected = ", ".join(map(str, types)) or "none"
        hint = "" if all(map(is_tensor, results)) else "; push an array, such as np.asarray(...)"
        raise MachineError(
            f"{self.name}: expected results {expected} by its type rule, got "
            f"{describe(results) or 'none'}{hint}"
        )
