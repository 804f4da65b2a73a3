"""mlvm: an eager tensor language over a small stack machine.

`import mlvm.eager as ml` is the language; `mlvm.arena` its memory, `mlvm.core` the machine.
"""

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"mlvm has no {name}; the language is mlvm.eager: import mlvm.eager as ml, ml.{name}",
        name=name,
    )
