"""The real vLLM on CPU, one engine a family: it loads `final/`, and after two syncs has the learner's log-probs."""

from __future__ import annotations

import pytest

from support.family_check import checks_of, subject_of

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]

FAMILIES = (
    "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4",
    "glm4_moe", "gpt_oss", "granite", "granitemoehybrid", "cohere2", "olmo2", "olmoe", "phi3", "qwen3_next", "smollm3",
)  # fmt: skip
"""One or two of every kind among those that docs/models.md has as right."""


@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_computes_what_the_learner_computes_after_every_sync(name: str) -> None:
    found = {check.what: check for check in checks_of(subject_of(name), engine=True)}
    assert [check.detail for check in found.values() if not check.holds] == []
    assert "after two syncs" in found["engine"].detail
