"""Forecasts the speed of a run, without Ray, GPUs and weights: `rayapp plan CONFIG --simulate`.

    the real loop, feeding, store, cluster calls and `run_group`  --calls-->  TimedServer, TimedLearners
                 on VirtualTimeLoop: its clock jumps to the next timer        that take the plan's seconds

`Plays` gives the lengths: from the trajectories of a recorded run, or log-normal. A server decodes all its sequences in
steps, whose seconds depend on their number and on the tokens in its KV cache (`Seconds`). It admits a sequence if the
cache has room for its final length, so vLLM's preemptions are not simulated. The router is the real one; cohorts, the
concurrency limit of CPU runs, dynamic sampling on real rewards, checkpoints and recovery are not simulated.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from rayapp.config.config import Config, with_values
from rayapp.core.errors import InputError, StopTraining
from rayapp.core.files import write_text
from rayapp.core.types import (
    Completion,
    Group,
    GroupSummary,
    Prompt,
    RequestId,
    Reward,
    RolloutStatus,
    SamplingParams,
    Trajectory,
    TurnRecord,
    VersionSpan,
)
from rayapp.driver.cluster import Cluster, Router
from rayapp.driver.loop import train
from rayapp.driver.store import StoredGroup
from rayapp.learner.memory.plan import plan_gpu
from rayapp.learner.memory.shape import Gpu, ModelShape
from rayapp.learner.memory.speed import (
    StepLoad,
    decode_step_s,
    learner_speeds,
    prefill_s,
    sleep_and_wake,
    weight_sync,
)
from rayapp.rollout.group import run_group
from rayapp.rollout.images import ImagePlacement
from rayapp.rollout.order import GroupRequest
from rayapp.rollout.problem import Problem
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.trackers import RunTracker
from rayapp.runs.trajectories import read_groups

NUM_WARM = 2
"""Number of first steps that are not counted: in them all servers start at the same time, with empty caches."""
SEGMENT_TOKENS = 256
"""Decoding steps after which a server's seconds per decoding step are computed again, because its sequences have grown.
"""
MAX_TRACE_GROUPS = 4096


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that does not wait for the next timer but lets the clock jump to it, unless a thread is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.num_threads:
            return super().select(0.05 if timeout is None else min(timeout, 0.05))
        events = super().select(0 if timeout is not None else None)
        if not events and timeout is not None:
            self.now_s += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps: a sleep of an hour takes no time. Work in threads takes no virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]  # a method with its own type variables
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._jumping.num_threads += 1

        def ended(_: asyncio.Future[Any]) -> None:
            self._jumping.num_threads -= 1

        future.add_done_callback(ended)
        return future


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds that each stand-in's work takes, and the limits of a server."""

    decode: Callable[[int, float], float]
    """Function (number of sequences, their tokens in the KV cache) -> seconds of a decoding step."""
    prefill: Callable[[float], float]
    """Function (number of prompt tokens) -> seconds to compute them."""
    train: Callable[[StepLoad], float]
    """Function (tokens of a step) -> seconds of the learners' step, without the weight sync."""
    sync: float
    turn: float
    """Seconds to put servers to sleep; waking them takes as long."""
    max_num_seqs: int
    kv_tokens: int

    @classmethod
    def planned(cls, shape: ModelShape, config: Config, gpu: Gpu) -> Seconds:
        """Return the plan's seconds for GPUs of this kind."""
        server = plan_gpu(shape, config, gpu).server

        def train_s(load: StepLoad) -> float:
            phases = learner_speeds(shape, config, gpu, server, load)
            return sum(speed.seconds for name, speed in phases.items() if name not in ("weight sync", "sleep, wake"))

        shares = config.cluster.placement == "colocated"
        return cls(
            decode=lambda num, tokens: decode_step_s(shape, config, gpu, server, num, tokens),
            prefill=lambda tokens: prefill_s(shape, config, gpu, tokens),
            train=train_s,
            sync=weight_sync(shape, config, gpu).seconds,
            turn=sleep_and_wake(shape, config, server).seconds / 2 if shares else 0.0,
            max_num_seqs=config.server.max_num_seqs,
            kv_tokens=server.kv_tokens,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, and the pause and tool results that follow it."""

    num_tokens: int
    pause_s: float = 0.0
    """Seconds of the turn's tools; after the last turn, seconds of the verdict."""
    num_read: int = 0
    """Tokens of the tool results, which the policy reads after the pause."""


@dataclass(frozen=True, slots=True)
class Play:
    """Lengths of one trajectory."""

    num_prompt: int
    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + sum(turn.num_tokens + turn.num_read for turn in self.turns)


class Plays(Protocol):
    """Lengths of the trajectories of a run."""

    def group(self, group_id: int, size: int) -> Sequence[Play]:
        """Return the lengths of a group's trajectories; the same in every simulation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """One turn of log-normal length. Half of the variance is between prompts, half between the completions of a
    prompt.
    """

    num_prompt: int
    median: float
    sigma: float
    longest: int
    pause_mean_s: float = 0.0
    pause_sigma: float = 0.6
    seed: int = 0

    def group(self, group_id: int, size: int) -> Sequence[Play]:
        """Return the lengths of a group's trajectories."""
        rng = np.random.default_rng((self.seed, group_id))
        z = np.sqrt(0.5) * (rng.standard_normal() + rng.standard_normal(size))
        lengths = np.clip(self.median * np.exp(self.sigma * z), 1, self.longest).astype(int)
        middle = np.log(self.pause_mean_s) - self.pause_sigma**2 / 2 if self.pause_mean_s else -np.inf
        pauses = np.exp(middle + self.pause_sigma * rng.standard_normal(size))
        return [
            Play(self.num_prompt, (Turn(int(num), float(pause)),)) for num, pause in zip(lengths, pauses, strict=True)
        ]


def plays_of(config: Config, lengths: str, tool_s: float) -> Plays:
    """Return the lengths that `--lengths` names: a run folder, or MEDIAN or MEDIAN,SIGMA of a log-normal.

    Args:
        lengths: value of `--lengths`; empty: a log-normal whose median is a quarter of the longest completion, with
            sigma 0.8.
        tool_s: mean seconds of tools and verdict after a log-normal completion.
    Raises:
        InputError: `lengths` is neither a run folder nor numbers.
    """
    if Path(lengths).is_dir() and lengths:
        return Trace(Path(lengths))
    longest = config.rollout.max_completion_tokens
    try:
        median, sigma = (*(float(part) for part in lengths.split(",")), 0.8)[:2] if lengths else (longest / 4, 0.8)
        if not (0 < median < math.inf and 0 <= sigma < math.inf):
            raise ValueError(lengths)
    except ValueError:
        raise InputError(
            f"--lengths {lengths!r} is neither a run folder nor a median of completion tokens: use --lengths "
            "outputs/my-run, --lengths MEDIAN or --lengths MEDIAN,SIGMA, such as 1200,0.8 (SIGMA is the standard "
            "deviation of the logarithm)"
        ) from None
    prompt = max(1, config.rollout.max_prompt_tokens // 2)
    return LogNormal(num_prompt=prompt, median=median, sigma=sigma, longest=longest, pause_mean_s=tool_s)


class Trace:
    """Lengths of a recorded run. Groups take the lengths of the recorded groups, in order; after the last comes the
    first again.

    Args:
        folder: run folder, with `trajectories/`.

    Raises:
        InputError: it has no trajectories.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted((folder / "trajectories").glob("step=*.parquet"))
        recorded = itertools.chain.from_iterable(read_groups(file) for file in files)
        self._groups = [group for group in map(_recorded, itertools.islice(recorded, MAX_TRACE_GROUPS)) if group]
        if not self._groups:
            raise InputError(
                f"{folder} has no trajectories (trajectories/step=*.parquet): name a run folder that was recorded with "
                "tracking.trajectories=true, or give lengths as MEDIAN or MEDIAN,SIGMA"
            )

    def group(self, group_id: int, size: int) -> Sequence[Play]:
        """Return the lengths of a group's trajectories; for another group size, draw recorded ones with replacement."""
        plays = self._groups[group_id % len(self._groups)]
        if len(plays) == size:
            return plays
        return [plays[index] for index in np.random.default_rng(group_id).integers(len(plays), size=size)]


def _recorded(group: Group) -> list[Play]:
    return [_play(trajectory) for trajectory in group.trajectories if trajectory.turns and not trajectory.forks]


def _play(trajectory: Trajectory) -> Play:
    turns, verdict_s = trajectory.turns, trajectory.reward.time_score_s
    ends = [*(turn.start for turn in turns[1:]), trajectory.token_ids.size]
    return Play(
        turns[0].start,
        tuple(
            Turn(
                turn.end - turn.start,
                sum(call.duration_s for call in turn.calls) + (verdict_s if turn is turns[-1] else 0.0),
                end - turn.end,
            )
            for turn, end in zip(turns, ends, strict=True)
        ),
    )


@dataclass(order=True, slots=True)
class _Sequence:
    end: float
    """Value of the server's step counter at which the sequence's last token is sampled."""
    number: int
    num_reserved: int = field(compare=False)
    base: float = field(compare=False)
    """Number of prompt tokens less the step counter at the start, so that `base` plus the counter is the sequence's
    tokens in the cache.
    """
    answer: asyncio.Future[None] = field(compare=False)


class TimedServer:
    """Stand-in for a `VllmServerHandle` and the engine behind it."""

    def __init__(self, index: int, seconds: Seconds, keeps: bool) -> None:
        self.name = f"vllm-server-{index}"
        self.version = 0
        self.busy_s = 0.0
        self.num_sampled = 0
        self._seconds = seconds
        self._keeps = keeps
        self._loop = asyncio.get_running_loop()
        self._running: list[_Sequence] = []
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._num_reserved, self._base, self._counter = 0, 0.0, 0.0
        self._prefill_s, self._at_s = 0.0, 0.0
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._cached: dict[tuple[int, int], int] = {}

    async def generate(
        self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams, on_tokens: object = None
    ) -> Completion:
        """Return `max_tokens` tokens at the time when this server would have sampled them."""
        answer: asyncio.Future[None] = self._loop.create_future()
        self._advance()
        self._waiting.append((next(self._numbers), len(prompt_ids), sampling.max_tokens, answer))
        self._prefill(request_id, len(prompt_ids))
        self._go_on()
        first = self.version
        await answer
        self._cached[request_id.group, request_id.trajectory] = len(prompt_ids) + sampling.max_tokens
        self.num_sampled += sampling.max_tokens
        last = VersionSpan(policy_version=self.version, num_tokens=sampling.max_tokens - 1)
        spans = (VersionSpan(policy_version=first, num_tokens=1), last) if first != self.version else ()
        nothing = np.zeros(sampling.max_tokens, np.int32)
        return Completion(
            token_ids=nothing, log_probs=nothing.astype(np.float32), text="", finish_reason="stop",
            policy_version=first, version_spans=spans,
        )  # fmt: skip

    def _prefill(self, request_id: RequestId, num_tokens: int) -> None:
        """Add the seconds of the prompt's tokens that are not in the prefix cache."""
        own, shared = (request_id.group, request_id.trajectory), (request_id.group, -1)
        cached = self._cached.get(own, self._cached.get(shared, 0))
        self._cached.setdefault(shared, num_tokens)
        self._prefill_s += self._seconds.prefill(max(1, num_tokens - cached))

    async def sleep(self) -> bool:
        """Stop, if this server shares the learners' GPU or keeps its requests."""
        self.pause()
        await asyncio.sleep(self._seconds.turn)
        return True

    def pause(self) -> None:
        self._advance()
        self._is_paused = True
        if self._timer is not None:
            self._timer.cancel()

    def resume(self, version: int) -> None:
        self._advance()
        self.version, self._is_paused = version, False
        if not self._keeps:
            self._cached.clear()
        self._go_on()

    def _advance(self) -> None:
        """Advance the prefill and the step counter by the time since the last call."""
        now = self._loop.time()
        passed, self._at_s = now - self._at_s, now
        if self._is_paused or not self._running:
            return
        self.busy_s += passed
        prefilling = min(passed, self._prefill_s)
        self._prefill_s -= prefilling
        self._counter += (passed - prefilling) / self._step_s()

    def _step_s(self) -> float:
        num = len(self._running)
        return self._seconds.decode(num, self._base + num * self._counter)

    def _go_on(self) -> None:
        """Finish the requests whose sequences have ended, admit waiting requests, and set the timer to the next end."""
        if self._is_paused:
            return
        while self._running and self._running[0].end <= self._counter + 1e-6:
            self._end(heapq.heappop(self._running))
        while self._waiting and self._has_room(self._waiting[0]):
            self._start(*self._waiting.pop(0))
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            left = min(self._running[0].end - self._counter, SEGMENT_TOKENS)
            self._timer = self._loop.call_later(self._prefill_s + left * self._step_s(), self._tick)

    def _tick(self) -> None:
        self._advance()
        self._go_on()

    def _has_room(self, waiting: tuple[int, int, int, asyncio.Future[None]]) -> bool:
        _, num_prompt, num_tokens, _ = waiting
        fits = self._num_reserved + num_prompt + num_tokens <= self._seconds.kv_tokens
        return not self._running or (len(self._running) < self._seconds.max_num_seqs and fits)

    def _start(self, number: int, num_prompt: int, num_tokens: int, answer: asyncio.Future[None]) -> None:
        started = _Sequence(
            self._counter + num_tokens, number, num_prompt + num_tokens, num_prompt - self._counter, answer
        )
        heapq.heappush(self._running, started)
        self._num_reserved += started.num_reserved
        self._base += started.base

    def _end(self, ended: _Sequence) -> None:
        self._num_reserved -= ended.num_reserved
        self._base -= ended.base
        if not ended.answer.done():
            ended.answer.set_result(None)


@dataclass(slots=True)
class TimedLearners:
    """Stand-in for `LearnerGroup`: a step takes the seconds that the plan gives for its tokens."""

    config: Config
    seconds: Seconds
    busy_s: float = 0.0
    version: int = 0
    num_tokens: int = 0
    """Sampled tokens that were trained on."""
    ages: Counter[int] = field(default_factory=Counter)
    """Number of groups by staleness."""
    num_late: int = 0

    async def train_step(self, step: int, summaries: tuple[GroupSummary, ...], refs: Sequence[Any]) -> dict[str, float]:
        needed_s = self.seconds.train(load_of(summaries, shares_prefixes=self.config.learner.share_prefixes))
        await asyncio.sleep(needed_s)
        self.busy_s += needed_s
        self.version = step
        self.num_tokens += int(sum(summary.num_response_tokens.sum() for summary in summaries))
        self.ages.update(step - 1 - summary.min_policy_version for summary in summaries)
        self.num_late += sum(kind == "deadline" for summary in summaries for kind in summary.failure_kinds)
        return {}

    def holds(self, version: int) -> bool:
        return self.version == version

    async def begin_checkpoint(self, folder: Path, version: int) -> None:
        """Write an empty file, because the loop saves a checkpoint when the simulation ends."""
        await asyncio.to_thread(write_text, folder.parent / "simulated", "")

    async def checkpoint_done(self) -> bool:
        return True


def load_of(summaries: Sequence[GroupSummary], *, shares_prefixes: bool) -> StepLoad:
    """Return the tokens of a step with these groups."""
    totals = [summary.num_tokens.astype(float) for summary in summaries]
    sampled = [summary.num_response_tokens.astype(float) for summary in summaries]
    prompts = np.array([(total - own).min() for total, own in zip(totals, sampled, strict=True)])
    repeated = np.array([1 if shares_prefixes else total.size for total in totals])
    read = [total - prompt for total, prompt in zip(totals, prompts, strict=True)]
    return StepLoad(
        prompts=len(summaries),
        sequences=sum(total.size for total in totals),
        computed_tokens=int((prompts * repeated).sum() + sum(own.sum() for own in read)),
        predicted_tokens=int(sum(own.sum() for own in sampled)),
        attended=float((repeated * prompts**2 / 2).sum())
        + sum(float((own * prompt + own**2 / 2).sum()) for own, prompt in zip(read, prompts, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class TimedSync:
    """Stand-in for `WeightSync`: servers pause for the seconds of a sync, and continue with the new version."""

    seconds: Seconds
    are_lost: bool = False

    async def sync(
        self, version: int, *, servers: Sequence[TimedServer], **others: object
    ) -> tuple[dict[str, float], dict[str, Any]]:
        for server in servers:
            server.pause()
        await asyncio.sleep(self.seconds.sync + (self.seconds.turn if version else 0.0))
        for server in servers:
            server.resume(version)
        return {}, {}


class _NoLosses:
    """Stand-in for `Supervisor`: no process is ever lost."""

    async def settled(self) -> None:
        return

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class SimulatedAgent:
    """`Agent` that plays trajectories of given lengths."""

    plays: Sequence[Play]

    async def play(
        self, problem: Problem, *, engine: Any, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        play, turns = self.plays[request_id.trajectory], list[TurnRecord]()
        size = play.num_prompt
        mask = np.zeros(play.num_tokens, np.bool_)
        for number, turn in enumerate(play.turns):
            own = replace(sampling, max_tokens=turn.num_tokens)
            completion = await engine.generate(request_id._replace(turn=number), range(size), own)
            mask[size : size + turn.num_tokens] = True
            size += turn.num_tokens
            turns.append(TurnRecord.of(completion, end=size, text="", started_at_s=0.0))
            size += turn.num_read
            await asyncio.sleep(turn.pause_s)
        return Trajectory(
            token_ids=np.zeros(size, np.int32), response_mask=mask, rollout_log_probs=np.zeros(size, np.float32),
            completion_text="", status=RolloutStatus.COMPLETED, turns=tuple(turns), num_turns=len(turns),
            min_policy_version=turns[0].policy_version, max_policy_version=turns[-1].max_policy_version,
        )  # fmt: skip


async def _half_solved(problem: Problem, played: Trajectory, sandboxes: object, seed: int) -> Reward:
    """Return a random reward, so that groups have a signal whatever the run's rules are."""
    return Reward(value=float(np.random.default_rng((seed, played.token_ids.size)).random() < 0.5))


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """Stand-in for `RolloutWorkerHandle` that runs groups with the real `run_group`."""

    config: Config
    servers: Sequence[TimedServer]
    plays: Plays
    name: str = "rollout-worker-0"

    async def run_group(self, request: GroupRequest) -> tuple[GroupSummary, Any]:
        assert request.server is not None
        config, size = self.config, self.config.rollout.group_size
        plays = self.plays.group(request.group_id, size)
        tokens = np.zeros(plays[0].num_prompt, np.int32)
        problem = Problem(prompt=Prompt(task="simulated", text="", token_ids=tokens), score=_half_solved)
        group, summary = await run_group(
            request, problem, cast("Any", SimulatedAgent(plays)), sandboxes=cast("Any", None),
            engine=self.servers[request.server], sampling=SamplingParams(max_tokens=1, temperature=1.0),
            group_size=size, seed=config.run.seed, deadline_s=config.group_deadline_s,
        )  # fmt: skip
        return summary, group


class SimulatedCluster(Cluster):
    """`Cluster` of stand-ins in this process, without Ray's object store."""

    def put_groups(self, groups: Sequence[Group]) -> list[StoredGroup[Any]]:
        assert not groups
        return []

    async def fetch_groups(self, groups: Sequence[StoredGroup[Any]]) -> list[Group]:
        return [group.ref for group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Speed of a simulated run, without its first NUM_WARM steps."""

    step_s: float
    tokens_per_s: float
    """Sampled tokens that were trained on, per second."""
    servers_idle: float
    """Share of the time in which a server samples nothing, averaged over servers."""
    learners_idle: float
    staleness: Mapping[int, float]
    """Share of the trained groups by staleness: policy version that is trained minus the version that sampled the
    group's first token.
    """
    num_late: int
    """Trajectories dropped because they took longer than rollout.group_deadline_s."""

    @property
    def mean_staleness(self) -> float:
        return sum(age * share for age, share in self.staleness.items())


@dataclass(slots=True)
class _Count:
    """Sums from the start of the simulation to one of its moments."""

    at_s: float
    servers_s: float
    learners: TimedLearners


def forecast(config: Config, seconds: Seconds, plays: Plays, *, num_steps: int = 12) -> Forecast:
    """Simulate `NUM_WARM` steps that are not counted, then `num_steps` steps that are.

    Raises:
        RayappError: the run itself would end, e.g. because too many trajectories miss their deadline.
    """
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        ahead = config.train.max_staleness + 1  # because a run admits fewer groups near its end
        simulated = with_values(
            config,
            run={"output_dir": folder, "name": "simulated"},
            train={"num_steps": NUM_WARM + num_steps + ahead},
            eval={"before_training": False, "every_steps": 0},
            checkpoint={"every_steps": 0, "keep_best": 0},
            tracking={"trajectories": False, "trackers": ("jsonl",)},
        )
        return runner.run(_simulate(simulated, seconds, plays, NUM_WARM + num_steps))


async def _simulate(config: Config, seconds: Seconds, plays: Plays, last: int) -> Forecast:
    keeps = config.train.partial_rollouts
    servers = tuple(TimedServer(index, seconds, keeps) for index in range(config.server.num_servers))
    learners = TimedLearners(config, seconds)
    stand_ins: dict[str, Any] = {
        "servers": servers, "learners": learners, "weights": TimedSync(seconds), "supervisor": _NoLosses(),
        "rollout_workers": (SimulatedWorker(config, servers, plays),) * config.rollout.num_workers,
        "router": Router(len(servers)), "pool": None,
        "start_learners": None, "images": ImagePlacement.of(config, ()),
    }  # fmt: skip
    cluster = SimulatedCluster(config=config, **stand_ins)
    counts = list[_Count]()

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        now = asyncio.get_running_loop().time()
        now_learners = replace(learners, ages=learners.ages.copy())
        counts.append(_Count(now, sum(server.busy_s for server in servers), now_learners))
        if step == last:
            raise StopTraining

    with RunFolder.open(config) as opened:
        await train(config, cluster, opened, RunTracker({}, None), on_step)
    return _between(counts[NUM_WARM - 1], counts[-1], len(counts) - NUM_WARM, len(servers))


def _between(first: _Count, last: _Count, num_steps: int, num_servers: int) -> Forecast:
    passed_s, before, after = last.at_s - first.at_s, first.learners, last.learners
    ages = after.ages - before.ages
    return Forecast(
        step_s=passed_s / num_steps,
        tokens_per_s=(after.num_tokens - before.num_tokens) / passed_s,
        servers_idle=1 - (last.servers_s - first.servers_s) / passed_s / num_servers,
        learners_idle=1 - (after.busy_s - before.busy_s) / passed_s,
        staleness={age: ages[age] / ages.total() for age in sorted(ages)},
        num_late=after.num_late - before.num_late,
    )
