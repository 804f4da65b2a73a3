NON_DIFFERENTIABLE=None
from mlvm.eager import primitives as op
from mlvm.eager import functions as fn
VJPS = {
 "add": dict(x=lambda g: g, y=lambda g: g),
 "multiply": dict(x=lambda g, y: g*y, y=lambda g, x: g*x),
 "sum": dict(x=lambda g, x_type, axis, keepdims: op.broadcast_to(g, shape=x_type.shape)),
 "copy": dict(x=lambda g: g),
}
