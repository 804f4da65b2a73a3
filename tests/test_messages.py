"""`python -m tests.messages` finds the texts of raises and warnings."""

from __future__ import annotations

from tests import messages


def test_the_texts_of_a_module_are_found() -> None:
    source = (
        "text = f'{a}: expected 2, got {len(b)}'\n"
        "warnings.warn('x ' + y, Kind)\n"
        "raise errors.ShapeError(text) from None\n"
        "raise ValueError(f'no {x!r}')\n"
        "raise ShapeError('no axis').at(op, (x,))\n"
        "raise refusal(x, 'no bytes')\n"
        "raise kind(reason)\n"
        "raise error\n"
        "def damaged(reason): return FileError(f'{reason}; write it again')\n"
        "raise damaged(f'no {x}')\n"
    )
    assert list(messages.of_python(source)) == [
        (2, "warn", "x {y}"),
        (3, "ShapeError", "{a}: expected 2, got {len(b)}"),
        (4, "ValueError", "no {x}"),
        (5, "ShapeError", "no axis"),
        (6, "refusal", "no bytes"),
        (10, "FileError", "no {x}; write it again"),
    ]


def test_messages_of_python_and_c_are_found() -> None:
    files = {place.partition(":")[0].rpartition(".")[2] for place, _, _ in messages.messages()}
    assert files >= {"py", "c"}
