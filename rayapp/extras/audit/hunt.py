"""Searches for leaks of a task's solution and hidden tests where model-written code runs.

    workspace filled as for an agent -> program inside reads files, environment, processes -> texts -> compared outside

No secret enters the sandbox: the program searches for public words, such as the function's name, and returns the files
that contain them. The search also finds secrets that have other white space, or are Python functions whose names were
changed.
"""

from __future__ import annotations

import ast
import builtins
import copy
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from rayapp.core.errors import SandboxProtocolError
from rayapp.core.protocols import SandboxSource
from rayapp.core.syntax import parse
from rayapp.core.types import AgentStart, SandboxSpec
from rayapp.tasks.verdict import LEASE_TIMEOUT_S

_TIMEOUT_S = 60.0
_MAX_OUTPUT_BYTES = 8 << 20
_MIN_WORD_CHARS = 4  # Shorter words occur in files of any system.
_MIN_NODES = 20  # Smaller functions may be equal by chance, so they are not compared.
_PYTHONS_NAMES = frozenset(vars(builtins))
_PROGRAM = """
import json, os, sys
words = json.loads(sys.stdin.read())
seen, here = {}, os.path.realpath('.')
def look(path, always):
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > 1 << 20:
            return
        with open(path, errors='replace') as file:
            text = file.read()
    except (OSError, ValueError):
        return
    if always or any(word in text for word in words):
        seen[path] = text
def walk(root, always):
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in SKIPPED]
        for name in names:
            look(os.path.join(folder, name), always)
SKIPPED = {'/proc', '/sys', '/dev', '/usr', '/bin', '/sbin', '/lib', '/lib64', here, sys.base_prefix}
walk(here, True)
if words:
    walk('/', False)
try:
    processes = os.listdir('/proc')
except OSError:
    processes = ()
for number in processes:
    if number.isdigit():
        for name in ('cmdline', 'environ'):
            try:
                with open('/proc/%s/%s' % (number, name), errors='replace') as file:
                    seen['/proc/%s/%s' % (number, name)] = file.read(1 << 16)
            except OSError:
                pass
seen['its environment'] = repr(dict(os.environ))
print(json.dumps(seen))
"""
# The system's programs and Python are skipped: they are the same for every task, and reading them takes minutes.


async def texts_in_sandbox(start: AgentStart, words: Iterable[str], sandboxes: SandboxSource) -> dict[str, str]:
    """Return path -> text of the files that code in an agent's workspace can read.

    Outside the workspace, only files with one of the words of 4 or more letters count. Raises SandboxError.
    """
    asked = start.spec or SandboxSpec()
    spec = replace(asked, packages=(*asked.packages, *start.packages))
    told = json.dumps(sorted(word for word in words if len(word.removeprefix("def ")) >= _MIN_WORD_CHARS))
    async with sandboxes.lease(spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
        for path, text in start.files.items():
            await sandbox.write_file(path, text.encode())
        if start.setup:
            await sandbox.run_command(start.setup, timeout_s=_TIMEOUT_S)
        ran = await sandbox.run_code(_PROGRAM, timeout_s=_TIMEOUT_S, stdin=told, max_output_bytes=_MAX_OUTPUT_BYTES)
    try:
        found = json.loads(ran.stdout)
    except ValueError:
        why = ran.error or (f"stopped for {ran.stopped_for.value}" if ran.stopped_for else "no answer")
        raise SandboxProtocolError(f"the workspace's files can't be read in the sandbox: {why}") from None
    return {str(path): str(text) for path, text in found.items()}


def places_of(secrets: Iterable[str], texts: dict[str, str], public: Iterable[str] = ()) -> list[str]:
    """Return the paths of texts that contain a secret. Python functions of the `public` texts are no secrets."""
    secrets = tuple(secrets)
    known = {_bare(secret) for secret in secrets}
    shapes = {shape for secret in secrets for shape in _shapes(secret)}
    shapes -= {shape for text in public for shape in _shapes(text)}
    return [path for path, text in texts.items() if _holds(text, known, shapes)]


def holds_expression(text: str, expression: str) -> bool:
    """Return True if a text contains the whole expression, ignoring white space."""
    parts = re.findall(r"\w+|[^\w\s]", expression)
    return re.search(r"(?<![\w.])" + r"\s*".join(map(re.escape, parts)) + r"(?!\w)", text) is not None


def _holds(text: str, known: set[str], shapes: set[str]) -> bool:
    bare = _bare(text)
    return any(secret in bare for secret in known) or not shapes.isdisjoint(_shapes(text))


def _bare(text: str) -> str:
    return "".join(text.split())


def _shapes(text: str) -> Iterator[str]:
    """Yield each function in Python source in a form that is independent of its names; nothing if it is not Python."""
    tree = parse(text) if "def " in text else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and sum(1 for _ in ast.walk(node)) >= _MIN_NODES:
            yield _shape(node)


def _shape(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a function's syntax tree without name, docstring and annotations; names except builtins are numbered."""
    function = copy.deepcopy(function)
    function.name, function.returns, function.decorator_list = "", None, []
    if ast.get_docstring(function, clean=False) is not None:
        del function.body[0]
    numbers: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.arg, node.annotation = numbers.setdefault(node.arg, str(len(numbers))), None
        elif isinstance(node, ast.Name) and node.id not in _PYTHONS_NAMES:
            node.id = numbers.setdefault(node.id, str(len(numbers)))
    return ast.dump(function)
