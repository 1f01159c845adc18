"""Where everything lives (docs/develop.md), read off the syntax trees: a room imports only from rooms on lines below
it.

And what `rayapp --help` must not load: it has to answer at once.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LINES = """
    extras
    cli
    api
    driver
    actors testing
    rollout learner
    engine
    runs tasks tools
    sandbox storage
    config
    core
"""
"""From the top down. Rooms of one line don't import each other; `actors` is a folder of its own beside `rayapp`."""
TASKS_DATA = "rayapp/tasks/library/repositories"
"""Code that policies work on: data, not modules of ours."""
LEVEL = {room: -level for level, line in enumerate(LINES.split("\n")) for room in line.split()}
MOST_AT_THE_TOP = 16
MOST_LINES = {
    "actors": 3063, "api": 880, "cli": 2573, "config": 2960, "core": 3279, "driver": 2645, "engine": 2013,
    "extras": 12995, "learner": 7961, "rollout": 7357, "runs": 2155, "sandbox": 6831, "storage": 1818, "tasks": 5824,
    "testing": 413, "tools": 1962,
}  # fmt: skip
"""Lines that each room may have. A room grows only by a change of this table."""
MOST_FILES = 16
HEAVY = {"torch", "ray", "verl", "vllm", "transformers", "pyarrow", "matplotlib", "mlflow", "pandas", "e2b", "daytona"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, tuple[str, ...]]:
    """Every module of the product, and what it imports: modules and names, also inside functions and for types only."""
    files = [
        path for path in sorted([*(ROOT / "rayapp").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]) if is_ours(path)
    ]
    return {module_name(path): tuple(imports_of(ast.parse(path.read_text()).body)) for path in files}


def is_ours(path: Path) -> bool:
    return not path.relative_to(ROOT).is_relative_to(TASKS_DATA)


def imports_of(statements: Iterable[ast.stmt | ast.excepthandler | ast.match_case]) -> Iterator[str]:
    """Statements only, no expressions: an import is never inside one, and there are far fewer."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"imports are absolute: {ast.unparse(node)}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from imports_of(getattr(node, inside, ()))


def begins(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def room_of(name: str) -> str:
    """`rayapp.core.types` -> core, `actors.spawn` -> actors."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "rayapp" else first


def importers(*names: str) -> list[str]:
    return [module for module, imports in modules().items() if any(begins(each, *names) for each in imports)]


def outside(found: Iterable[str], *allowed: str) -> list[str]:
    return [module for module in found if not begins(module, *allowed)]


def test_a_room_imports_only_from_rooms_on_lines_below_it() -> None:
    upward = [
        f"{module} imports {name}"
        for module, imports in modules().items()
        if room_of(module) in LEVEL
        for name in imports
        if room_of(name) in LEVEL and begins(name, "rayapp", "actors") and room_of(name) != room_of(module)
        if LEVEL[room_of(name)] >= LEVEL[room_of(module)]
    ]

    assert upward == []


def test_every_room_has_its_line() -> None:
    folders = {path.name for path in (ROOT / "rayapp").iterdir() if path.is_dir() and path.name != "__pycache__"}

    assert folders | {"actors"} == set(LEVEL)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, imports in modules().items():
        for name in imports:
            target = name if name in modules() else name.rpartition(".")[0]
            if target in modules() and target != module:
                graph[module].add(target)

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_the_hall_and_every_folder_can_be_taken_in_at_a_glance() -> None:
    hall = [
        path.name for path in (ROOT / "rayapp").iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")
    ]
    sources = [
        path
        for top in ("rayapp", "actors")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py" and is_ours(path)
    ]
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in sources)

    assert len(hall) <= MOST_AT_THE_TOP, sorted(hall)
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


def test_no_room_has_more_lines_than_its_table_says() -> None:
    sizes: Counter[str] = Counter()
    for room in MOST_LINES:
        folder = ROOT / room if room == "actors" else ROOT / "rayapp" / room
        sizes[room] = sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py") if is_ours(path))

    assert {room: size for room, size in sizes.items() if size > MOST_LINES[room]} == {}


def test_the_core_never_imports_an_extra_and_extras_do_not_import_each_other() -> None:
    assert outside(importers("rayapp.extras"), "rayapp.extras") == []
    across = [
        f"{module} imports {name}"
        for module, imports in modules().items()
        for name in imports
        if begins(module, "rayapp.extras") and begins(name, "rayapp.extras")
        if module.split(".")[2:3] != name.split(".")[2:3]
    ]
    assert across == []


def test_types_and_errors_import_nothing_of_ours_and_protocols_only_them() -> None:
    own = {name: [each for each in modules()[f"rayapp.core.{name}"] if begins(each, "rayapp", "actors")]
           for name in ("types", "errors", "protocols")}  # fmt: skip

    assert own["types"] == own["errors"] == []
    assert outside(own["protocols"], "rayapp.core.types", "rayapp.core.errors") == []


@pytest.mark.parametrize(
    ("imported", "allowed"),
    [
        ("actors", ["actors", "rayapp.driver.cluster"]),
        ("ray", ["actors", "rayapp.driver.cluster"]),
        ("vllm", ["rayapp.engine", "rayapp.learner.state.sender", "rayapp.rollout.agent.vllm_tool_parser"]),
    ],
)
def test_only_few_import_processes_ray_and_vllm(imported: str, allowed: list[str]) -> None:
    assert outside(importers(imported), *allowed) == []


def test_the_product_imports_no_generator_and_no_test() -> None:
    assert importers("scripts", "tests", "benchmarks") == []


def test_help_and_config_show_load_neither_torch_nor_ray() -> None:
    program = (
        "import sys\n"
        "from rayapp.cli.main import run\n"
        "assert run(['--help']) == 0 and run(['train', '--help']) == 0\n"
        f"at_once = set({HEAVY}) & set(sys.modules)\n"
        "assert run(['config', 'show']) == 0\n"
        "heavy = {'torch', 'ray', 'verl', 'vllm', 'transformers', 'pandas', 'e2b', 'daytona', 'mlflow'}\n"
        "print('LOADED', sorted(at_once | heavy & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.stdout.splitlines()[-1] == "LOADED []", done.stderr


def test_every_file_of_tests_that_the_order_of_tests_names_is_there(request: pytest.FixtureRequest) -> None:
    order: Any = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    files = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {f"{file.parts[0]}/{file.name}" for file in files}
    groups = {group for named in order.GROUPS.values() for group in named}
    assert order.SLOW_UNITS | order.TOGETHER.keys() <= there
    assert set(order.LONGEST_FIRST) <= there | groups | {file.parts[0] for file in files}
