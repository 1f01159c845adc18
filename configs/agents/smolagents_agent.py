"""An agent on smolagents that must call a tool in each step. See docs/agents.md."""

import os
import sys
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIServerModel(os.environ["RAYAPP_MODEL"], api_base=url, api_key=key)
Path("answer").write_text(str(ToolCallingAgent([add], model).run(sys.argv[1])))
