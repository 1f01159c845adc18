"""Reads demonstrations for supervised steps, as token ids with a mask of the tokens to learn.

A demonstration is a `Trajectory` that was not sampled. Its ids are built as in a rollout: first the prompt, as the chat
template renders it; then the answer, encoded separately, with the token or text that ends a turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.config.config import Config
from rayapp.config.keys import all_tasks
from rayapp.core.errors import InputError
from rayapp.core.files import json_lines
from rayapp.core.types import Fork, Reward, Trajectory
from rayapp.rollout.agent.chat import ChatTokenizer, load_template, special_ids
from rayapp.storage.media import by_sha256
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.data.files import fetch_files
from rayapp.tasks.data.pictures import COLUMNS, Pictured, PictureRows, picture_rows, with_parts
from rayapp.tasks.loading import load_tasks

KINDS = "messages; prompt and completion; or token_ids and response_mask"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields with a turn's thoughts, by template
_CALL_PARTS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "reasoning", "function_call")
Render = Callable[..., str]  # (messages, add_generation_prompt) -> text of the chat template
Found = tuple[str, Trajectory, Mapping[str, bytes]]  # file and row, demonstration, its pictures by SHA-256


@dataclass(slots=True, kw_only=True)
class Demonstrations:
    """The demonstrations of all rows, in the order of the files."""

    rows: list[Trajectory] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)  # SHA-256 -> encoded bytes
    num_left_out: int = 0  # longer than warmup.max_tokens, with data.filter_overlong_prompts


def read_demonstrations(config: Config, files: Sequence[str]) -> Demonstrations:
    """Return all demonstrations in the files or, without files, those of the run's tasks. An InputError names the row
    that can't be used."""
    tokenizer: Any = load_tokenizer(config.model, config.agent.chat_template_kwargs)
    if not files:
        found = _of_tasks(all_tasks(config), tokenizer)
    else:
        template = load_template(config.agent.chat_template) if config.agent.chat_template else None
        paths = asyncio.run(fetch_files(files, config.data.cache_dir))
        found = _of_files(paths, files, tokenizer, template, picture_rows(config.model, config.data))
    return _within_limit(found, config.max_demonstration_tokens, drops=config.data.filter_overlong_prompts)


def _within_limit(found: Iterator[Found], limit: int, *, drops: bool) -> Demonstrations:
    result = Demonstrations()
    for where, row, pictures in found:
        if row.num_tokens <= limit:
            result.rows.append(row)
            result.pictures |= pictures
        elif drops:
            result.num_left_out += 1
        else:
            raise InputError(
                f"{where} has {row.num_tokens} tokens, but warmup.max_tokens is {limit}. Raise warmup.max_tokens, "
                "shorten the row, or set data.filter_overlong_prompts: true"
            )
    if not result.rows:
        left_out = f"all {result.num_left_out} rows are longer than warmup.max_tokens = {limit}. Raise this key"
        raise InputError(
            f"the warm-up has no demonstrations: {left_out if result.num_left_out else 'the files have no rows'}"
        )
    return result


def _of_tasks(names: Sequence[str], tokenizer: ChatTokenizer) -> Iterator[Found]:
    tasks = load_tasks(names)
    without = [task.name for task in tasks if not (isinstance(task, CodingTask) and task.demonstrations)]
    if without:
        raise InputError(
            f"the warm-up (warmup.num_steps) has no files, and these tasks have no demonstrations: "
            f"{', '.join(without)}. Write demonstrations into each task (docs/tasks.md), name files in warmup.files, "
            "or set warmup.num_steps to 0."
        )
    for task in tasks:
        assert isinstance(task, CodingTask)
        prompt = task.render(tokenizer)
        # End the demonstration as sampling ends: at a stop text or, if the prompt has none, at the tokenizer's end
        # token.
        end = (
            []
            if prompt.stop and task.prompt_format == "chat_prefill"
            else [_end_of_text(tokenizer, f"task {task.name}")]
        )
        for number, text in enumerate(task.demonstrated_completions, start=1):
            completion = tokenizer.encode(text, add_special_tokens=False) + end
            where = f"demonstration {number} of task {task.name}"
            yield where, _trajectory([(prompt.token_ids.tolist(), False), (completion, True)], text), {}


