"""Found in place of vLLM: an engine that does not start, which takes the real one 30 seconds."""

import sys
from typing import Any


class AsyncEngineArgs:
    def __init__(self, **arguments: Any) -> None:
        raise RuntimeError("no room for the KV cache")


class AsyncLLM:
    """What is imported beside it."""


sys.modules["vllm.v1.engine.async_llm"] = sys.modules[__name__]
