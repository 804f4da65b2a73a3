"""Statements in the eager language, written at random, one after the other.

Each statement is tried on a VM when it is written: what raises is not written, and what a name
holds is known from then on. Most are templates, whose `{placeholders}` name what may stand there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError, OpError
from mlvm.core.rules import broadcast_shapes
from mlvm.core.types import Shape, TensorType
from mlvm.eager.tree import named_leaves
from tests.fuzz.language.source import Block, Node, rendered


def templates_of(templates: str) -> list[str]:
    """Templates that three spaces or a new line stand between."""
    return re.split(r"\s{3,}|\n", templates.strip())


_TEXT: Final = Path(__file__).with_name("templates.txt").read_text("utf-8")
_SECTIONS: Final = [
    (head, templates_of(text)) for head, text in re.findall(r"== (.+) ==\n((?:.+\n)+)", _TEXT)
]
EXPRESSIONS: Final = [(int(head), each) for head, each in _SECTIONS if head.isdigit()]
"""What a name is given, by how often."""

UPDATES, UNPREDICTABLE = (dict(_SECTIONS)[head] for head in ("updates", "unpredictable"))
"""What no captured function can do."""

NUMBERS: Final = {
    "float": ["2", "0.5", "-1.5", "3.0", "0", "True", "np.float32(0.25)", "np.float64(1.5)"],
    "signed": ["2", "3", "-1", "1", "np.int64(2)", "True"],
    "unsigned": ["2", "3", "1"],
    "bool": ["True", "False"],
}
DTYPES: Final = {"f32": 60, "f64": 12, "i64": 9, "i32": 6, "bool": 8, "u8": 3}


class Writer:
    """Writes statements that run where those before have run.

    `types` has the tensors that may be named, by expression, `namespace` what the names hold.
    `own` are those of them that statements here have made. What is in `fixed` names is not updated.
    No statement matches `without`.
    """

    without: re.Pattern[str] | None = None

    def __init__(
        self, rng: random.Random, namespace: dict[str, Any], names: Iterator[int], limit: int
    ) -> None:
        self.rng = rng
        self.namespace = namespace
        self.names = names
        self.limit = limit
        self.types: dict[str, TensorType] = {}
        self.modules: dict[str, Any] = {}
        self.numbers: list[str] = []
        self.own: list[str] = []
        self.lines: list[Node] = []
        self.depth = 0
        self.rebinds = False
        self.layer = ""
        self.inner: list[Self] = []
        self.fixed: set[str] = set()

    def forget(self) -> None:
        """Drop what the names hold: gradients that were tried are in the way of other updates."""
        self.namespace.clear()
        for each in self.inner:
            each.forget()

    def within(self) -> Self:
        """A writer of the statements of a function inside."""
        inner = type(self)(self.rng, dict(self.namespace), self.names, self.limit)
        self.inner.append(inner)
        inner.fixed = set(self.fixed)
        inner.types, inner.modules = dict(self.types), dict(self.modules)
        inner.numbers, inner.depth = [*self.numbers], self.depth + 1
        inner.without = self.without
        return inner

    # --- statements, tried ---

    def says(self, node: Node) -> bool:
        """Write a statement, if it runs. Several lines are one that runs as a whole."""
        text = "\n".join(rendered([node]))
        if self.without is not None and self.without.search(text):
            return False
        try:
            exec(text, self.namespace)
        except MlvmError:
            return False
        self.lines.append(node)
        return True

    def name(self, prefix: str = "t") -> str:
        return f"{prefix}{next(self.names)}"

    def makes(self, expression: str, prefix: str = "t") -> str | None:
        """Write a statement that gives a name to a value; the name, if it runs."""
        name = self.name(prefix)
        if not self.says(f"{name} = {expression}"):
            return None
        if not self._is_welcome(self.namespace[name]):
            self.lines.pop()
            return None
        self.knows(name)
        return name

    def _is_welcome(self, value: Any) -> bool:
        """Return whether a value is of a size and, most of the time, has values to go on with."""
        if not isinstance(value, ml.Tensor):
            return True
        if value.size > self.limit or value.ndim > 4:
            return False
        array = value.numpy()
        good = bool(np.isfinite(array).all() and (np.abs(array) < 1e4).all())
        return good if value.dtype.is_float else True

    def knows(self, expression: str) -> None:
        """Let what the expression holds be used in what is written next."""
        value = eval(expression, self.namespace)
        if isinstance(value, ml.Tensor):
            self.types[expression] = value.type
            self.own.append(expression)
        elif isinstance(value, (list, tuple)):
            for i in range(len(value)):
                self.knows(f"{expression}[{i}]")
        elif isinstance(value, dict):
            for name in value:
                self.knows(f"{expression}[{name!r}]")
        elif isinstance(value, ml.nn.Module):
            if type(value).__name__ != "Box":
                self.modules[expression] = value
            for name, field in vars(value).items():
                if isinstance(field, (ml.Tensor, ml.nn.Module, dict, list, tuple)):
                    self.knows(f"{expression}.{name}")
        elif isinstance(value, (bool, int, float)):
            self.numbers.append(expression)

    # --- what stands in a template ---

    def some(self, welcome: Callable[[TensorType], bool] = lambda type: True) -> str | None:
        """One of the tensors that may be named, the later ones more often."""
        matches = [each for each, type in self.types.items() if welcome(type)]
        if not matches:
            return None
        n = len(matches)
        late = n - 1 - int(self.rng.expovariate(0.3))
        return matches[max(late, 0)] if self.rng.random() < 0.5 else self.rng.choice(matches)

    def filled(self, template: str) -> str | None:
        """The template with something for each placeholder; None where there is nothing."""
        chosen: list[str] = []

        def fill(match: re.Match[str]) -> str:
            name = self._fill(match[1], chosen)
            if name is None:
                raise LookupError(match[1])
            return name

        try:
            return re.sub(r"\{(\w+)\}", fill, template)
        except LookupError:
            return None

    def _fill(self, kind: str, chosen: list[str]) -> str | None:
        rng = self.rng
        partner = self.types[chosen[-1]] if chosen else TensorType("f32")
        first = self.types[chosen[0]] if chosen else partner
        shapes = [self.types[each].shape for each in chosen]
        conditions: dict[str, Callable[[TensorType], bool]] = {
            "x": lambda type: True,
            "f": lambda type: type.dtype.is_float,
            "i": lambda type: type.dtype.is_integer,
            "b": lambda type: type.dtype.kind == "bool",
            "m": lambda type: type.dtype.is_float and type.ndim >= 2,
            "k": lambda type: type.dtype.is_integer and type.ndim == 0,
            "key": lambda type: type is TensorType("u64", (2,)),
            "like": lambda type: (
                type.dtype is partner.dtype and _broadcast(type.shape, partner.shape) is not None
            ),
            "into": lambda type: (
                type.dtype is first.dtype and _broadcast(type.shape, first.shape) == first.shape
            ),
            "twin": lambda type: type is partner,
            "fit": lambda type: type.dtype is first.dtype and type.shape == _broadcast(*shapes),
        }
        if kind in conditions:
            name = self.some(conditions[kind])
            if name is not None:
                chosen.append(name)
            return name
        n = partner.ndim
        match kind:
            case "n":
                return rng.choice([*NUMBERS[partner.dtype.kind], *self.numbers])
            case "same":
                return chosen[0]
            case "module":
                self.layer = rng.choice([*self.modules, ""])
                return self.layer or None
            case "dtype":
                return repr(rng.choice([*DTYPES]))
            case "one":
                return str(rng.randrange(-n, n)) if n else None
            case "axis":
                several = tuple(sorted(rng.sample(range(n), rng.randint(0, n))))
                one = str(rng.randrange(-n, n)) if n else "None"
                return rng.choice([repr(several), one, "None"])
            case "order":
                return repr(tuple(rng.sample(range(n), n)))
            case "shape":
                return repr(rng.choice(shapes_of(partner.size)))
            case "picks":
                return f"ml.arange({rng.randint(1, 3)})"
            case "cut":
                return rng.choice(["[1]", "2"])
            case "index":
                items = [self._item(length) for length in partner.shape[: rng.randint(1, 3)]]
                return ", ".join(items) or "..."
        raise AssertionError(kind)

    def _item(self, length: int) -> str:
        i = self.rng.randrange(-length, length) if length else 0
        items = [str(i), f"{i}:", f":{i}", ":", "::2", "::-1", "None", "..."]
        return self.rng.choice([*items, ":", str(i)])

    # --- what is written ---

    def expression(self) -> bool:
        [(_, templates)] = self.rng.choices(EXPRESSIONS, [weight for weight, _ in EXPRESSIONS])
        text = self.filled(self.rng.choice(templates))
        return text is not None and self.makes(text) is not None

    def update(self) -> bool:
        text = self.filled(self.rng.choice(UPDATES))
        if text is None:
            return False
        target = re.match(r"(\w+) [-+*/]=", text)
        if self.depth and target and target[1] not in self.own:  # which needs a `nonlocal`
            return False
        written = re.match(r"(\w+).* [-+*/]=|.*out=(\w+).*", text)
        if written and self.fixed.intersection(written.groups()):
            return False
        item = re.match(r"(.*)\[[^]]*\] [-+*/]=", text)
        if item and isinstance(eval(item[1], self.namespace), tuple):
            return False
        return self.says(text)

    def container(self) -> bool:
        parts = [self.some() for _ in range(self.rng.randint(1, 3))]
        x, *rest = [each for each in parts if each is not None]
        text = self.rng.choice(
            [
                f"[{', '.join([x, *rest])}]",
                f"{{'a': {x}, 'b': [{', '.join(rest)}]}}",
                f"({x}, {x})",
                f"Box(a={x})",
            ]
        )
        return self.makes(text, "tree") is not None

    def loop(self) -> bool:
        """Write a loop of a few iterations over a variable."""
        h, x = self.some(_is_float), self.some(_is_float)
        if h is None or x is None:
            return False
        name = self.name("h")
        step = self.rng.choice(["ml.tanh({h} + {x})", "{h} * 0.5 + {x}", "ml.sin({h}) * {x} + {h}"])
        times = self.rng.randint(2, 8)
        lines = (
            f"{name} = {h}",
            Block(f"for _ in range({times}):", (f"{name} = {step.format(h=name, x=x)}",)),
        )
        if not all(self.says(line) for line in lines):
            return False
        self.knows(name)
        return True

    def function(self) -> bool:
        """A function of tensors, called with them in one order and, of one type, in another."""
        names = [self.some() for _ in range(self.rng.randint(1, 3))]
        operands = [each for each in names if each is not None]
        name, inner, parameters = self.name("f"), self.within(), []
        for each in operands:
            parameters.append(inner.takes(each))
        inner.writes(self.rng.randint(1, 4))
        results = [inner.some() or parameters[0] for _ in range(self.rng.randint(1, 2))]
        body = (*inner.lines, f"return {', '.join(results)}")
        if not self.says(Block(f"def {name}({', '.join(parameters)}):", body)):
            return False
        self.makes(f"{name}({', '.join(operands)})")
        if len({self.types[each] for each in operands}) == 1:  # what is in it may fit no others
            self.makes(f"{name}({', '.join(reversed(operands))})")
        return True

    def takes(self, expression: str, prefix: str = "p") -> str:
        """A parameter, for which the expression is given."""
        name = self.name(prefix)
        self.namespace[name] = eval(expression, self.namespace)
        self.knows(name)
        return name

    def kinds(self) -> list[tuple[int, Callable[[], bool]]]:
        """Return the statements that may be written, by frequency."""
        kinds: list[tuple[int, Callable[[], bool]]] = [
            (60, self.expression), (7 if not self.depth else 2, self.update), (2, self.container),
            (3, self.loop), (2, self.rebinding),
        ]  # fmt: skip
        if self.depth < 2:
            kinds += [(4, self.function), (9, self.gradient), (4, self.training)]
        return kinds

    def writes(self, statements: int) -> None:
        """Write the given number of statements, or as many as are possible."""
        kinds, written = self.kinds(), 0
        for _ in range(6 * statements):
            [write] = self.rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
            lines, types, modules = [*self.lines], dict(self.types), dict(self.modules)
            numbers, own = [*self.numbers], [*self.own]
            if write():
                written += 1
            else:
                self.lines, self.types, self.modules = lines, types, modules
                self.numbers, self.own = numbers, own
            if written == statements:
                return

    def scalar_function(self, operands: list[str], aux: bool = False) -> str | None:
        """Write a function of these operands to a float scalar; its name. With `aux` it also
        returns something else."""
        name, inner, parameters = self.name("loss"), self.within(), []
        inner.types = {x: type for x, type in inner.types.items() if self.rng.random() < 0.5}
        for each in operands:
            parameters.append(inner.takes(each))
        inner.writes(self.rng.randint(1, 5))
        float_ones = [each for each in inner.own if _is_float(inner.types[each])]
        if not float_ones:
            return None
        terms = [f"ml.sum({float_ones[-1]})"]
        forms = ["ml.mean({0} * {0})", "ml.sum(ml.tanh({0}))", "ml.sum({0})"]
        for each in self.rng.sample(float_ones, min(len(float_ones), self.rng.randint(0, 2))):
            terms.append(self.rng.choice(forms).format(each))
        value = " + ".join(terms)
        more = f"return {value}, {inner.some()}" if aux else f"return {value}"
        if not self.says(Block(f"def {name}({', '.join(parameters)}):", (*inner.lines, more))):
            return None
        return name

    def variables(self) -> list[str]:
        """Expressions that a gradient may be taken with respect to."""
        trees = [
            name
            for name in self.namespace
            if re.fullmatch(r"(params|tree|model|p)\d+", name)
            and _is_float_tree(self.namespace[name])
        ]
        variables = []
        for _ in range(self.rng.randint(1, 3)):
            is_tree = trees and self.rng.random() < 0.4
            variables.append(self.rng.choice(trees) if is_tree else self.some(_is_float))
        return [x for x in variables if x is not None]

    def gradient(self) -> bool:
        operands = self.variables()
        has_aux = self.rng.random() < 0.15
        fn = self.scalar_function(operands, has_aux) if operands else None
        if fn is None:
            return False
        arguments = ", ".join(operands)
        n = len(operands)
        numbers = sorted(self.rng.sample(range(n), self.rng.randint(1, n)))
        argnums = self.rng.choice([repr(tuple(numbers)), str(numbers[0])])
        if has_aux:
            text = f"ml.value_and_grad({fn}, {argnums}, has_aux=True)({arguments})"
            return self.makes(text, "g") is not None
        roll = self.rng.random()
        if roll < 0.3:
            return self.makes(f"ml.grad({fn}, {argnums})({arguments})", "g") is not None
        if roll < 0.65:
            return self.makes(f"ml.value_and_grad({fn}, {argnums})({arguments})", "g") is not None
        if roll < 0.8:
            value, pull, g = self.name("v"), self.name("pull"), self.name("g")
            lines = [f"{value}, {pull} = ml.vjp({fn}, {arguments})", f"{g} = {pull}({value} * 0.5)"]
            if self.rng.random() < 0.3:
                lines.append(f"{self.name('g')} = {pull}({value})")
            if not all(self.says(line) for line in lines):
                return False
            self.knows(value)
            self.knows(g)
            return self.rng.random() < 0.2 or self.says(f"del {pull}")
        second = self.name("second")
        x = operands[0]
        if x not in self.types:
            return False
        inner = ", ".join(["q", *operands[1:]])
        body = f"return ml.sum(ml.tanh(ml.grad({fn})({inner})) * q)"
        return self.says(Block(f"def {second}(q):", (body,))) and (
            self.makes(f"ml.value_and_grad({second})({x})", "g") is not None
        )

    def training(self) -> bool:
        """An optimizer's update."""
        optimizers = [name for name in self.namespace if re.fullmatch(r"opt\d+", name)]
        if not optimizers:
            return False
        optimizer = self.rng.choice(optimizers)
        params = "params" + optimizer[3:]
        fn = self.scalar_function([params])
        g = fn and self.makes(f"ml.value_and_grad({fn})({params})", "g")
        if g is None:
            return False
        gradients = self.rng.choice([f"{g}[1]", f"ml.optim.clip_by_global_norm({g}[1], 1.0)"])
        return self.says(f"{optimizer}.update({gradients})")

    def rebinding(self) -> bool:
        """A Module's field that names another tensor from then on."""
        fields = [x for x in self.types if re.fullmatch(r"box\d+\.mean", x)]
        text = fields and self.filled(f"ml.tanh({fields[0]} * 0.9) + {{f}}")
        if not text or not self.rebinds:
            return False
        name = self.makes(text)
        if name is None or self.types[name] is not self.types[fields[0]]:
            return False
        return self.says(f"{fields[0]} = {name}")


def _is_float(type: TensorType) -> bool:
    return type.dtype.is_float


def _is_float_tree(tree: Any) -> bool:
    try:
        leaves_found = [x for _, x in named_leaves(tree)]
    except MlvmError:
        return False
    return bool(leaves_found) and all(_is_float(x.type) for x in leaves_found)


def _broadcast(*shapes: Shape) -> Shape | None:
    try:
        return broadcast_shapes(*shapes)
    except OpError:
        return None


def shapes_of(size: int) -> list[Shape]:
    """Return shapes of the given number of elements."""
    shapes: list[Shape] = [(size,), (1, size), (size, 1)]
    for n in (2, 3, 4, 5):
        if size % n == 0 and size:
            shapes += [(n, size // n), (size // n, n), (n, 1, size // n)]
    return shapes if size != 1 else [*shapes, (), (1, 1, 1)]
