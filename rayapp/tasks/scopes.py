"""Distinguishes local variables from builtins in parsed code, so that a bubble sort may have `sorted = False`.

A name counts as local only if it is bound in an enclosing function: then Python never falls back to the builtin. The
time is proportional to the code's size, however deep the nesting.
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
    """The parent of each node of a syntax tree, and the names in it that are local variables."""

    def __init__(self, tree: ast.AST) -> None:
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._locals = set(_local_names(tree))

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def is_local(self, node: ast.Name) -> bool:
        """True if the name is a variable of an enclosing function."""
        return node in self._locals


def _local_names(tree: ast.AST) -> Iterator[ast.Name]:
    # Name -> for each enclosing scope that has the name, innermost last, True if it is a function's variable there.
    said: dict[str, list[bool]] = {}
    pending: list[ast.AST | _Leave] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _Leave):
            for name in node.names:
                said[name].pop()
            continue
        if isinstance(node, ast.Name) and (verdicts := said.get(node.id)) and verdicts[-1]:
            yield node
        body = _scope_body(node)
        inside = set(body)
        pending += [child for child in ast.iter_child_nodes(node) if child not in inside]
        if body:
            # Walk the body first. Remove the scope's names before the walk goes on to nodes outside the body.
            names = _verdicts(node)
            for name, is_local in names.items():
                said.setdefault(name, []).append(is_local)
            pending += [_Leave(list(names)), *body]


class _Leave:
    """Marker in the walk: a scope's body ends here, so its names are removed."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


def _scope_body(node: ast.AST) -> list[ast.AST]:
    """Return the nodes that run inside a scope: no defaults, decorators, bases and annotations, which run in the outer
    one."""
    match node:
        case ast.Lambda(body=expression):
            return [expression]
        case ast.FunctionDef(body=statements) | ast.AsyncFunctionDef(body=statements) | ast.ClassDef(body=statements):
            return list(statements)
        case _:
            return []


def _verdicts(scope: ast.AST) -> dict[str, bool]:
    # True for a variable of this function, False for a name that is looked up elsewhere
    nodes = list(_own_nodes(scope))
    global_names = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    outer_names = {name for node in nodes if isinstance(node, ast.Nonlocal) for name in node.names}
    bound = set(_bindings(scope, nodes)) - global_names - outer_names
    if isinstance(scope, ast.ClassDef):
        return dict.fromkeys(bound, False)
    return dict.fromkeys(bound, True) | dict.fromkeys(global_names, False)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope's body; of a nested scope only its own node."""
    pending = _scope_body(scope)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _NEW_SCOPE):
            pending.extend(ast.iter_child_nodes(node))


def _bindings(scope: ast.AST, own_nodes: list[ast.AST]) -> Iterator[str]:
    if isinstance(scope, Function):
        arguments = scope.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        yield from (argument.arg for argument in named if argument is not None)
    for node in own_nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name.partition(".")[0]
