"""ListOps (Nangia and Bowman, arXiv 1804.06028): evaluation of nested lists of digits.

`[MAX 2 9 [MIN 4 7 ] 0 ]` is 9. The grammar and the probabilities are from the published generator.
Single digits, and expressions longer than `MOST_SYMBOLS`, are drawn again. As in that generator,
every inner node has two branches: an operator is combined with one argument at a time, and finally
with the bracket: ((((MAX 2) 9) ...) ]).
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from models.data.dataset import Array, DataSet, Indices, Labels

OPERATORS: Final = ("MIN", "MAX", "MED", "SM")
SYMBOLS: Final = (*map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]")
"""Symbols of leaves by number. The number of a digit is the digit."""
END: Final = SYMBOLS.index("]")
VALUE_P: Final = 0.25  # probability of an operator where a digit is also allowed
MAX_ARGS: Final = 5
MAX_DEPTH: Final = 20
MOST_SYMBOLS: Final = 50
MOST_NODES: Final = 2 * MOST_SYMBOLS - 1
NUM_TREES: Final = 12_000
HELD_OUT: Final = 2_000

NO_CHILD: Final = -1

Expression: TypeAlias = "int | tuple[int, list[Expression]]"
"""A digit, or the symbol number of an operator with a list of arguments."""


def load(seed: int = 0, count: int = NUM_TREES, held_out: int = HELD_OUT) -> DataSet:
    """Generate `count` different trees from `seed`, labelled with the values."""
    random = np.random.Generator(np.random.PCG64(seed))
    by_text: dict[str, Expression] = {}
    while len(by_text) < count:
        expression = generate(random)
        if isinstance(expression, tuple) and len(symbols(expression)) <= MOST_SYMBOLS:
            by_text[" ".join(SYMBOLS[i] for i in symbols(expression))] = expression
    expressions = list(by_text.values())
    train, test = expressions[:-held_out], expressions[-held_out:]
    shape = (MOST_NODES, 3)
    return DataSet(
        "listops", Trees(train), Trees(test), shape, 10, None, "trees", num_symbols=len(SYMBOLS)
    )


def generate(random: np.random.Generator, depth: int = 1) -> Expression:
    """Draw an expression as the published generator does."""
    if depth >= MAX_DEPTH or random.random() > VALUE_P:
        return int(random.integers(10))
    count = int(random.integers(2, MAX_ARGS + 1))
    arguments = [generate(random, depth + 1) for _ in range(count)]
    return 10 + int(random.integers(len(OPERATORS))), arguments


def value(expression: Expression) -> int:
    """Evaluate the expression: 0 .. 9. A median between two digits is rounded down."""
    if isinstance(expression, int):
        return expression
    operator, arguments = expression
    values = [value(each) for each in arguments]
    match OPERATORS[operator - 10]:
        case "MIN":
            return min(values)
        case "MAX":
            return max(values)
        case "MED":
            return int(np.median(values))
        case _:
            return sum(values) % 10


def symbols(expression: Expression) -> list[int]:
    """Return the symbols of the expression from left to right."""
    if isinstance(expression, int):
        return [expression]
    operator, arguments = expression
    return [operator, *(symbol for each in arguments for symbol in symbols(each)), END]


def nodes(expression: Expression) -> Array:
    """Return the tree: i64[MOST_NODES,3], with the root first.

    Each node is a row (symbol, left, right).

    A leaf has `NO_CHILD` instead of children, and an inner node has the symbol 0. Rows after the
    last node are leaves without a parent.
    """
    rows = np.full((MOST_NODES, 3), (0, NO_CHILD, NO_CHILD))
    count = 0

    def add(expression: Expression) -> int:
        nonlocal count
        here, count = count, count + 1
        if isinstance(expression, int):
            rows[here, 0] = expression
            return here
        operator, arguments = expression
        _branch(here, [operator, *arguments, END])
        return here

    def _branch(here: int, parts: list[Expression]) -> None:
        """Fill the node `here`: the left child contains all parts except the last."""
        nonlocal count
        *before, last = parts
        if len(before) == 1:
            rows[here, 1] = add(before[0])
        else:
            rows[here, 1], count = count, count + 1
            _branch(int(rows[here, 1]), before)
        rows[here, 2] = add(last)

    add(expression)
    return rows


class Trees:
    """Trees of expressions, and the values: i64[B, MOST_NODES, 3] and i64[B]."""

    def __init__(self, expressions: list[Expression]) -> None:
        self._nodes = np.stack([nodes(each) for each in expressions]).astype(np.int8)
        self._values = np.array([value(each) for each in expressions])

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, indices: Indices) -> tuple[Array, Labels]:
        return self._nodes[indices].astype(np.int64), self._values[indices]
