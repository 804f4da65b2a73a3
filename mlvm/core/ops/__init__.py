"""Tensor ops, one file per family; importing the package fills `mlvm.core.op.OPS`."""

from mlvm.core.ops import bessel as bessel
from mlvm.core.ops import creation as creation
from mlvm.core.ops import decompositions as decompositions
from mlvm.core.ops import elementwise as elementwise
from mlvm.core.ops import fft as fft
from mlvm.core.ops import incomplete as incomplete
from mlvm.core.ops import indexing as indexing
from mlvm.core.ops import lanes as lanes
from mlvm.core.ops import layout as layout
from mlvm.core.ops import matmul as matmul
from mlvm.core.ops import neural as neural
from mlvm.core.ops import packed as packed
from mlvm.core.ops import quantized as quantized
from mlvm.core.ops import random as random
from mlvm.core.ops import recurrent as recurrent
from mlvm.core.ops import reduction as reduction
from mlvm.core.ops import special as special
from mlvm.core.ops import windows as windows
