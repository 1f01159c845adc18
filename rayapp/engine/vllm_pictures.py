"""Pictures of a request in vLLM's form: one placeholder a picture, which vLLM expands with the model's own processor.

vLLM keeps processed pictures and their features by SHA-256. Its expansion must give the ids that the rollout made with
the same processor, because the learner trains on them: every answer is compared, so a difference ends the run at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from rayapp.config.sections import ModelSection
from rayapp.core.errors import EngineError
from rayapp.core.types import RequestId, SamplingParams
from rayapp.storage.media import MOST_PICTURES, compact, opened
from rayapp.storage.models.pictures import reads_pictures

_opened: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Pictures in Pillow's form by SHA-256, as long as a request that waits has them: a group's requests share them."""


def picture_args(model: ModelSection, *, on_gpu: bool) -> dict[str, Any]:
    """Return the engine arguments of a model that reads pictures: no memory for videos, and the pictures of the longest
    prompt and of all later turns."""
    if not reads_pictures(model):
        return {}
    # On a CPU the cache has its own size, and a trial of the largest picture would take minutes.
    return {"limit_mm_per_prompt": {"image": 2 * MOST_PICTURES, "video": 0}, "skip_mm_profiling": not on_gpu}


async def open_pictures(sampling: SamplingParams) -> list[Any]:
    """Decode a request's pictures in threads. Raises EngineError: a picture's bytes are missing."""
    found = list[Any]()
    for sha256 in (picture.sha256 for picture in sampling.media):
        if sha256 not in sampling.pictures:
            raise EngineError(f"the bytes of picture {sha256} were not sent with the request")
        if (shown := _opened.get(sha256)) is None:
            _opened[sha256] = shown = await asyncio.to_thread(opened, sampling.pictures[sha256])
        found.append(shown)
    return found


def engine_prompt(
    prompt_ids: Sequence[int], sampling: SamplingParams, pictures: Sequence[Any], placeholder: int | None
) -> dict[str, Any]:
    """Return vLLM's prompt, with the opened pictures. Raises EngineError: the model reads no pictures."""
    media = sampling.media
    if not media:
        return {"prompt_token_ids": list(prompt_ids)}
    if placeholder is None:
        raise EngineError("the prompt has pictures, but the served model reads only text")
    return {
        "prompt_token_ids": compact(prompt_ids, media, placeholder),
        "multi_modal_data": {"image": list(pictures)},
        "multi_modal_uuids": {"image": [picture.sha256 for picture in media]},
    }


def check_expansion(
    request_id: RequestId, sampling: SamplingParams, prompt_ids: Sequence[int], read: Sequence[int] | None
) -> None:
    """Raise EngineError if vLLM read other token ids than a request with pictures has."""
    if sampling.media and read is not None and list(read) != list(prompt_ids):
        raise EngineError(
            f"{request_id}: vLLM expands the prompt's {len(sampling.media)} pictures to {len(read)} tokens, but the "
            f"learner's processor to {len(prompt_ids)}, or with other ids. Training on them would be wrong: install "
            "the same transformers for both, and remove mm_processor_kwargs from server.engine_args"
        )
