"""Tables in C of a step's functions, which `plan/loop.c` runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from mlvm.build.call_images import Image
from mlvm.build.formulas import Formulas, number
from mlvm.build.lane_code import LaneCode, LanePart
from mlvm.build.literals import array, integer, real, string
from mlvm.build.steps import LoopFunction, LoopStep
from mlvm.core.types import TensorType
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.types import DTYPES

_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}


class Numbered(dict[object, int]):
    """Numbers of values in the order of first use; `all` has the values in that order."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def __missing__(self, value: object) -> int:
        self[value] = len(self.all)
        self.all.append(value)
        return self[value]


class Tables:
    """Text of the tables for some instruction sets, and the kernels that they use."""

    def __init__(self, functions: Sequence[LoopFunction], sets: Sequence[str]) -> None:
        self.sets = sets
        self.kernels: set[str] = set()
        self.rows: set[str] = set()
        self.types, self.ops, self.lines = Numbered(), Numbered(), Numbered()
        self._numbers, self._places, self._pointers = Numbered(), Numbered(), Numbered()
        self._calls, self._lane_codes = Numbered(), Numbered()
        self._text: list[str] = []
        self._functions = functions

    def text_of_images(
        self, place: dict[object, int], guards: Sequence[Sequence[tuple[int, Any]]],
        formulas: Formulas, used: Iterable[int],
    ) -> tuple[str, dict[int, int]]:  # fmt: skip
        """Return the tables of functions that are variants of `main`, each with guards.

        Also return the numbers that these formulas, and the `used` formulas, have in C.
        """
        images = [Image(k, self.initializer, self.call) for k in range(len(guards))]
        text = [
            image.text(
                main.steps,
                self.sets,
                lambda step, set_, call: self._step(step, set_, "", place, 0, call),
            )
            for image, main in zip(images, self._functions, strict=True)
        ]
        all_patches = [formula for image in images for _, _, formula in image.patches]
        numbered = formulas.numbered(
            [*used, *all_patches, *[formula for each in guards for formula, _ in each]]
        )
        variants = []
        for k, (image, main) in enumerate(zip(images, self._functions, strict=True)):
            pointers, patches = image.tables(numbered)
            tables = {
                "Guard guards": [f"{{{numbered[n]}, {number(value)}}}" for n, value in guards[k]],
                "size_t pointers": pointers,
                "Patch patches": patches,
                "Place places": self._places_of(main),
            }
            for name, rows in tables.items():
                text.append(array(f"static const {name}{k}[]", rows or ["{0}"]))
            counts = f"{len(guards[k])}, {len(pointers)}, {len(patches)}, sizeof({image.name})"
            variants.append(f"{{guards{k}, pointers{k}, patches{k}, {counts}, places{k}}}")
        text.append(array("static const Variant variants[]", variants))
        for name in self.sets:
            rows = [f"&{image.of(name)}" for image in images]
            text.append(array(f"static const void *const images_{name}[]", rows))
        for name, rows in zip(
            ("Formula formulas", "Number constants"), formulas.tables(numbered), strict=True
        ):
            text.append(array(f"static const {name}[]", rows))
        largest = " ".join([f"{image.name} of{k};" for k, image in enumerate(images)])
        text.append(f"typedef union {{ {largest} }} AnyImage;\n")
        text.append("static const Place *const places[] = {NULL};\n")
        return "\n".join([*self._declared(), "", *self._text, *text]), numbered

    def _places_of(self, function: LoopFunction) -> list[str]:
        return [f"{{{self.ops[s.place.op]}, {self.lines[s.place.line]}}}" for s in function.steps]

    def _declared(self) -> list[str]:
        return [
            f"extern const {kind}Entry {kind.lower()}_{entry}_{name};"
            for kind, names in (("Kernel", self.kernels), ("Row", self.rows))
            for entry in sorted(names)
            for name in self.sets
        ]

    def text(self, place: dict[object, int], scratch: int) -> str:
        """Return all tables except the tables of types.

        `place` numbers the addresses; `scratch` is the offset of the scratch memory of calls on the
        stack.
        """
        steps, places = [], []
        for k, function in enumerate(self._functions):
            ends = self._places_of(function)
            places.append(array(f"static const Place places{k}[]", ends))
            for name in self.sets:
                rows = [
                    self._step(s, name, f"{k}_{i}", place, scratch)
                    for i, s in enumerate(function.steps)
                ]
                steps.append(array(f"static const Step steps{k}_{name}[]", rows))
        for name in self.sets:
            rows = [
                f"{{steps{i}_{name}, {len(f.steps)}, NULL, NULL}}"
                for i, f in enumerate(self._functions)
            ]
            steps.append(array(f"static const Function functions_{name}[]", rows))
        places.append(
            array("static const Place *const places[]", [f"places{i}" for i in range(len(places))])
        )
        return "\n".join([*self._declared(), "", *self._text, *steps, *places])

    def text_of_types(self) -> str:
        """Return the tables of the types in use."""
        types = []
        for i, type in enumerate(self.types.all):
            assert isinstance(type, TensorType)
            shape = array(f"static const int64_t shape{i}[]", [*map(str, type.shape)] or ["0"])
            code = f"{type.nbytes}, {type.size}, shape{i}, {_CODES[type.dtype]}, {type.ndim}"
            types.append(f"{shape}static const Type type{i} = {{{code}}};\n")
        return "\n".join(types)

    def _once(self, family: Numbered, stem: str, type: str, items: Iterable[str]) -> str:
        """Write a table, unless an equal table exists; return the name, `stem` and a number."""
        key = type, tuple(items)
        is_written = key in family
        name = f"{stem}{family[key]}"
        if not is_written:
            self._text.append(array(f"static const {type} {name}[]", key[1]))
        return name

    def _ints(self, values: Iterable[int]) -> str:
        """Return the name of a table of these integers."""
        return self._once(self._numbers, "n", "int64_t", map(integer, values))

    def _floats(self, values: Iterable[float]) -> str:
        return self._once(self._numbers, "n", "double", map(real, values))

    def call(self, call: KernelCall, set_: str, scratch: int = 0) -> str:
        """Return the C expression of a call, for an instruction set.

        The scratch memory starts at that offset.
        """
        key = call, scratch if call.scratch or call.shared else 0
        is_written = key in self._calls
        number = self._calls[key]
        for name in () if is_written else self.sets:
            placed = self.initializer(call, name, {}, key[1])
            self._text.append(f"static const Placed call{number}_{name} = {placed};\n")
        return f"&call{number}_{set_}.call"

    def initializer(
        self, call: KernelCall, set_: str, replaced: Mapping[str, str], scratch: int
    ) -> str:
        """Return the initializer of a call with scratch memory at that offset.

        `replaced` has the expressions of members that are defined elsewhere.
        """
        ints, floats, parts, rows, _ = call.described()
        self.kernels.add(call.kernel)
        self.rows.update(rows)
        members = {
            "kernel": f"&kernel_{call.kernel}_{set_}",
            "units": call.units,
            "work": real(call.work),
            "scratch": call.scratch,
            "shared": call.shared,
            "nparams": call.nparams,
            "nchildren": len(parts),
            **replaced,
        }
        if "ints" not in members:
            members["ints"] = self._ints(ints) if ints else "NULL"
        if "floats" not in members:
            members["floats"] = self._floats(floats) if floats else "NULL"
        if "children" not in members:
            each = [self.call(part, set_) for part in parts]
            members["children"] = self._names("children", "KernelCall", each)
        each = [f"&row_{row}_{set_}" for row in rows]
        members["rows"] = self._names("rows", "RowEntry", each)
        initializer = ", ".join([f".{key} = {value}" for key, value in members.items()])
        return f"{{.call = {{{initializer}}}, .scratch = {scratch}}}"

    def _names(self, name: str, type: str, items: Sequence[str]) -> str:
        """Write a table of names; return the name of the table, or NULL if it is empty."""
        return self._once(self._pointers, name, f"{type} *const", items) if items else "NULL"

    def _addresses(self, numbers: Iterable[int]) -> str:
        """Return the table of indices into `arguments`."""
        return self._once(self._places, "at", "uint32_t", [*map(str, numbers)] or ["0"])

    # --- lanes ---

    def _lanes(self, code: LaneCode, set_: str) -> str:
        """Return the C expression of a program for rows, for an instruction set."""
        key = code, set_
        is_written = key in self._lane_codes
        name = f"lanes{self._lane_codes[key]}"
        if is_written:
            return f"&{name}"

        def table(what: str, type: str, rows: Iterable[object]) -> str:
            return self._table(f"{name}_{what}", type, rows)

        def registers(what: str, pairs: Iterable[tuple[int, int]]) -> str:
            return table(what, "LaneRegister", [f"{{{number}, {size}}}" for number, size in pairs])

        linked = code.linked
        segments = [
            self._segment(f"{name}_{i}", parts, code.at, set_)
            for i, parts in enumerate(code.segments)
        ]
        sites = [
            f"{{{segment}, {total}, {nbytes}, {len(sizes)}, {self._ints(sizes or [0])}}}"
            for segment, total, nbytes, sizes in code.sites
        ]
        checks = [string(step[3]) if step[0] == "check" else "NULL" for step in linked.steps]
        first = (
            None if code.first is None else self._part(f"{name}_first", code.first, code.at, set_)
        )
        flat, heavy = code.flat, frozenset(linked.heavy)
        members = {
            "nresults": len(code.returned),
            "nsums": code.nsums,
            "nargs": code.nargs,
            "nshared": len(code.shared),
            "nhoisted": len(code.hoisted),
            "nsteps": len(linked.steps),
            "nsizes": len(flat.sizes),
            "nsegments": len(segments),
            "nsites": len(sites),
            "nplaces": len(code.places),
            "width": linked.width,
            "code": self._ints(flat.code),
            "at": self._ints(flat.at),
            "sizes": self._ints(flat.sizes or [0]),
            "heavy": table("heavy", "char", [int(i in heavy) for i in range(len(linked.steps))]),
            "lent": table("lent", "char", [int(n in linked.lent) for n in flat.sizes]),
            "messages": table("messages", "char *const", checks),
            "params": registers("params", code.params),
            "returned": registers("returned", code.returned),
            "segments": table("segments", "LaneSegment", segments),
            "sites": table("sites", "LaneSite", sites),
            "first": "NULL" if first is None else table("first", "LanePart", [first]),
            "hoisted": table("hoisted", "size_t", code.hoisted),
            "places": table("places", "LanePlace", [f"{{{i}, {at}}}" for i, at in code.places]),
            "memory": code.at,
        }
        initializer = ",\n".join([f"    .{key} = {value}" for key, value in members.items()])
        self._text.append(f"static const LaneCode {name} = {{\n{initializer}}};\n")
        return f"&{name}"

    def _table(self, name: str, type: str, rows: Iterable[object]) -> str:
        self._text.append(array(f"static const {type} {name}[]", [*map(str, rows)] or ["0"]))
        return name

    def _segment(self, name: str, parts: Sequence[LanePart], at: int, set_: str) -> str:
        ends = len(parts[0].operands), len(parts[0].results)
        rows = [self._part(f"{name}_{part.rows}", part, at, set_) for part in parts]
        counts = self._ints([part.rows for part in parts])
        table = self._table(f"{name}_parts", "LanePart", rows)
        return f"{{{len(parts)}, {ends[0]}, {ends[1]}, {counts}, {table}}}"

    def _part(self, name: str, part: LanePart, at: int, set_: str) -> str:
        calls = [
            f"{{{self.call(call, set_, at + scratch)}, {self._addresses(places)}}}"
            for call, places, scratch in part.calls
        ]
        tables = [
            self._table(f"{name}_{what}", type, rows)
            for what, type, rows in (
                ("calls", "BoundCall", calls),
                ("operands", "size_t", part.operands),
                ("results", "size_t", part.results),
            )
        ]
        return f"{{{tables[0]}, {len(calls)}, {tables[1]}, {tables[2]}}}"

    def _step(
        self,
        step: LoopStep,
        set_: str,
        where: str,
        place: dict[object, int],
        scratch: int,
        call: str | None = None,
    ) -> str:
        members: dict[str, object] = {"code": step.code}
        if step.number:
            members["number"] = step.number
        if step.nparams:
            members["nparams"] = step.nparams
        if step.run is not None:
            name = self._addresses([place[parameter] for parameter in step.run.parameters])
            call = call or self.call(step.run.call, set_, step.run.scratch)
            members["bound"] = f"{{{call}, {name}}}"
        if step.code == "PUSH":
            members["value"] = f"{{INTEGER, {{.integer = {integer(step.number)}}}}}"
        if step.records:
            members["foreign"] = 1
            members["nparams"] = step.records
        if step.lanes is not None:
            members |= {
                "foreign": 1,
                "nparams": "LANES_RUN",
                "callee": self._lanes(step.lanes, set_),
            }
        if step.cases:
            name = f"cases{where}_{set_}"
            cases = []
            for case in step.cases.values():
                types = ", ".join([f"&type{self.types[type]}" for type in case.types])
                out = "NULL" if case.out is None else f"&type{self.types[case.out]}"
                over = ", ".join([f"{each}u" for each in case.over])
                fields = [
                    f".count = {len(case.types)}",
                    f".call = {self.call(case.call, set_, scratch)}",
                ]
                fields += [f".types = {{{types}}}"] * bool(types) + [f".out = {out}"]
                fields += [f".nwrites = {len(case.over)}"] + [f".over = {{{over}}}"] * bool(over)
                cases.append(f"{{{', '.join(fields)}}}")
            self._text.append(array(f"static const Case {name}[]", cases))
            members |= {"cases": name, "ncases": len(cases)}
        return f"{{{', '.join([f'.{key} = {value}' for key, value in members.items()])}}}"


FILE_OF: Final = {name: file for name, (file, _) in _native.kernels().items()}
"""File of `plan/kernels` for each kernel."""