def _of_files(
    paths: Sequence[Path],
    names: Sequence[str],
    tokenizer: ChatTokenizer,
    template: str | None,
    pictures: PictureRows | None,
) -> Iterator[Found]:
    for path, name in zip(paths, names, strict=True):
        for number, row in enumerate(_raw_rows(path)):
            where = f"{name}: row {number}"
            read = partial(_shown, row=row, pictures=pictures, folder=path.parent, where=where)
            try:
                found = list(_of_row(row, tokenizer, template, read))
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{where}: {error}") from error
            for trajectory, shown in found:
                yield (where, *_with_pictures(trajectory, shown, pictures, where))


def _shown(
    messages: Sequence[Mapping[str, Any]], *, row: Any, pictures: PictureRows | None, folder: Path, where: str
) -> Pictured:
    """Return the messages, with parts for the row's pictures."""
    if not any(row.get(column) for column in COLUMNS):
        return Pictured(with_parts(messages, 0))
    if pictures is None or not messages:
        needed = "messages, in which they have places" if pictures else "a model that reads pictures"
        raise ValueError(f"the row has images, which need {needed}")
    return pictures.read(messages, row, folder, where)


def _with_pictures(
    found: Trajectory, shown: Pictured, pictures: PictureRows | None, where: str
) -> tuple[Trajectory, dict[str, bytes]]:
    """Return the demonstration with the tokens of its pictures, which are not learned, and their bytes."""
    if pictures is None or not shown.encoded:
        return found, {}
    is_place = found.token_ids == pictures.processor.token_id
    number = int(is_place.sum())  # an earlier sequence of the conversation shows only the first ones
    first = Pictured((), shown.encoded[:number], shown.sizes[:number])
    ids, media = pictures.place(found.token_ids.tolist(), first, where)
    is_text, mask = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    for each in media:
        is_text[each.start : each.end] = False
    mask[is_text] = found.response_mask[~is_place]
    made = _trajectory_of(np.array(ids, np.int32), mask, found.completion_text)
    return replace(made, media=media), by_sha256(first.encoded)


def _raw_rows(path: Path) -> Iterator[Any]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256):
                    yield from map(_without_filled_in, batch.to_pylist())
            return
        with path.open(encoding="utf-8-sig") as lines:
            yield from (row for _, row in json_lines(lines, str(path)))
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise InputError(f"{path} can't be read: {error}") from error


def _without_filled_in(value: Any) -> Any:
    """Remove None: parquet gives each object the keys of all objects of its column."""
    if isinstance(value, dict):
        return {key: _without_filled_in(item) for key, item in value.items() if item is not None}
    return [_without_filled_in(item) for item in value] if isinstance(value, list) else value


def _of_row(
    row: Any, tokenizer: ChatTokenizer, template: str | None, read: Callable[[list[Any]], Pictured]
) -> Iterator[tuple[Trajectory, Pictured]]:
    if not isinstance(row, dict):
        raise TypeError(f"the row is a {type(row).__name__}: it must be an object with {KINDS}")
    has = {key for key, value in row.items() if value is not None}
    if {"token_ids", "response_mask"} <= has:
        yield _of_tokens(row, tokenizer), read([])
        return
    if {"prompt", "completion"} <= has and isinstance(row["prompt"], str):
        yield _of_texts(row, tokenizer), read([])
        return
    if {"prompt", "completion"} <= has:
        asked, messages = _messages(row, "prompt"), _messages(row, "completion")
    elif "messages" in has:
        asked, messages = [], _messages(row, "messages")
    else:
        raise ValueError(f"the row has {', '.join(sorted(has)) or 'no fields'}: it must have {KINDS}")
    if row.get("functions"):
        raise ValueError("functions is OpenAI's old form, which templates leave out: give tools")
    tools = _data(row.get("tools") or [], "tools", list, "a list")
    tools = [_data(tool, f"tools[{i}]", dict, "an object") for i, tool in enumerate(tools)]
    render = partial(_render, tokenizer, template, tools or None)
    shown = read([*asked, *messages])
    yield from ((each, shown) for each in _of_conversation(shown.messages, len(asked), render, tokenizer))


