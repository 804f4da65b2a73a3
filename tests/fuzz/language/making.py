"""Programs in the eager language, made at random."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Collection, Iterator
from typing import Any, Final

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.core.types import Shape
from tests.fuzz.language.branching import Branching
from tests.fuzz.language.source import IMPORTS, Block, Call, Node, Source
from tests.fuzz.language.writing import DTYPES, UNPREDICTABLE, Writer, shapes_of

LAYERS: Final = [
    "ml.nn.Linear({n}, {m})", "ml.nn.Linear({n}, {n}, bias=False)", "ml.nn.LayerNorm({n})",
    "ml.nn.RMSNorm({n})",
    "ml.nn.Sequential(ml.nn.Linear({n}, {n}), ml.nn.BatchNorm({n}), ml.nn.ELU())",
    "ml.nn.BatchNorm({n}).eval()", "ml.nn.Dropout(0.5)", "ml.nn.Dropout(0.5).eval()",
    "ml.nn.Sequential(ml.nn.Linear({n}, {n}), ml.tanh)",
    "ml.nn.Sequential(ml.nn.Linear({n}, {m}), ml.gelu, ml.nn.Dropout(0.25), ml.nn.LayerNorm({m}))",
    "ml.nn.Sequential(ml.nn.Linear({n}, {m}), ml.nn.Dropout(0.25)).eval()",
]  # fmt: skip
CONTROL: Final = re.compile(r"ml\.(cond|switch|while_loop|fori_loop|scan|map|function)\(")
OPTIMIZERS: Final = [
    "ml.optim.SGD({p}, 0.1)",
    "ml.optim.SGD({p}, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "ml.optim.Adam({p}, 0.05)",
    "ml.optim.AdamW({p}, ml.optim.cosine(0.1, total_steps=10, warmup_steps=2))",
]
MORE_OPTIMIZERS: Final = [
    "ml.optim.RMSProp({p}, 0.05, momentum=0.5, centered=True)",
    "ml.optim.Lion({p}, 0.01, weight_decay=0.1, groups=[('*', {{'betas': (0.5, 0.9)}})])",
    "ml.optim.SGD({p}, 0.1, groups=[(lambda path, x: x.ndim < 9, {{'momentum': 0.5}})])",
]
RATES: Final = ["0.1 / (i + 1)", "0.1 if i < 2 else 0.05", "0.01 * i", "[0.1, 0][i % 2]"]
NUMBERS: Final = ["2", "0.5", "-1.0", "3", "True", "i"]
MORE_NUMBERS: Final = ["i / 3", "-0.0", "1e30", "2**40 + i"]


def make(seed: int, number: int, without: re.Pattern[str] | None = None) -> Source:
    """The program of that number, always the same one for the same seed; no statement of it matches
    `without`."""
    name = f"language:{seed}:{number}"
    return _Maker(random.Random(name), random.Random(f"{name}:more"), without).source()


class _Maker:
    """Makes one program: its state, the arguments of its calls, and its step."""

    def __init__(
        self, rng: random.Random, more: random.Random, without: re.Pattern[str] | None
    ) -> None:
        self.rng = rng
        self.without = without
        self.more = more  # for what came later, so that the rest of a program stays as it was
        roll = rng.random()
        big = 1 if roll < 0.85 else 60 if roll < 0.97 else 200
        self.rows = rng.choice([1, 2, 3, 4]) * big
        self.columns = rng.choice([1, 2, 3, 5]) * min(big, 130)
        self.limit = 8 * max(64, self.rows * self.columns)
        self.seeds = itertools.count(rng.randrange(1000))
        self.names = itertools.count()
        self.changes: list[str] = []  # of hyperparameters, before each step
        self.namespace: dict[str, Any] = {}
        exec(IMPORTS, self.namespace)

    def shape(self) -> Shape:
        r, c = self.rows, self.columns
        shapes: list[Shape] = [(r, c), (c,), (r,), (), (r * c,), (1, c), (r, 1), (c, r)]
        return self.rng.choices(shapes, [6, 4, 2, 2, 2, 2, 2, 2])[0]

    def tensor(self, dtype: str | None = None) -> str:
        [kind] = [dtype] if dtype else self.rng.choices([*DTYPES], [*DTYPES.values()])
        return f"tensor({kind!r}, {self.shape()}, {next(self.seeds)})"

    def source(self) -> Source:
        arena = ml.Arena(ml.VM("making"), "making")
        self.writers: list[Writer] = []
        try:
            with arena.allocating():
                return self._source()
        finally:
            for writer in self.writers:
                writer.forget()
            arena.close()

    def _writer(self, namespace: dict[str, Any]) -> Writer:
        self.writers.append(Branching(self.rng, namespace, self.names, self.limit))
        self.writers[-1].without = self.without
        return self.writers[-1]

    def _source(self) -> Source:
        rng = self.rng
        resets = rng.random() < 0.4
        setup = self._writer(self.namespace)
        state = self._state(setup)
        tensors = [setup.makes(self.tensor(), "kept") for _ in range(rng.randint(0, 2))]
        parameters, calls = self._calls(setup, [each for each in tensors if each])
        body = setup.within()
        body.depth = 0
        body.rebinds = not resets  # what eager code binds a field to ends with its arena
        for each in tensors:  # which the step knows by its arguments alone
            body.types.pop(each or "", None)
        first = calls[0]
        scratch = self._writer({**self.namespace, "i": 0})
        for line in first.making:
            if line not in self.changes:
                scratch.says(line)
        for parameter, argument in zip(parameters, first.arguments, strict=True):
            body.namespace[parameter] = eval(argument, scratch.namespace)
            if argument.startswith("values"):  # which a captured function gets as a tensor
                body.says(f"{parameter} = ml.asarray({parameter})")
            body.knows(parameter)
        body.writes(rng.randint(2, 22))
        if rng.random() < 0.02:
            text = body.filled(rng.choice(UNPREDICTABLE))
            if text is not None:
                body.makes(text)
        names = {line.split()[0] for line in _lines(body.lines) if re.match(r"\w+ [-+*/]=", line)}
        outer = sorted(names.intersection(state))
        if outer:
            body.lines.insert(0, f"nonlocal {', '.join(outer)}")
        if any(CONTROL.search(line) for line in _lines(body.lines)):
            calls = [call for call in calls if _is_alike(call, first)]
        order = [*range(len(calls)), *[rng.randrange(len(calls)) for _ in range(2)]]
        order += [0] * (3 - len(order))
        return Source(
            setup=tuple(setup.lines),
            parameters=tuple(parameters),
            body=tuple(body.lines),
            results=tuple(self._results(body)),
            calls=tuple(calls),
            order=tuple(order),
            state=(*state, *[each for each in tensors if each]),
            resets=resets,
        )

    def _state(self, setup: Writer) -> list[str]:
        """Write what the step reaches by itself; the names."""
        rng, state = self.rng, []
        for _ in range(rng.randint(1, 4)):
            state.append(setup.makes(self.tensor("f32" if rng.random() < 0.7 else None), "w"))
        state.append(
            setup.makes(f"ml.random.key({next(self.seeds)})", "key") if rng.random() < 0.3 else None
        )
        if rng.random() < 0.4:
            layer = rng.choice(LAYERS).format(n=self.columns, m=rng.choice([1, 2, self.columns]))
            state.append(setup.makes(layer, "model"))
        if rng.random() < 0.3:
            state.append(
                setup.makes(f"Box(mean={self.tensor('f32')}, n={self.tensor('i64')})", "box")
            )
        if rng.random() < 0.4:
            number = next(self.names)
            x, y = self.tensor("f32"), self.tensor("f32")
            w = f"w{number}"
            trees = [
                f"{{'a': {x}, 'b': [{y}]}}",
                f"Box(a={x}, b={y})",
                f"ml.nn.Linear({self.columns}, 2)",
            ]
            trees += [f"[{x}, {{'c': {y}}}]"]
            line = f"params{number} = {rng.choice(trees)}"
            if rng.random() < 0.3:
                setup.says(f"{w} = {x}")
                state.append(w)
                setup.knows(w)
                line = f"params{number} = " + rng.choice(
                    [f"{{'a': {w}, 'b': {w}}}", f"Box(a={w}, b=[{w}, {y}])"]
                )
            setup.says(line)
            setup.knows(f"params{number}")
            optimizer = self.more.choice([rng.choice(OPTIMIZERS)] * 4 + MORE_OPTIMIZERS)
            setup.says(f"opt{number} = {optimizer.format(p=f'params{number}')}")
            state += [f"params{number}", f"opt{number}"]
            if self.more.random() < 0.5:
                self.changes.append(f"opt{number}.learning_rate = {self.more.choice(RATES)}")
        return [name for name in state if name is not None]

    def _calls(self, setup: Writer, tensors: list[str]) -> tuple[list[str], list[Call]]:
        """The parameters, and the arguments of one to three signatures."""
        rng = self.rng
        first = self._writer({**self.namespace, "i": 0})
        making, sources = self._sources(
            first, [*tensors, *[w for w in setup.types if rng.random() < 0.3]]
        )
        n = rng.randint(1, 5)
        templates = [self._argument(first, sources) for _ in range(n)]
        parameters = [*"abcde"[:n]]
        calls = []
        for k in range(rng.choice([1, 1, 2, 2, 3])):
            lines = self._resized(making) if k and rng.random() < 0.3 else making
            arguments = [self._fit(each, first, sources) for each in templates]
            calls.append(Call((*lines, *self.changes), tuple(arguments)))
        return parameters, calls

    def _sources(self, writer: Writer, outer: list[str]) -> tuple[list[str], list[str]]:
        """Statements that make tensors for arguments, and the names of these and of `outer`."""
        rng, sources = self.rng, [*outer]
        for _ in range(rng.randint(1, 4)):
            text = self.tensor("f32" if rng.random() < 0.6 else None)
            name = writer.makes(f"{text[:-1]} + i)", "x")
            if name:
                sources.append(name)
        for _ in range(rng.randint(0, 2)):
            base = rng.choice(sources)
            shape = rng.choice(shapes_of(eval(base, writer.namespace).size))
            view = writer.makes(f"ml.reshape({base}, {shape})", "x")
            if view:
                sources.append(view)
        for each in outer:
            writer.knows(each)
        return [line for line in writer.lines if isinstance(line, str)], sources

    def _resized(self, making: list[str]) -> list[str]:
        """The statements with a row less, if they run so."""
        fewer = [line.replace(f"({self.rows}, ", f"({self.rows - 1}, ") for line in making]
        try:
            exec("\n".join(fewer), {**self.namespace, "i": 0})
        except MlvmError:
            return making
        return fewer

    def _argument(self, writer: Writer, sources: list[str]) -> str:
        """A template of an argument, in which a type stands for a tensor."""
        rng = self.rng

        def leaf() -> str:
            return f"<{writer.types[rng.choice(sources)]}>"

        roll = rng.random()
        if roll < 0.72:
            return leaf()
        if roll < 0.82:
            return "<number>"
        if roll < 0.86:
            return f"values('f32', {self.shape()}, {next(self.seeds)} + i)"
        return rng.choice(
            [
                f"[{leaf()}, {leaf()}]",
                f"{{'k': {leaf()}, 'l': ({leaf()}, 2)}}",
                f"({leaf()}, None)",
                f"Box(a={leaf()})",
            ]
        )

    def _fit(self, template: str, writer: Writer, sources: list[str]) -> str:
        """The argument with a tensor of its type for each, mostly one of several."""

        def chosen(match: re.Match[str]) -> str:
            if match[1] == "number":
                return self.more.choice([self.rng.choice(NUMBERS)] * 4 + MORE_NUMBERS)
            return self.rng.choice(
                [each for each in sources if str(writer.types[each]) == match[1]]
            )

        return re.sub(r"<([^>]*)>", chosen, template)

    def _results(self, body: Writer) -> list[str]:
        """Return the expressions of the step's results: new tensors and others, some seen in other
        shapes."""
        rng, results = self.rng, []
        for _ in range(rng.randint(1, 5)):
            x = body.some()
            if x is None:
                continue
            shape = rng.choice(shapes_of(body.types[x].size))
            forms = [x, x, x, f"ml.reshape({x}, {shape})", f"({x}, {x})", f"{{'r': {x}}}"]
            results.append(rng.choice(forms))
            if rng.random() < 0.2:
                results.append(x)
        if rng.random() < 0.1:
            results.append(rng.choice(["None", "'text'", "2.5", "(1, True)"]))
        return results


def _is_alike(call: Call, first: Call) -> bool:
    """Return whether two calls have arguments of the same types: a branch that eager code does not
    take need not fit others."""
    pairs = zip(call.arguments, first.arguments, strict=True)
    return call.making == first.making and not any(
        each != other and {each, other} & set(NUMBERS) for each, other in pairs
    )


def _lines(nodes: Collection[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Block):
            yield from _lines(node.body)
        else:
            yield node
