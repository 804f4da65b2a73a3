"""Deep-learning library that makes memory visible, on top of a stack virtual machine.

`mlvm.eager` is the eager language (`import mlvm.eager as ml`), `mlvm.arena` contains named memory,
and `mlvm.core` contains the virtual machine.
"""

import sys as _sys

__version__ = "0.3.0.dev0"


def _where(name: str) -> str:
    return f"mlvm has no {name}; the language is mlvm.eager: import mlvm.eager as ml, ml.{name}"


def __getattr__(name: str) -> object:
    raise AttributeError(_where(name), name=name)


class _Finder:
    """Last module finder, whose error for `from mlvm import nn` names mlvm.eager."""

    @staticmethod
    def find_spec(path: str, *args: object) -> None:
        package, _, name = path.partition(".")
        if package == __name__ and name and "." not in name:
            raise ImportError(_where(name), name=path)


_sys.meta_path.append(_Finder)
