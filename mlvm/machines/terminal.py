"""Help, standard streams and exit statuses of commands: the same for every `python -m` of mlvm."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import select
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from mlvm.core.errors import ArgumentError, MlvmError, brief, did_you_mean, notes_of
from mlvm.core.sizes import parse_count, parse_size

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def whole_number(text: str) -> int:
    """Read a whole number above 0, such as 3, 64M or "64 MiB", for `add_argument`."""
    try:
        return parse_size(text, "")
    except ArgumentError:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to 2**63 - 1, got {brief(text)}; the units are "
            f"K, M, G, T, KiB ... TiB and kB ... TB, as in 4G"
        ) from None


def count(text: str) -> int:
    """Read a number of at least 0, for `add_argument`."""
    if (number := parse_count(text)) is None:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at most 18 digits, got {brief(text)}"
        )
    return number


REPEATED: Final[Any] = {"action": "append", "default": []}
"""Arguments of `add_argument` for an option that may be repeated."""


def unknown(what: str, value: object, names: Iterable[Any]) -> str:
    """Return an error message with the most similar name and all names."""
    texts = [*map(str, names)]
    hint = did_you_mean(str(value), texts)
    return f"unknown {what} {value!r}{hint}; expected one of {', '.join(texts)}"


class OptionError(MlvmError, ValueError):
    """Error for an option of a command or function that is unknown or out of range."""


Work = Callable[[Any], int | None]
"""Function of a command: accepts the options, and may return an exit status."""


class CommandParser(argparse.ArgumentParser):
    """Parser of a command, which calls `work` with the options.

    The docstring of `work` is the help text: a sentence, details, and examples. Errors name the
    most similar option or value. With `has_script`, arguments after `--` belong to a script.
    """

    def __init__(self, work: Work, *, has_script: bool = False, **options: Any) -> None:
        text, _, examples = (inspect.getdoc(work) or "").partition("\n\nExample")
        super().__init__(
            description=text, epilog=f"example{examples}", formatter_class=_Help, **options
        )
        self._has_script = has_script
        self.set_defaults(work=work, parser=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [*(sys.argv[1:] if args is None else args)]
        end = words.index("--") if self._has_script and "--" in words else len(words)
        options, unknown = super().parse_known_args(words[:end], namespace)
        if self._has_script:
            options.arguments = words[end + 1 :]
        if unknown:
            text = f"unrecognized arguments: {shlex.join(unknown)}"
            text += did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            script = next((i for i, word in enumerate(words, 1) if word.endswith(".py")), 0)
            if self._has_script and script:
                call = f"{self.prog} {shlex.join([*words[:script], '--', *words[script:]])}"
                text += f"; those of a script follow --: {call}"
            self.error(text)
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown("value", value, action.choices))

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Parse the arguments, run the command, and return the exit status of `run_command`.

        For bad usage, including `OptionError`, the program exits with status 2.
        """

        def work() -> int | None:
            options = self.parse_args(arguments)
            call, parser = (vars(options).pop(name) for name in ("work", "parser"))
            try:
                status: int | None = call(options)
            except OptionError as error:
                parser.error(escaped(str(error)))
            return status

        return run_command(work)


def add_command(commands: Any, name: str, work: Work, **options: Any) -> CommandParser:
    """Add a command to the subparsers of a `CommandParser`, and return its parser."""
    summary = " ".join((inspect.getdoc(work) or "").partition("\n\n")[0].split()).rstrip(".")
    text = summary[:1].lower() + summary[1:]
    parser: CommandParser = commands.add_parser(name, work=work, help=text, **options)
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help text that shows defaults, and examples as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example"):
            return text
        fill = super()._fill_text
        return "\n\n".join(fill(part, width, indent) for part in text.split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_known = type(action.default) in (int, float, str) and "default:" not in str(action.help)
        return super()._get_help_string(action) if is_known else action.help

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        text = super()._format_args(action, default_metavar)
        return f"{action.metavar} ..." if action.nargs == argparse.REMAINDER else text


def run_command(work: Callable[[], int | None]) -> int:
    """Run a command and return the exit status: 0, 1 for an error, 130 after Ctrl-C.

    The result of `work`, or the `status` of an error, replaces these values. An error is one line
    on stderr. Characters that stdout cannot encode are escaped. If the reader of stdout closes the
    pipe, as `head` does, the command exits with status 0. Output to a closed stream is discarded.
    """
    open_streams()
    status, leaving = 0, None
    try:
        status = work() or 0
    except SystemExit as exit:  # raised by --help, or for invalid usage
        leaving = exit
    except (MlvmError, OSError, MemoryError) as error:
        if not is_reader_gone(error):
            say(f"error: {one_line(error)}")
            status = getattr(error, "status", 1)
    except KeyboardInterrupt:
        say("interrupted")
        status = INTERRUPTED
    failed = _flushed()
    if failed is not None:  # discard the rest, or the flush at exit fails as well
        _discard(sys.stdout.fileno())
        if not isinstance(failed, BrokenPipeError):
            say(f"error: standard output: {one_line(failed)}")
            return status or 1
    if leaving is not None:
        raise leaving
    return status


def is_reader_gone(error: Exception) -> bool:
    """Return whether the error means that the reader of stdout has closed the pipe."""
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # Windows has no `poll`
        return True
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def open_streams() -> None:
    """Escape characters that stdout cannot encode, and open closed streams as null devices."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(number)
            except OSError:  # otherwise the next opened file would get the number of a stream
                _discard(number)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard(number: int) -> None:
    """Make the null device the file of a descriptor."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def _flushed() -> OSError | None:
    """Flush stdout, and return the error if that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def say(line: str) -> None:
    """Write a line to stderr. Characters that a terminal might interpret are escaped."""
    print(escaped(line), file=sys.stderr, flush=True)


def escaped(text: str) -> str:
    """Escape characters that a terminal might interpret, such as a newline as `\\n`."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: Exception) -> str:
    """Return the text and the notes of an error as one line."""
    if isinstance(error, OSError) and error.strerror:
        file = "" if error.filename is None else f"{os.fspath(error.filename)}: "
        text = f"{file}{error.strerror}"
    else:
        text = str(error) or "out of memory"
    return " ".join("; ".join([text, *notes_of(error)]).splitlines())
