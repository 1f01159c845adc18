"""Trajectories as traces: which are chosen, the contents of their spans, and that MLflow's own client reads them
back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayapp.config.config import Config
from rayapp.core.types import (
    CallRecord,
    ExecRecord,
    Fork,
    Group,
    Reward,
    RolloutStatus,
    Trajectory,
    TurnRecord,
)
from rayapp.extras.trackers.traces import Span, TracedRollout, chosen_rollouts, to_span, walk
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking import trackers
from rayapp.runs.tracking.background import MAX_WAITING_TRACES, BackgroundTracer
from support import make

ROOT = Path(__file__).parents[4]
RAN = ExecRecord(sandbox_id="box-7", provider="local", outcome="ok", started_at_s=1002.25, duration_s=0.5)
CALL = CallRecord(
    name="python",
    arguments='{"code": "print(6 * 7)"}',
    output="42",
    started_at_s=1002.0,
    duration_s=1.0,
    waited_s=0.25,
    execs=(RAN,),
)
REFUSED = CallRecord(name="", arguments="{}", output="Error: can't be read", failure="malformed")


def decode(token_ids: Sequence[int]) -> str:
    """Token 65 is A."""
    return "".join(map(chr, token_ids))


def turn(start: int, end: int, started_at_s: float, *calls: CallRecord) -> TurnRecord:
    times = {"started_at_s": started_at_s, "queued_s": 0.5, "generate_s": 1.5}
    return make.turn(start, end, text=f"said {start}", policy_version=3, calls=calls, **times)


def trajectory(*turns: TurnRecord, status: RolloutStatus = RolloutStatus.COMPLETED) -> Trajectory:
    mask = np.zeros(8, np.bool_)
    for one in turns:
        mask[one.start : one.end] = True
    reward = Reward(value=1.0, terms={"score": 1.0}, time_score_s=0.25)
    if status.is_error:
        reward = Reward.invalid("tool_unavailable", "the server is gone")
    more: dict[str, Any] = {"response_mask": mask, "status": status, "turns": turns, "policy_version": 3}
    return make.trajectory(range(65, 73), completion_text="said 6", reward=reward, **more)  # ABCDEFGH


TWO_TURNS = trajectory(turn(2, 4, 1000.0, CALL, REFUSED), turn(6, 8, 1004.0))


def group(*trajectories: Trajectory, group_id: int = 5) -> Group:
    return make.group(*trajectories, group_id=group_id, task="openai/gsm8k", text="AB")


def rollout(one: Trajectory = TWO_TURNS) -> TracedRollout:
    return TracedRollout(step=9, group=group(one), index=0)


def spans(root: Span) -> dict[str, Span]:
    return {span.name: span for _, _, span in walk(root)}


def test_tokens_are_text_and_each_generation_shows_all_that_the_policy_read() -> None:
    root = to_span(rollout(), decode)

    first, second = (span for _, _, span in walk(root) if span.name == "generate")
    assert (first.inputs, first.outputs) == ({"text": "AB"}, {"text": "CD"})
    assert (second.inputs, second.outputs) == ({"text": "ABCDEF"}, {"text": "GH"})


def test_a_turn_of_a_rollout_that_forked_shows_what_that_turn_read() -> None:
    forked = replace(TWO_TURNS, forks=(Fork(start=4, after=1),))

    _, second = (span for _, _, span in walk(to_span(rollout(forked), decode)) if span.name == "generate")

    assert second.inputs == {"text": "ABEF"}
    assert second.attributes["num_input_tokens"] == 4


def test_times_are_those_that_the_worker_noted() -> None:
    found = spans(to_span(rollout(), decode))

    assert (found["turn 0"].start_s, found["turn 0"].end_s) == (1000.0, 1003.0)  # to the end of its call
    assert (found["tool python"].start_s, found["tool python"].end_s) == (1002.0, 1003.0)
    assert (found["sandbox"].start_s, found["sandbox"].end_s) == (1002.25, 1002.75)
    # 1004 + 0.5 queued + 1.5 generating, and then 0.25 scoring
    assert (found["score"].start_s, found["rollout"].end_s) == (1006.0, 1006.25)
    assert chosen_rollouts(1, [group(trajectory())], 1.0, seed=0) == (), "one that never spoke is not traced"


def test_failures_stand_where_they_happened() -> None:
    failed = trajectory(turn(2, 4, 1000.0, REFUSED), status=RolloutStatus.ERROR_TOOL)
    found = spans(to_span(rollout(failed), decode))

    assert found["tool call that can't be read"].error == "malformed"
    assert found["rollout"].error == "the server is gone"
    assert spans(to_span(rollout(), decode))["rollout"].error == ""


def test_the_share_that_is_traced_is_as_configured_and_the_same_every_time() -> None:
    groups = [group(*[TWO_TURNS] * 10, group_id=number) for number in range(100)]

    chosen = chosen_rollouts(1, groups, 0.2, seed=0)

    assert 150 < len(chosen) < 250  # 200 of 1,000 expected; 4 standard deviations are 50
    assert [one.key for one in chosen] == [one.key for one in chosen_rollouts(1, groups, 0.2, seed=0)]
    assert [one.key for one in chosen] != [one.key for one in chosen_rollouts(1, groups, 0.2, seed=1)]
    assert len(chosen_rollouts(1, groups, 1.0, seed=0)) == 1000
    assert chosen_rollouts(1, groups, 0.0, seed=0) == ()


def test_traces_that_nobody_takes_are_bounded() -> None:
    def never(step: int) -> Any:
        raise ConnectionError("no server")

    tracer = BackgroundTracer("slow", never)
    tracer.close()  # its thread has ended: later groups are not traced
    for step in range(MAX_WAITING_TRACES):
        tracer.trace(step, [group(TWO_TURNS)])

    with pytest.raises(Exception, match=r"gets no traces of step 9: .* Lower tracking.trace_ratio"):
        tracer.trace(9, [group(TWO_TURNS)])


@pytest.fixture
def mlflow_run(tmp_path: Path, tiny_model: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "traced", "output_dir": str(tmp_path)},
            "model": {"path": str(tiny_model)},
            "tracking": {"trackers": ["mlflow"], "project": "tools", "trace_ratio": 1.0},
        }
    )


def write(config: Config, step: int, *groups: Group) -> None:
    with RunFolder.open(config) as folder, trackers.make_trackers(config, folder) as tracker:
        tracker.log(step, {"reward/mean": 1.0})
        tracker.trace(step, groups)
    assert tracker._num_failed == {}


def found_traces(config: Config) -> list[Any]:
    """Return the traces of the run as MLflow's own client reads them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{(config.run_folder / 'mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("tools")
    (run,) = {each.info.run_id for each in client.search_runs([experiment.experiment_id])}
    return list(client.search_traces(locations=[experiment.experiment_id], run_id=run))


