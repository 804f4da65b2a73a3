"""The build of a planned step: a folder of C from which `make` builds a library and a program."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from mlvm.arena.placement import rounded
from mlvm.build.call_images import patched_fields
from mlvm.build.formulas import BuiltVariant, Formulas, OpenLengths, axes_of, variants
from mlvm.build.literals import array, string
from mlvm.build.lower import Temporary
from mlvm.build.steps import KernelRun, LoopStep, Steps
from mlvm.build.tables import FILE_OF, Tables
from mlvm.build.targets import OPTIONS, TARGETS, CannotBuild, Target, sets_for
from mlvm.core.errors import MachineError
from mlvm.core.machine import fused
from mlvm.core.machine.link import bind, link
from mlvm.core.machine.verify import verify
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.types import ALIGNMENT, Array, TensorType, aligned_array, u8
from mlvm.machines import native
from mlvm.machines.files import write_files
from mlvm.machines.local import LocalVM
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall
from mlvm.step.compile import Planned
from mlvm.step.flow import Location
from mlvm.step.open_step import OpenStep
from mlvm.step.saved import SavedStep

HERE: Final = Path(__file__).parent
PACKAGE: Final = HERE.parent
NATIVE: Final = Path(native.__file__).parent


class Built(NamedTuple):
    """Result of a build: the instruction sets and kernels, and bytes of memory and weights."""

    sets: tuple[str, ...]
    kernels: tuple[str, ...]
    memory: int
    weights: int


def build(
    step: SavedStep,
    folder: Path,
    open_lengths: OpenLengths,
    *,
    target: str = "host",
    simd: str = "auto",
    embed: bool = False,
    threads: int = 1,
    depth: int = 64,
    records: int = 1 << 20,
    title: str = "a step",
) -> Built:
    """Write the folder. Raises `CannotBuild` for a step that needs Python, and `OSError`."""
    sets = sets_for(target, simd)
    counts = ("threads", threads, 1, 1024), ("depth", depth, 0, 1 << 20)
    for name, value, least, most in (*counts, ("records", records, 0, 1 << 40)):
        if not least <= value <= most:
            raise CannotBuild(f"expected {name} from {least} to {most}, got {value}")
    with _kernels_of_all_sets():
        layout = _StepLayout(step, open_lengths, threads, depth, records)
    mains = [each.functions.steps.functions[0] for each in layout.variants]
    tables = Tables(layout.steps.functions if step.open is None else mains, sets)
    text = layout.text(tables, embed)
    makefile = folder / "Makefile"
    if makefile.exists() and not makefile.read_bytes().startswith(_WRITTEN.encode()):
        raise CannotBuild(f"{folder} has a Makefile that mlvm did not write; pass an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted({FILE_OF[name] for name in tables.kernels})
    files += ["elementwise"] * bool(tables.rows)
    has_lengths = step.open is not None
    contents = _sources(folder, files, threads, has_lengths)
    used = [("kernel", name) for name in sorted(tables.kernels)]
    used += [("row", name) for name in sorted(tables.rows)]
    defines = [f"#define USES_{kind}_{name} ~, KEPT\n" for kind, name in used]
    contents[folder / "used.h"] = "".join(defines)
    contents[folder / "tables.c"] = text
    contents[folder / "described.h"] = _described(step, layout.axes, sets, threads)
    contents[folder / "step.h"] = _header(step, sets, threads, title)
    weights = layout.weights()
    if embed:
        rows = [str(byte) for byte in weights]
        declared = array("_Alignas(64) const uint8_t step_weights[]", rows)
        contents[folder / "weights.c"] = f"#include <stdint.h>\n{declared}"
    else:
        contents[folder / "weights.bin"] = weights
    contents[makefile] = _makefile(TARGETS[target], sets, files, embed, threads, has_lengths)
    write_files(contents)
    return Built(sets, tuple([name for _, name in used]), layout.memory, len(weights))


@contextmanager
def _kernels_of_all_sets() -> Iterator[None]:
    """Plan calls of kernels that every instruction set has.

    Python may use a set with more kernels, `avx512_bf16`.
    """
    used = _native.simd()
    if used not in OPTIONS:
        _native.choose_simd("plain")
    try:
        yield
    finally:
        _native.choose_simd(used)


class _Functions:
    """Functions of a step at some sizes, with scratch memory of the calls in the plan.

    step: with types and attributes as formulas, if it has sizes.
    memory: bytes of the plan and scratch memory.
    """

    def __init__(
        self,
        threads: int,
        formulas: Formulas,
        step: SavedStep,
        opened: SavedStep | None = None,
    ) -> None:
        self.step, planned = opened or step, step.planned
        self._threads, self._formulas = threads, formulas
        self._moments = {pc: moment for moment, pc in enumerate(planned.moments)}
        types = [each.type for each in planned.arguments]
        functions = LocalVM(native=True).functions
        verdict = verify(planned.program, functions, types)
        code = link(planned.program, functions, verdict)
        try:
            bind(code, tuple(_arrays(planned)), fused.Workspace(), checked=True)
        except MachineError as error:
            raise CannotBuild(str(error)) from None
        if opened is None:
            self.steps = Steps(code, types, planned.lines, self.scratch_of)
        else:
            types = [each.type for each in opened.planned.arguments]
            places = planned.lines, self.scratch_of
            self.steps = Steps(code, types, *places, self._attributes_at, formulas.bound)
        lifetimes = self.step.planned.lifetimes
        self._stays = sorted(
            [(x.offset, formulas.bound(x.nbytes), x.start, x.end) for x in lifetimes]
        )
        self.memory = self._plan = planned.plan.nbytes
        for pc, steps in self.steps.runs():
            self._place_scratch(pc, steps)

    def _attributes_at(self, pc: int) -> Attributes:
        """Return the attributes of the call at a pc of `main`."""
        immediates = self.step.planned.program.main.code[pc].immediates
        return next((x for x in immediates[2:] if isinstance(x, Mapping)), NO_ATTRIBUTES)

    def scratch_of(self, call: KernelCall) -> int:
        """Return the bytes of scratch memory of a call: each thread's, and that which all share."""
        nbytes = {"scratch": call.scratch, "shared": call.shared}
        for field, formula in patched_fields(call):
            if field in nbytes:
                nbytes[field] = self._formulas.largest(formula)
        return rounded(nbytes["scratch"]) * self._threads + rounded(nbytes["shared"])

    def _place_scratch(self, pc: int, steps: Sequence[LoopStep]) -> None:
        """Place scratch memory and temporaries of an op's calls in the plan's gaps at that time.

        If there is no gap, they are placed after the plan.
        """
        runs = [step.run for step in steps if step.run is not None]
        temporaries = [x for run in runs for x in run.parameters if isinstance(x, Temporary)]
        temporary_bytes = rounded(max([x.at + x.nbytes for x in temporaries], default=0))
        nbytes = temporary_bytes + max([self.scratch_of(run.call) for run in runs], default=0)
        if not nbytes:
            return
        moment, at = self._moments.get(pc), 0
        if moment is None:
            at = rounded(self._plan)
        else:
            for offset, stay_nbytes, start, end in self._stays:
                if not start <= moment < end:
                    continue
                if at + nbytes <= offset:
                    break
                at = max(at, rounded(offset + stay_nbytes))
        self.memory = max(self.memory, at + nbytes)
        for step, run in zip(steps, runs, strict=True):
            parameters = [
                x._replace(at=at + x.at) if isinstance(x, Temporary) else x for x in run.parameters
            ]
            step.run = KernelRun(run.call, tuple(parameters), at + temporary_bytes)