def _of_tokens(row: Mapping[str, Any], tokenizer: Any) -> Trajectory:
    token_ids = _integers(row["token_ids"], "token_ids", len(tokenizer)).astype(np.int32)
    mask = _integers(row["response_mask"], "response_mask", 2).astype(np.bool_)
    if token_ids.ndim != 1 or token_ids.shape != mask.shape:
        raise ValueError(
            f"token_ids and response_mask must be flat lists of the same length; their shapes are {token_ids.shape} "
            f"and {mask.shape}"
        )
    if not mask.any():
        raise ValueError("response_mask has no true: mark at least one token to learn from")
    if mask[0]:
        raise ValueError("response_mask begins with true: the first token must belong to the prompt (false)")
    forks = tuple(Fork(**fork) for fork in row.get("forks") or ())
    starts = [fork.start for fork in forks]
    if starts != sorted({*starts} & {*range(1, token_ids.size)}):
        raise ValueError(
            f"forks: each `start` must be from 1 to {token_ids.size - 1}, and greater than the `start` before it"
        )
    if any(fork.after >= fork.start for fork in forks):
        raise ValueError("forks: each `after` must be less than the `start` of the same fork")
    return replace(_trajectory_of(token_ids, mask, str(row.get("completion") or "")), forks=forks)


def _integers(value: Any, key: str, limit: int) -> Any:
    """Return the numbers, integers from 0 to `limit` - 1, as an array."""
    for place, item in enumerate(value if isinstance(value, list) else []):
        if not isinstance(item, int) or not 0 <= item < limit:
            raise ValueError(f"{key}[{place}] is {item!r:.60}; it must be an integer from 0 to {limit - 1}")
    return np.asarray(value)


def _of_texts(row: Mapping[str, Any], tokenizer: ChatTokenizer) -> Trajectory:
    """Return prompt, completion and end token, without a chat template."""
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(completion, str):
        raise TypeError("prompt is a string, so completion must be a string; or give both as lists of messages")
    _not_empty(completion, "completion")
    _not_empty(prompt, "prompt")
    answer = [*tokenizer.encode(completion, add_special_tokens=False), _end_of_text(tokenizer, "warmup.files")]
    return _trajectory([(tokenizer.encode(prompt), False), (answer, True)], completion)


def _of_conversation(
    messages: Sequence[Mapping[str, Any]], first: int, render: Render, tokenizer: ChatTokenizer
) -> Iterator[Trajectory]:
    """Yield demonstrations that together train on every assistant turn once, from message `first` on.

    All turns are in one sequence, as in a rollout. If the template changes earlier turns when later ones are added
    (Qwen3 removes their thoughts), a new sequence begins with the changed text.
    """
    # OpenAI's `weight: 0` leaves a turn out.
    turns = [
        i for i in range(first, len(messages)) if messages[i]["role"] == "assistant" and messages[i].get("weight", 1)
    ]
    if not turns:
        raise ValueError("the row has no assistant message to learn from")
    parts: list[tuple[list[int], bool]] = []
    so_far, answers = "", list[str]()
    for i in turns:
        if not messages[i].get("tool_calls"):
            _not_empty(messages[i].get("content"), f"the content of message {i} (assistant)")
        head, answer = _turn(messages, i, render, tokenizer)
        if parts and not head.startswith(so_far):
            yield _trajectory(parts, answers[-1])
            parts, so_far = [], ""
        parts += [(tokenizer.encode(head[len(so_far) :], add_special_tokens=False), False)]
        parts += [(tokenizer.encode(answer, add_special_tokens=False), True)]
        so_far = head + answer
        answers.append(answer)
    yield _trajectory(parts, answers[-1])


def _turn(messages: Sequence[Mapping[str, Any]], i: int, render: Render, tokenizer: ChatTokenizer) -> tuple[str, str]:
    """Return the text before assistant message `i`, and its own with the token that ends the turn."""
    head, whole = render(messages[:i], add_generation_prompt=True), render(messages[: i + 1], False)
    if not whole.startswith(head):
        raise ValueError(
            f"message {i} can't be learned from: the chat template renders it as "
            f"{whole[len(head) - 40 : len(head) + 40]!r}, which does not continue the generation prompt "
            f"{head[-40:]!r}. Give token_ids and response_mask, or prompt and completion as strings"
        )
    answer = whole[len(head) :]
    # Templates write a line break after the token that ends a turn; a policy never samples this line break.
    ended = tokenizer.encode(answer.rstrip(), add_special_tokens=False)
    if not ended or ended[-1] not in special_ids(tokenizer):
        raise ValueError(
            f"message {i} can't be learned from: the chat template ends it with {answer[-40:]!r}, which has no token "
            "that ends a turn, so the policy would learn answers that never end. Name a template with such a token in "
            "agent.chat_template, or give token_ids and response_mask"
        )
    if str(messages[i].get(_THOUGHTS[0]) or "").strip() not in answer:
        raise ValueError(
            f"message {i} can't be learned from: the chat template leaves out its thoughts (reasoning_content). Write "
            "them into the content as <think>...</think>, or remove them"
        )
    content = str(messages[i].get("content") or "")
    is_thought = content.lstrip().startswith("<think>") and content.count("</think>") == 1
    if "</think>" in content and not is_thought and content.strip() not in answer:
        raise ValueError(
            f"message {i} can't be learned from: the chat template takes a </think> in its content for the end of a "
            "thought, and changes the content. Reword the content, name another template in agent.chat_template, or "
            "give token_ids and response_mask"
        )
    return head, answer.rstrip()