@pytest.mark.slow
def test_mlflows_own_client_reads_a_trace_for_each_rollout(mlflow_run: Config) -> None:
    write(mlflow_run, 9, group(TWO_TURNS, trajectory(turn(2, 4, 1000.0), status=RolloutStatus.ERROR_TOOL)))

    traces = {trace.info.tags["trajectory"]: trace for trace in found_traces(mlflow_run)}
    assert {name: trace.info.state.value for name, trace in traces.items()} == {"0": "OK", "1": "ERROR"}
    found = traces["0"]
    assert (found.info.tags["step"], found.info.tags["mlflow.traceName"]) == ("9", "openai/gsm8k")
    assert found.info.execution_duration == 6250
    names = {span.span_id: span.name for span in found.data.spans}
    assert sorted((names.get(span.parent_id, ""), span.name, span.span_type) for span in found.data.spans) == [
        ("", "rollout", "AGENT"),
        ("rollout", "score", "EVALUATOR"),
        ("rollout", "turn 0", "CHAIN"),
        ("rollout", "turn 1", "CHAIN"),
        ("tool python", "sandbox", "TOOL"),
        ("turn 0", "generate", "LLM"),
        ("turn 0", "tool call that can't be read", "TOOL"),
        ("turn 0", "tool python", "TOOL"),
        ("turn 1", "generate", "LLM"),
    ]
    python, box = (next(s for s in found.data.spans if s.name == name) for name in ("tool python", "sandbox"))
    assert (python.inputs, python.outputs) == ({"code": "print(6 * 7)"}, {"text": "42"})
    assert (box.attributes["sandbox_id"], box.attributes["provider"]) == ("box-7", "local")
    assert (box.start_time_ns, box.end_time_ns) == (1002_250_000_000, 1002_750_000_000)


@pytest.mark.slow
def test_a_step_taken_again_replaces_its_traces_and_hostile_texts_come_back_readable(mlflow_run: Config) -> None:
    bad = "\x00 \udc80 \u202e <script>alert(1)</script> \U0001f4a5 ' ; drop table traces"
    call = CallRecord(name=bad, arguments=bad, output=bad, failure=bad, started_at_s=1001.0)
    for step, one in ((9, TWO_TURNS), (9, TWO_TURNS), (10, trajectory(turn(2, 4, 1000.0, call)))):
        write(mlflow_run, step, group(one))

    found = found_traces(mlflow_run)
    spans = {trace.info.tags["step"]: trace.data.spans for trace in found}
    assert (len(found), len(spans["9"])) == (2, 9)
    (tool,) = (span for span in spans["10"] if span.span_type == "TOOL")
    # Characters that no database can hold are escaped.
    readable = bad.replace("\0", r"\x00").replace("\udc80", r"\udc80")
    assert (tool.inputs, tool.outputs) == ({"text": readable}, {"text": readable})
    assert tool.name == f"tool {readable}"


def test_only_the_drivers_one_writer_opens_the_tracking_database() -> None:
    files = [path for part in ("rayapp", "actors") for path in (ROOT / part).rglob("*.py")]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    imports = re.compile(r"^\s*(from|import) mlflow\b", re.MULTILINE)

    importing = {name for name, text in sources.items() if imports.search(text)}
    assert importing == {"rayapp/extras/trackers/mlflow_tracker.py"}
    # The two commands that are drivers.
    assert {name for name, text in sources.items() if "trackers import" in text and "make_trackers" in text} == {
        "rayapp/driver/loop.py",
        "rayapp/driver/sft.py",
    }
