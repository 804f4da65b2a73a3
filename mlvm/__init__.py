"""mlvm: an eager tensor language over a small stack machine.

`import mlvm.eager as ml` is the language; `mlvm.arena` its memory, `mlvm.core` the machine.
"""

import sys as _sys

__version__ = "0.2.0"


def _where(name: str) -> str:
    return f"mlvm has no {name}; the language is mlvm.eager: import mlvm.eager as ml, ml.{name}"


def __getattr__(name: str) -> object:
    raise AttributeError(_where(name), name=name)


class _Finder:
    """Last finder of modules, which says where the language is to `from mlvm import nn`."""

    @staticmethod
    def find_spec(path: str, *args: object) -> None:
        package, _, name = path.partition(".")
        if package == __name__ and name and "." not in name:
            raise ImportError(_where(name), name=path)


_sys.meta_path.append(_Finder)
