"""Uses of deprecated public names in Python code: positions and replacements.

In: the syntax tree of a file. Out: an `Edit` for each use of a known object, such as `ml.nll` after
`import mlvm.eager as ml`. Also a `Doubt` for each use of an unknown object, such as `x.rate` for a
parameter x. Names are looked up in the scopes of Python. A name that is bound to objects of
different kinds is unknown.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import mlvm.eager as ml
from mlvm.core.errors import with_article
from mlvm.eager import public
from mlvm.renamed import ATTRIBUTES, KEYWORDS, NAMES

T = TypeVar("T")

_MODULES: Final = {
    "mlvm.core.errors": "ml.errors",
    **{room: f"ml.{name}" for name, room in public.SHOWN.items()},
    "mlvm.eager": "ml",
}
"""Modules as users write them. Submodules precede their parents."""
_CLASSES: Final = {"ml.capture": "Captured", "ml.default_vm": "VM", "ml.record": "Recording"}
"""Classes of function results."""
_OLD_ATTRIBUTES: Final = {name for names in ATTRIBUTES.values() for name in names}
_OLD_KEYWORDS: Final = {owner.rpartition(".")[2]: names for owner, names in KEYWORDS.items()}
_WORD: Final = re.compile(r"\w+")
OLD_NAMES: Final = frozenset(name for names in NAMES.values() for name in names)
_PATH: Final = re.compile(r"\w+(\.\w+)+")


class Edit(NamedTuple):
    """Replacement of the text `old` at a line, counted from 1, and a byte offset in the line."""

    line: int
    offset: int
    old: str
    new: str


class Doubt(NamedTuple):
    """Use of a name that may be old, which is not changed."""

    line: int
    text: str


class _Assignment(NamedTuple):
    """Binding of a name: an object of mlvm, the value of an expression, or something else.

    Attributes:
        path: dotted path of an imported module, class or function.
        value, scope: an expression, and the scope that evaluates it.
        is_type: whether the expression is the annotation of the name, not the value.
        owner: for `self`, the scope of the class.
        alias: the part of an import statement that binds the name without `as`.
        is_definition: whether the name is a function or class of the file.
        body: for a class of the file, the scope of the class.
    """

    path: str | None = None
    value: ast.expr | None = None
    scope: _Scope | None = None
    is_type: bool = False
    owner: _Scope | None = None
    alias: ast.alias | None = None
    is_definition: bool = False
    body: _Scope | None = None


class _Scope:
    """Scope of Python, with all assignments to names.

    The scope of a class also contains the bases, and the assignments of fields of `self`, as
    "self.x". Scopes within a class do not see the names of the class.
    """

    def __init__(
        self,
        parent: _Scope | None = None,
        bases: list[ast.expr] | None = None,
        *,
        is_comprehension: bool = False,
    ) -> None:
        self.bases = bases  # None for the scopes of functions and the module
        self.around = parent
        is_in_class = parent is not None and parent.bases is not None
        self.parent: _Scope | None = parent.parent if parent and is_in_class else parent
        self.module: _Scope = parent.module if parent else self
        self.is_comprehension = is_comprehension
        self.names: defaultdict[str, list[_Assignment]] = defaultdict(list)
        self.outer: dict[str, _Scope] = {}  # names that the scope declares global or nonlocal
        self.nonlocals: list[str] = []
        self.bases_here: list[_Scope] = []  # the scopes of bases that the file defines
        self.subclasses: list[_Scope] = []

    def bind(self, name: str, assignment: _Assignment) -> None:
        self.outer.get(name, self).names[name].append(assignment)

    def resolve_nonlocals(self) -> None:
        """Move the assignments of nonlocal names to the functions that have these names."""
        for name in self.nonlocals:
            outer = self.parent
            while outer and (name not in outer.names or name in outer.nonlocals):
                outer = outer.parent
            if outer is not None:
                outer.names[name] += self.names.pop(name, [])
                self.outer[name] = outer

    def find(self, name: str) -> list[_Assignment]:
        """Return the assignments to which a name may refer.

        The body of a class reads a global name until it binds the name.
        """
        scope: _Scope | None = self.outer.get(name, self)
        while scope is not None:
            if name in scope.names:
                is_class = scope.bases is not None
                return scope.names[name] + (scope.module.names.get(name, []) if is_class else [])
            scope = scope.parent
        return []

    def ancestors(self) -> list[_Scope]:
        """Return the scopes of a class and the bases in the file."""
        return _closure(self, lambda each: each.bases_here)

    def relatives(self) -> list[_Scope]:
        """Return the scopes of classes with instances that may share a method with this class."""
        return _closure(self, lambda each: each.bases_here + each.subclasses)


def _closure(first: _Scope, following: Callable[[_Scope], list[_Scope]]) -> list[_Scope]:
    """Return a scope and all scopes that `following` reaches from it."""
    reached = [first]
    for each in reached:
        reached += [one for one in following(each) if one not in reached]
    return reached


_Use: TypeAlias = tuple[ast.AST, _Scope]


@cache
def _shown(path: str) -> str:
    """Return the dotted path of an object as users write it: mlvm.core.errors is `ml.errors`."""
    module, _, name = path.rpartition(".")
    room, _ = public.PLACES.get(NAMES["ml"].get(name, name), ("", ""))
    if module and room == module:
        return f"ml.{name}"
    for module, shown in _MODULES.items():
        if path == module or path.startswith(f"{module}."):
            return shown + path[len(module) :]
    return path


def _new_name(path: str | None) -> str | None:
    """Return the new name of the object with an old path."""
    module, _, name = (path or "").rpartition(".")
    return NAMES.get(module, {}).get(name)


@cache
def _classes(path: str) -> frozenset[str] | None:
    """Return the names of the class with this path and the bases; None unless it is a class."""
    root, _, names = path.partition(".")
    if root != "ml" or not names or not names.rpartition(".")[2][0].isupper():
        return None
    if _new_name(path) is not None:
        return frozenset()
    try:
        value = attrgetter(names)(ml)
    except AttributeError:
        return None
    if not isinstance(value, type):
        return None
    return frozenset(each.__name__ for each in value.__mro__) | (
        {"VM"} if value is ml.VM else set()
    )


def _same(values: Iterator[T | None]) -> T | None:
    """Return the only value, or None if there is not exactly one."""
    first, *others = [*values] or [None]
    return first if all(each == first for each in others) else None


class OldUses:
    """Uses of old names in a file, which `find` collects.

    `paths` contains the paths of names that the file does not bind, as in documentation, where `ml`
    needs no import. A file that imports nothing of mlvm, and has no such names, has no doubts.
    """

    def __init__(self, tree: ast.Module, paths: Mapping[str, str] | None = None) -> None:
        self._module = _Scope()
        self._scopes = [self._module]
        self._anywhere = _Scope()  # fields of objects of unknown class
        self._uses: list[_Use] = []
        self._words: set[str] = set()  # names, keywords and texts of the file
        self._texts: set[str] = set()  # words of texts, `global` and `nonlocal`
        self._assigned: set[ast.expr] = set()  # targets with known values
        self._has_star = False
        self._has_mlvm = bool(paths)
        self._others: set[str] = set()
        self.edits: list[Edit] = []
        self.doubts: list[Doubt] = []
        self._visit(tree, self._module)
        for name, path in (paths or {}).items():
            if name not in self._module.names:
                self._module.bind(name, _Assignment(path=path))
        for scope in self._scopes:
            scope.resolve_nonlocals()
        for scope in self._scopes:
            for base in scope.bases or ():
                if scope.around and isinstance(base, ast.Name):
                    bindings = scope.around.find(base.id)
                    scope.bases_here += [each.body for each in bindings if each.body]
            for each in scope.bases_here:
                each.subclasses.append(scope)

    def find(self, preserved: Set[str] = frozenset()) -> None:
        """Find the edits and doubts. Imports of names in `preserved` continue to bind them."""
        self._imports = self._renamed_imports(preserved | self._texts)
        checks: dict[type[ast.AST], Callable[..., None]] = {
            ast.Attribute: self._attribute,
            ast.Name: self._name,
            ast.alias: self._alias,
            ast.Call: self._call,
            ast.Constant: self._text,
        }
        for node, scope in self._uses:
            checks[type(node)](node, scope)
        if not self._has_mlvm:
            self.doubts.clear()
        self.edits.sort()
        self.doubts.sort()

    @property
    def from_other_files(self) -> set[str]:
        """Return the names that the file imports or reads from modules outside of mlvm."""
        names = self._others | (self._words if "*" in self._others else set())
        for node, scope in self._uses:
            path = self._path(node, scope) if isinstance(node, ast.Attribute) else None
            root, _, name = (path or "").partition(".")
            if root not in ("ml", "mlvm"):
                names.add(name.rpartition(".")[2])
        return names

    @property
    def imported(self) -> dict[str, str]:
        """Return the paths of the module's imports, by name."""
        names = self._module.names
        return {name: each.path for name in names for each in names[name] if each.path}

    # --- scopes and assignments -------------------------------------------------------------

    def _scope(self, parent: _Scope, **options: Any) -> _Scope:
        self._scopes.append(_Scope(parent, **options))
        return self._scopes[-1]

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, (ast.Attribute, ast.Name, ast.Call, ast.Constant)):
            self._uses.append((node, scope))
        children: list[ast.AST] = [*ast.iter_child_nodes(node)]
        match node:
            case ast.Import(names):
                for each in names:
                    path = each.name if each.asname else each.name.partition(".")[0]
                    self._has_mlvm |= _is_of_mlvm(each.name)
                    scope.bind(each.asname or path, _Assignment(path=path))
            case ast.ImportFrom(module, names, level):
                self._import_from(None if level else module, names, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                return self._function(node, scope)
            case ast.ClassDef(name, bases):
                inner = self._scope(scope, bases=bases)
                scope.bind(name, _Assignment(is_definition=True, body=inner))
                body = {*node.body}
                for child in children:
                    self._visit(child, inner if child in body else scope)
                return None
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                first = node.generators[0].iter
                self._visit(first, scope)
                scope = self._scope(scope, is_comprehension=True)
                for generator in node.generators:
                    children += ast.iter_child_nodes(generator)
                children = [x for x in children if x not in (first, *node.generators)]
            case ast.Assign(targets, value):
                for target in targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign(target, annotation, value):
                self._assign(target, value or annotation, scope, is_type=value is None)
            case ast.NamedExpr(target, value):
                outer = scope
                while outer.is_comprehension and outer.parent:
                    outer = outer.parent
                self._assign(target, value, outer)
            case ast.withitem(value, ast.Name() as target):
                self._assign(target, value, scope)
            case ast.Global(names):
                self._texts |= {*names}
                scope.outer.update((name, self._module) for name in names)
            case ast.Nonlocal(names):
                self._texts |= {*names}
                scope.nonlocals += names
            case ast.Name(name):
                self._words.add(name)
                if _is_target(node) and node not in self._assigned:
                    scope.bind(name, _Assignment())
            case ast.Expr(ast.Constant(str())) | ast.JoinedStr():
                children = [x for x in children if not isinstance(x, ast.Constant)]
            case ast.Constant(str(text)):
                self._words.add(text)
                self._texts |= {*_WORD.findall(text)}
                if _PATH.fullmatch(text):  # as in `patch("module.name")`
                    self._others.add(text.rpartition(".")[2])
            case ast.keyword(str(name)):
                self._words.add(name)
            case ast.MatchMapping(rest=str(name)):
                scope.bind(name, _Assignment())
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar() if node.name:
                scope.bind(node.name, _Assignment())
        for child in children:
            self._visit(child, scope)
        return None

    def _import_from(self, module: str | None, names: list[ast.alias], scope: _Scope) -> None:
        is_of_mlvm = _is_of_mlvm(module)
        self._has_mlvm |= is_of_mlvm
        for each in names:
            if not is_of_mlvm:
                self._others.add(each.name)
            if each.name == "*":
                self._has_star |= module == "mlvm.eager"
                continue
            path = f"{module}.{each.name}" if module and module != "mlvm.eager.errors" else None
            alias = None if each.asname else each
            scope.bind(each.asname or each.name, _Assignment(path=path, alias=alias))
            if module == "mlvm.eager.errors":  # no such module: `ml.errors` is mlvm.core.errors
                if each.name in NAMES["ml.errors"]:
                    self._doubt(each, f"{each.name} of {module}, which cannot be imported")
            elif _new_name(_shown(path or "")) is not None:
                self._uses.append((each, scope))

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: _Scope
    ) -> None:
        inner = self._scope(scope)
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        several = [each for each in (arguments.vararg, arguments.kwarg) if each]
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self._visit(default, scope)
        for each in parameters + several:
            if each.annotation is not None:
                self._visit(each.annotation, scope)
            is_typed = each.annotation is not None and each not in several
            typed = _Assignment(value=each.annotation, scope=scope, is_type=True)
            inner.bind(each.arg, typed if is_typed else _Assignment())
        if isinstance(node, ast.Lambda):
            self._visit(node.body, inner)
            return
        value: ast.expr | None = None
        for decorator in node.decorator_list:
            self._visit(decorator, scope)
            value = value or ast.Call(decorator, [ast.Name(node.name, ast.Load())], [])
        for each in (*getattr(node, "type_params", ()), *([node.returns] if node.returns else ())):
            self._visit(each, scope)
        is_static = any(getattr(each, "id", "") == "staticmethod" for each in node.decorator_list)
        if scope.bases is not None and parameters and not is_static:
            inner.names[parameters[0].arg] = [_Assignment(owner=scope)]
        scope.bind(node.name, _Assignment(value=value, scope=scope, is_definition=True))
        for statement in node.body:
            self._visit(statement, inner)

    def _assign(
        self, target: ast.expr, value: ast.expr, scope: _Scope, *, is_type: bool = False
    ) -> None:
        assignment = _Assignment(value=value, scope=scope, is_type=is_type)
        match target, value:
            case ast.Name(name), _:
                self._assigned.add(target)
                scope.bind(name, assignment)
            case ast.Attribute(instance, attribute), _:
                bindings = scope.find(instance.id) if isinstance(instance, ast.Name) else []
                for each in bindings or [_Assignment()]:
                    if each.body is not None:
                        each.body.bind(attribute, assignment)
                    else:
                        (each.owner or self._anywhere).bind(f"self.{attribute}", assignment)
            case ast.Tuple(targets) | ast.List(targets), ast.Tuple(values) if len(targets) == len(
                values
            ):
                for part, one in zip(targets, values, strict=True):
                    self._assign(part, one, scope)

    # --- objects of expressions ----------------------------------------------------------

    def _path(self, node: ast.AST | None, scope: _Scope | None, depth: int = 0) -> str | None:
        """Return the path of the module, class or function that an expression names."""
        if scope is None or depth > 20:
            return None
        if isinstance(node, ast.Attribute):
            base = self._path(node.value, scope, depth + 1)
            return base and _shown(f"{base}.{node.attr}")
        if not isinstance(node, ast.Name):
            return None
        return _same(
            _shown(each.path)
            if each.path
            else None
            if each.is_type or each.is_definition
            else self._path(each.value, each.scope, depth + 1)
            for each in scope.find(node.id)
        )

    def _kinds(
        self, node: ast.AST | None, scope: _Scope | None, depth: int = 0
    ) -> frozenset[str] | None:
        """Return the names of the class of an expression's value and the bases."""
        if scope is None or depth > 20:
            return None
        if isinstance(node, ast.Call):
            inner = node.func.func if isinstance(node.func, ast.Call) else node.func
            path = self._path(inner, scope) or ""
            if path in _CLASSES and (inner is node.func or path == "ml.capture"):
                return frozenset([_CLASSES[path]])
            return _classes(path) if inner is node.func else None
        assignments: list[_Assignment] = []
        if isinstance(node, ast.Name):
            assignments = scope.find(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self._owner(node.value, scope)
            assignments = [
                one
                for each in ((*owner.relatives(), self._anywhere) if owner else ())
                for name in (node.attr, f"self.{node.attr}")
                for one in each.names.get(name, ())
            ]
        return _same(self._kinds_of(each, depth) for each in assignments)

    def _kinds_of(self, assignment: _Assignment, depth: int) -> frozenset[str] | None:
        if assignment.owner is not None:  # `self` in a class: search the known bases
            paths = [
                self._path(base, each.around)
                for each in assignment.owner.ancestors()
                for base in each.bases or ()
            ]
            return frozenset().union(*[_classes(path) or () for path in paths if path])
        if assignment.is_type:
            path = self._path(_without_none(assignment.value), assignment.scope)
            return _classes(path) if path else None
        return self._kinds(assignment.value, assignment.scope, depth + 1)

    def _owner(self, node: ast.expr, scope: _Scope) -> _Scope | None:
        """Return the scope of the class if the expression is `self`."""
        bindings = scope.find(node.id) if isinstance(node, ast.Name) else ()
        return next((each.owner for each in bindings if each.owner), None)

    # --- uses ----------------------------------------------------------------------------

    def _renamed_imports(self, preserved: Set[str]) -> set[int]:
        """Return the ids of imported names that can change together with all uses.

        The new name must be free, and no use may also refer to a different object.
        """
        bound = {name for scope in self._scopes for name in scope.names}
        renamed, others = set(), set()
        for node, scope in self._uses:
            if not isinstance(node, (ast.Name, ast.alias)) or _is_target(node):
                continue
            name = node.id if isinstance(node, ast.Name) else node.name
            bindings = scope.find(name)
            news = {each.alias and _new_name(_shown(each.path or "")) for each in bindings}
            are_free = not news & {None, *self._words, *bound}
            is_field = isinstance(node, ast.alias) and scope.bases is not None
            if len(news) == 1 and are_free and name not in preserved and not is_field:
                renamed |= {id(each.alias) for each in bindings}
            else:
                others |= {id(each.alias) for each in bindings}
        return renamed - others

    def _alias(self, node: ast.alias, scope: _Scope) -> None:
        bound = scope.find(node.asname or node.name)
        new = next(name for each in bound if (name := _new_name(_shown(each.path or ""))))
        keeps = node.asname is None and id(node) not in self._imports
        text = f"{new} as {node.name}" if keeps else new
        self.edits.append(Edit(node.lineno, node.col_offset, node.name, text))

    def _name(self, node: ast.Name, scope: _Scope) -> None:
        assignments = scope.find(node.id)
        if assignments and all(
            each.alias and id(each.alias) in self._imports for each in assignments
        ):
            new = _new_name(_shown(assignments[0].path or ""))
            if new is not None:
                self.edits.append(Edit(node.lineno, node.col_offset, node.id, new))
        elif not assignments and self._has_star and node.id in NAMES["ml"]:
            self._doubt(node, f"{node.id} may be of `from mlvm.eager import *`")

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> None:
        path, name = self._path(node, scope), node.attr
        new = _new_name(path)
        if path is None and name in _OLD_ATTRIBUTES:
            kinds = self._kinds(node.value, scope)
            owners = [each for each in ATTRIBUTES if name in ATTRIBUTES[each]]
            new = next((ATTRIBUTES[each][name] for each in owners if each in (kinds or ())), None)
            owner = self._owner(node.value, scope)
            is_defined = owner and any(name in each.names for each in owner.relatives())
            is_text = isinstance(node.value, (ast.Constant, ast.JoinedStr))
            if (kinds is None and not is_text) or (new and is_defined):
                self._doubt(node, f".{name}, if it belongs to {_of_classes(owners)}")
                new = None
        elif path is None and isinstance(node.value, ast.Name):
            paths = [_shown(each.path) for each in scope.find(node.value.id) if each.path]
            if any(_new_name(f"{each}.{name}") for each in paths):
                self._doubt(
                    node, f"{node.value.id}.{name}, where {node.value.id} has several values"
                )
        if new is not None and node.end_lineno and node.end_col_offset is not None:
            offset = node.end_col_offset - len(name.encode())
            self.edits.append(Edit(node.end_lineno, offset, name, new))

    def _call(self, node: ast.Call, scope: _Scope) -> None:
        function: ast.expr = node.func
        if self._path(function, scope) == "functools.partial" and node.args:
            function = node.args[0]
        path = self._path(function, scope)
        name = getattr(function, "attr", getattr(function, "id", ""))
        owners = [(path or "").rpartition(".")[2]] if (path or "").startswith("ml.") else []
        is_known = path is not None
        if path is None and name in _OLD_KEYWORDS and isinstance(function, ast.Attribute):
            kinds = self._kinds(function.value, scope)
            is_known = kinds is not None
            owners = [f"{kind}.{name}" for kind in kinds or ()]
        elif path is None:
            is_known = any(each.is_definition for each in scope.find(name))
        renamed = next((KEYWORDS[each] for each in owners if each in KEYWORDS), {})
        names = {each.arg for each in node.keywords}
        for each in node.keywords:
            arg = each.arg or ""
            if arg in renamed and renamed[arg] not in names:
                self.edits.append(Edit(each.lineno, each.col_offset, arg, renamed[arg]))
            elif arg in renamed or (not is_known and arg in _OLD_KEYWORDS.get(name, ())):
                self._doubt(each, f"{arg}= of {name}")
            elif not arg and renamed.keys() & self._words:
                self._doubt(node, f"keywords of {name} that come from a dict")
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            path, text = self._path(node.args[0], scope), node.args[1].value
            if path and isinstance(text, str) and _new_name(f"{path}.{text}"):
                self._doubt(node, f"the text {text!r} in getattr")

    def _text(self, node: ast.Constant, scope: _Scope) -> None:
        if isinstance(node.value, str) and node.value.rpartition(".")[2] in NAMES["ml.errors"]:
            self._doubt(node, f"the text {node.value!r}")

    def _doubt(self, node: ast.expr | ast.keyword | ast.alias, text: str) -> None:
        self.doubts.append(Doubt(node.lineno, text))


def _is_target(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_of_mlvm(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "mlvm"


def _without_none(annotation: ast.expr | None) -> ast.expr | None:
    """Return T for the annotations `T | None` and `"T"`."""
    match annotation:
        case ast.BinOp(left, ast.BitOr(), ast.Constant(None)):
            return left
        case ast.Constant(str(text)):
            with suppress(SyntaxError):
                return ast.parse(text, mode="eval").body
    return annotation


def _of_classes(names: list[str]) -> str:
    return " or ".join(map(with_article, names))
