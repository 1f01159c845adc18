"""The tokenizer of the run's model."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

from rayapp.config.config import Config
from rayapp.core.imports import large_imports
from rayapp.core.protocols import Tokenizer


def load_tokenizer(config: Config) -> Tokenizer:
    """The model's own tokenizer."""
    with large_imports():
        _skip_generation()
        from transformers import AutoTokenizer  # seconds to import: not when the CLI only prints help

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    return tokenizer


def _skip_generation() -> None:
    """Import what transformers finds classes with, without its generation and torch._dynamo, which take as long again.

    Models whose code is in their folder get generation as a base: it is imported for the first of them.
    """
    if "transformers.models.auto.auto_factory" in sys.modules:
        return
    from transformers import configuration_utils, dynamic_module_utils, utils  # noqa: F401 - which ask for PyTorch too
    from transformers.models.auto import configuration_auto  # noqa: F401

    with patch.object(utils, "is_torch_available", lambda: False):
        from transformers.models.auto import auto_factory

    vars(auto_factory)["is_torch_available"] = utils.is_torch_available
    add_to = auto_factory.add_generation_mixin_to_remote_model

    def with_generation(model_class: Any) -> Any:
        from transformers.generation import GenerationMixin

        vars(auto_factory)["GenerationMixin"] = GenerationMixin
        return add_to(model_class)

    vars(auto_factory)["add_generation_mixin_to_remote_model"] = with_generation
