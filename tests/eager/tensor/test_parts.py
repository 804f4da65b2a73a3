"""Updates of parts of tensors: those that are lost warn, and others do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import mlvm.eager as ml
from tests.brief import cases


def add_to_diagonal(a: Any, by: float) -> None:
    for i in range(a.shape[0]):
        a[i, i] = a[i, i] + by


def zero_first(a: Any, *, to: float = 0.0) -> None:
    total = ml.sum(a)
    a[0] = to
    assert total.shape == ()


def double(a: Any) -> None:
    a *= 2.0


def doubled(a: Any) -> Any:
    a[0] = 2.0
    return a


def put_away(a: Any, shelf: list[Any]) -> None:
    a[0] = 2.0
    shelf.append(a)


def replaced(a: Any) -> None:
    a = a + 1.0
    a[0] = 2.0


def closed_over(a: Any) -> None:
    def inner() -> Any:
        return a

    a[0] = 2.0
    assert inner() is a


def lost_in_a_function(x: Any) -> None:
    add_to_diagonal(x[0, :, :], 1.0)


def lost_with_a_keyword(x: Any) -> None:
    zero_first(a=x[0], to=1.0)


def lost_by_an_operator(x: Any) -> None:
    double(ml.reshape(x, -1))


def lost_after_unpacking(x: Any) -> None:
    first, _ = x
    first[first == 0.0] = 1.0


def lost_after_unpacking_a_view(x: Any) -> None:
    first, _ = ml.reshape(x, (2, -1))
    first[0] = 1.0


def lost_before_the_whole_is_read(x: Any) -> Any:
    y = x + 0.0
    turned = y.T
    turned[0] = 1.0
    return y


def lost_to_a_flat_name(x: Any) -> Any:
    y = x + 0.0
    flat = ml.reshape(y, (-1,))
    flat[::4] = 1.0
    return y * 2.0


def has_effect_in_a_function(x: Any) -> None:
    y = x[0]
    add_to_diagonal(y, 1.0)
    assert float(ml.sum(y)) == 3.0


def has_effect_by_the_result(x: Any) -> None:
    x[0] = doubled(x[0])


def has_effect_on_a_shelf(x: Any) -> None:
    put_away(x[0], [])


def has_another_value(x: Any) -> None:
    replaced(x[0])


def has_effect_in_a_closure(x: Any) -> None:
    closed_over(x[0])


def has_effect_on_a_named_row(x: Any) -> None:
    row = x[0]
    row[0] = 1.0


def has_effect_on_a_part_alone(x: Any) -> Any:
    flat = ml.reshape(x + 0.0, (-1,))
    flat[0] = 1.0
    return flat


def has_effect_on_rows_of_a_temporary(x: Any) -> None:
    first, _ = ml.reshape(x + 0.0, (2, -1))
    first[0] = 1.0


HERE = [value for name, value in globals().items() if name.startswith(("lost_", "has_"))]


@cases("function", *HERE)
def test_updates_that_are_lost_warn(function: Callable[..., Any]) -> None:
    x = ml.zeros((2, 9) if "whole" in function.__name__ else (2, 3, 3))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            function(x)
        texts = [str(each.message) for each in told]
        if function.__name__.startswith("has_"):
            assert not texts
        else:
            assert texts, "no warning"
            assert all("its update changes no other tensor" in text for text in texts)
            assert {each.filename for each in told} == {__file__}
            assert {each.category for each in told} == {ml.NoEffectWarning}
