"""One trajectory as a tree of spans for a trace viewer. Pure; `mlflow_tracker.py` writes them.

    rollout
      turn 0              a completion and the results of its tools
        generate          in: the text the policy read; out: the text it sampled
        tool python       in: arguments; out: the result as the policy read it
          sandbox         one execution
      turn 1 ...
      score               the verdict

Times are those recorded by the rollout worker. Tokens become text here: the workers have no part in tracking.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayapp.core.trajectories import before
from rayapp.core.types import CallRecord, ExecOutcome, Group, Reward, Trajectory, TurnRecord

Decode = Callable[[Sequence[int]], str]  # Function from token ids to text, special tokens included.


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    name: str
    kind: str  # AGENT, CHAIN, LLM, TOOL or EVALUATOR, as MLflow names them.
    start_s: float  # Unix time.
    end_s: float
    inputs: Any = None
    outputs: Any = None
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # Reason of a failure; empty if there was none.
    children: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRollout:
    step: int
    group: Group
    index: int

    @property
    def trajectory(self) -> Trajectory:
        return self.group.trajectories[self.index]

    @property
    def key(self) -> str:
        """Return a key of the place in a run, so that steps repeated by a resumed run replace traces."""
        return f"step={self.step}/group={self.group.group_id}/trajectory={self.index}"


def chosen_rollouts(step: int, groups: Iterable[Group], ratio: float, *, seed: int) -> tuple[TracedRollout, ...]:
    """Choose a share `ratio` of the trajectories, each by itself, the same in every repetition of a run. Trajectories
    without a turn have no spans and are left out."""
    found = (
        TracedRollout(step=step, group=group, index=index)
        for group in groups
        for index, trajectory in enumerate(group.trajectories)
        if trajectory.turns
    )
    return tuple(one for one in found if _draw(f"{seed}/{one.group.group_id}/{one.index}") < ratio)


def _draw(name: str) -> float:
    """Return a number from [0, 1) that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def to_span(rollout: TracedRollout, decode: Decode) -> Span:
    trajectory, prompt = rollout.trajectory, rollout.group.prompt
    turns = tuple(_turn(trajectory, number, turn, decode) for number, turn in enumerate(trajectory.turns))
    last_s = max(turn.end_s for turn in turns)
    score = _score(trajectory.reward, last_s)
    return Span(
        name="rollout",
        kind="AGENT",
        start_s=trajectory.turns[0].started_at_s,
        end_s=score.end_s,
        inputs={"prompt": prompt.text},
        outputs={"answer": trajectory.completion_text, "reward": trajectory.reward.value},
        attributes={
            "task": prompt.task,
            "step": rollout.step,
            "group": rollout.group.group_id,
            "trajectory": rollout.index,
            "status": trajectory.status.value,
            "num_tokens": trajectory.num_tokens,
            "num_response_tokens": trajectory.num_response_tokens,
            "policy_version": trajectory.max_policy_version,
        },
        error=trajectory.reward.detail or trajectory.status.value if trajectory.status.is_error else "",
        children=(*turns, score),
    )


def _turn(trajectory: Trajectory, number: int, turn: TurnRecord, decode: Decode) -> Span:
    generated_s = turn.started_at_s + turn.queued_s + turn.generate_s
    read = before(turn.start, trajectory.forks)
    generate = Span(
        name="generate",
        kind="LLM",
        start_s=turn.started_at_s,
        end_s=generated_s,
        inputs={"text": decode(trajectory.token_ids[read].tolist())},
        outputs={"text": decode(trajectory.token_ids[turn.start : turn.end].tolist())},
        attributes={
            "num_input_tokens": read.size,
            "num_output_tokens": turn.end - turn.start,
            "finish_reason": turn.finish_reason,
            "policy_version": turn.policy_version,
            "queued_s": turn.queued_s,
        },
    )
    calls = tuple(_call(call, generated_s) for call in turn.calls)
    return Span(
        name=f"turn {number}",
        kind="CHAIN",
        start_s=turn.started_at_s,
        end_s=max([generated_s, *(call.end_s for call in calls)]),
        outputs={"text": turn.text},
        children=(generate, *calls),
    )


def _call(call: CallRecord, generated_s: float) -> Span:
    # A call that was refused without being run has no start time.
    start_s = call.started_at_s or generated_s
    return Span(
        name=f"tool {call.name}" if call.name else "tool call that can't be read",
        kind="TOOL",
        start_s=start_s,
        end_s=start_s + call.duration_s,
        inputs=_arguments(call.arguments),
        outputs={"text": call.output},
        attributes={"waited_s": call.waited_s} | ({} if call.reward is None else {"reward": call.reward}),
        error=call.failure,
        children=tuple(
            Span(
                name="sandbox",
                kind="TOOL",
                start_s=ran.started_at_s,
                end_s=ran.started_at_s + ran.duration_s,
                outputs={"outcome": ran.outcome},
                attributes={"sandbox_id": ran.sandbox_id, "provider": ran.provider},
                error="" if ran.outcome == ExecOutcome.OK else ran.outcome,
            )
            for ran in call.execs
        ),
    )


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"text": text}


def _score(reward: Reward, start_s: float) -> Span:
    return Span(
        name="score",
        kind="EVALUATOR",
        start_s=start_s,
        end_s=start_s + reward.time_score_s,
        outputs={"reward": reward.value, "valid": reward.valid, "terms": reward.terms},
        attributes={"status": reward.status},
        error=reward.detail if not reward.valid else "",
    )


def walk(root: Span) -> Iterator[tuple[int, int | None, Span]]:
    pending: list[tuple[int | None, Span]] = [(None, root)]
    for number, (parent, span) in enumerate(pending):
        yield number, parent, span
        pending += [(number, child) for child in span.children]
