"""Class with the methods of a tensor, filled by `operators.py` and `functions/methods.py`.

For example, `x.sum()` is `sum(x)`. `methods.pyi` describes it for editors and type checkers; the
build writes this file (`mlvm.eager.stub`).
"""


class Methods:
    """Operators, and the functions of `mlvm.eager` that are also methods of a tensor."""

    __slots__ = ()