class _StepLayout:
    """Memory layout of a step, with tables in C.

    variants: the functions; with sizes, each variant is valid for some sizes.
    axes: the number of the dynamic size of an input's axis.
    """

    def __init__(
        self,
        step: SavedStep,
        open_lengths: OpenLengths,
        threads: int,
        depth: int,
        records: int,
    ) -> None:
        self.step, self.threads, opened = step, threads, step.open
        self.axes = {} if opened is None else axes_of(opened)
        self.formulas = Formulas(() if opened is None else opened.lengths)
        plan = partial(_Functions, threads, self.formulas)
        self.variants: list[BuiltVariant[_Functions]] = (
            [BuiltVariant(plan(step))]
            if opened is None
            else [*variants(step, opened, self.formulas, open_lengths, plan)]
        )
        first, _, self.scalars = self.variants[0]
        self.steps = first.steps
        self.depth = _depth(self.steps, depth)
        uses = any(step.records for function in self.steps.functions for step in function.steps)
        self.records = records * uses
        self.room = records * bool(self.steps.lanes)
        self.memory = max([each.functions.memory for each in self.variants])
        bound = self.formulas.bound
        self.outputs = [self._take(bound(type.nbytes)) for type in first.step.outputs]
        self.inputs = [
            self._take(nbytes) if self._is_written("input", i) else None
            for i, nbytes in enumerate([bound(type.nbytes) for type in first.step.inputs])
        ]
        self.states = [
            self._take(array.nbytes) if self._is_written("state", i) or i in self.scalars else None
            for i, array in enumerate(step.states)
        ]
        cases = [x.call for f in self.steps.functions for s in f.steps for x in s.cases.values()]
        self.scratch = self._take(max(map(first.scratch_of, cases), default=0))
        for lanes in self.steps.lanes.values():
            lanes.at = self._take(lanes.nbytes)
        self.memory = rounded(self.memory)
        self.in_weights, end = [], ALIGNMENT
        for state in step.states:
            self.in_weights.append(end)
            end += rounded(state.nbytes)
        self.nweights = end

    def _take(self, nbytes: int) -> int:
        at = rounded(self.memory)
        self.memory = at + nbytes
        return at

    def _is_written(self, role: str, place: int) -> bool:
        written = [self.step.planned.arguments[i] for i in self.steps.written]
        return any(each.role == role and each.place == place for each in written)

    def _address(self, tensor: Location) -> str:
        """Return the address of a tensor as an initializer in C."""
        role, place, _ = tensor
        at = place if role == "scratch" else getattr(self, f"{role}s")[place]
        if at is not None:
            return f"{{IN_MEMORY, {at}}}"
        if role == "input":
            return f"{{IN_INPUT, {place}}}"
        return f"{{IN_WEIGHTS, {self.in_weights[place]}}}"

    def fingerprint(self) -> int:
        """Hash the program and the state types, to detect weights of a different step."""
        digest = hashlib.sha256(self.step.planned.program.to_bytes())
        digest.update(repr([TensorType.of(state) for state in self.step.states]).encode())
        return int.from_bytes(digest.digest()[:8], "little")

    def weights(self) -> bytes:
        """Return the file of the state, as `step_init` reads it."""
        head = b"MLVMSTEP" + np.array([self.fingerprint(), self.nweights], "<u8").tobytes()
        parts = [head.ljust(ALIGNMENT, b"\0")]
        for state in self.step.states:
            parts.append(state.tobytes().ljust(rounded(state.nbytes), b"\0"))
        return b"".join(parts)

    def text(self, tables: Tables, embed: bool) -> str:
        step, functions, arguments = self.step, self.steps.functions, self.step.planned.arguments
        place: dict[object, int] = {i: i for i in range(len(arguments))}
        addresses = [self._address(each) for each in arguments]
        mains = [variant.functions.steps.functions[0] for variant in self.variants]
        for run in [each.run for main in mains for each in main.steps]:
            for each in run.parameters if run is not None else ():
                if each not in place:
                    assert isinstance(each, Temporary)
                    place[each] = len(addresses)
                    addresses.append(f"{{IN_MEMORY, {each.at}}}")
        open_tables: dict[str, list[str]] = {}
        open_members: dict[str, object] = {}
        if step.open is None:
            body = tables.text(place, self.scratch)
        else:
            body, open_tables, open_members = self._open_text(step.open, tables, place)
        pushed = [
            f"{{{number}, &type{tables.types[arguments[number].type]}}}"
            for number in self.steps.pushed
        ]
        body = tables.text_of_types() + body
        inputs = [
            f"{{{type.nbytes}, {int(own is not None)}, {own or 0}}}"
            for type, own in zip(step.inputs, self.inputs, strict=True)
        ]
        states = [
            f"{{{state.nbytes}, {at}, {int(own is not None)}, {own or 0}}}"
            for state, at, own in zip(step.states, self.in_weights, self.states, strict=True)
        ]
        outputs = [self._address(each) for each in step.results]
        lines = ["/".join(Path(str(line)).parts[-2:]) for line in tables.lines.all]
        named = {
            "Set sets": [
                *[
                    f'{{"{name}", functions_{name}, NULL}}'
                    if step.open is None
                    else f'{{"{name}", NULL, images_{name}}}'
                    for name in tables.sets
                ],
                "{NULL, NULL, NULL}",
            ],
            "char *const ops": [string(str(op)) for op in tables.ops.all],
            "char *const lines": [*map(string, lines)],
            "Address arguments": addresses,
            "Pushed pushed": pushed,
            "Input inputs": inputs,
            "Address outputs": outputs,
            "State states": states,
            **open_tables,
        }
        declared = [array(f"static const {name}[]", rows or ["0"]) for name, rows in named.items()]
        depth, main = self.depth, functions[0]
        deepest = [function.height for function in functions[1:]]
        values = main.height + depth * max(deepest, default=0) + 1
        heap = main.nbytes + depth * max([f.nbytes for f in functions[1:]], default=0)
        most = self.memory + self.nweights + self.records + self.room + heap
        most += sum([type.nbytes for type in step.inputs])
        most += _ENTRY * (values + depth + len(addresses) + len(pushed) + self.threads)
        members = {
            **{name: name for name in ("sets", "ops", "lines", "places", "arguments", "pushed")},
            **{name: name for name in ("inputs", "outputs", "states")},
            "narguments": len(addresses),
            "npushed": len(pushed),
            "ninputs": len(inputs),
            "noutputs": len(outputs),
            "nstates": len(states),
            "memory": self.memory,
            "ours": self.memory,
            "threads": self.threads,
            "values": values,
            "frames": depth,
            "heap": heap,
            "records": self.records,
            "lanes": self.room,
            "run_lanes": "lanes_run" if self.steps.lanes else "NULL",
            "weights": self.nweights,
            "fingerprint": f"UINT64_C({self.fingerprint()})",
            "embedded": "step_weights" if embed else "NULL",
            **open_members,
        }
        initializer = ",\n".join([f"    .{key} = {value}" for key, value in members.items()])
        return "\n".join(
            [
                "/* Written by `python -m mlvm build`. */",
                f'#include "{_RUNTIME}/built.h"\n',
                "#include <math.h>\n",
                "extern const uint8_t step_weights[];\n" * embed,
                body,
                *declared,
                f"_Static_assert(UINT64_C({most}) <= SIZE_MAX / 2, {string(_TOO_LARGE)});",
                f"const Built built = {{\n{initializer}}};",
                "",
            ]
        )

    def _open_text(
        self, opened: OpenStep, tables: Tables, place: dict[object, int]
    ) -> tuple[str, dict[str, list[str]], dict[str, object]]:
        """Return the text of functions with sizes, further tables, and members of `Built`."""
        formulas, first = self.formulas, self.variants[0].functions.step
        results = [[*map(formulas.number_of, each.type.array_shape)] for each in first.results]
        inputs = [formulas.number_of(type.nbytes) for type in first.inputs]
        guards = [each.guards for each in self.variants]
        used = [*inputs, *chain(*results), *self.scalars.values()]
        body, numbered = tables.text_of_images(place, guards, formulas, used)
        shapes = [f"{{{len(shape)}, axes{i}}}" for i, shape in enumerate(results)]
        scalars = [
            f"{{{self.states[i]}, MLVM_{TensorType.of(self.step.states[i]).dtype.name.upper()}, "
            f"{numbered[n]}}}"
            for i, n in self.scalars.items()
        ]
        lengths = [
            f"{{{string(x.name)}, {x.at_most}, {opened.values[x.place]}}}" for x in opened.lengths
        ]
        named = {
            "Length lengths": lengths,
            "Scalar scalars": scalars or ["{0, 0, 0}"],
            "uint32_t input_formulas": [str(numbered[n]) for n in inputs] or ["0"],
            **{
                f"uint32_t axes{i}": [str(numbered[n]) for n in shape] or ["0"]
                for i, shape in enumerate(results)
            },
            "Shape shapes": shapes or ["{0, NULL}"],
        }
        members: dict[str, object] = {
            "nformulas": len(numbered),
            "nvariants": len(self.variants),
            "nscalars": len(scalars),
            "image": "sizeof(AnyImage)",
        }
        names = ("lengths", "formulas", "constants", "variants", "scalars", "input_formulas")
        members |= {name: name for name in (*names, "shapes")}
        return body, named, members


