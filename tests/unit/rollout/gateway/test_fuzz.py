"""Agents that do what agents do (streams, retries, parallel calls, helpers, edited history, dropped connections, wrong
keys) in all three APIs: training gets exactly the tokens that the engine sampled, each once."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest

from rayapp.core.trajectories import before
from rayapp.core.types import Completion, RequestId, RolloutStatus, SamplingParams
from rayapp.learner.batch import TrainItem, make_micro_batch, trained_branches
from rayapp.rollout.gateway.session import Session
from support import make

SCHEMA = {"type": "object", "properties": {"t": {"type": "string"}}}
Message = dict[str, Any]
"""role, text, and calls (id, arguments) or id."""


@dataclass
class LoggingEngine:
    """Samples at random and logs its completions."""

    tokenizer: Any
    dice: random.Random
    log: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)

    async def generate(
        self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams, on_tokens: Any = None
    ) -> Completion:
        await asyncio.sleep(self.dice.choice([0, 0, 0.001, 0.01]))
        ids = self._said()[: sampling.max_tokens]
        completion = make.completion(*ids, log_probs=np.array([-self.dice.random() for _ in ids], np.float32))
        self.log.append((tuple(prompt_ids), completion))
        return completion

    def _said(self) -> list[int]:
        if self.dice.random() < 0.2:
            return [*(self.dice.randrange(256) for _ in range(12)), self.tokenizer.eos_token_id]
        text = self.dice.choice(["", "yes", " so ", "<think>hm</think>ab", "\n"])
        for _ in range(self.dice.choice([0, 0, 1, 2])):
            arguments = {"t": self.dice.choice("ab")}
            text += f"<tool_call>\n{json.dumps({'name': 'echo', 'arguments': arguments})}\n</tool_call>"
        text += self.dice.choice(["", "", "", "<tool_call>{"])
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]


@dataclass
class FuzzedAgent:
    """One session's agent."""

    http: aiohttp.ClientSession
    url: str
    key: str
    dice: random.Random
    conversations: list[list[Message]] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    async def act(self) -> None:
        """Do one random action of an agent."""
        match self.dice.choice(["go on", "go on", "go on", "parallel", "retry", "edit", "helper", "drop", "key"]):
            case "parallel":
                await asyncio.gather(*(self._go_on() for _ in range(3)))
            case "retry" if self.conversations:
                messages = list(self.dice.choice(self.conversations))
                while messages and messages[-1]["role"] == "assistant":
                    messages.pop()
                await self._ask(messages)
            case "edit" if self.conversations:
                messages = [dict(each) for each in self.dice.choice(self.conversations)]
                self.dice.choice(messages)["text"] = "[cut]"
                await self._go_on(messages)
            case "helper":
                await self._go_on([{"role": "system", "text": "You help."}, {"role": "user", "text": "a part"}])
            case "drop":
                asking = asyncio.create_task(self._go_on())
                await asyncio.sleep(self.dice.choice([0, 0.002, 0.01]))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            case "key":
                await self._ask([{"role": "user", "text": "let me in"}], key="wrong")
            case _:
                await self._go_on()

    async def _go_on(self, messages: list[Message] | None = None) -> None:
        if messages is None:
            messages = list(self.dice.choice(self.conversations)) if self.conversations else []
        if not messages:
            messages = [{"role": "system", "text": "Be brief."}, {"role": "user", "text": "hi"}]
        last = messages[-1]
        if last["role"] == "assistant":
            results = [{"role": "tool", "text": self.dice.choice(["A", "a longer result"]), "id": call[0]}
                       for call in last.get("calls", ())]  # fmt: skip
            self.dice.shuffle(results)
            messages = [*messages, *(results or [{"role": "user", "text": self.dice.choice(["?", "more"])}])]
        await self._ask(messages)

    async def _ask(self, messages: list[Message], key: str = "") -> None:
        if not messages:
            return
        dialect = self.dice.choice([chat, anthropic, responses])
        path, body, read = dialect(messages)
        body |= {"stream": True} if (streams := self.dice.random() < 0.3) else {}
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with self.http.post(f"{self.url}{path}", json=body, headers=headers) as answer:
            self.statuses[answer.status] += 1
            text = await answer.text()
            if answer.status == 200 and not streams:
                self.conversations.append([*messages, read(json.loads(text))])


def chat(messages: list[Message]) -> tuple[str, Message, Any]:
    told = []
    for each in messages:
        message: Message = {"role": each["role"], "content": each["text"]}
        if each.get("calls"):
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": "echo", "arguments": arguments}}
                for call_id, arguments in each["calls"]
            ]
        told.append(message | ({"tool_call_id": each["id"]} if each["role"] == "tool" else {}))

    def read(reply: Message) -> Message:
        message = reply["choices"][0]["message"]
        calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        return {"role": "assistant", "text": message["content"] or "", "calls": calls}

    tool = {"type": "function", "function": {"name": "echo", "parameters": SCHEMA}}
    return "/v1/chat/completions", {"messages": told, "tools": [tool]}, read


