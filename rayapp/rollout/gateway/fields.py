"""Sorts the fields of a request that a dialect does not read into harmless, ignored, unknown and refused ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayapp.rollout.gateway.conversation import RefusedError, not_in_training, not_offered


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that concern the caller, or the storage and speed of a service.
_HARMLESS = names("""
    access_programs betas billing_policy cache_control client_metadata diagnostics extra_headers inference_geo
    max_tool_calls metadata model moderation prediction priority prompt_cache_key prompt_cache_options
    prompt_cache_retention request_id safety_identifier service_tier speed store stream stream_options user
    user_profile_id workspace_id
    """)
# Fields whose settings the chat template or the session determines.
_NOT_FOLLOWED = names("context_management include reasoning thinking truncation verbosity")
# Field of an unsupported feature -> values that don't use the feature.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "best_of": (1,),
    **dict.fromkeys(
        names("""
        audio background chat_template compaction container continue_final_message conversation echo fallbacks
        function_call functions guided_choice guided_grammar guided_json guided_regex image logits_processors logprobs
        mcp_servers prompt prompt_logprobs repetition_detection structural_tag suffix thread top_logprobs
        truncate_prompt_tokens use_beam_search web_search_options
        """),
        (0, False, "", [], {}),
    ),
}
# Field of earlier versions of vLLM -> field that replaces it.
_INSTEAD = {f"guided_{name}": f"structured_outputs: {{{name}: …}}" for name in ("json", "regex", "choice", "grammar")}

_MAX_FIELDS = 100
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], Field(max_length=1024)]
_Word = Annotated[str, Field(min_length=1, max_length=200)]


class SamplingFields(BaseModel):
    """Sampling fields of a request, with the names and bounds of vLLM's SamplingParams, and with limited sizes.
    Defaults of fields outside `_DISTRIBUTION` have no effect on sampling."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 64)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    ignore_eos: bool = False
    stop_token_ids: _Ids = []
    allowed_token_ids: _Ids | None = None
    bad_words: Annotated[list[_Word], Field(max_length=64)] = []
    logit_bias: dict[Annotated[_Id, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=1024
    )
    thinking_token_budget: int | None = Field(None, ge=0, lt=1 << 31)


# Most clients always send them, even if their users chose no value; training ignores them.
_DISTRIBUTION = names("temperature top_p top_k seed")
SAMPLING_FIELDS = frozenset(SamplingFields.model_fields)


def ignored_sampling(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the request's fields of `_DISTRIBUTION`. RefusedError: a value is out of bounds, or another
    field would change how the policy samples."""
    given = {name: value for name in SAMPLING_FIELDS if (value := body.get(name)) is not None}
    if not given:
        return ()
    try:
        found = SamplingFields.model_validate(given).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise RefusedError("invalid", f"{where}: {first['msg']}, not {first['input']!r:.60}") from None
    for name, field in SamplingFields.model_fields.items():
        if name in found and name not in _DISTRIBUTION and found[name] != field.default:
            raise RefusedError("invalid", not_in_training(f"{name} {found[name]!r:.60}"))
    return tuple(name for name in found if name in _DISTRIBUTION)


def other_fields(body: Mapping[str, Any], read: Collection[str]) -> tuple[str, ...]:
    """Return the ignored fields among those that a dialect does not `read`. RefusedError: one is not supported."""
    if len(body) > _MAX_FIELDS:
        raise RefusedError("invalid", f"the body has {len(body)} fields: at most {_MAX_FIELDS} are allowed")
    not_followed = list[str]()
    for name, value in body.items():
        if value is None or name in read or name in _HARMLESS or name in SAMPLING_FIELDS:
            continue
        if name in _NOT_FOLLOWED:
            not_followed.append(name)
        elif name not in _NEUTRAL:
            not_followed.append(name[:60])
        elif value not in _NEUTRAL[name]:
            instead = f" Send {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise RefusedError("invalid", not_offered(f"{name} {value!r:.60}") + instead)
    return tuple(not_followed)
