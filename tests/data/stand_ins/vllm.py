"""Found in place of vLLM: an engine that does not start, which takes the real one 30 seconds."""

import sys
from dataclasses import dataclass


@dataclass
class AsyncEngineArgs:
    model: str = ""

    def __init__(self, **arguments: object) -> None:
        raise RuntimeError("no room for the KV cache")


AsyncLLM = core = utils = multiproc_executor = None  # imported beside it
for name in ("vllm.v1.engine.async_llm", "vllm.v1.engine", "vllm.v1.executor"):
    sys.modules[name] = sys.modules[__name__]