def anthropic(messages: list[Message]) -> tuple[str, Message, Any]:
    system = "\n".join(each["text"] for each in messages if each["role"] == "system")
    told: list[Message] = []
    for each in messages:
        if each["role"] == "tool":
            block = {
                "type": "tool_result",
                "tool_use_id": each["id"],
                "content": [{"type": "text", "text": each["text"]}],
            }
            told.append({"role": "user", "content": [block]})
        elif each["role"] == "assistant":
            blocks: list[Message] = [{"type": "text", "text": each["text"]}]
            blocks += [{"type": "tool_use", "id": call_id, "name": "echo", "input": json.loads(arguments)}
                       for call_id, arguments in each.get("calls", ())]  # fmt: skip
            told.append({"role": "assistant", "content": blocks})
        elif each["role"] == "user":
            told.append({"role": "user", "content": each["text"]})

    def read(reply: Message) -> Message:
        text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        calls = [(block["id"], json.dumps(block["input"])) for block in reply["content"] if block["type"] == "tool_use"]
        return {"role": "assistant", "text": text, "calls": calls}

    tool = {"name": "echo", "input_schema": SCHEMA}
    return "/v1/messages", {"messages": told, "system": system, "max_tokens": 100, "tools": [tool]}, read


def responses(messages: list[Message]) -> tuple[str, Message, Any]:
    items: list[Message] = []
    for each in messages:
        if each["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": each["id"], "output": each["text"]})
            continue
        items.append({"role": each["role"], "content": each["text"]})
        items += [{"type": "function_call", "call_id": call_id, "name": "echo", "arguments": arguments}
                  for call_id, arguments in each.get("calls", ())]  # fmt: skip

    def read(reply: Message) -> Message:
        said: Message = {"role": "assistant", "text": "", "calls": []}
        for item in reply["output"]:
            if item["type"] == "message":
                said["text"] += item["content"][0]["text"]
            elif item["type"] == "function_call":
                said["calls"].append((item["call_id"], item["arguments"]))
        return said

    tool = {"type": "function", "name": "echo", "parameters": SCHEMA}
    return "/v1/responses", {"input": items, "tools": [tool]}, read


async def fuzzed(tokenizer: Any, seed: int, num_actions: int) -> tuple[Session, LoggingEngine, Counter[int]]:
    """Return a session after so many actions of its agent."""
    engine, sampling = LoggingEngine(tokenizer, random.Random(seed)), SamplingParams(max_tokens=1000, seed=seed)
    limits = {"max_tokens": 1_000_000, "max_turns": 100_000}
    async with (
        make.session(tokenizer, engine, sampling=sampling, **limits) as (gateway, session),
        aiohttp.ClientSession() as http,
    ):
        agent = FuzzedAgent(http, gateway.url_of(session), session.key, random.Random(seed + 1))
        for _ in range(num_actions):
            await agent.act()
    return session, engine, agent.statuses


def check(session: Session, engine: LoggingEngine, statuses: Counter[int]) -> None:
    tree = session.tree
    ids, log_probs = tree.trajectory().token_ids, tree.trajectory().rollout_log_probs
    trained = [
        (
            tuple(ids[before(turn.start, tree.forks)].tolist()),
            tuple(ids[turn.start : turn.end].tolist()),
            tuple(log_probs[turn.start : turn.end].tolist()),
        )
        for turn in tree.turns
    ]
    logged = [(prompt, tuple(c.token_ids.tolist()), tuple(c.log_probs.tolist())) for prompt, c in engine.log]
    assert Counter(trained) == Counter(logged)

    trajectory = session.trajectory()
    assert trajectory.status is RolloutStatus.COMPLETED
    assert trajectory.num_response_tokens == sum(c.token_ids.size for _, c in engine.log)
    places = np.concatenate([path[responses] for path, responses in trained_branches(trajectory)])
    assert sorted(places.tolist()) == np.flatnonzero(trajectory.response_mask).tolist()
    item = TrainItem(row=0, group=0, trajectory=trajectory, advantages=np.ones(places.size, np.float32))
    batch = make_micro_batch([item], share_prefixes=True)
    assert batch.num_trained_tokens == places.size
    # What branches share is computed once, but for a few tokens where a branch would save less than it costs.
    assert batch.packing.num_tokens <= tree.size + 3 * len(tree.forks)
    # Only wrong keys are refused.
    assert set(statuses) <= {200, 401}


LONG_SEEDS = [pytest.param(seed, marks=pytest.mark.long) for seed in range(100, 140)]


@pytest.mark.parametrize("seed", [*range(3), *LONG_SEEDS])
async def test_what_is_trained_is_what_the_engine_sampled_whatever_an_agent_does(
    chat_tokenizer: Any, seed: int
) -> None:
    session, engine, statuses = await fuzzed(chat_tokenizer, seed, 30)

    assert session.tree.forks
    check(session, engine, statuses)
