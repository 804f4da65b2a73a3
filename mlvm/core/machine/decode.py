"""Decoder from stack code to instructions with operands and results, in basic blocks.

Stack code is the public form of a program: it is written, verified and sent. A reader of a program
needs the operands of a call, but not the stack operations that push them. `Code.block` follows the
stack through one basic block and leaves out the pushes:

    load_arg 1; get 0; push_str "add"; cfunc 2 1; set 0      ->
    cfunc "add" (load_arg 1, slot 0) -> Result(3, 0);  set slot 0 to Result(3, 0)

A reference to an operand is one of the following. An `Instruction` is a push of a value that the
code contains: `load_arg`, `push_const`, `push_int` or `push_str`. An int is the number of a frame
slot, as in `get`, and refers to the slot's value at the start of the block. A `Result` refers to
the result of a call in the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import counted
from mlvm.core.locks import cached_property
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.program.program import STAR, Function, Instruction, Opcode, Program

_PUSHES: Final = frozenset({Opcode.load_arg, Opcode.push_str, Opcode.push_const, Opcode.push_int})
FEW: Final = 32  # maximum number of results of a call with individual references


class Result(NamedTuple):
    """Reference to result `number` of the call at `pc`."""

    pc: int
    number: int


Ref: TypeAlias = int | Instruction | Result
Count: TypeAlias = Callable[[str | None], int | None]


class Decoded(NamedTuple):
    """Decoded instruction; those that only push or drop a value are left out.

    Attributes:
        kind: the opcode's name.
        pc, start: the pc of the instruction, and the first pc after the previous decoded one.
        operands: the values that it pops, in order. None: the number is unknown, as for a `halt`.
        results: number of results that it pushes. None: known only at run time.
        callee: the function's name for a `call`; a reference to the name for a `cfunc`.
        attributes: the attributes of a `cfunc`.
        at: the slot of a `set`, the target pc of a jump, or the declared results of a `cfunc`.
        fault: the error in the use of the stack or in immediates, which terminates the block.
    """

    kind: str
    pc: int
    start: int
    operands: Sequence[Ref] | None = ()
    results: int | None = 0
    callee: Any = None
    attributes: Attributes = NO_ATTRIBUTES
    at: Any = None
    fault: str | None = None

    @property
    def name(self) -> str | None:
        """Return the name of the host function that a `cfunc` calls; None if it is computed."""
        return _immediate(self.callee, Opcode.push_str)  # type: ignore[no-any-return]

    @property
    def arguments(self) -> list[int] | None:
        """Return the argument indices of the launch if all operands are arguments; else None."""
        numbers = [*map(argument_of, self.operands or ())]
        return None if self.operands is None or None in numbers else numbers  # type: ignore[return-value]


class Block(NamedTuple):
    """Basic block: the instructions from pc `start` to before `end`.

    The effect of the block on the frame: slots from `low` on are dropped, the slots in `changed`
    are set, and the values in `pushed` are pushed. `many` results of the last instruction follow,
    and any number of unknown values if the block `is_open`. `goes_on` is true if execution may
    continue with the next block.
    """

    start: int
    end: int
    code: tuple[Decoded, ...]
    low: int
    changed: tuple[tuple[int, Ref], ...]
    pushed: tuple[Ref, ...]
    many: int
    is_open: bool
    goes_on: bool

    @property
    def height(self) -> int:
        """Return the number of known values above base at the end."""
        return self.low + len(self.pushed) + self.many


def argument_of(ref: Ref | None) -> int | None:
    """Return the number of the launch's argument that an operand refers to, or None."""
    return _immediate(ref, Opcode.load_arg)  # type: ignore[no-any-return]


def _immediate(ref: Any, opcode: Opcode) -> Any:
    return ref.immediates[0] if ref.__class__ is Instruction and ref.opcode is opcode else None