_WRITTEN: Final = (
    "# Written by `python -m mlvm build`: `make` makes libstep.a and a program, `step`."
)
_TOO_LARGE: Final = "the step needs more memory than the address space"
_ENTRY: Final = 128  # bytes; larger than a value, a frame, a pointer or a tensor of the loop
_RUNTIME: Final = "mlvm/build/src"
PLAN: Final = ("loop", "bound", "lanes", "records", "processor")
"""Sources of the loop."""
_PLAN: Final = "mlvm/machines/native/src/plan"


def _arrays(planned: Planned) -> Iterator[Array]:
    """Yield the arguments as arrays of this process, which overlap as in the plan."""
    homes: dict[tuple[str, int], Array] = {}
    for role, place, type in planned.arguments:
        home, at, nbytes = (role, place), 0, type.nbytes
        if role == "scratch":
            home, at, nbytes = (role, 0), place, planned.plan.nbytes
        if home not in homes:
            homes[home] = aligned_array(TensorType(u8, (nbytes,)))
        yield type.over(homes[home][at:])


def _depth(steps: Steps, most: int) -> int:
    """Return the greatest depth of calls: `most` where functions call themselves."""
    depths: dict[int, int] = {}

    def of(index: int, above: tuple[int, ...]) -> int:
        if index in above:
            return most
        if index not in depths:
            inner = [of(each, (*above, index)) for each in steps.functions[index].calls]
            depths[index] = min(1 + max(inner), most) if inner else 0
        return depths[index]

    return of(0, ())


