"""Records the tokens of a trajectory that were read or sampled: token ids, mask and log-probs, and the text of each
turn.

An `AgentPrompt` is the input of a play, and a `Trajectory` its record. The agent loop and tasks of one turn record a
single conversation, in which each turn follows the last token. A session of the gateway records a tree:

    add_turn(after=-1, [1, 2], sampled [3])    1 2 3
    add_turn(after=2, [4], sampled [5])        1 2 3 4 5              continues
    add_turn(after=1, [], sampled [6])         1 2 3 4 5 | 6          a retry: 6 was sampled after 1 2

Tokens are stored in the order of the turns, and `forks` lists each token that does not follow the token stored before
it. Tokens that several turns read are stored once, even if an agent sends the whole conversation again. A sampled turn
is always stored, even if it equals another turn.

Pictures of one size stand for the same ids. So a token is stored as a key: its id and the number of its picture.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayapp.core.protocols import RolloutEngine
from rayapp.core.trajectories import join_allowed, path_to
from rayapp.core.types import (
    AllowedTokens,
    CallRecord,
    Completion,
    ExpertArray,
    FloatArray,
    Fork,
    Media,
    Picture,
    RequestId,
    Reward,
    RolloutStatus,
    SamplingParams,
    SandboxSpec,
    Trajectory,
    TurnRecord,
    VersionSpan,
)  # fmt: skip
from rayapp.rollout.agent.text import CutSide


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """Limits of a trajectory's tokens, turns, calls and tool results."""

    max_response_tokens: int  # after the prompt, over all turns, tool results included
    # Calls in the last turn run only if one of them hands in the answer: the policy would not read the results.
    max_assistant_turns: int = 5
    max_calls_per_turn: int = 8  # further calls get an error as their result
    max_tool_output_chars: int = 1024  # longer results are cut
    cut_side: CutSide = "middle"  # left (the beginning), right (the end), or middle (both ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPrompt:
    """Inputs with which an agent loop starts a trajectory."""

    token_ids: tuple[int, ...]  # rendered once for all trajectories of a group
    # Pictures that an environment's first message added to `token_ids`; those of a row's prompt are the group's.
    media: Media = ()
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # SHA-256 -> encoded bytes
    # Row's `extra_info.tools_kwargs`, by tool, e.g. {"calc_gsm8k_reward": {"create_kwargs": {…}}}.
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # relative path -> text, in the workspace at the start
    packages: tuple[str, ...] = ()  # that the workspace's sandbox imports in advance
    spec: SandboxSpec | None = None  # of the workspace's sandbox; None: the tools choose
    setup: tuple[str, ...] = ()  # command in the workspace before the first call
    first_turn: int = 0  # 1 if a request with number 0 was already sent for the trajectory


_FAILURE_KINDS = {
    RolloutStatus.ERROR_TOOL: "tool_unavailable",
    RolloutStatus.ERROR_SANDBOX: "sandbox",
    RolloutStatus.ERROR_TASK: "task",
}


def failed(played: Trajectory, status: RolloutStatus, failure: str, *, kind: str = "") -> Trajectory:
    """Mark a trajectory as failed for a reason other than the policy. Without a `kind` it follows from the status."""
    reward = Reward.invalid(kind or _FAILURE_KINDS.get(status, "unscored"), failure)
    return replace(played, status=status, reward=reward)


Keys = NDArray[np.int64]
_ID_BITS = 32
_TOKEN = np.dtype(
    [("key", np.int64), ("log_prob", np.float32), ("is_sampled", np.bool_), ("is_routed", np.bool_)], align=True
)


