"""Adds the scores of judges (`reward.judges` of a source) to verdicts, by trajectory and by group.

    verdict --with_scores: rubric, reward_model--> reward --with_comparisons: pairwise, the whole group--> reward

The reward's value is verdict_weight * verdict + the sum of weight * score over the judges. If a judge with a weight
other than 0 fails, the trajectory's reward is invalid, not 0. Its failure kind is `judge_answer`, `judge_timeout`,
`judge_unreachable`, `judge_busy` or `judge_refused`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayapp.config.agent import RewardSection
from rayapp.config.other_models import JudgeSection
from rayapp.core.aio import side_by_side
from rayapp.core.errors import RewardFailedError
from rayapp.core.types import Prompt, Reward
from rayapp.extras.judges.judge import Bill, Judge, JudgeFailedError
from rayapp.extras.judges.questions import Asked

SOLVED = "solved"
_WON = {"A": 1.0, "B": 0.0, "tie": 0.5}


class Judges:
    """All judges of one process.

    Args:
        num_sharing: number of processes that use the judges at the same time, by which the rate limits are divided.
    Raises ConfigError: the environment variable of a key is not set.
    """

    def __init__(self, sections: Iterable[JudgeSection], *, num_sharing: int = 1) -> None:
        self._judges = {each.name: Judge(each, num_sharing=num_sharing) for each in sections}

    async def check(self) -> None:
        """Ask each judge one question. Raises ConfigError: one gives no usable answer."""
        await side_by_side(judge.check() for judge in self._judges.values())

    def of(self, reward: RewardSection) -> Judging:
        return Judging(self._judges, reward)

    async def close(self) -> None:
        for judge in self._judges.values():
            await judge.close()


class Judging:
    """The judges of one source, with their weights."""

    def __init__(self, judges: Mapping[str, Judge], reward: RewardSection) -> None:
        named = [(judges[name], weight) for name, weight in reward.judges.items()]
        self._alone = [each for each in named if each[0].section.kind != "pairwise"]
        self._comparing = [each for each in named if each[0].section.kind == "pairwise"]
        self._verdict_weight = reward.verdict_weight

    @property
    def compares(self) -> bool:
        """Return whether a judge compares the responses of a group."""
        return bool(self._comparing)

    @property
    def compare_timeout_s(self) -> float:
        """Seconds to reserve for comparisons within the group's deadline."""
        return max((judge.section.timeout_s for judge, _ in self._comparing), default=0.0)

    async def with_scores(self, prompt: Prompt, completion_text: str, verdict: Reward) -> Reward:
        """Add the scores of judges that score single responses. An invalid verdict stays as it is."""
        if not verdict.valid or not (self._alone or self._comparing):
            return verdict
        reward = replace(verdict, value=self._verdict_weight * verdict.value)
        opinions = await side_by_side(_scored(judge, prompt, completion_text, reward) for judge, _ in self._alone)
        for (judge, weight), opinion in zip(self._alone, opinions, strict=True):
            reward = _with_opinion(reward, judge, weight, opinion)
        return reward

    async def with_comparisons(self, prompt: Prompt, texts: Sequence[str], rewards: Sequence[Reward]) -> list[Reward]:
        """Add the scores of pairwise judges to the rewards of a group. Invalid rewards stay as they are."""
        found = list(rewards)
        there = [place for place, reward in enumerate(rewards) if reward.valid]
        solved = [bool(rewards[place].terms.get(SOLVED)) for place in there]
        for judge, weight in self._comparing:
            try:
                asked = {place: Asked.of(prompt, texts[place], judge.section) for place in there}
                opinions = await _compared(judge, asked, solved)
            except RewardFailedError as error:
                opinions = [_failed(error) for _ in there]
            for place, opinion in zip(there, opinions, strict=True):
                if found[place].valid:
                    found[place] = _with_opinion(found[place], judge, weight, opinion)
        return found


@dataclass(slots=True, kw_only=True)
class _Opinion:
    """A judge's result for one response."""

    score: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    failure: RewardFailedError | None = None
    bill: Bill = field(default_factory=Bill)


