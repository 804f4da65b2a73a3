"""Blocks that set a field of the context, such as a dtype."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import ContextDecorator
from functools import partial, wraps
from typing import Any, ClassVar, TypeAlias, TypeVar

from mlvm.arena.context import current, set_context
from mlvm.core.errors import ArgumentError, brief

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Blocks: TypeAlias = tuple[tuple[object, T], ...]
"""Open blocks with the values that they set, the innermost last."""


def without_block(blocks: Blocks[T], block: object) -> Blocks[T]:
    """Return the open blocks without the last entry of `block`."""
    for i in reversed(range(len(blocks))):
        if blocks[i][0] is block:
            return blocks[:i] + blocks[i + 1 :]
    return blocks


class OpenBlocks:
    """Base of context managers that add a value to a list of open blocks in the context.

    Each thread and task has a separate list of open blocks. They may be left in any order, because
    a generator may leave a block late. An object can be entered several times. An interrupt while a
    block is entered or left leaves no block behind.

    _blocks: the field of the context that contains the open blocks with values.
    """

    _blocks: ClassVar[str]

    def _enter(self, value: object) -> None:
        before = self._open()
        try:
            self._set(*before, (self, value))
        except BaseException:  # an interrupt
            self._set(*before)
            raise

    def __exit__(self, *_: object) -> None:
        remaining: Blocks[Any] | None = None
        try:
            remaining = without_block(self._open(), self)
            self._set(*remaining)
        except BaseException:  # an interrupt
            self._set(*(without_block(self._open(), self) if remaining is None else remaining))
            raise

    @classmethod
    def _open(cls) -> Blocks[Any]:
        blocks: Blocks[Any] = getattr(current(), cls._blocks)
        return blocks

    @classmethod
    def _set(cls, *blocks: tuple[object, Any]) -> None:
        set_context(**{cls._blocks: blocks})


class ContextBlock(OpenBlocks, ContextDecorator):
    """Context manager and decorator that sets a field of the context to `dtype`.

    _field: the field. The field `<_field>s` contains the open blocks. The first entry is the value
    outside of all blocks.
    """

    _field: ClassVar[str]
    dtype: Any

    def __init_subclass__(cls) -> None:
        cls._blocks = f"{cls._field}s"

    def __enter__(self) -> None:
        self._enter(self.dtype)

    @classmethod
    def set_innermost(cls, value: object) -> None:
        """Set the value in the innermost block, or outside of all blocks."""
        *outer, (block, _) = cls._open()
        cls._set(*outer, (block, value))

    @classmethod
    def _set(cls, *blocks: tuple[object, Any]) -> None:
        set_context(**{cls._blocks: blocks, cls._field: blocks[-1][1]})

    def __call__(self, func: F) -> F:
        """Decorate a function so that it runs in such a block."""
        if inspect.isclass(func) or inspect.isasyncgenfunction(func):
            raise ArgumentError(
                f"{type(self).__name__}: expected a function or generator to decorate, got "
                f"{'a class: decorate its __call__' if inspect.isclass(func) else brief(func)}"
            )
        result: Any = super().__call__(func)
        if inspect.isgeneratorfunction(func):

            @wraps(func)
            def result(*args: Any, **keywords: Any) -> Any:
                return (yield from _run_in(self, func(*args, **keywords)))

        elif inspect.iscoroutinefunction(func):

            @wraps(func)
            async def result(*args: Any, **keywords: Any) -> Any:
                with self:
                    return await func(*args, **keywords)

        return result  # type: ignore[no-any-return]


def _run_in(block: ContextBlock, inner: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a generator, but not the code that iterates over it, in the block."""
    resume = partial(next, inner)
    while True:
        with block:
            try:
                value = resume()
            except StopIteration as end:
                return end.value
        try:
            resume = partial(inner.send, (yield value))
        except GeneratorExit:
            with block:
                inner.close()
            raise
        except BaseException as error:  # raised by `throw` of the iterating code
            resume = partial(inner.throw, error)
