"""A ReAct module of DSPy with a tool; its adapter asks for JSON. See docs/agents.md."""

import os
import sys
from pathlib import Path

import dspy


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


dspy.configure(lm=dspy.LM(f"openai/{os.environ['RAYAPP_MODEL']}", cache=False), adapter=dspy.JSONAdapter())
done = dspy.ReAct("question -> answer: int", tools=[add])(question=sys.argv[1])
Path("answer").write_text(str(done.answer))