def _render(
    tokenizer: ChatTokenizer, template: str | None, tools: Any, messages: Any, add_generation_prompt: bool
) -> str:
    if not template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the row has messages, but the model has no chat template to render them: set agent.chat_template, or give "
            "prompt and completion as strings"
        )
    options = ({"chat_template": template} if template else {}) | ({"tools": tools} if tools else {})
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        )
    except Exception as error:  # boundary: a template is a program that may raise anything
        raise ValueError(
            f"the chat template can't render the row's messages: {type(error).__name__}: {error}"
        ) from error


def _messages(row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = row[key]
    if not isinstance(value, list) or not all(isinstance(one, dict) and "role" in one for one in value):
        raise ValueError(f"{key} must be a list of messages: objects with `role` and `content`")
    return [
        _with_parsed_calls({key: item for key, item in one.items() if item is not None}, f"{key}[{place}]")
        for place, one in enumerate(value)
    ]


def _with_parsed_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    # Arguments are objects in rollouts, JSON text in OpenAI's form.
    calls = _data(message.get("tool_calls") or [], f"{where}.tool_calls", list, "a list")
    parsed = [_with_parsed_arguments(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if "function_call" in message:
        raise ValueError(f"{where}.function_call is OpenAI's old form, which templates leave out: give tool_calls")
    content = message.get("content", "")
    if not isinstance(content, str | list):
        raise TypeError(f"{where}.content is {content!r:.60}: it must be text, or a list of parts")
    kinds = [part.get("type") for part in content if isinstance(part, dict)]
    if other := next((kind for kind in kinds if kind in _CALL_PARTS), ""):
        raise ValueError(
            f"{where}.content has a part of type {other}, which templates leave out: give tool_calls, messages of the "
            "role tool, and reasoning_content"
        )
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name)), None)
    thinking = dict.fromkeys(_THOUGHTS, thoughts) if thoughts else {}
    return message | thinking | ({"tool_calls": parsed} if parsed else {})


def _with_parsed_arguments(call: Any, where: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _with_parsed_arguments(function, f"{where}.function")}
    if "arguments" not in call:
        return call
    return call | {"arguments": _data(call["arguments"], f"{where}.arguments", dict, "an object")}


def _data(value: Any, where: str, kind: type, what: str) -> Any:
    """Return a field's data, which some data sets write as JSON text."""
    try:
        # `int` refuses NaN and Infinity, which are no JSON
        found = json.loads(value.strip() or "{}", parse_constant=int) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise TypeError(f"{where} is {value!r:.60}, which is not the JSON of {what}")
    return found


def _not_empty(value: Any, what: str) -> None:
    if not isinstance(value, str | list) or not value or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{what} is {value!r:.40}: it must have text to learn from")


def _end_of_text(tokenizer: Any, what: str) -> int:
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{what}: the tokenizer has no eos_token, which must end every answer. In warmup.files, give rows with "
            "token_ids and response_mask instead"
        )
    return int(tokenizer.eos_token_id)


def _trajectory(parts: Sequence[tuple[Sequence[int], bool]], text: str) -> Trajectory:
    token_ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in parts])
    mask = np.concatenate([np.full(len(ids), sampled) for ids, sampled in parts])
    return _trajectory_of(token_ids, mask, text)


def _trajectory_of(token_ids: Any, mask: Any, text: str) -> Trajectory:
    reward = Reward(value=1.0, status="demonstration")
    return Trajectory.of_tokens(token_ids, mask, reward=reward, completion_text=text)