def _sources(
    folder: Path, files: Sequence[str], threads: int, has_lengths: bool
) -> dict[Path, str | bytes]:
    """Create the folders of the package in `folder`, and return the sources to compile."""
    plan = NATIVE / "src" / "plan"
    if not plan.is_dir():
        raise CannotBuild(f"the C sources are missing in {plan}; reinstall mlvm")
    sources = [plan / f"{name}.c" for name in (*PLAN, *["formulas"] * has_lengths)]
    sources += [*plan.glob("*.h"), *plan.glob("kernels/*.h"), *plan.glob("kernels/*.def")]
    sources += [plan / "kernels" / f"{name}.c" for name in files]
    runtime = ["built.h", "lanes.h", "lanes.c", "step.c", "command.c"]
    sources += [HERE / "src" / name for name in (*runtime, "step_threads.h")]
    sources += [HERE / "src" / "threads.c"] * (threads > 1)
    sources.append(NATIVE.parent / "mlvm.h")
    copies = {folder / "mlvm" / file.relative_to(PACKAGE): file for file in sources}
    for copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
    return {copy: file.read_bytes() for copy, file in copies.items()}


_C_WORDS: Final = (
    " alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t "
    "char16_t char32_t class co_await co_return co_yield compl concept const const_cast "
    "consteval constexpr constinit continue decltype default delete do double dynamic_cast "
    "else enum explicit export extern false float for friend goto if inline int int64_t long "
    "mutable namespace new noexcept not not_eq nullptr offsetof operator or or_eq private "
    "protected public register reinterpret_cast requires restrict return short signed sizeof "
    "static static_assert static_cast struct switch template this thread_local throw true try "
    "typedef typeid typename typeof typeof_unqual union unsigned using virtual void volatile "
    "wchar_t while xor xor_eq linux unix NULL "
)
"""Words that no member has, in C and in C++."""

