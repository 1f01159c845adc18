"""Whether `distillation.teacher` can score what the policy samples, found out before any actor starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayapp.config.config import Config, alone, frozen_models, with_values
from rayapp.config.model_servers import server_named
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.keys import read_key
from rayapp.storage.models.check import check_model
from rayapp.storage.models.prefetch import with_local_model
from rayapp.storage.models.tokenizer import load_tokenizer

SERVER_TIMEOUT_S = 10.0
PROBE = 'def f(x):\n\treturn x ** 2  # 0123456789 ÄÖÜ 漢字 \u20ac\n\nThe quick brown fox; "jumps" over [lazy] dogs?'
"""Text that two tokenizers don't read alike by chance."""


def check_teacher(config: Config) -> None:
    """Check the teacher as a model, and that its tokens are the policy's.

    Args:
        config: its model.path is on this machine or a hub.
    Raises:
        InputError: there is no such model, or it has another tokenizer.
    """
    section = config.distillation
    ours = [alone(config, each) for each in config.model_servers if each.name == server_named(section.base_url)]
    if section.base_url and not ours:
        _check_server(config)
        return
    own = next(iter(ours), config if section.is_policy else frozen_models(config).get("teacher"))
    if own is None:
        return
    more = {"max_prompt_tokens": config.rollout.max_prompt_tokens + section.num_privileged_tokens}
    try:
        # No server holds it, so that none needs to split it.
        local = with_local_model(with_values(own, server={"tensor_parallel_size": 1}, rollout=more))
        check_model(local)
    except (InputError, ConfigError) as error:
        raise InputError(f"distillation.teacher {own.model.path!r} can't be used: {error}") from error
    policy, teacher = _tokens(config), _tokens(local)
    ordered = sorted(policy.items(), key=lambda entry: entry[1])
    if others := [token for token, number in ordered if teacher.get(token) != number]:
        there = f"number {teacher[others[0]]}" if others[0] in teacher else "none"
        raise InputError(
            f"distillation.teacher {own.model.path!r} has another tokenizer than model.path {config.model.path!r}: "
            f"{len(others)} of {len(policy)} tokens differ, such as {others[0]!r}, number {policy[others[0]]} of the "
            f"policy's and {there} of the teacher's. A teacher scores the policy's own tokens: take one of its family."
        )


def _check_server(config: Config) -> None:
    """Whether it reads a text as the tokens of the policy."""
    import httpx

    section = config.distillation
    key = read_key(section.api_key_env, "the teacher")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": section.teacher, "prompt": PROBE, "add_special_tokens": False}
    try:
        url = f"{section.base_url.removesuffix('/v1')}/tokenize"
        answer = httpx.post(url, json=body, headers=headers, timeout=SERVER_TIMEOUT_S)
        answer.raise_for_status()
        found = answer.json()["tokens"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"distillation.base_url {section.base_url!r} does not tell the tokens of {section.teacher!r}: "
            f"{type(error).__name__}: {error}. It must be a vLLM server (vllm serve MODEL) that runs."
        ) from error
    if found != load_tokenizer(config).encode(PROBE, add_special_tokens=False):
        raise InputError(
            f"distillation.teacher {section.teacher!r} at {section.base_url} has another tokenizer than model.path "
            f"{config.model.path!r}: they read the same text as other tokens. A teacher scores the policy's own "
            "tokens: take one of its family."
        )


def _tokens(config: Config) -> dict[str, int]:
    """Number of every token, added ones too."""
    file = Path(config.model.path) / "tokenizer.json"
    if not file.is_file():
        tokenizer: Any = load_tokenizer(config)
        return dict(tokenizer.get_vocab())
    from tokenizers import Tokenizer

    return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
