"""`rayapp serve`, the whole command: a model on the real vLLM, and the policy of a run that goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 900.0
CHAT = "agent.chat_template=chatml_hermes"
SCORE = {
    "type": "object",
    "properties": {"score": {"enum": [1, 2, 3]}, "sure": {"type": "boolean"}},
    "required": ["score", "sure"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "rate", "description": "Rates.", "parameters": SCORE}}


@contextmanager
def serving(log: Path, environment: dict[str, str], *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, "-m", "rayapp", "serve", *arguments, CHAT, "--port", "0"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        until(lambda: "try " in log.read_text(), lambda: process.poll() is None, log.read_text)
        url = re.search(r"OpenAI +(http\S+)", log.read_text())
        assert url is not None
        yield process, url[1]
    finally:
        process.kill()
        process.wait()


def until(reached: Callable[[], bool], may_go_on: Callable[[], bool], output: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert may_go_on(), output()
        assert time.monotonic() < deadline, output()
        time.sleep(0.1)


def ask(url: str, key: str, **asked: Any) -> Any:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=DEADLINE_S)
    return client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}], **asked)


def other_routes_answer(url: str, key: str) -> None:
    """Check completions, responses, messages and models, each with what only it offers."""
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=DEADLINE_S)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id

    plain = client.completions.create(model="any", prompt=["one", "two"], max_tokens=4, n=2, logprobs=3, temperature=1)
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) for choice in plain.choices)
    pieces = client.completions.create(model="any", prompt="one", max_tokens=4, temperature=0, stream=True)
    whole = client.completions.create(model="any", prompt="one", max_tokens=4, temperature=0)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    chosen = client.completions.create(
        model="any", prompt="one", max_tokens=9, extra_body={"structured_outputs": {"choice": ["left", "right"]}}
    )
    assert chosen.choices[0].text in ("left", "right")
    scored = ask(url, key, logprobs=True, top_logprobs=2, max_tokens=3, temperature=1)
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in scored.choices[0].logprobs.content)

    form: Any = {"format": {"type": "json_schema", "name": "form", "schema": SCORE}}
    first = client.responses.create(model="any", input="hello", text=form, max_output_tokens=300, temperature=1)
    jsonschema.validate(json.loads(first.output_text), SCORE)
    second = client.responses.create(
        model="any", input="again", previous_response_id=first.id, max_output_tokens=4, temperature=0
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens

    other = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0, timeout=DEADLINE_S)
    said: Any = [{"role": "user", "content": "hello"}]
    formed = other.messages.create(
        model="any", messages=said, max_tokens=300,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCORE}}},
    )  # fmt: skip
    jsonschema.validate(json.loads(formed.content[0].text), SCORE)
    tool: Any = {"name": "rate", "description": "Rates.", "input_schema": SCORE}
    called = other.messages.create(
        model="any", messages=said, max_tokens=400, tools=[tool], tool_choice={"type": "tool", "name": "rate"}
    )
    assert called.stop_reason == "tool_use"
    jsonschema.validate(called.content[-1].input, SCORE)


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_a_model_is_served_until_sigterm_and_nothing_is_left(
    tmp_path: Path,
    short_run: Callable[..., dict[str, Any]],
    policy_of: Callable[..., Path],
    descendants: Callable[[], dict[int, str]],
    settled: Callable[..., dict[int, str]],
) -> None:
    file, log = tmp_path / "config.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(short_run(tmp_path, model={"path": str(policy_of({"yes": 1.0}))})))
    # A Ray of its own: another Ray on this machine may be found otherwise.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY")} | {"RAY_ADDRESS": "local"}

    with serving(log, kept, str(file), "--max-tokens", "900") as (process, url):
        key = re.search(r"key +(\S+) +\(made for this server", log.read_text())
        assert key is not None
        greedy = [ask(url, key[1], temperature=0, max_tokens=20) for _ in range(2)]
        streamed = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in ask(url, key[1], temperature=0, max_tokens=20, stream=True)
        )
        with pytest.raises(openai.AuthenticationError):
            ask(url, "another")
        formed = ask(url, key[1], response_format=form_of(SCORE), max_tokens=300, temperature=1)
        forced = ask(url, key[1], tools=[TOOL], tool_choice="required", max_tokens=300, temperature=1)
        with pytest.raises(openai.BadRequestError, match="schema"):
            ask(url, key[1], response_format=form_of({"type": "nonsense"}))
        other_routes_answer(url, key[1])
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)

    assert greedy[0].choices[0].message.content == greedy[1].choices[0].message.content == streamed
    jsonschema.validate(json.loads(formed.choices[0].message.content), SCORE)
    assert forced.choices[0].message.tool_calls
    for call in forced.choices[0].message.tool_calls:
        assert call.function.name == "rate"
        jsonschema.validate(json.loads(call.function.arguments), SCORE)
    assert (code, log.read_text().splitlines()[-1]) == (0, "stopped"), log.read_text()
    assert "Traceback" not in log.read_text()
    assert settled(descendants) == {}


def test_adapters_are_served_beside_the_model_each_under_its_name(
    tmp_path: Path, short_run: Callable[..., dict[str, Any]], chat_model: Path
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapters = ("early", "late")
    for number, name in enumerate(adapters):
        torch.manual_seed(number)
        base: Any = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
        random: Any = {"r": 4, "lora_alpha": 32, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}
        get_peft_model(base, LoraConfig(**random)).save_pretrained(tmp_path / name)
    file, log = tmp_path / "config.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(short_run(tmp_path, model={"path": str(chat_model)})))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY")} | {"RAY_ADDRESS": "local"}
    kept["RAYAPP_SERVE_API_KEY"] = "secret"
    options = [option for name in adapters for option in ("--adapter", f"{name}={tmp_path / name}")]

    with serving(log, kept, str(file), "--max-tokens", "200", *options) as (process, url):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=DEADLINE_S)

        def greedy(model: str) -> Any:
            asked: Any = [{"role": "user", "content": "hello"}]
            options: Any = {"temperature": 0, "max_tokens": 20, "logprobs": True}
            return client.chat.completions.create(model=model, messages=asked, **options)

        listed = [model.id for model in client.models.list().data]
        replies = {name: [greedy(name) for _ in range(2)] for name in ("policy", *adapters)}
        with pytest.raises(openai.NotFoundError, match="there is no model 'later'"):
            greedy("later")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()

    assert listed[1:] == [*adapters]
    texts = {name: {reply.choices[0].message.content for reply in each} for name, each in replies.items()}
    assert all(len(each) == 1 for each in texts.values()), texts
    firsts = {name: round(each[0].choices[0].logprobs.content[0].logprob, 2) for name, each in replies.items()}
    assert len(set(firsts.values())) == 3, firsts
    assert [each[0].model for each in replies.values()] == ["policy", *adapters]


def test_the_policy_of_a_run_that_goes_on_is_served_and_the_run_does_not_notice(
    tmp_path: Path, short_run: Callable[..., dict[str, Any]], standing_ray: Any
) -> None:
    file, folder = tmp_path / "config.yaml", tmp_path / "run"
    limits = {"max_prompt_tokens": 200, "max_completion_tokens": 50}
    file.write_text(yaml.safe_dump(short_run(tmp_path, train={"num_steps": 1_000_000}, rollout=limits)))
    attached = standing_ray.environment | {"RAY_ADDRESS": standing_ray.address, "RAYAPP_SERVE_API_KEY": "secret"}

    def steps() -> int:
        lines = folder / "metrics.jsonl"
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    training = standing_ray.train(str(file), log=tmp_path / "train.log")
    try:
        until(lambda: steps() >= 2, lambda: training.poll() is None, (tmp_path / "train.log").read_text)
        with serving(tmp_path / "log", attached, str(folder / "config.yaml"), "--running") as (process, url):
            first = ask(url, "secret", max_tokens=5)
            version = metrics(url)["rayapp_serve_policy_version"]
            before = steps()
            until(lambda: steps() >= before + 2, lambda: training.poll() is None, (tmp_path / "train.log").read_text)
            ask(url, "secret", max_tokens=5)
            later = metrics(url)["rayapp_serve_policy_version"]
            training.send_signal(signal.SIGTERM)
            ended = training.wait(120)
            code = process.wait(120)
    finally:
        training.kill()
        training.wait()

    assert first.usage.completion_tokens == 5
    assert 2 <= version < later
    assert ended == 130, (tmp_path / "train.log").read_text()
    assert code == 1  # it can't go on, and says why
    assert "vllm-server-0" in (tmp_path / "log").read_text().splitlines()[-1]
    assert "secret" not in (tmp_path / "log").read_text()
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()][:2] == [1, 2]