_C_TYPES: Final = {
    "bool": "uint8_t",
    "f32": "float",
    "f64": "double",
    "c64": "float",
    "c128": "double",
    "f16": "uint16_t",
    "bf16": "uint16_t",
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"i{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
}


def _header(step: SavedStep, sets: Sequence[str], threads: int, title: str) -> str:
    results = [each.type for each in step.results]
    by_lengths = "" if step.open is None else " at the lengths of the call before saving"
    fields = {}
    for name, types, texts in (
        ("input", step.inputs, step.input_types),
        ("output", results, [f"{type}{by_lengths}" for type in results]),
    ):
        rows = [
            f"    const {_C_TYPES.get(type.dtype.name, 'uint8_t')} *{name}{i}; /* {text} */\n"
            for i, (type, text) in enumerate(zip(types, texts, strict=True))
        ]
        fields[f"{name.upper()}S"] = "".join(rows) or f"    const void *no_{name};\n"
    safe = title.replace("*/", "* /").encode("ascii", "backslashreplace").decode()
    more = {"LENGTHS": _lengths(step.open), "SETS": ", ".join(sets), "THREADS": threads}
    return _filled("step.h.in", TITLE=safe, **fields, **more)


def _filled(template: str, **fields: object) -> str:
    """Return a template of `src/` with field names such as @SETS@ replaced by the values."""
    text = (HERE / "src" / template).read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: str(fields[match[1]]), text)


