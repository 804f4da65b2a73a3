"""mlvm: an eager tensor language over a small stack machine.

`import mlvm.eager as ml` is the language; `mlvm.arena` its memory, `mlvm.core` the machine.
"""

__version__ = "0.1.0"
