"""Found in place of `rayapp.rollout.agent.vllm_tool_parser`; tests/contracts/test_tool_parsers.py compares the two."""

from support.hermes import HermesParser


def load_parser(name, tokenizer, tools, sample=None):
    assert name in {"hermes", "auto"}
    return HermesParser()
