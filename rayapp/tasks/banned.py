"""Screens a completion before its code runs: extracts the code, parses it, and finds banned names in it.

A pattern is written like the code that it bans: `sorted`, `.sort`, `heapq`, `os.path`, `import` for any import, `*` or
`not in` for an operator. Found are aliases (`s = sorted`, `import heapq as h`), names in strings (`getattr`,
`__builtins__[…]`, `eval`, `"so" + "rted"`) and lookups by a computed string.

Not found are other functions with the same effect, and effects without a name (a set of small integers iterates in
order). A name bound in a module or class body counts as used: Python may fall back to the builtin.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterator, Sequence

from rayapp.core.syntax import parse, syntax_problem
from rayapp.tasks.extraction import extract_code, extract_module, extract_program
from rayapp.tasks.scopes import Scopes

_CODE_CALLS = frozenset({"eval", "exec", "compile"})
_IMPORT_CALLS = frozenset({"__import__", "import_module"})
# Functions that take a name or code as a string.
_LOOKUP_CALLS = _CODE_CALLS | _IMPORT_CALLS | {
    "getattr", "getattr_static", "attrgetter", "methodcaller", "__getattribute__", "locate", "resolve_name",
}  # fmt: skip
_NAMESPACE_CALLS = frozenset({"globals", "locals", "vars"})
# Names through which every other name can be reached.
_NAMESPACES = frozenset({
    "__builtins__", "__dict__", "__globals__", "f_builtins", "f_globals", "f_locals", "modules", "__subclasses__",
    "__code__", "__match_args__", "CodeType",
})  # fmt: skip
_UNREADABLE_MODULES = frozenset({"ctypes", "gc", "marshal", "pickle", "runpy", "inspect"})
_ENTRY_METHODS = frozenset({"get", "pop", "setdefault", "__getitem__"})
_WHOLE_METHODS = frozenset({"copy", "items", "keys", "values"})
_DYNAMIC = "dynamic lookup"
# Operator, and the stem of its method's and function's names (module `operator`), without unary ones (`-x`).
_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "add"), ast.Sub: ("-", "sub"), ast.Mult: ("*", "mul"), ast.MatMult: ("@", "matmul"),
    ast.Div: ("/", "truediv"), ast.FloorDiv: ("//", "floordiv"), ast.Mod: ("%", "mod"), ast.Pow: ("**", "pow"),
    ast.LShift: ("<<", "lshift"), ast.RShift: (">>", "rshift"), ast.BitAnd: ("&", "and"), ast.BitOr: ("|", "or"),
    ast.BitXor: ("^", "xor"), ast.Invert: ("~", "invert"), ast.Eq: ("==", "eq"), ast.NotEq: ("!=", "ne"),
    ast.Lt: ("<", "lt"), ast.LtE: ("<=", "le"), ast.Gt: (">", "gt"), ast.GtE: (">=", "ge"),
    ast.In: ("in", "contains"), ast.NotIn: ("not in", ""), ast.Is: ("is", ""), ast.IsNot: ("is not", ""),
    ast.And: ("and", ""), ast.Or: ("or", ""), ast.Not: ("not", ""),
}  # fmt: skip
_STEMS = dict(_OPERATORS.values())


def find_banned(source: str, patterns: Sequence[str]) -> str | None:
    """Return the first pattern that the code uses, or `dynamic lookup (NAME)` for a computed name; None if the code is
    allowed or does not parse."""
    tree = parse(source)
    if tree is None or not patterns:
        return None
    wanted = {name: pattern for pattern in patterns for name in _names_of(normal_pattern(pattern))}
    most_parts = max(name.count(".") + 1 for name in wanted)
    mentions = _mentions(tree, most_parts)
    try:
        return next((wanted.get(name, name) for name in mentions if name in wanted or _DYNAMIC in name), None)
    except RecursionError:
        return f"{_DYNAMIC} (nested too deeply to read)"


def normal_pattern(pattern: str) -> str:
    """Return a pattern in its normal form: `sorted(` is `sorted`. ValueError: it is neither a name nor an operator."""
    name = " ".join(pattern.split())
    if name in _STEMS:
        return name
    name = name.removesuffix("(").strip()
    parts = name.removeprefix(".").split(".")
    if not all(part.isidentifier() for part in parts) or (name != "import" and any(map(keyword.iskeyword, parts))):
        raise ValueError(
            f"{pattern!r} is neither a name nor an operator: write it like `sorted`, `.sort`, `heapq`, `os.path`, "
            "`import`, `*` or `not in`"
        )
    return name


def _names_of(pattern: str) -> Iterator[str]:
    """Yield the names; an operator also bans its methods and its functions in the module operator."""
    yield pattern
    if stem := _STEMS.get(pattern):
        yield from (f".__{kind}{stem}__" for kind in ("", "r", "i"))
        yield from (f"operator.{name}" for name in (stem, f"{stem}_", f"i{stem}", f"__{stem}__", f"__i{stem}__"))


def _mentions(tree: ast.Module, most_parts: int) -> Iterator[str]:
    """Yield the names in the form of patterns; dotted names have up to `most_parts` parts."""
    scopes = Scopes(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Name() if not scopes.is_local(node):
                if isinstance(node.ctx, ast.Load):
                    yield node.id
                yield from _reflection(node, node.id, scopes, most_parts)
            case ast.Attribute():
                yield from _attribute(node, most_parts)
                yield from _reflection(node, node.attr, scopes, most_parts)
            case ast.Import(names=aliases):
                yield "import"
                for alias in aliases:
                    yield from _imported(alias.name, most_parts)
            case ast.ImportFrom(module=module, names=aliases):
                yield "import"
                package = ".".join((module or "").split(".")[:most_parts])
                for alias in aliases:
                    yield alias.name
                    yield from _imported(f"{package}.{alias.name}", most_parts)
            case ast.MatchClass(kwd_attrs=attributes):
                yield from (f".{name}" for name in attributes)
            case ast.BinOp() | ast.AugAssign() | ast.BoolOp() | ast.UnaryOp() | ast.Compare():
                yield from _operators(node)


def _operators(node: ast.BinOp | ast.AugAssign | ast.BoolOp | ast.UnaryOp | ast.Compare) -> Iterator[str]:
    used = node.ops if isinstance(node, ast.Compare) else [node.op]
    yield from (_OPERATORS[type(each)][0] for each in used if type(each) in _OPERATORS)


def _attribute(node: ast.Attribute, most_parts: int) -> Iterator[str]:
    yield f".{node.attr}"
    if isinstance(node.ctx, ast.Load):
        yield node.attr
    parts, value = [node.attr], node.value
    while isinstance(value, ast.Attribute) and len(parts) < most_parts:
        parts, value = [value.attr, *parts], value.value
    if isinstance(value, ast.Name):
        yield ".".join([value.id, *parts])


def _imported(dotted: str, most_parts: int) -> Iterator[str]:
    """Yield the names that an import uses: `os` and `os.path` for `os.path`."""
    parts = dotted.strip(".").split(".", most_parts)
    yield from (".".join(parts[:end]) for end in range(1, min(len(parts), most_parts) + 1))
    if parts[0] in _UNREADABLE_MODULES:
        yield f"{_DYNAMIC} (module {parts[0]})"


def _reflection(node: ast.Name | ast.Attribute, name: str, scopes: Scopes, most_parts: int) -> Iterator[str]:
    """Yield the names that `node` looks up, if it is a lookup function or a namespace."""
    parent = scopes.parent(node)
    call = parent if isinstance(parent, ast.Call) and parent.func is node else None
    if name in _LOOKUP_CALLS and not _is_regex(node):
        for text in _texts_looked_up(name, call.args) if call and call.args else [None]:
            yield from _named(name, text, most_parts)
    elif name in _NAMESPACE_CALLS:
        yield from _named(name, _entry(call, scopes) if call else None, most_parts)
    elif name in _NAMESPACES:
        yield from _named(name, _entry(node, scopes), most_parts)


def _texts_looked_up(name: str, arguments: Sequence[ast.expr]) -> list[str | None]:
    """Return the arguments taken as names: a string for a constant, None for a computed value."""
    match name:
        case "getattr" | "getattr_static":
            arguments = arguments[1:2]
        case "__getattribute__":
            arguments = arguments[-1:]
        case "attrgetter":
            pass
        case _:
            arguments = arguments[:1]
    return [_constant(argument) for argument in arguments] or [None]


def _named(how: str, text: str | None, most_parts: int) -> Iterator[str]:
    if how in _IMPORT_CALLS:
        yield "import"
    if text is None or text in _NAMESPACES | _LOOKUP_CALLS:
        yield f"{_DYNAMIC} ({how})"
    elif how in _CODE_CALLS:
        code = parse(text)
        yield from _mentions(code, most_parts) if code is not None else ()
    else:
        yield from _imported(text, most_parts)
        for part in text.split("."):
            yield part
            yield f".{part}"


def _entry(holder: ast.expr, scopes: Scopes) -> str | None:
    """Return `"x"` for `holder["x"]`, `holder.x` and `holder.get("x")`; None for every other use."""
    parent = scopes.parent(holder)
    if isinstance(parent, ast.Subscript) and parent.value is holder:
        return _constant(parent.slice)
    if not isinstance(parent, ast.Attribute) or parent.attr in _WHOLE_METHODS:
        return None
    call = scopes.parent(parent)
    if parent.attr in _ENTRY_METHODS:
        return _constant(call.args[0]) if isinstance(call, ast.Call) and call.func is parent and call.args else None
    return parent.attr


def _constant(node: ast.expr) -> str | None:
    """Return the string value of an expression that consists of constants."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_constant(left), _constant(right)]
        case ast.JoinedStr(values=values):
            parts = [_constant(value.value if isinstance(value, ast.FormattedValue) else value) for value in values]
        case _:
            return None
    known = [part for part in parts if part is not None]
    return "".join(known) if len(known) == len(parts) else None


def _is_regex(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "compile" and getattr(node.value, "id", "") == "re"


def screen(completion: str, func_name: str, prefill: str, banned_patterns: Sequence[str]) -> tuple[str, str, str]:
    """Return the completion's code, status and detail. The status is empty if the code may run."""
    code = extract_code(completion, func_name, prefill=prefill)
    if code is None:
        return "", "no_code", f"no `def {func_name}` in the completion"
    status, detail = _problem(code)
    banned = None if status else find_banned(code, banned_patterns)
    return (code, status, detail) if banned is None else (code, "banned", f"uses {banned.strip()}")


def screen_module(completion: str, func_name: str, prefill: str) -> tuple[str, str, str]:
    """Return code, status and detail like `screen`, for problems of data sets: no names are banned, and the code stays
    uncut, because the data sets' checkers run it unchanged. `func_name` is empty for a whole program."""
    code = extract_module(completion, func_name, prefill=prefill) if func_name else extract_program(completion)
    if code is None:
        return "", "no_code", f"the completion defines no {func_name}" if func_name else "the completion is empty"
    return code, *_problem(code)


def _problem(code: str) -> tuple[str, str]:
    problem = syntax_problem(code)
    return ("syntax_error", f"the code does not parse: {problem}") if problem else ("", "")
