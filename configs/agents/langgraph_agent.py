"""A ReAct agent on LangGraph with a tool. See docs/agents.md."""

import os
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model=os.environ["RAYAPP_MODEL"]), [add])
done = agent.invoke({"messages": [("user", sys.argv[1])]})
Path("answer").write_text(done["messages"][-1].content)