def _lengths(opened: OpenStep | None) -> str:
    """Return the declarations of a step's sizes."""
    if opened is None:
        return ""
    fields: dict[str, str] = {}
    for each in opened.lengths:
        name = re.sub(r"\W", "_", each.name, flags=re.ASCII)
        while re.match(r"\d|_[A-Z_]|$", name) or name in fields or f" {name} " in _C_WORDS:
            name = f"n_{name}"
        fields[name] = f"    int64_t {name}; /* 1 to {each.at_most} */\n"
    return _filled("lengths.h.in", COUNT=len(fields), FIELDS="".join(fields.values())) + "\n"


def _described(
    step: SavedStep, axes: Mapping[tuple[int, int], int], sets: Sequence[str], threads: int
) -> str:
    """Return the description of the step for the command line, in C."""
    results = [each.type for each in step.results]
    lengths: list[str] = []

    def rows_of(
        types: Sequence[TensorType], axes: Mapping[tuple[int, int], int], names: Iterable[object]
    ) -> list[str]:
        rows = []
        for i, (type, name) in enumerate(zip(types, names, strict=True)):
            shape = type.array_shape  # the shape of the numpy array
            text = ", ".join(map(str, shape)) + "," * bool(shape)
            descr = type.dtype.numpy.str if type.dtype.name != "bf16" else "<V2"
            numbers = [axes.get((i, k), -1) for k in range(len(shape))]
            has = any(n >= 0 for n in numbers)
            if has:
                lengths.append(array(f"static const int step_lengths{i}[]", map(str, numbers)))
            rows.append(
                f"{{{string(str(name))}, {string(descr)}, {string(text)}, {type.nbytes}, "
                f"{type.dtype.numpy.itemsize}, {f'step_lengths{i}' if has else 'NULL'}}}"
            )
        return rows or ['{"", "", "", 0, 0, NULL}']

    inputs = rows_of(step.inputs, axes, step.input_types)
    takes = ", ".join(map(str, step.input_types)) or "none"
    of_lengths = step.open.lengths if step.open is not None else ()
    spelled = ", ".join([f"{x.name} 1 to {x.at_most}" for x in of_lengths])
    outputs = rows_of(results, {}, results)
    declared = _filled(
        "described.h.in",
        TAKES=string(takes),
        TAKES_LENGTHS=string(spelled),
        SETS=string(", ".join(sets)),
        THREADS=threads,
        NINPUTS=len(step.inputs),
        NOUTPUTS=len(results),
        NLENGTHS=len(of_lengths),
    )
    for name, rows in (("input", inputs), ("output", outputs)):
        lengths.append(array(f"static const TensorSpec step_{name}_specs[]", rows))
    return declared + "\n".join(lengths)


def _makefile(
    target: Target,
    sets: Sequence[str],
    files: Sequence[str],
    embed: bool,
    threads: int,
    has_lengths: bool,
) -> str:
    own = ["tables.c", *["weights.c"] * embed]
    own += [f"{_RUNTIME}/{name}.c" for name in ("step", "lanes")]
    own += [f"{_RUNTIME}/threads.c"] * (threads > 1)
    own += [f"{_PLAN}/{name}.c" for name in (*PLAN, *["formulas"] * has_lengths)]
    zig = "ZIG" in target.compiler
    rules = [
        f"made/{name}/%.o: {_PLAN}/kernels/%.c used.h\n\t@mkdir -p $(@D)\n\t$(CC) $(FLAGS) "
        f"{OPTIONS[name]} -DTARGET={name} -DWANTED='\"used.h\"' -c -o $@ $<\n\n"
        for name in sets
    ]
    return _filled(
        "Makefile.in",
        WRITTEN=_WRITTEN,
        ZIG="ZIG = python -m ziglang\n" * zig,
        CC=target.compiler,
        AR=f"{'$(ZIG) ' * zig}ar",
        FLAGS=target.flags,
        PTHREAD=" -pthread" * (threads > 1),
        LINK=target.linking,
        OWN=" ".join(own),
        KERNELS=" ".join(files),
        OBJECTS="".join([f" $(KERNELS:%=made/{name}/%.o)" for name in sets]),
        SUFFIX=target.suffix,
        THREADED=" -DSTEP_THREADS" * (threads > 1),
        RULES="".join(rules),
    )