class Recorder:
    """Records the tokens of one trajectory. `prompt_ids` is empty if each conversation has its own prompt."""

    def __init__(self, prompt_ids: Sequence[int] = (), media: Media = ()) -> None:
        self.size = 0
        self.forks: list[Fork] = []
        self.turns: list[TurnRecord] = []
        self._tokens = np.empty(1024, _TOKEN)
        # Indices of tokens with their experts, once for each token.
        self._experts: list[tuple[NDArray[np.int64], ExpertArray]] = []
        # First sampled token of a turn, and the tokens that its form allowed.
        self._allowed: list[tuple[int, AllowedTokens]] = []
        self._starts = [0]
        self._children: dict[int, list[int]] = defaultdict(list)  # token -> tokens that fork from it
        # SHA-256 -> (number from 1 on, number of tokens) of a picture
        self._pictures: dict[str, tuple[int, int]] = {}
        self.add_read(prompt_ids, media)

    def trajectory(
        self,
        status: RolloutStatus = RolloutStatus.COMPLETED,
        failure: str = "",
        *,
        answer: str | None = None,
        agent_output: str = "",
    ) -> Trajectory:
        """Return the recorded tokens as a trajectory. `failure` is for an ERROR_* status; without an `answer` the last
        turn's text is the answer."""
        tokens, turns = self._tokens[: self.size], self.turns
        said = turns[-1].text if turns else ""
        played = Trajectory(
            token_ids=tokens["key"].astype(np.int32),  # without the picture's number
            response_mask=tokens["is_sampled"].copy(),
            rollout_log_probs=tokens["log_prob"].copy(),
            completion_text=said if answer is None else answer,
            status=status,
            min_policy_version=min((turn.policy_version for turn in turns), default=0),
            max_policy_version=max((turn.max_policy_version for turn in turns), default=0),
            num_turns=len(turns),
            time_generate_s=sum(turn.queued_s + turn.generate_s for turn in turns),
            turns=tuple(turns),
            forks=tuple(self.forks),
            agent_output=agent_output,
            routed_experts=self._routed_experts(),
            allowed=self._allowed_tokens(),
            media=self._media(tokens["key"]),
        )
        return failed(played, status, failure) if status.is_error else played

    async def sample_turn(
        self,
        engine: RolloutEngine,
        request_id: RequestId,
        sampling: SamplingParams,
        text_of: Callable[[Completion], str],
    ) -> Completion:
        """Sample one turn after the last token, and record it with the text of `text_of`."""
        started_at_s, last = time.time(), self.size - 1
        sampling = replace(sampling, num_routed=self.num_routed(last), media=self.media(last))
        completion = await engine.generate(request_id, self.context(last), sampling)
        self.add_turn(last, (), completion, text=text_of(completion), started_at_s=started_at_s)
        return completion

    def add_calls(self, calls: tuple[CallRecord, ...]) -> None:
        self.turns[-1] = replace(self.turns[-1], calls=calls)

    def add_read(self, token_ids: Sequence[int], media: Media = ()) -> None:
        """Append tokens that the policy reads but did not sample, with the pictures among them."""
        self._append(self.size - 1, self.keys(token_ids, media), sampled=False)

    def keys(self, token_ids: Sequence[int] | Keys, media: Media = ()) -> Keys:
        """Return the keys of tokens with pictures among them."""
        keys: Keys = np.array(token_ids, np.int64)
        for each in media:
            number, _ = self._pictures.setdefault(each.sha256, (len(self._pictures) + 1, each.end - each.start))
            keys[each.start : each.end] += number << _ID_BITS
        return keys

    def _media(self, keys: Keys) -> Media:
        """Return the pictures among tokens. A turn never ends inside a picture, so each is whole."""
        numbers = keys >> _ID_BITS
        shown, known, found, place = np.flatnonzero(numbers), list(self._pictures.items()), list[Picture](), 0
        while place < shown.size:
            start = int(shown[place])
            sha256, (_, size) = known[int(numbers[start]) - 1]
            found.append(Picture(sha256=sha256, start=start, end=start + size))
            place += size
        return tuple(found)

    def _routed_experts(self) -> ExpertArray | None:
        if not self._experts:
            return None
        first = self._experts[0][1]
        experts = np.zeros((self.size, *first.shape[1:]), first.dtype)
        for indices, chosen in self._experts:
            experts[indices] = chosen
        return experts

    def _allowed_tokens(self) -> AllowedTokens | None:
        parts, end = list[tuple[AllowedTokens | None, int]](), 0
        for start, allowed in self._allowed:
            parts += [(None, start - end), (allowed, allowed.mask_of.size)]
            end = start + allowed.mask_of.size
        return join_allowed([*parts, (None, self.size - end)])

    def num_routed(self, last: int) -> int:
        """Return the number of leading tokens, on the path to the token at `last`, whose experts are recorded."""
        return int(self._tokens["is_routed"][path_to(last, self.forks)].sum()) if self._experts else 0

    def context(self, last: int) -> list[int]:
        """Return the ids on the path to the token at `last`, inclusive, which are the engine's prompt; none for -1."""
        ids: list[int] = self._context(last).astype(np.int32).tolist()
        return ids

    def media(self, last: int) -> Media:
        """Return the pictures among the tokens of `context`."""
        return self._media(self._context(last)) if self._pictures else ()

    def has_text(self, last: int, token_id: int) -> bool:
        """Return whether a token on the path to the token at `last`, outside pictures, has this id."""
        return bool((self._context(last) == token_id).any())

    def _context(self, last: int) -> Keys:
        keys: Keys = self._tokens["key"][path_to(last, self.forks) if self.forks else slice(last + 1)]
        return keys

    def sampled_ids(self, turn: int) -> list[int]:
        ids: list[int] = self._tokens["key"][self.turns[turn].start : self.turns[turn].end].tolist()
        return ids

    def num_new(self, after: int, ids: Sequence[int] | Keys) -> int:
        """Return how many of the tokens, ids or keys, read after the token at `after`, the tree doesn't have yet."""
        return len(ids) - self._known(after, self.keys(ids))[1]

    def add_turn(
        self, after: int, read_ids: Sequence[int] | Keys, completion: Completion, *, text: str, started_at_s: float
    ) -> tuple[int, int]:
        """Record the tokens, ids or keys, read after `after` (-1: a new conversation), and the turn sampled after them.
        Return the indices of the last read and the last sampled token."""
        keys = self.keys(read_ids)
        after, num_known = self._known(after, keys)
        prompt_end = self._append(after, keys[num_known:], sampled=False)
        last = self._append(prompt_end, completion.token_ids.astype(np.int64), completion.log_probs, sampled=True)
        self._note_experts(last, completion)
        if completion.allowed is not None:
            self._allowed.append((self.size - completion.token_ids.size, completion.allowed))
        self.turns.append(TurnRecord.of(completion, end=self.size, text=text, started_at_s=started_at_s))
        return prompt_end, last

    def _note_experts(self, last: int, completion: Completion) -> None:
        if completion.routed_experts is None:
            return
        path = path_to(last, self.forks)
        # The completion has the experts of the path's tokens except the last. Concurrent turns may have recorded some
        # already.
        indices = path[path.size - 1 - len(completion.routed_experts) : -1]
        is_new = ~self._tokens["is_routed"][indices]
        self._experts.append((indices[is_new], completion.routed_experts[is_new]))
        self._tokens["is_routed"][indices] = True

    def _known(self, after: int, keys: Keys) -> tuple[int, int]:
        """Return the last of these tokens that the tree already has after `after`, and their number."""
        num_known = 0
        while num_known < keys.size:
            found = [(self._num_equal(start, keys[num_known:]), start) for start in self._next(after)]
            number, start = max(found, default=(0, 0))
            if number == 0:
                break
            after, num_known = start + number - 1, num_known + number
        return after, num_known

    def _next(self, after: int) -> list[int]:
        is_inside = after + 1 < self.size and self._starts[bisect_right(self._starts, after + 1) - 1] != after + 1
        is_first = after == -1 and self.size > 0
        return [*([after + 1] if is_inside or is_first else []), *self._children.get(after, ())]

    def _num_equal(self, start: int, keys: Keys) -> int:
        run = bisect_right(self._starts, start)
        end = self._starts[run] if run < len(self._starts) else self.size
        size = min(end - start, keys.size)
        differ = np.flatnonzero(self._tokens["key"][start : start + size] != keys[:size])
        return int(differ[0]) if differ.size else size

    def _append(self, after: int, keys: Keys, log_probs: FloatArray | float = 0.0, *, sampled: bool) -> int:
        if not keys.size:
            return after
        start, self.size = self.size, self.size + int(keys.size)
        if after != start - 1:
            self.forks.append(Fork(start=start, after=after))
            self._starts.append(start)
            self._children[after].append(start)
        if self.size > self._tokens.size:
            larger = np.empty(max(self.size, 2 * self._tokens.size), _TOKEN)
            larger[:start] = self._tokens[:start]
            self._tokens = larger
        added = self._tokens[start : self.size]
        added["key"], added["log_prob"], added["is_sampled"], added["is_routed"] = keys, log_probs, sampled, False
        return self.size - 1


def cut_completion(completion: Completion, num_tokens: int) -> Completion:
    """Return the first `num_tokens` tokens, as if `max_tokens` had been this number. The text is not cut."""
    if completion.token_ids.size <= num_tokens:
        return completion
    spans, left = list[VersionSpan](), num_tokens
    for span in completion.version_spans:
        if left > 0:
            spans.append(replace(span, num_tokens=min(span.num_tokens, left)))
        left -= span.num_tokens
    experts, num_cut = completion.routed_experts, completion.token_ids.size - num_tokens
    return replace(
        completion,
        routed_experts=None if experts is None else experts[: len(experts) - num_cut],
        token_ids=completion.token_ids[:num_tokens],
        log_probs=completion.log_probs[:num_tokens],
        allowed=None if completion.allowed is None else completion.allowed.of(slice(num_tokens)),
        finish_reason="length",
        version_spans=tuple(spans),
    )