def _with_opinion(reward: Reward, judge: Judge, weight: float, opinion: _Opinion) -> Reward:
    """Return the reward with a judge's score added; a missing score whose weight is not 0 makes it invalid."""
    name = f"judge/{judge.section.name}"
    costs = {key: reward.terms.get(key, 0.0) + value for key, value in opinion.bill.terms.items()}
    if (failure := opinion.failure) is not None:
        is_lost = bool(weight) and reward.valid
        kept = Reward.invalid(failure.kind, str(failure)) if is_lost else reward
        return replace(kept, terms=reward.terms | costs, time_score_s=reward.time_score_s)
    terms = {name: opinion.score} | {f"{name}/{key}": value for key, value in opinion.terms.items()}
    reason = f"{judge.section.name}: {opinion.reason}" if opinion.reason else ""
    detail = " | ".join(part for part in (reward.detail, reason) if part)
    value = reward.value + weight * opinion.score if reward.valid else 0.0
    return replace(reward, value=value, terms=reward.terms | costs | terms, detail=detail)


async def _scored(judge: Judge, prompt: Prompt, completion_text: str, verdict: Reward) -> _Opinion:
    try:
        score, parts, said = await judge.score(Asked.of(prompt, completion_text, judge.section))
    except RewardFailedError as error:
        return _failed(error)
    terms = dict(parts)
    if judge.section.kind == "rubric" and SOLVED in verdict.terms:
        terms["agrees"] = float((score >= 0.5) == (verdict.terms[SOLVED] >= 1.0))
    return _Opinion(score=score, terms=terms, reason=said.reason, bill=said.bill)


def _failed(error: RewardFailedError) -> _Opinion:
    paid = error.bill if isinstance(error, JudgeFailedError) else Bill()
    return _Opinion(failure=error, bill=paid + Bill(failed=1))


async def _compared(judge: Judge, asked: Mapping[int, Asked], solved: Sequence[bool]) -> list[_Opinion]:
    """Return each response's mean score over its pairs. Pairs that were not judged in both orders don't count."""
    responses = list(asked.values())
    opinions = [_Opinion() for _ in responses]
    pairs = list(_pairs(len(responses), NUM_OPPONENTS))
    results = await side_by_side(_pair(judge, responses[a], responses[b]) for a, b in pairs)
    seen: list[list[dict[str, float]]] = [[] for _ in responses]
    for (a, b), result in zip(pairs, results, strict=True):
        opinions[a].bill += result.bill
        opinions[a].reason = opinions[a].reason or result.reason
        if result.failure is not None:
            opinions[a].failure = opinions[b].failure = result.failure
            continue
        for place, won in ((a, result.score), (b, 1.0 - result.score)):
            agrees = {} if solved[a] == solved[b] else {"agrees": float(won > 0.5 if solved[place] else won < 0.5)}
            seen[place].append({"won": won, **result.terms, **agrees})
    for opinion, known in zip(opinions, seen, strict=True):
        if known:
            names = {name for each in known for name in each}
            terms = {name: _mean([each[name] for each in known if name in each]) for name in names}
            opinion.score, opinion.terms, opinion.failure = terms.pop("won"), terms, None
        elif opinion.failure is None:
            opinion.failure = RewardFailedError("there is no other response to compare it with", "judge_no_opponent")
    return opinions


async def _pair(judge: Judge, first: Asked, second: Asked) -> _Opinion:
    """Return the first response's mean score over both orders: 1 if better, 0 if worse, 0.5 for a tie."""
    if first.response == second.response:
        return _Opinion(score=0.5)
    try:
        there, back = await side_by_side([judge.compare(first, second), judge.compare(second, first)])
    except RewardFailedError as error:
        return _failed(error)
    shown_first, shown_last = _WON[there[0]], 1.0 - _WON[back[0]]
    terms = {"consistent": float(shown_first == shown_last), "prefers_first": (shown_first + 1.0 - shown_last) / 2}
    bill = there[1].bill + back[1].bill
    return _Opinion(score=(shown_first + shown_last) / 2, terms=terms, reason=there[1].reason, bill=bill)


NUM_OPPONENTS = 4  # responses of the group with which each response is compared, in both orders


def _pairs(number: int, num_opponents: int) -> Iterator[tuple[int, int]]:
    """Pair each response with its neighbours on a ring, so that all have the same number of opponents.

    Example: 4 responses, 2 opponents -> (0, 1), (1, 2), (2, 3), (3, 0).
    """
    seen = set()
    for distance in range(1, num_opponents // 2 + 1):
        for place in range(number):
            other = (place + distance) % number
            if other != place and (pair := frozenset((place, other))) not in seen:
                seen.add(pair)
                yield place, other


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