@dataclass
class Code:
    """Function that is decoded block by block.

    targets: the pcs of the jump targets.
    blocks: the decoded blocks by first pc.
    """

    function: Function
    functions: dict[str, Function]
    count: Count = lambda name: None
    blocks: dict[int, Block] = field(default_factory=dict)

    @cached_property
    def targets(self) -> set[int]:
        return self.function.targets

    def block(self, start: int, height: int) -> Block:
        """Decode the block that starts there, with that number of values above base."""
        if start not in self.blocks:
            self.blocks[start] = _Decoder(self, start, height).run()
        return self.blocks[start]

    def __iter__(self) -> Iterator[Block]:
        """Yield all blocks by first pc, including unreachable blocks."""
        code, todo, heights = self.function.code, [0], {0: 0}
        while todo:
            block = self.block(todo[-1], heights[todo.pop()])
            targets = [each.at for each in block.code if "jump" in each.kind]
            for pc in [*targets, block.end] if block.goes_on else targets:
                if isinstance(pc, int) and pc not in heights and 0 <= pc < len(code):
                    heights[pc] = block.height
                    todo.append(pc)
        pc = 0
        while pc < len(code):
            block = self.block(pc, 0)
            yield block
            pc = block.end

    def instructions(self) -> Iterator[Decoded]:
        """Yield all instructions except pushes and pops, by pc."""
        return (each for block in self for each in block.code)


def decode(program: Program, count: Count = lambda name: None) -> dict[str, Code]:
    """Return the decoded functions of a program; `count` is the number of results by host function.

    >>> from mlvm.core.machine.decode import decode
    >>> from mlvm.core.program.assembly import assemble
    >>> program = assemble('.func main 0 *\\n load_arg 0\\n push_str "exp"\\n cfunc 1 1\\n halt')
    >>> [each.kind for each in decode(program)["main"].instructions()]
    ['cfunc', 'halt']
    """
    functions = program.functions
    return {name: Code(function, functions, count) for name, function in functions.items()}


