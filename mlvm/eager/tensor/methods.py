"""What a tensor has from the functions: `x.sum()` is `sum(x)`. `as_methods` fills the class, and
`methods.pyi`, which `python -m mlvm.eager.stub methods` writes, tells editors and type checkers.
"""


class Methods:
    """The functions of `mlvm.eager` that are methods of a tensor too."""

    __slots__ = ()
