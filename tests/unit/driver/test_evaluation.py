"""Evaluations in the middle of a run: slow ones are allowed, and lost processes lose no prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.routing import Router
from rayapp.config.config import Config
from rayapp.core.errors import EngineDeadError, InputError, RestartsUsedUpError, RewardFailedError
from rayapp.core.timing import Phases
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, GroupSummary
from rayapp.driver.evaluation import evaluation_folder, validate
from rayapp.driver.feeding import MAX_ISSUES
from rayapp.driver.run import Training
from rayapp.driver.store import StoredGroup
from rayapp.driver.watchdog import unstalled
from rayapp.extras.view.run import ViewedRun
from rayapp.rollout.container_images import ImagePlacement
from rayapp.rollout.order import ANY_VERSION, Cohort, GroupRequest
from rayapp.runs.folder import RunFolder
from rayapp.runs.source import open_source
from rayapp.runs.tracking.metrics import read_metrics
from rayapp.runs.trajectories import read_groups
from support import make

NUM_PROMPTS = 3
SOURCES = [
    {"name": "code", "tasks": ["sort_numbers"]},
    {"name": "more", "tasks": ["sort_numbers"], "eval": {"samples_per_task": 4}},
]
STOP_AFTER_S = 0.03


class Worker:
    """Takes two thirds of `STOP_AFTER_S` for each prompt, on the test's clock; the first `num_lost` calls are lost."""

    name = "rollout-worker-0"

    def __init__(
        self, num_lost: int = 0, num_prompts: tuple[int, ...] = (NUM_PROMPTS,), failing: Sequence[int] = ()
    ) -> None:
        self._num_prompts, self._failing = num_prompts, failing
        self.now_s = 0.0
        self.requests: list[GroupRequest] = []
        self.num_settled = 0
        self.notes: list[str] = []
        self._num_lost = num_lost

    async def num_eval_prompts(self) -> tuple[int, ...]:
        return self._num_prompts

    async def evaluate(self, request: GroupRequest, step: int) -> tuple[GroupSummary, Group]:
        self.requests.append(request)
        if len(self.requests) <= self._num_lost:
            raise EngineDeadError("vllm-server-0: its process is gone")
        if request.group_id in self._failing:
            raise RewardFailedError("no verdict", "test")
        self.now_s += STOP_AFTER_S * 2 / 3
        await asyncio.sleep(STOP_AFTER_S / 5)  # the watchdog looks every tenth
        played = make.trajectory(range(4), 2, reward=1.0, policy_version=step)
        group = make.group(played, group_id=request.group_id)
        return summarize_group(group, time_total_s=0.0), group

    async def settled(self) -> None:
        """Return at once, as the supervisor does when all members are back."""
        await asyncio.sleep(0)
        self.num_settled += 1


async def fetched(groups: Sequence[StoredGroup[Group]]) -> list[Group]:
    return [group.ref for group in groups]


def run_with(worker: Worker, *, prompts_at_once: int, folder: RunFolder | None = None, **sections: Any) -> Training:
    config = Config.model_validate(
        {
            "eval": {"every_steps": 1, "samples_per_task": 2},
            "rollout": {"group_size": 2},
            "train": {"groups_per_step": prompts_at_once},
        }
        | sections
    )
    cluster = SimpleNamespace(
        config=config,
        is_synchronous=True,
        rollout_workers=[worker],
        images=ImagePlacement.of(config),
        router=Router(2, is_up=lambda server: server == 1 or worker.num_settled == 0),
        supervisor=worker,
        check_weights=lambda: None,
        fetch_groups=fetched,
    )
    watchdog = make.watchdog(stop_after_s=STOP_AFTER_S, clock=lambda: worker.now_s)
    keeps_nothing = SimpleNamespace(recording_evaluation=lambda step: nullcontext())
    run: Any = SimpleNamespace(
        cluster=cluster, watchdog=watchdog, folder=folder or keeps_nothing, stopping=asyncio.Event(),
        tracker=SimpleNamespace(note=worker.notes.append),
    )  # fmt: skip
    return run  # type: ignore[no-any-return]


async def test_an_evaluation_that_takes_longer_than_the_limit_of_a_stall_is_no_stall() -> None:
    worker = Worker()
    run = run_with(worker, prompts_at_once=1)

    async with unstalled(run.watchdog, "the end of step 1"):
        metrics = await validate(run, 1, Phases())

    assert metrics["eval/reward/mean"] == 1.0
    assert worker.now_s > STOP_AFTER_S


