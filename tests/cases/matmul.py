"""Cases of the matrix products, as einsum with the axes spelt out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case, Draws

_f64 = Draws(3).f64


def _einsum(subscripts: str) -> Callable[..., Array]:
    def expected(x: Array, y: Array, **_: bool) -> Array:
        return np.asarray(np.einsum(subscripts, x, y, optimize=False))

    return expected


def _z(*shape: int) -> Array:
    return _f64(*shape) + 1j * _f64(*shape)


_T_X, _T_Y = {"transpose_x": True}, {"transpose_y": True}
_INTS = np.arange(6, dtype=np.int8).reshape(2, 3) * 20, np.arange(6, dtype=np.int32).reshape(3, 2)

CASES: dict[str, list[Case]] = {
    "matmul": [
        Case((_f64(3), _f64(3)), _einsum("k,k->")),
        Case((_f64(3), _f64(3, 2)), _einsum("k,kn->n")),
        Case((_f64(4, 3), _f64(3)), _einsum("mk,k->m")),
        Case((_f64(2, 4, 3), _f64(3)), _einsum("bmk,k->bm")),
        Case((_f64(3), _f64(2, 3, 4)), _einsum("k,bkn->bn")),
        Case((_f64(4, 3), _f64(3, 2)), _einsum("mk,kn->mn")),
        Case((_f64(3, 4), _f64(3, 2)), _einsum("km,kn->mn"), _T_X),
        Case((_f64(4, 3), _f64(2, 3)), _einsum("mk,nk->mn"), _T_Y),
        Case((_f64(3, 4), _f64(2, 3)), _einsum("km,nk->mn"), {**_T_X, **_T_Y}),
        Case((_f64(2, 5, 4, 3), _f64(3, 2)), _einsum("abmk,kn->abmn")),
        Case((_f64(2, 4, 3), _f64(5, 3)), _einsum("bmk,nk->bmn"), _T_Y),
        Case((_f64(2, 3, 4), _f64(3, 5)), _einsum("bkm,kn->bmn"), _T_X),
        Case((_f64(2, 3, 4), _f64(3)), _einsum("bkm,k->bm"), _T_X),
        Case((_f64(3), _f64(2, 4, 3)), _einsum("k,bnk->bn"), _T_Y),
        Case((_f64(3, 4), _f64(2, 3, 5)), _einsum("km,bkn->bmn"), _T_X),
        Case((_f64(2, 1, 4, 3), _f64(3, 5, 3)), _einsum("aimk,bnk->abmn"), _T_Y),
        Case((_f64(2, 3, 4), _f64(2, 5, 3)), _einsum("bkm,bnk->bmn"), {**_T_X, **_T_Y}),
        Case((_f64(4, 3).astype("f"), _f64(3, 2).astype("f")), _einsum("mk,kn->mn")),
        Case((_f64(4, 3).astype("f"), _f64(3, 2)), _einsum("mk,kn->mn")),
        Case(_INTS, _einsum("mk,kn->mn")),
        Case((_z(3), _f64(2, 3, 4)), _einsum("k,bkn->bn")),
        Case((_z(2, 3, 4), _z(5, 3)), _einsum("bkm,nk->bmn"), {**_T_X, **_T_Y}),
        Case((_INTS[0].astype("i8"), _f64(3, 2).astype("f")), lambda x, y: x.astype("f") @ y),
    ],
    "batch_contract": [
        Case((_f64(4, 3), _f64(3, 2)), _einsum("mk,kn->mn")),
        Case((_f64(5, 4, 3), _f64(5, 3, 2)), _einsum("bmk,bkn->mn")),
        Case((_f64(5, 3, 4), _f64(5, 3, 2)), _einsum("bkm,bkn->mn"), _T_X),
        Case((_f64(2, 5, 4, 3), _f64(2, 5, 2, 3)), _einsum("abmk,abnk->mn"), _T_Y),
        Case((_f64(5, 3, 4), _f64(5, 2, 3)), _einsum("bkm,bnk->mn"), {**_T_X, **_T_Y}),
        Case((_f64(5, 3, 4).astype("f"), _f64(5, 3, 2).astype("f")), _einsum("bkm,bkn->mn"), _T_X),
    ],
}
