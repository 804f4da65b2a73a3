"""The tensor ops, a file a room. Importing this package fills `mlvm.core.op.OPS`."""

from mlvm.core.ops import elementwise as elementwise