async def test_a_prompt_that_is_lost_with_its_server_is_evaluated_again_alone_and_on_one_that_is_up() -> None:
    worker = Worker(num_lost=1)

    metrics = await validate(run_with(worker, prompts_at_once=NUM_PROMPTS), 1, Phases())

    assert metrics["eval/reward/mean"] == 1.0
    assert [(r.group_id, r.server, r.cohort) for r in worker.requests] == [
        *((place, place % 2, Cohort(place=place, size=NUM_PROMPTS)) for place in range(NUM_PROMPTS)),
        (0, 1, None),
    ]
    assert {(r.purpose, r.policy_version) for r in worker.requests} == {("eval", ANY_VERSION)}


async def test_prompts_that_start_together_are_of_one_source_and_have_its_number_of_samples() -> None:
    worker = Worker(num_prompts=(3, 2))

    await validate(run_with(worker, prompts_at_once=2, sources=SOURCES), 1, Phases())

    # Four samples at once: two prompts of two samples, or one of four.
    assert [(r.group_id, r.cohort) for r in worker.requests] == [
        (0, Cohort(place=0, size=2)), (1, Cohort(place=1, size=2)), (2, Cohort(place=0, size=1)),
        (3, Cohort(place=0, size=1)), (4, Cohort(place=0, size=1)),
    ]  # fmt: skip


async def test_a_prompt_that_is_lost_again_and_again_ends_the_run() -> None:
    worker = Worker(num_lost=MAX_ISSUES)

    with pytest.raises(RestartsUsedUpError, match=rf"the evaluation of prompt 0 was lost {MAX_ISSUES} times"):
        await validate(run_with(worker, prompts_at_once=1), 1, Phases())


@pytest.mark.parametrize("failing", [(), (1,), (0, 2), tuple(range(NUM_PROMPTS))])
async def test_prompts_that_an_evaluation_leaves_out_are_counted(failing: tuple[int, ...]) -> None:
    worker = Worker(failing=failing)

    metrics = await validate(run_with(worker, prompts_at_once=1), 1, Phases())

    assert metrics["eval/prompts/left_out"] == len(failing)
    assert metrics.get("eval/trajectories/scored", 0) == NUM_PROMPTS - len(failing)


async def test_what_an_evaluation_sampled_is_kept_to_be_read(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"output_dir": str(tmp_path), "name": "r"}})
    with RunFolder.open(config) as folder:
        await validate(run_with(Worker(), prompts_at_once=1, folder=folder), 4, Phases())
        kept = read_groups(folder.path / "evaluations" / "step=000004.parquet")
        assert [group.group_id for group in kept] == [0, 1, 2]

        folder.truncate_after(3)
        assert not list((folder.path / "evaluations").iterdir()), "a resumed run evaluates step 4 again"


async def test_an_evaluation_alone_is_a_folder_that_the_page_shows(tmp_path: Path) -> None:
    [group] = await fetched([StoredGroup(summary=None, ref=(await Worker().evaluate(GroupRequest(
        group_id=0, policy_version=0), 0))[1])])  # type: ignore[arg-type]  # fmt: skip
    with evaluation_folder(Config(), tmp_path / "eval") as (record, keep):
        record([group])
        keep({"reward/mean": 0.5})
    run = ViewedRun(open_source(str(tmp_path / "eval")))

    assert read_metrics(tmp_path / "eval" / "metrics.jsonl")[0]["eval/reward/mean"] == 0.5
    assert run.groups({})["rows"][0]["group_id"] == -1
    assert len(run.group(0, -1)["trajectories"]) == 1


def test_an_evaluation_never_goes_into_the_folder_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()

    with pytest.raises(InputError, match="holds a trained run"):
        evaluation_folder(Config(), tmp_path).__enter__()


async def test_an_evaluation_ends_when_its_run_stops_and_leaves_no_half_file(tmp_path: Path) -> None:
    worker = Worker()
    config = Config.model_validate({"run": {"output_dir": str(tmp_path), "name": "r"}})
    with RunFolder.open(config) as folder:
        run = run_with(worker, prompts_at_once=1, folder=folder)
        evaluation = asyncio.create_task(validate(run, 4, Phases()))
        while not worker.requests:
            await asyncio.sleep(0)
        run.stopping.set()  # as Ctrl-C does

        assert await evaluation == {}
        assert not list((folder.path / "evaluations").glob("*"))
    assert len(worker.requests) == 1
    assert worker.notes == ["the evaluation after step 4 is left out: the run stops"]
