"""The class that `operators.py` and `functions/methods.py` fill: what a tensor has from the ops and
functions, `x.sum()` being `sum(x)`. `methods.pyi` tells editors and type checkers; the build
writes it (`mlvm.eager.stub`).
"""


class Methods:
    """Operators, and the functions of `mlvm.eager` that are methods of a tensor too."""

    __slots__ = ()
