"""Sorts the fields of a request that a dialect does not read: harmless, without effect, unknown, or refused.

Each dialect calls `other_fields` with the names of the fields that it reads itself. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rayapp.rollout.gateway.conversation import RefusedError, not_offered


def names(text: str) -> frozenset[str]:
    """Return the words of a text that is divided by white space."""
    return frozenset(text.split())


_HARMLESS = names("""
    access_programs betas billing_policy cache_control client_metadata diagnostics extra_headers inference_geo
    max_tool_calls metadata model moderation prediction priority prompt_cache_key prompt_cache_options
    prompt_cache_retention request_id safety_identifier service_tier speed store stream stream_options user
    user_profile_id workspace_id
    """)
"""Fields that are ignored silently: they are about the caller, or about a service's storage and speed."""
_NOT_FOLLOWED = names("context_management include reasoning reasoning_effort thinking truncation verbosity")
"""Fields that are ignored and named in the reply: the chat template or the session determines their settings."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "repetition_penalty": (1,),
    "best_of": (1,),
    **dict.fromkeys(
        names("""
        allowed_token_ids audio background bad_words chat_template chat_template_kwargs compaction container
        continue_final_message conversation echo fallbacks frequency_penalty function_call functions guided_choice
        guided_grammar guided_json guided_regex ignore_eos image logit_bias logits_processors logprobs mcp_servers min_p
        min_tokens presence_penalty prompt prompt_logprobs repetition_detection stop_token_ids structural_tag
        structured_outputs thinking_token_budget thread top_logprobs truncate_prompt_tokens use_beam_search
        web_search_options
        """),
        (0, False, "", [], {}),
    ),
}
"""Fields that would change the sampling or request an unsupported feature, with the values of each that do neither."""

_MAX_FIELDS = 100


class OtherFields(NamedTuple):
    """Names of fields that a dialect does not read."""

    not_followed: tuple[str, ...]
    unknown: tuple[str, ...]


def other_fields(body: Mapping[str, Any], read: Collection[str]) -> OtherFields:
    """Sort the fields that a dialect does not read.

    Args:
        read: names of the fields that the dialect reads.
    Raises:
        RefusedError: a field asks for something that is not supported.
    """
    if len(body) > _MAX_FIELDS:
        raise RefusedError("invalid", f"the body has {len(body)} fields: at most {_MAX_FIELDS} are allowed")
    not_followed, unknown = list[str](), list[str]()
    for name, value in body.items():
        if value is None or name in read or name in _HARMLESS:
            continue
        if name in _NOT_FOLLOWED:
            not_followed.append(name)
        elif name not in _NEUTRAL:
            unknown.append(name[:60])
        elif value not in _NEUTRAL[name]:
            raise RefusedError("invalid", not_offered(f"{name} {value!r:.60}"))
    return OtherFields(tuple(not_followed), tuple(unknown))
