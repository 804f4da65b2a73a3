"""Images of a step's functions in C, one for each variant of a step with sizes.

An image is a struct of steps, kernel calls and the integers of these. A run copies the image to
private memory, relocates the pointers, and writes the fields that are formulas of sizes
(`built.h`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from mlvm.build.literals import integer, real
from mlvm.build.steps import LoopStep
from mlvm.machines.native._native import KernelCall

_FIELDS: Final = ("units", "work", "scratch", "shared")


def patched_fields(call: KernelCall) -> Iterator[tuple[str | int, int]]:
    """Yield the fields of a call that are formulas, and the formulas' numbers.

    A field is a name, the index of an integer, or `-1 - index` for a float.
    """
    patches = call.described()[4]
    for slot, formula in zip(patches[::2], patches[1::2], strict=True):
        if slot >= 0:
            yield slot, formula
        elif slot >= -len(_FIELDS):
            yield _FIELDS[-1 - slot], formula
        else:
            yield slot + len(_FIELDS), formula


def is_open(call: KernelCall) -> bool:
    """Return whether a call or a call inside it has formulas."""
    parts = call.described()[2]
    return any(True for _ in patched_fields(call)) or any(map(is_open, parts))


class Image:
    """Image of a variant.

    name: of the struct.
    pointers: fields that point into it.
    patches: fields that are formulas, whether each is real, and the formulas' numbers.
    """

    def __init__(
        self,
        number: int,
        initializer: Callable[[KernelCall, str, Mapping[str, str], int], str],
        closed: Callable[[KernelCall, str], str],
    ) -> None:
        """`initializer` writes a call with some members, and `closed` one without formulas."""
        self.name = f"Image{number}"
        self.pointers: list[str] = []
        self.patches: list[tuple[str, bool, int]] = []
        self._initializer, self._closed = initializer, closed
        self._members: list[tuple[str, Callable[[str], str]]] = []
        self._calls: dict[tuple[KernelCall, int], str] = {}

    def of(self, set_: str) -> str:
        """Return the name of the image for an instruction set."""
        return f"{self.name.lower()}_{set_}"

    def call(self, call: KernelCall, scratch: int) -> str:
        """Add a call with formulas; return the member."""
        key = call, scratch if call.scratch or call.shared else 0
        if key in self._calls:
            return self._calls[key]
        n = len(self._calls)
        member = self._calls[key] = f"call{n}"
        ints, floats, parts, _, _ = call.described()
        tables = set()
        for field, formula in patched_fields(call):
            if isinstance(field, str):
                self.patches.append((f"{member}.call.{field}", field == "work", formula))
                continue
            kind, place = ("ints", field) if field >= 0 else ("floats", -1 - field)
            self.patches.append((f"{kind}{n}[{place}]", kind == "floats", formula))
            tables.add(kind)
        if "ints" in tables:
            values = ", ".join(map(integer, ints))
            self._add(f"int64_t ints{n}[{len(ints)}]", lambda _: f"{{{values}}}")
        if "floats" in tables:
            reals = ", ".join(map(real, floats))
            self._add(f"double floats{n}[{len(floats)}]", lambda _: f"{{{reals}}}")
        if any(map(is_open, parts)):
            members = [self.call(part, 0) if is_open(part) else None for part in parts]
            tables.add("children")
            self.pointers += [f"children{n}[{i}]" for i, at in enumerate(members) if at]

            def children(set_: str) -> str:
                pairs = zip(parts, members, strict=True)
                each = [self._address(at, set_) or self._closed(part, set_) for part, at in pairs]
                return f"{{{', '.join(each)}}}"

            self._add(f"const KernelCall *children{n}[{len(parts)}]", children)
        self.pointers += [f"{member}.call.{table}" for table in sorted(tables)]

        def initialized(set_: str) -> str:
            places = {table: f"{self.of(set_)}.{table}{n}" for table in sorted(tables)}
            return self._initializer(call, set_, places, scratch)

        self._add(f"Placed {member}", initialized)
        return member

    def _add(self, declaration: str, value: Callable[[str], str]) -> None:
        """Add a member, with an initializer for each instruction set."""
        self._members.append((declaration, value))

    def _address(self, member: str | None, set_: str) -> str | None:
        """Return the address of a call that is a member, otherwise None."""
        return member and f"&{self.of(set_)}.{member}.call"

    def text(
        self,
        steps: Sequence[LoopStep],
        sets: Sequence[str],
        row_of: Callable[[LoopStep, str, str | None], str],
    ) -> str:
        """Return the struct and the tables in C.

        `row_of` writes a step, with the address of the call if the call depends on formulas.
        """
        members: list[str | None] = []
        for i, step in enumerate(steps):
            opened = step.run is not None and is_open(step.run.call)
            members.append(self.call(step.run.call, step.run.scratch) if opened else None)  # type: ignore[union-attr]
            self.pointers += [f"steps[{i}].bound.call"] * opened

        def rows(set_: str) -> str:
            pairs = zip(steps, members, strict=True)
            each = [row_of(step, set_, self._address(member, set_)) for step, member in pairs]
            return "{\n  " + ",\n  ".join(each) + "}"

        self._add(f"Step steps[{len(steps)}]", rows)
        self.pointers.append("functions[0].steps")
        main = f"steps, {len(steps)}, NULL, NULL"

        def functions(set_: str) -> str:
            return f"{{{{{self.of(set_)}.{main}}}}}"

        fields = [("Function functions[1]", functions), *self._members]
        declared = "".join([f"    {declaration};\n" for declaration, _ in fields])
        text = [f"typedef struct {{\n{declared}}} {self.name};\n"]
        for set_ in sets:
            values = ",\n".join([value(set_) for _, value in fields])
            text.append(f"static const {self.name} {self.of(set_)} = {{\n{values}}};\n")
        return "\n".join(text)

    def tables(self, numbered: Mapping[int, int]) -> tuple[list[str], list[str]]:
        """Return the rows of pointers and patches in C."""
        pointers = [f"offsetof({self.name}, {each})" for each in self.pointers]
        patches = [
            f"{{offsetof({self.name}, {each}), {int(is_real)}, {numbered[formula]}}}"
            for each, is_real, formula in self.patches
        ]
        return pointers, patches
