"""Requests and replies of OpenAI's Completions API, which continues prompts without a chat template. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayapp.rollout.gateway.conversation import Ask, Begun, Choice, RefusedError, Reply
from rayapp.rollout.gateway.fields import names, other_fields, sampling
from rayapp.rollout.gateway.openai_chat import OpenAIChat, usage
from rayapp.rollout.gateway.reading import (
    event,
    positive,
    refuse,
    stops,
    structured_form,
    text,
    top_log_probs,
)
from rayapp.rollout.gateway.streams import PartKind, StreamWriter

_FIELDS = names("logprobs max_tokens model n prompt stop stream stream_options structured_outputs")
_MAX_TOKENS = 16
"""OpenAI's default for `max_tokens`."""


class OpenAICompletions:
    """`Dialect` of OpenAI's Completions API: reads its requests and writes its replies."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        others, stream = other_fields(body, _FIELDS), body.get("stream_options") or {}
        distribution, options = sampling(body)
        return Ask(
            prompts=_prompts(body.get("prompt")),
            model=text(body.get("model"), "model") or "policy",
            num_choices=positive(body.get("n"), "n") or 1,
            max_tokens=positive(body.get("max_tokens"), "max_tokens") or _MAX_TOKENS,
            stop=stops(body.get("stop"), "stop"),
            distribution=distribution,
            options=options,
            num_top_log_probs=top_log_probs(
                {"top_logprobs": body.get("logprobs")}, are_wanted=body.get("logprobs") is not None
            ),
            form=structured_form(body.get("structured_outputs")),
            reads_calls=False,
            is_stream=bool(body.get("stream")),
            wants_usage=isinstance(stream, dict) and bool(stream.get("include_usage")),
            not_followed=others.not_followed,
            unknown=others.unknown,
        )

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        choices = [
            _choice(i, choice.text, choice.finish_reason, _logprobs(choice)) for i, choice in enumerate(reply.choices)
        ]
        return _head(reply) | {"choices": choices, "usage": usage(reply)}

    def stream(self, begun: Begun, ask: Ask) -> StreamWriter:
        return _Stream(begun, ask)

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        return OpenAIChat().refusal(refused)

    def refusal_event(self, refused: RefusedError) -> bytes:
        return event(self.refusal(refused))


class _Stream(StreamWriter):
    def _event(self, **fields: Any) -> bytes:
        return event(_head(self.begun) | ({"usage": None} if self.ask.wants_usage else {}) | fields)

    def delta(self, index: int, kind: PartKind, text: str) -> bytes:
        return self._event(choices=[_choice(index, text)])

    def end(self, reply: Reply) -> bytes:
        events = list[bytes]()
        for index, choice in enumerate(reply.choices):
            events.append(self.rest(index, choice))
            events.append(self._event(choices=[_choice(index, "", choice.finish_reason, _logprobs(choice))]))
        if self.ask.wants_usage:
            events.append(self._event(choices=[], usage=usage(reply)))
        return b"".join([*events, b"data: [DONE]\n\n"])


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts in the field `prompt`, which has one prompt or a list of them. A prompt is a string or a list
    of token ids.
    """
    many = [given] if isinstance(given, str) or _are_ids(given) else given
    if not isinstance(many, list) or not many or not all(isinstance(each, str) or _are_ids(each) for each in many):
        raise refuse("prompt must be a string, a list of token ids, or a list of such prompts")
    return tuple(each if isinstance(each, str) else tuple(each) for each in many)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)


def _head(reply: Begun) -> dict[str, Any]:
    return {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created_s, "model": reply.model}


def _choice(index: int, words: str, reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "text": words, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if not choice.log_probs:
        return None
    offsets = [0]
    for each in choice.log_probs[:-1]:
        offsets.append(offsets[-1] + len(each.token))
    return {
        "tokens": [each.token for each in choice.log_probs],
        "token_logprobs": [max(each.log_prob, -9999.0) for each in choice.log_probs],
        "top_logprobs": [
            {token: max(value, -9999.0) for token, value in (*each.top, (each.token, each.log_prob))}
            for each in choice.log_probs
        ],
        "text_offset": offsets,
    }
