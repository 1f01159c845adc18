"""Draws sentinels: copies of hidden tests in which one expectation is wrong, so that right code fails them. Pure
functions.

Wrong code can pass tests that run in its process: it exits with success, patches the asserts, or returns an object that
equals everything. Such code also passes a sentinel, because it can't distinguish a sentinel from the original test.
Examples:

    assert median([4, 1, 3, 2]) == 2.5     ->  assert median([4, 1, 3, 2]) == 4.5
    self.assertTrue(is_open(door))         ->  self.assertFalse(is_open(door))
    with pytest.raises(ValueError): …      ->  with pytest.raises(KeyError): …
"""

from __future__ import annotations

import ast
import builtins
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rayapp.core.syntax import expression, parse, values_of_names

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_RUNNERS = re.compile(r"\b(?:pytest|py\.test|unittest|nose2?)\b")
_SKIPS = re.compile(r"skip|xfail|expectedFailure")
_OPPOSITES = {
    "assertTrue": "assertFalse", "assertIs": "assertIsNot", "assertIn": "assertNotIn",
    "assertIsNone": "assertIsNotNone", "assertIsInstance": "assertNotIsInstance",
    "assertLess": "assertGreaterEqual", "assertGreater": "assertLessEqual",
}  # fmt: skip
_OPPOSITES |= {opposite: name for name, opposite in _OPPOSITES.items()}
_EQUALS = re.compile(r"assert(?:\w*Equals?|CountEqual)")
_FLIPPED = {
    ast.Lt: ("<", ">="), ast.GtE: (">=", "<"), ast.Gt: (">", "<="), ast.LtE: ("<=", ">"), ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
_STRING = re.compile(r"""([A-Za-z]*)(\"{3}|'{3}|"|')(.*)\2""", re.DOTALL)
_DIGITS = {"0x": "123456789abcdef", "0o": "1234567", "0b": "01"}
_RAISES = frozenset({"pytest.raises", "self.assertRaises", "self.assertRaisesRegex"})
# Exceptions that code hardly raises, but that tests name; and those that no other builtin exception is a case of.
_NEVER_RAISED = ("ZeroDivisionError", "RecursionError", "FileExistsError", "PermissionError", "UnicodeEncodeError")
_OFTEN_RAISED = ("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "OSError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinel:
    file: str
    test: str  # Name within the file: `test_total`, or `TestCart::test_total`.
    start: int
    end: int  # End of the range of the file's bytes to replace.
    wrong: str

    @property
    def name(self) -> str:
        return f"{self.file}::{self.test}"


def run_by(script: str, files: Sequence[str]) -> list[str]:
    """Return the test files that a script names, or all if it names only a test runner."""
    tests = [file for file in files if file.endswith(".py") and file.rpartition("/")[2].startswith("test")]
    named = [file for file in tests if file.rpartition("/")[2].removesuffix(".py") in script]
    return named or (tests if _RUNNERS.search(script) else [])


def draw(files: Mapping[str, bytes], tests: Sequence[str], rng: random.Random) -> list[Sentinel]:
    """Return sentinels in random order: first one for each test, then the others."""
    by_test: dict[str, list[Sentinel]] = {}
    for file in tests:
        for sentinel in _in_file(file, files[file], rng):
            by_test.setdefault(sentinel.name, []).append(sentinel)
    queues = [rng.sample(queue, len(queue)) for queue in by_test.values()]
    firsts = [queue.pop() for queue in queues]
    others = [sentinel for queue in queues for sentinel in queue]
    return [*rng.sample(firsts, len(firsts)), *rng.sample(others, len(others))]


def with_sentinels(files: Mapping[str, bytes], sentinels: Sequence[Sentinel]) -> dict[str, bytes]:
    changed = dict(files)
    for each in sorted(sentinels, key=lambda each: each.start, reverse=True):
        data = changed[each.file]
        changed[each.file] = data[: each.start] + each.wrong.encode() + data[each.end :]
    return changed


def _in_file(file: str, data: bytes, rng: random.Random) -> Iterator[Sentinel]:
    tree = parse(data.decode(errors="replace"))
    # Skip files with undecodable bytes, form feeds or carriage returns: positions in the syntax tree would be wrong.
    if tree is None or b"\f" in data or b"\r" in data or data.decode(errors="replace").encode() != data:
        return
    lines = [0, *(place + 1 for place, byte in enumerate(data) if byte == 10)]
    for name, function in _tests_of(tree.body):
        text = partial(_text, data=data, lines=lines)
        for node, wrong in _expectations(function.body, text, values_of_names(tree, function), rng):
            start, end = _span(node, lines)
            yield Sentinel(file=file, test=name, start=start, end=end, wrong=wrong)


def tests_in(file: str, data: bytes) -> dict[str, str]:
    """Return `file::test` -> source in `ast`'s form."""
    tree = parse(data.decode(errors="replace")) if file.endswith(".py") else None
    return {f"{file}::{name}": ast.unparse(node) for name, node in _tests_of(tree.body)} if tree else {}


def _tests_of(body: Sequence[ast.stmt], above: str = "") -> Iterator[tuple[str, _Function]]:
    """Yield (name, function) of tests, without those marked to be skipped or to fail."""
    for node in body:
        if not isinstance(node, _Function | ast.ClassDef):
            continue
        if any(_SKIPS.search(ast.unparse(decorator)) for decorator in node.decorator_list):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _tests_of(node.body, f"{above}{node.name}::")
        elif node.name.startswith("test"):
            yield above + node.name, node


_Change = tuple[ast.expr, str]  # Node of a test, and the text that replaces it.
_Text = partial[str]  # Function that returns the source text of a node.
_Values = Mapping[str, Sequence[ast.expr]]


def _expectations(body: Sequence[ast.stmt], text: _Text, values: _Values, rng: random.Random) -> Iterator[_Change]:
    for node in body:
        match node:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                yield from _wrong_side(left, right, text, values, rng)
            case ast.Assert(test=test):
                yield _flipped(test, text)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"))) as call):
                yield from _of_method(call, text, values, rng)
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=func, args=[kind, *_]))]) if (
                ast.unparse(func) in _RAISES
            ):
                yield kind, _other_exception(ast.unparse(kind), rng)
            case (
                ast.With(body=inside) | ast.AsyncWith(body=inside) | ast.For(body=inside) | ast.AsyncFor(body=inside)
                | ast.Try(body=inside)
            ):  # fmt: skip
                yield from _expectations(inside, text, values, rng)


