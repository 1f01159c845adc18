"""The tokenizer of the run's model."""

from __future__ import annotations

from rayapp.config.config import Config
from rayapp.core.imports import large_imports
from rayapp.core.protocols import Tokenizer


def load_tokenizer(config: Config) -> Tokenizer:
    """The model's own tokenizer."""
    with large_imports():
        from transformers import AutoTokenizer  # seconds to import: not when the CLI only prints help

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    return tokenizer
