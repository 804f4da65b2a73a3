"""mlvm's eager language: `import mlvm.eager as ml`.

Names and signatures are those of the Python Array API standard, JAX's where it is silent.
Tensors are values on a VM; `with arena:` says where results are allocated; `grad` and
`value_and_grad` differentiate; `ml.nn`, `ml.optim` and `ml.random` are what training needs.
"""

from typing import TYPE_CHECKING

from mlvm.eager import primitives, public
from mlvm.eager.elsewhere import hint_at
from mlvm.eager.primitives import *  # noqa: F403
from mlvm.eager.public import *  # noqa: F403

if not TYPE_CHECKING:  # mypy reads no list but a literal one; it follows the imports instead
    __all__ = [*primitives.__all__, *public.__all__]

hint_at(public.Tensor, primitives, public)
