"""Pictures of a request in vLLM's form: one placeholder a picture, which vLLM expands with the model's own processor.

vLLM keeps processed pictures and their features by SHA-256. Its expansion must give the ids that the rollout made with
the same processor, because the learner trains on them: every answer is compared, so a difference ends the run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayapp.config.sections import ModelSection
from rayapp.core.errors import EngineError
from rayapp.core.types import RequestId, SamplingParams
from rayapp.storage.media import compact, opened
from rayapp.storage.models.pictures import reads_pictures


def picture_args(model: ModelSection, *, on_gpu: bool) -> dict[str, Any]:
    """Return the engine arguments of a model that reads pictures: no memory for videos, any number of pictures."""
    if not reads_pictures(model):
        return {}
    # On a CPU the cache has its own size, and a trial of the largest picture would take minutes.
    return {"limit_mm_per_prompt": {"video": 0}, "skip_mm_profiling": not on_gpu}


def engine_prompt(prompt_ids: Sequence[int], sampling: SamplingParams, placeholder: int | None) -> dict[str, Any]:
    """Return vLLM's prompt. Raises EngineError: the model reads no pictures, or a picture's bytes are missing."""
    media = sampling.media
    if not media:
        return {"prompt_token_ids": list(prompt_ids)}
    if placeholder is None:
        raise EngineError("the prompt has pictures, but the served model reads only text")
    if missing := [picture.sha256 for picture in media if picture.sha256 not in sampling.pictures]:
        raise EngineError(f"the bytes of picture {missing[0]} were not sent with the request")
    return {
        "prompt_token_ids": compact(prompt_ids, media, placeholder),
        "multi_modal_data": {"image": [opened(sampling.pictures[picture.sha256]) for picture in media]},
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
