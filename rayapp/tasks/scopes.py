"""Tells local variables from builtins in parsed code, for `banned.py`: `sorted = False` in a bubble sort is no call.

A name counts as local only where Python itself can never fall back to the builtin: it is bound in an enclosing
function. A binding in a module or class body, in a comprehension, or under `global` does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_NEW_SCOPE = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


class Scopes:
    """Answers for one syntax tree."""

    def __init__(self, tree: ast.AST) -> None:
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._bound: dict[ast.AST, frozenset[str]] = {}

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def is_local(self, node: ast.Name) -> bool:
        """True if the name is a variable of a function around it."""
        child: ast.AST = node
        while (parent := self._parents.get(child)) is not None:
            if isinstance(parent, Function) and _runs_inside(child, parent):
                if node.id in self._names_bound_in(parent):
                    return True
                if node.id in _declared_global(parent):
                    return False
            elif isinstance(parent, ast.ClassDef) and child in parent.body and node.id in self._names_bound_in(parent):
                return False
            child = parent
        return False

    def _names_bound_in(self, scope: ast.AST) -> frozenset[str]:
        if scope not in self._bound:
            declared = _declared(scope, ast.Global) | _declared(scope, ast.Nonlocal)
            self._bound[scope] = frozenset(_bindings(scope)) - declared
        return self._bound[scope]


def _runs_inside(child: ast.AST, function: Function) -> bool:
    """Defaults, decorators and annotations belong to the scope around the function."""
    return child is function.body if isinstance(function, ast.Lambda) else child in function.body


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope's body, without those of scopes nested in it (whose first node is still given)."""
    body = getattr(scope, "body", [])
    pending: list[ast.AST] = list(body) if isinstance(body, list) else [body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _NEW_SCOPE):
            pending.extend(ast.iter_child_nodes(node))


def _bindings(scope: ast.AST) -> Iterator[str]:
    if isinstance(scope, Function):
        arguments = scope.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        yield from (argument.arg for argument in named if argument is not None)
    for node in _own_nodes(scope):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name.partition(".")[0]


def _declared(scope: ast.AST, kind: type[ast.Global] | type[ast.Nonlocal]) -> frozenset[str]:
    return frozenset(name for node in _own_nodes(scope) if isinstance(node, kind) for name in node.names)


def _declared_global(function: Function) -> frozenset[str]:
    return _declared(function, ast.Global)
