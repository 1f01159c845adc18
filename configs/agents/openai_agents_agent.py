"""An agent on openai-agents with a tool and a typed answer. See docs/agents.md."""

import os
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from pydantic import BaseModel


class Answer(BaseModel):
    value: int


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)
set_default_openai_api("chat_completions")
agent = Agent(name="adder", tools=[add], output_type=Answer, model=os.environ["RAYAPP_MODEL"])
done = Runner.run_sync(agent, sys.argv[1])
Path("answer").write_text(str(done.final_output.value))