class _Decoder:
    """Symbolic stack of a block.

    Slots of the frame below `low` have the values from the start of the block, except those in
    `changed`. `stack` is above them; if the stack `is_open`, any number of unknown values is
    between.
    """

    def __init__(self, code: Code, start: int, height: int) -> None:
        self.of, self.start, self.low = code, start, height
        self.nparams = code.function.nparams
        self.changed: dict[int, Ref] = {}
        self.stack: list[Ref] = []
        self.is_open = False
        self.many = 0
        self.decoded: list[Decoded] = []
        self.first = start  # first pc of the next decoded instruction

    def run(self) -> Block:
        code, targets = self.of.function.code, self.of.targets
        stack, goes_on = self.stack, True
        pc = self.start
        for pc in range(self.start, len(code)):
            instruction = code[pc]
            opcode, immediates = instruction
            if opcode in _PUSHES:
                stack.append(instruction)
            else:
                before = len(self.decoded)
                try:
                    goes_on = self.step(pc, opcode, immediates)
                except (TypeError, ValueError, LookupError, AttributeError) as fault:
                    self.decoded.append(Decoded(opcode._name_, pc, self.first, fault=str(fault)))
                    goes_on = False
                if len(self.decoded) > before:
                    self.first = pc + 1
                if not goes_on or opcode is Opcode.jump_if_false or self.many:
                    break
            if pc + 1 in targets:
                break
        end, changed = min(pc + 1, len(code)), tuple(self.changed.items())
        state = self.low, changed, tuple(stack), self.many, self.is_open
        return Block(self.start, end, tuple(self.decoded), *state, goes_on)

    def step(self, pc: int, opcode: Opcode, immediates: tuple[Any, ...]) -> bool:
        """Execute one instruction symbolically; return whether the next instruction may follow."""
        kind, goes_on = opcode._name_, True
        operands: Sequence[Ref] | None = ()
        results: int | None = 0
        callee, attributes, at = None, NO_ATTRIBUTES, None
        if opcode is Opcode.cfunc:
            nparams, at, *rest = immediates
            attributes = rest[0] if rest else NO_ATTRIBUTES
            callee = self.stack.pop() if self.stack else self.pop(1)[0]
            operands = self.everything() if nparams == STAR else self.pop(nparams)
            results = self.of.count(_immediate(callee, Opcode.push_str)) if at == STAR else at
        elif opcode is Opcode.get:
            self.stack.append(self.value(immediates[0]))
            return True
        elif opcode is Opcode.pop:
            self.pop(immediates[0])
            return True
        elif opcode is Opcode.halt:
            operands, goes_on = None, False
        elif opcode is Opcode.call:
            [callee] = immediates
            function = self.of.functions[callee]
            operands, results = self.pop(function.nparams), _results(function)
        elif opcode is Opcode.return_:
            operands, goes_on = self.pop(immediates[0]), False
        elif opcode is Opcode.jump or opcode is Opcode.jump_if_false:
            if self.is_open:
                raise ValueError("expected a stack of known height at this jump")
            [at], goes_on = immediates, opcode is Opcode.jump_if_false
            operands = self.pop(int(goes_on))
        elif opcode is Opcode.set:
            [at] = immediates
            operands = self.pop(1)
            self.value(at)  # raises if the slot does not exist
            values: Any = self.stack if at >= self.low else self.changed
            values[at - self.low if at >= self.low else at] = operands[0]
        elif opcode is Opcode.load_global:
            operands, results = self.pop(1), 1
        else:
            operands = self.pop(1)
            operands = (*self.pop(1), *operands)
        self.decoded.append(
            Decoded(kind, pc, self.first, operands, results, callee, attributes, at)
        )
        if results != 0:
            self.leave(pc, results)
        return goes_on

    def leave(self, pc: int, results: int | None) -> None:
        """Push the results of a call; if the number is unknown, the stack becomes open."""
        if results is None:
            self.changed.update(enumerate(() if self.is_open else self.stack, self.low))
            self.low += 0 if self.is_open else len(self.stack)
            self.stack.clear()
            self.is_open = True
        elif results == 1:
            self.stack.append(Result(pc, 0))
        elif results > FEW and self.is_open:
            self.stack.clear()
        elif results <= FEW:
            self.stack += [Result(pc, i) for i in range(results)]
        else:
            self.many = results

    def pop(self, n: int) -> Sequence[Ref]:
        """Pop n values."""
        at = len(self.stack) - n
        if at < 0:
            height = len(self.stack) + (0 if self.is_open else self.low)
            if n > height:
                qualifier = " known" * self.is_open
                raise ValueError(
                    f"expected {counted(n, 'value')} above base, got {height}{qualifier}"
                )
            if n > FEW and not (self.stack or self.changed):
                self.low -= n
                return range(self.low, self.low + n)
            if n > 1 << 20:
                raise ValueError(f"expected at most {1 << 20} values above base, got {n}")
            self.stack[:0] = [self.value(i) for i in range(self.low + at, self.low)]
            self.low, at = self.low + at, 0
            for i in [i for i in self.changed if i >= self.low]:
                del self.changed[i]
        values = tuple(self.stack[at:])
        del self.stack[at:]
        return values

    def everything(self) -> Sequence[Ref] | None:
        """Pop all values above base; return None if the number is unknown."""
        if self.is_open:
            self.low, self.is_open = 0, False
            self.changed = {i: x for i, x in self.changed.items() if i < 0}
            self.stack.clear()
            return None
        return self.pop(self.low + len(self.stack))

    def value(self, i: int) -> Ref:
        """Return the value of a slot."""
        above = self.low + (0 if self.is_open else len(self.stack))
        if not -self.nparams <= i < above:
            below = f"{counted(self.nparams, 'parameter')} below base"
            raise ValueError(
                f"slot {i} does not exist: {below}, {counted(above, 'value')} above it"
            )
        return self.stack[i - self.low] if i >= self.low else self.changed.get(i, i)


def _results(function: Function) -> int | None:
    """Return the number of results of a function; None if `return`s differ."""
    if function.nresults != STAR:
        return int(function.nresults)
    counts = {each.immediates[0] for each in function.code if each.opcode is Opcode.return_}
    return counts.pop() if len(counts) == 1 else None
