"""Problems of reasoning-gym as tasks: equal for equal seeds, scored by its rule, in a sandbox if that evaluates
code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import InputError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.extras.generators.reasoning_gym import GeneratedTask, load_generated
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.loading import load_tasks
from support import make

real = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def package() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'reasoning-gym>=0.1.25'")


async def score(task: GeneratedTask, text: str, sandboxes: SandboxSource) -> Reward:
    return await task.score(make.prompt(task=task.name), text, sandboxes, seed=0)


@pytest.mark.usefixtures("package")
def test_a_seed_gives_the_same_problems_and_another_one_others() -> None:
    first, again, other = (load_generated(f"reasoning_gym:chain_sum?size=5&seed={seed}") for seed in (1, 1, 2))

    assert first == again
    assert [task.prompt for task in first] != [task.prompt for task in other]
    assert len(load_tasks(["reasoning_gym:chain_sum?size=5", "reasoning_gym:leg_counting?size=3"])) == 8


@real
@pytest.mark.usefixtures("package")
async def test_a_right_answer_earns_one_and_prose_nothing(sandboxes: SandboxSource) -> None:
    (task,) = load_generated("reasoning_gym:leg_counting?size=1")
    wrong = str(int(task.answer or "") + 1)

    assert (await score(task, f"I count. {task.solution}", sandboxes)).terms == {"pass_rate": 1.0, "solved": 1.0}
    assert (await score(task, f"<answer>{wrong}</answer>", sandboxes)).value == 0.0
    nothing = await score(task, "no idea", sandboxes)
    assert (nothing.value, nothing.status) == (0.0, "no_answer")


@real
@pytest.mark.slow  # a sandbox with sympy and all that the package loads
@pytest.mark.usefixtures("package")
async def test_an_answer_that_the_package_would_evaluate_is_scored_in_a_sandbox(
    sandboxes: SandboxSource, tmp_path: Path
) -> None:
    (task,) = load_generated("reasoning_gym:string_insertion?size=1&seed=3")
    assert not task.is_compared

    right = await score(task, task.solution or "", sandboxes)
    assert (right.value, right.terms["solved"], right.terms["verdict/forgeable"]) == (1.0, 1.0, 1.0), right
    file = tmp_path / "written-by-an-answer"
    tmp_path.chmod(0o777)
    assert (await score(task, f"<answer>open({str(file)!r}, 'w')</answer>", sandboxes)).value < 1.0
    assert not file.exists()


STAND_IN = """
class Data:
    def __getitem__(self, index):
        return "wanted"
    def score_answer(self, answer, entry):
        if MISSES_A_FILE or answer == "1/0":
            raise FileNotFoundError("a font")
        return float(answer == entry)

def create_dataset(name, size):
    return Data()
"""


@pytest.mark.parametrize("misses_a_file", [True, False])
async def test_an_answer_earns_no_zero_where_the_right_one_can_not_be_scored_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misses_a_file: bool
) -> None:
    (tmp_path / "reasoning_gym.py").write_text(STAND_IN.replace("MISSES_A_FILE", str(misses_a_file)))
    monkeypatch.syspath_prepend(tmp_path)
    task = GeneratedTask(name="any", prompt="?", answer="wanted", options='{"size": 1}', index=0, is_compared=False)

    async with open_pool(SandboxConfig(max_leases=1), "test-stand-in") as (source, _):
        broken = await score(task, "<answer>1/0</answer>", source)
        right = await score(task, task.solution or "", source)

    assert (broken.valid, broken.failure_kind, broken.value) == (not misses_a_file, "no_score" * misses_a_file, 0.0)
    assert (right.valid, right.value) == (not misses_a_file, float(not misses_a_file))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("chain_sums", "there is no generator 'chain_sums'; did you mean chain_sum?"),
        ("chain_sum?min_term=1", "the generator refuses its options: .*min_term"),
        ("chain_sum?min_terms=9&max_terms=2", "the generator refuses its options"),
    ],
)
def test_a_generator_or_option_that_is_not_there_is_refused(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", "[?]")):
        load_generated(f"reasoning_gym:{source}")


def test_without_the_package_it_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)

    with pytest.raises(InputError, match="pip install 'reasoning-gym>=0"):
        load_generated("reasoning_gym:chain_sum")


async def test_the_last_answer_counts_and_one_that_holds_the_right_text_earns_a_part() -> None:
    task = GeneratedTask(name="any", prompt="?", answer="42", options="{}", index=0, is_compared=True)
    source: Any = None  # nothing runs

    for text, worth in (("<answer>1</answer> <answer> 42 </answer>", 1.0), ("<answer>x 42</answer>", 0.5), ("42", 0.0)):
        assert (await score(task, text, source)).value == worth
