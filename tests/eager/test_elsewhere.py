"""Names of other libraries say what they are called here."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.eager.elsewhere import FUNCTIONS, METHODS

NAMESPACES = {name: getattr(ml, name) for name in dir(ml)}
NAMESPACES = {name: each for name, each in NAMESPACES.items() if isinstance(each, ModuleType)}
HINTS = [(f"x.{name}", hint) for name, hint in METHODS.items()]
HINTS += [(f"{m}.{name}", hint) for m, names in FUNCTIONS.items() for name, hint in names.items()]


def test_what_a_hint_names_exists() -> None:
    x, y = ml.ones((2, 2)), ml.ones(2)
    named = 0
    for name, hint in HINTS:
        for start, path in re.findall(r"\b(ml|x|y)\.([a-z_]\w*(?:\.\w+)*)", hint, re.IGNORECASE):
            found: Any = {"ml": ml, "x": x, "y": y}[start]
            for part in path.split("."):
                assert hasattr(found, part), (name, hint)
                found = getattr(found, part)
            named += 1
    assert named > len(HINTS) / 2


@pytest.mark.parametrize("module", FUNCTIONS)
def test_a_name_from_elsewhere_is_none_of_the_module(module: str) -> None:
    [found] = [each for each in (ml, *NAMESPACES.values()) if each.__name__ == module]
    for name, hint in FUNCTIONS[module].items():
        with pytest.raises(AttributeError, match=f"^{module} has no {name}; {re.escape(hint)}$"):
            getattr(found, name)
        assert not hasattr(found, name)


def test_a_method_from_elsewhere_is_none_of_a_tensor() -> None:
    x = ml.ones(2)
    for name, hint in METHODS.items():
        with pytest.raises(AttributeError, match=f"^a Tensor has no {name}; {re.escape(hint)}$"):
            getattr(x, name)


def test_a_mistyped_name() -> None:
    untyped: Any = ml
    with pytest.raises(
        AttributeError, match=r"^mlvm\.eager has no sotfmax; did you mean softmax\?"
    ):
        untyped.sotfmax  # noqa: B018
    with pytest.raises(AttributeError, match=r"^mlvm\.eager\.nn has no Liner; did you mean Linear"):
        untyped.nn.Liner  # noqa: B018
    with pytest.raises(AttributeError, match=r"^mlvm\.eager has no zzz$"):
        untyped.zzz  # noqa: B018


@pytest.mark.parametrize("name", ["", *NAMESPACES])
def test_a_namespace_lists_what_is_public(name: str) -> None:
    import mlvm.eager.stub  # noqa: F401  (leaves a name in the package)

    module = NAMESPACES[name] if name else ml
    assert sorted(dir(module)) == sorted(module.__all__)
    for each in dir(module):
        assert not isinstance(getattr(module, each), ModuleType) or each in NAMESPACES


def test_modules_of_the_package_are_still_found() -> None:
    from mlvm.eager import primitives, tensor

    assert sys.modules["mlvm.eager.tensor"] is tensor
    assert primitives.__name__ == "mlvm.eager.primitives"
