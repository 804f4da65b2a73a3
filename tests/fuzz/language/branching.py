"""Statements with control flow: branches and loops that go round a few times."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from mlvm.core.types import TensorType
from mlvm.eager.control.state import as_tree
from tests.fuzz.language.source import Block, rendered
from tests.fuzz.language.writing import Writer, templates_of

MOST_ROWS: Final = 6
"""A scan goes through."""


class Form(NamedTuple):
    """A tree: how it is written, and the expressions for its tensors."""

    text: str
    paths: tuple[str, ...]


FORMS: Final = [
    Form("{0}", ("",)), Form("{0}", ("",)), Form("({0}, {1})", ("[0]", "[1]")),
    Form("[{0}, {1}]", ("[0]", "[1]")), Form("{{'b': {0}, 'a': [{1}]}}", ("['b']", "['a'][0]")),
    Form("({0}, None, {1})", ("[0]", "[2]")), Form("Box(x={0}, y={1})", (".x", ".y")),
    Form("({0}, {1}, ({2},))", ("[0]", "[1]", "[2][0]")),
]  # fmt: skip
OTHER_ORDER: Final = {"{{'b': {0}, 'a': [{1}]}}": "{{'a': [{1}], 'b': {0}}}"}

CONDITIONS: Final = templates_of("""
    ml.sum({f}) > 0   ml.any({b})   ml.max({x}) == ml.min({same})   {k} > 1   ml.sum({f}) < 1
    ml.random.uniform(()) < 0.5   ml.reshape({k} <= 0, (1, 1))   ml.mean({f})   True   False
""")
TURNS: Final = ["0", "1", "2", "3", "4", "ml.clip({k}, 0, 3)", "ml.sum({b}) % 4", "{k}"]
TESTS: Final = templates_of("""
    {i} < {most}   {i} < {most}   ({i} < {most}) & (ml.sum(ml.abs({h})) < 20)
    ({i} < {most}) & (ml.random.uniform(()) < 0.8)   ({i} < {most}) & ml.all({h} == {h})
