from mlvm.eager.primitives import *
from mlvm.eager.autodiff import grad, value_and_grad, vjp
from mlvm.eager.tensor import from_array as asarray
from mlvm.arena.arena import Arena