def _flipped(test: ast.expr, text: _Text) -> _Change:
    match test:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            is_written, flipped = _FLIPPED[type(operator)]
            written = f"{text(left)} {is_written} {text(right)}"
            if text(test) == written:
                return test, f"{text(left)} {flipped} {text(right)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return test, _in_brackets(operand, text(operand))
    return test, f"not {_in_brackets(test, text(test))}"


def _in_brackets(node: ast.expr, text: str) -> str:
    is_plain = isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript) and "\n" not in text
    return text if is_plain else f"({text})"


def _of_method(call: ast.Call, text: _Text, values: _Values, rng: random.Random) -> Iterator[_Change]:
    assert isinstance(call.func, ast.Attribute)
    name = call.func.attr
    if name in _OPPOSITES:
        yield call.func, f"self.{_OPPOSITES[name]}"
    elif _EQUALS.fullmatch(name) and "Not" not in name and len(call.args) > 1:
        yield from _wrong_side(call.args[0], call.args[1], text, values, rng)
    elif f"self.{name}" in _RAISES and len(call.args) > 1:
        yield call.args[0], _other_exception(ast.unparse(call.args[0]), rng)


def _wrong_side(left: ast.expr, right: ast.expr, text: _Text, values: _Values, rng: random.Random) -> Iterator[_Change]:
    """Yield a change to the literal side of a comparison, or to a literal that its name stands for. Without one, yield
    two of the right side: to a random number, and to a value of the same type, which code can't know by its type."""
    for side in map(_bare, (right, left)):
        literals = values.get(side.id, ()) if isinstance(side, ast.Name) else [side]
        if found := [change for each in literals if (change := _leaf(each, text, rng)) is not None]:
            yield rng.choice(found)
            return
    yield right, str(rng.randint(1000, 99999))
    yield right, f"{_in_brackets(right, text(right))} * {rng.randint(2, 9)}"


def _bare(node: ast.expr) -> ast.expr:
    is_near = ast.unparse(node).startswith(("approx(", "pytest.approx("))
    return node.args[0] if is_near and isinstance(node, ast.Call) and node.args else node


def _leaf(node: ast.expr, text: _Text, rng: random.Random) -> _Change | None:
    """Return a change to a constant in a literal; None for any other expression."""
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    leaves = [leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
    if leaves:
        leaf = rng.choice(leaves)
        return leaf, _other(leaf.value, text(leaf), rng)
    return node, f"[{rng.randint(0, 99)}]"


def _other(value: object, written: str, rng: random.Random) -> str:
    """Return the source of a clearly different constant of the same type, written as the one that it replaces: code
    could know a sentinel by other quotes or digits."""
    match value:
        case bool():
            return str(not value)
        case int() | float():
            return _other_number(written, rng)
        case str() | bytes():
            return _other_text(value, written, rng)
    return str(rng.randint(2, 99))


def _other_text(value: str | bytes, written: str, rng: random.Random) -> str:
    if found := _STRING.fullmatch(written):
        kind, quotes, body = found.groups()
        for place in rng.sample(range(len(body) + 1), len(body) + 1)[:20]:
            other = f"{kind}{quotes}{body[:place]}{rng.choice('aeioust')}{body[place:]}{quotes}"
            # Within an escape, or between two strings, a letter changes more or nothing.
            if parse(other) is not None and len(ast.literal_eval(expression(other))) == len(value) + 1:
                return other
    return repr(value + "a") if isinstance(value, str) else repr(value + b"a")


def _other_number(written: str, rng: random.Random) -> str:
    start = 2 if written[:2].lower() in _DIGITS else 0
    digits = _DIGITS.get(written[:2].lower(), "123456789")
    place = next((at for at, digit in enumerate(written) if at >= start and digit.lower() in digits.lstrip("0")), -1)
    place = start if place < 0 else place
    old = digits.find(written[place].lower())
    others = [digit for new, digit in enumerate(digits) if abs(new - old) > 1] or [digits[1 - old]]
    return f"{written[:place]}{rng.choice(others)}{written[place + 1 :]}"


def _other_exception(written: str, rng: random.Random) -> str:
    """Return an exception that is no case of the written ones, nor they of it; a rare one if one is not Python's."""
    kinds = [getattr(builtins, name, None) for name in re.findall(r"\w+", written)]
    known = tuple(kind for kind in kinds if isinstance(kind, type))
    names = (*_OFTEN_RAISED, *_NEVER_RAISED) if len(known) == len(kinds) else _NEVER_RAISED
    related = {name for name in names for kind in known
               if issubclass(kind, getattr(builtins, name)) or issubclass(getattr(builtins, name), kind)}  # fmt: skip
    return rng.choice([name for name in names if name not in related and name not in written] or ["KeyboardInterrupt"])


def _text(node: ast.expr, *, data: bytes, lines: Sequence[int]) -> str:
    start, end = _span(node, lines)
    return data[start:end].decode()


def _span(node: ast.expr, lines: Sequence[int]) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