""")
INDICES: Final = ["{k}", "{k} % 3", "0", "1", "ml.sum({b}) % 3", "ml.sum({b})"]


REFUSED: Final = re.compile(r"ml\.(random|dropout|function)|model|out=|[-+*/]= |\.update\(")
"""What an `ml.subroutine` may not do in a captured one."""


class Branching(Writer):
    """A writer that also writes control flow. `is_body`: what it writes is part of some."""

    is_body = False

    def kinds(self) -> list[tuple[int, Callable[[], bool]]]:
        kinds = super().kinds()
        if self.depth < 3:
            fns = [self.cond, self.switch, self.while_loop, self.fori_loop, self.scan, self.map]
            fns.append(self.recursion)
            kinds += [((2, 1, 1)[self.depth] * (2 if fn == self.scan else 1), fn) for fn in fns]
        return kinds

    def cond(self) -> bool:
        pred = self.filled(self.rng.choice(CONDITIONS))
        operands = self._operands()
        names = self._alternatives(operands, 2)
        if pred is None or names is None:
            return False
        return self.makes(f"ml.cond({', '.join([pred, *names, *operands])})") is not None

    def switch(self) -> bool:
        index = self.filled(self.rng.choice(INDICES))
        operands = self._operands()
        names = self._alternatives(operands, self.rng.randint(1, 4))
        if index is None or names is None:
            return False
        arguments = ", ".join([f"[{', '.join(names)}]", *operands])
        return self.makes(f"ml.switch({index}, {arguments})") is not None

    def while_loop(self) -> bool:
        form, values = self._state()
        count = self.rng.choice(["0", "ml.zeros((), dtype='i32')", "1"])
        init = f"({count}, {form.text.format(*values)})"
        inner, parameter, after = self._body(init, ["[1]" + path for path in form.paths])
        result = f"({parameter}[0] + 1, {self._written(form, after)})"
        body = self._defined("body", parameter, inner, result)
        most = str(self.rng.randint(0, 4))
        test = self.rng.choice(TESTS).replace("{most}", most).replace("{i}", "s[0]")
        test = test.replace("{h}", "s[1]" + form.paths[0])
        return self._makes_by(body, f"ml.while_loop(lambda s: {test}, {{}}, {init}{self._again()})")

    def fori_loop(self) -> bool:
        upper = self.filled(self.rng.choice(TURNS))
        lower = self.rng.choice(["0", "0", "1", "-1"])
        form, values = self._state()
        init = form.text.format(*values)
        if upper is None or int(eval(upper, self.namespace)) > MOST_ROWS:
            return False
        i = self.name("i")
        inner, parameter, after = self._body(init, form.paths, {i: "1"})
        body = self._defined("body", f"{i}, {parameter}", inner, self._written(form, after))
        return self._makes_by(body, f"ml.fori_loop({lower}, {upper}, {{}}, {init}{self._again()})")

    def scan(self) -> bool:
        xs, row, length = self._rows()
        form, values = self._state()
        init = form.text.format(*values)
        name = self.name("row")
        inner, parameter, after = self._body(init, form.paths, {name: row or "None"})
        ys = [y for y in (inner.some() for _ in range(self.rng.randint(0, 2))) if y is not None]
        y = {0: "None", 1: "{0}", 2: self.rng.choice(["({0}, {1})", "{{'y': {0}, 'z': {1}}}"])}
        result = f"({self._written(form, after)}, {y[len(ys)].format(*ys)})"
        body = self._defined("body", f"{parameter}, {name}", inner, result)
        reverse = self.rng.choice(["", "", ", reverse=True"])
        return self._makes_by(body, f"ml.scan({{}}, {init}, {xs}{length}{reverse}{self._again()})")

    def map(self) -> bool:
        xs, row, _ = self._rows()
        if row is None:
            return False
        inner, name = self._inner(), self.name("row")
        inner.learns(name, eval(row, self.namespace))
        inner.writes(self.rng.randint(1, 3))
        y = inner.some()
        body = self._defined("body", name, inner, self.rng.choice([f"{y}", f"[{y}, {name}]"]))
        return self._makes_by(body, f"ml.map({{}}, {xs})")

    def recursion(self) -> bool:
        """Write a function that calls itself, once or twice, to a given depth."""
        form, values = self._state()
        init = form.text.format(*values)
        n = self.name("n")
        inner, parameter, after = self._body(init, form.paths, {n: "2"})
        text = "\n".join(rendered(inner.lines))
        if "Box" in form.text or (REFUSED.search(text) and self.rng.random() < 0.95):
            return False
        name = self.name("again")
        deeper = f"{name}({n} - 1, {self._written(form, after)})"
        if form.text == "{0}" and inner.types[parameter].dtype.is_float:
            forms = ["{0}", "ml.sin({0}) + {1}", "{0} * 0.5 + {2}({3} - 2, {1})"]
            deeper = self.rng.choice(forms).format(deeper, parameter, name, n)
        lines, last = tuple(inner.lines), f"lambda: {deeper}"
        if self.rng.random() < 0.5:  # its ops before the call are in the branch, too
            last = self.name("deeper")
            lines = (Block(f"def {last}():", (*lines, f"return {deeper}")),)
        result = f"ml.cond({n} < 1, lambda: {parameter}, {last})"
        if self.rng.random() < 0.5:
            result = f"ml.cond({n} >= 1, {last}, lambda: {parameter})"
        lines = (*lines, f"return {result}")
        if not self.says(Block(f"def {name}({n}, {parameter}):", lines)):
            return False
        depth = self.filled(self.rng.choice(["0", "1", "2", "3", "ml.clip({k}, 0, 3)"]))
        if depth is None or not self.says(f"{name} = ml.subroutine({name})"):
            return False
        return self.makes(f"{name}({depth}, {init})") is not None

    # --- pieces ---

    def learns(self, name: str, value: Any) -> None:
        """Let a name stand for a tree of tensors, numbers among them too."""
        self.namespace[name] = as_tree(value)
        self.knows(name)
        self.fixed.add(name)

    def _inner(self) -> Branching:
        inner = self.within()
        inner.is_body = True
        return inner

    def _operands(self) -> list[str]:
        names = [self.some() for _ in range(self.rng.randint(0, 2))]
        return [each for each in names if each is not None]

    def _state(self) -> tuple[Form, list[str]]:
        """A form of state, and what it is at first."""
        form = self.rng.choice(FORMS)
        values: list[str] = []
        for _ in form.paths:
            roll = self.rng.random()
            x = self.some(lambda type: type.dtype.is_float) if roll < 0.7 else self.some()
            if values and roll > 0.9:
                x = values[0]
            number = self.rng.choice(["2", "0.5", "True"])
            plain = 0.7 < roll < 0.75 and "Box" not in form.text
            values.append(number if plain else x or "ml.ones(())")
        return form, values

    def _written(self, form: Form, leaves: Sequence[str]) -> str:
        text = OTHER_ORDER.get(form.text, form.text) if self.rng.random() < 0.3 else form.text
        return text.format(*leaves)

    def _body(
        self, init: str, paths: Sequence[str], others: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[Branching, str, list[str]]:
        """Write a body: its writer, the name of the state, and what its tensors are afterwards. The
        other parameters stand for these expressions."""
        inner, parameter = self._inner(), self.name("s")
        for name, expression in {**others, parameter: init}.items():
            inner.learns(name, eval(expression, self.namespace))
        types = [inner.types[parameter + path] for path in paths]
        inner.writes(self.rng.randint(1, 4))
        return (
            inner,
            parameter,
            [self._next(inner, parameter, p, t) for p, t in zip(paths, types, strict=True)],
        )

    def _next(self, inner: Branching, parameter: str, path: str, type: TensorType) -> str:
        """An expression for what a tensor of the state is after a turn."""
        candidates = [x for x in inner.own if inner.types.get(x) is type and x not in inner.fixed]
        roll = self.rng.random()
        if candidates and roll < 0.7:
            return self.rng.choice(candidates)
        match = inner.some(lambda each: each is type)
        if match is not None and roll < 0.85:  # the same again, or another one's
            return match
        forms = {
            "float": "ml.tanh({}) * 0.5", "bool": "ml.logical_not({})", "signed": "{} + 1",
            "unsigned": "{} + 1",
        }  # fmt: skip
        return forms[type.dtype.kind].format(parameter + path)

    def _alternatives(self, operands: list[str], n: int) -> list[str] | None:
        """Write n functions of the operands, which make results of the same types."""
        form = self.rng.choice(FORMS)
        types: list[TensorType] = []
        names: list[str] = []
        for _ in range(n):
            inner = self._inner()
            parameters = []
            for each in operands:
                parameters.append(inner.name("p"))
                inner.learns(parameters[-1], eval(each, self.namespace))
            inner.writes(self.rng.randint(0, 3))
            results: list[str] = []
            if types:
                for type in types:
                    match = inner.some(partial(is_, type))
                    new = f"ml.ones({type.shape}, dtype='{type.dtype.name}')"
                    results.append(match if match and self.rng.random() < 0.9 else new)
            else:
                for _ in form.paths:
                    x = inner.some()
                    if x is None:
                        return None
                    results.append(x)
                    types.append(inner.types[x])
            result = self._written(form, results)
            body = self._defined("way", ", ".join(parameters), inner, result)
            if not self.says(body):
                return None
            names.append(self.defined)
        return names

    def _rows(self) -> tuple[str, str | None, str]:
        """Return the input of a scan: xs, an expression for a row, and a length."""
        short = self.some(lambda type: type.ndim > 0 and 0 < type.shape[0] <= MOST_ROWS)
        if short is None or self.rng.random() < 0.15:
            return "None", None, f", {self.rng.choice(['0', '1', '3', 'length=2'])}"
        n = self.types[short].shape[0]
        twin = self.some(lambda type: type.shape[:1] == (n,)) or short
        xs, row = self.rng.choice(
            [
                (short, f"{short}[0]"),
                (short, f"{short}[0]"),
                (f"({short}, {twin})", f"({short}[0], {twin}[0])"),
                (f"{{'u': {short}}}", f"{{'u': {short}[0]}}"),
                (f"{short}[:0]", f"{short}[0]"),
            ]
        )
        k = self.some(lambda type: type.dtype.is_integer and type.ndim == 0)
        if k is not None and self.rng.random() < 0.2 and not xs.endswith(":0]"):
            return xs, row, f", ml.clip({k}, 0, {n})"
        return xs, row, ""

    def within(self) -> Self:
        inner = super().within()
        inner.is_body = self.is_body
        return inner

    def _again(self) -> str:
        if self.is_body:  # what runs again cannot use what the body around it has made
            return ""
        return self.rng.choice(["", "", "", ", checkpoint=True"])

    def _defined(self, prefix: str, parameters: str, inner: Branching, result: str) -> Block:
        self.defined = self.name(prefix)
        return Block(f"def {self.defined}({parameters}):", (*inner.lines, f"return {result}"))

    def _makes_by(self, body: Block, template: str) -> bool:
        name = self.defined
        return self.says(body) and self.makes(template.replace("{}", name)) is not None
