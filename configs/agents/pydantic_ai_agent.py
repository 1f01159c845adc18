"""An agent on pydantic-ai with a tool and a typed answer, which is a forced tool call. See docs/agents.md."""

import os
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic_ai import Agent


class Answer(BaseModel):
    value: int


agent = Agent(f"openai-chat:{os.environ['RAYAPP_MODEL']}", output_type=Answer)


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


Path("answer").write_text(str(agent.run_sync(sys.argv[1]).output.value))
