"""Who may import whom, read off the syntax trees: types <- protocols <- the parts <- driver; actors -> rayapp.

And what `rayapp --help` must not load: it has to answer at once.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "rayapp").rglob("*.py"), *(ROOT / "actors").rglob("*.py")])
PARTS = (
    "agent",
    "algo",
    "engines",
    "learner",
    "rollout",
    "sandbox",
    "storage",
    "tasks",
    "tools",
    "tracking",
    "weights",
)
DRIVER = ("rayapp.driver", "rayapp.evaluation", "rayapp.feeding", "rayapp.run", "rayapp.step")
"""The loop, by what it does; all of it runs in the driver's process."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, also_inside_functions: bool = True) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if also_inside_functions else at_the_top(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_the_top(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when the module is imported: not function bodies, nor what only type checkers read."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not is_typing:
            pending.extend(ast.iter_child_nodes(node))


def begins(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def offenders(importers: Iterator[Path] | list[Path], *banned: str) -> list[str]:
    return [
        f"{module_name(path)} imports {name}"
        for path in importers
        for name in imports_of(path)
        if begins(name, *banned)
    ]


def part_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "rayapp" and len(parts) > 2 else ""


def test_types_and_errors_import_nothing_of_ours() -> None:
    own = [ROOT / "rayapp" / "errors.py", ROOT / "rayapp" / "types.py"]

    assert offenders(own, "rayapp", "actors") == []


def test_protocols_import_only_types_and_errors() -> None:
    names = [name for name in imports_of(ROOT / "rayapp" / "protocols.py") if begins(name, "rayapp", "actors")]

    assert [name for name in names if not begins(name, "rayapp.types", "rayapp.errors")] == []


def test_parts_import_neither_the_driver_nor_the_cluster_nor_actors() -> None:
    parts = [path for path in FILES if part_of(path) in PARTS]

    assert offenders(parts, *DRIVER, "rayapp.cluster", "rayapp.cli", "actors") == []


def test_actors_import_neither_the_driver_nor_the_cluster() -> None:
    actors = [path for path in FILES if module_name(path).startswith("actors")]

    assert offenders(actors, *DRIVER, "rayapp.cluster", "rayapp.cli") == []


def test_only_the_cluster_imports_actors() -> None:
    others = [path for path in FILES if begins(module_name(path), "rayapp") and path.name != "cluster.py"]

    assert offenders(others, "actors") == []


def test_only_processes_import_ray() -> None:
    # ray_session.py starts and stops Ray for cluster.py; object_store.py the weight transport; submit.py a client.
    allowed = ("actors", "rayapp.cluster", "rayapp.ray_session", "rayapp.submit", "rayapp.weights.object_store")
    others = [path for path in FILES if not begins(module_name(path), *allowed)]

    assert offenders(others, "ray") == []


def test_only_the_engine_imports_vllm() -> None:
    others = [path for path in FILES if not module_name(path).startswith("rayapp.engines.vllm")]

    assert offenders(others, "vllm") == []


def test_what_reads_hostile_text_needs_the_standard_library_alone() -> None:
    # The text process has no other packages: `text_process.py`.
    own = {
        f"rayapp.tasks.{name}" for name in ("answer_rules", "banned", "extraction", "scopes", "screening", "text_child")
    }
    names = {name for path in FILES if module_name(path) in own for name in imports_of(path)}

    assert [n for n in names if n.split(".")[0] not in sys.stdlib_module_names and not begins(n, *own)] == []


@pytest.mark.parametrize(
    "path", [ROOT / "rayapp" / "config.py", ROOT / "rayapp" / "cli.py"], ids=lambda path: path.name
)
def test_command_line_loads_nothing_heavy_at_the_top(path: Path) -> None:
    heavy = ("torch", "ray", "verl", "vllm", "transformers", "numpy", "pyarrow", "matplotlib", "mlflow")

    assert [name for name in imports_of(path, also_inside_functions=False) if begins(name, *heavy)] == []


def test_help_and_config_show_load_neither_torch_nor_ray() -> None:
    program = (
        "import sys\n"
        "from rayapp.cli import run\n"
        "assert run(['--help']) == 0 and run(['train', '--help']) == 0 and run(['config', 'show']) == 0\n"
        "heavy = {'torch', 'ray', 'verl', 'vllm', 'transformers', 'pandas', 'e2b', 'daytona', 'mlflow'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout.splitlines()[-1] == "LOADED []", done.stderr
