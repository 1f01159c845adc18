"""Plays a task with agent frameworks as they are published, and writes the table of docs/agents.md.

    python -m scripts.agent_frameworks                   install, play and write the table: about ten minutes
    python -m scripts.agent_frameworks langgraph dspy    only print the rows of these

The policy is scripted: it adds 19 and 23 with the framework's tool, or writes 42 with its shell, and then answers.
Each framework is installed from PyPI or npm into a folder of its own, because their dependencies contradict ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayapp.config.config import Config
from rayapp.core import syntax
from rayapp.core.types import RequestId, SamplingParams, Trajectory
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.external_agent import ExternalAgent
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.limits import SessionLimits
from rayapp.rollout.problem import problem_of_row
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.data.data_row import DataRow
from rayapp.testing.engine import ScriptedEngine

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "configs" / "agents"
PAGE, MARKS = ROOT / "docs" / "agents.md", ("<!-- frameworks -->\n", "<!-- end of frameworks -->\n")
CACHE = Path("build/agent_frameworks")
TASK = "What is 19 + 23? Use your tool."
ANSWER = "42"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_ADD = call("add", a=19, b=23)
_WRITE = "echo 42 > answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework, and the policy's turns that solve the task with it."""

    name: str
    packages: tuple[str, ...]
    """Packages with their versions, the framework first; those of npm begin with `npm:`."""
    command: tuple[str, ...]
    """Command; a program `*.py` is run by the framework's own Python."""
    turns: tuple[str, ...]
    external: dict[str, Any] = field(default_factory=dict)
    """Further keys of `agent.external`."""
    unsupported: str = ""

    @property
    def of_npm(self) -> bool:
        return self.packages[0].startswith("npm:")

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("@" if self.of_npm else "=")[2]

    @property
    def num_glue_lines(self) -> int:
        """Lines of the program between framework and policy, without docstring and blank lines."""
        if not self.command[0].endswith(".py"):
            return 0
        source = (PROGRAMS / self.command[0]).read_text()
        first = syntax.module(source).body[1].lineno
        return sum(bool(line.strip()) for line in source.splitlines()[first - 1 :])


FRAMEWORKS = (
    Framework(
        name="openai-agents",
        packages=("openai-agents==0.24.0",),
        command=("openai_agents_agent.py", "{prompt}"),
        turns=(_ADD, '{"value": 42}'),
        external={"structured": "free"},
        unsupported="`guide` beside tools: a guided answer has the form at once, so tools are never called",
    ),
    Framework(
        name="pydantic-ai",
        packages=("pydantic-ai-slim[openai]==2.68.0",),
        command=("pydantic_ai_agent.py", "{prompt}"),
        turns=(_ADD, call("final_result", value=42)),
        external={"structured": "free"},
    ),
    Framework(
        name="LangGraph",
        packages=("langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4"),
        command=("langgraph_agent.py", "{prompt}"),
        turns=(_ADD, "42"),
    ),
    Framework(
        name="smolagents",
        packages=("smolagents[openai]==1.26.0",),
        command=("smolagents_agent.py", "{prompt}"),
        turns=(_ADD, call("final_answer", answer="42")),
        external={"structured": "free"},
    ),
    Framework(
        name="DSPy",
        packages=("dspy==3.4.1",),
        command=("dspy_agent.py", "{prompt}"),
        turns=(
            '{"next_thought": "add", "next_tool_name": "add", "next_tool_args": {"a": 19, "b": 23}}',
            '{"next_thought": "done", "next_tool_name": "finish", "next_tool_args": {}}',
            '{"reasoning": "added", "answer": 42}',
        ),
        external={"structured": "free", "on_failure": "score"},
        unsupported="one conversation: each step is a new prompt",
    ),
    Framework(
        name="Claude Code",
        packages=("npm:@anthropic-ai/claude-code@2.1.197",),
        command=("claude", "--print", "--model={model}", "--allowedTools=Bash", "--", "{prompt}"),
        turns=(call("Bash", command=_WRITE, description="write"), "42"),
        external={
            "models": "untrained",
            "env": {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_SMALL_FAST_MODEL": "small"},
        },
    ),
    Framework(
        name="opencode",
        packages=("npm:opencode-ai@1.18.33",),
        command=("opencode", "run", "--model=openai/{model}", "{prompt}"),
        turns=(call("bash", command=_WRITE, description="write"), "42"),
        external={
            "models": "untrained",
            "env": {
                "OPENCODE_CONFIG_CONTENT": json.dumps({
                    "small_model": "openai/small",
                    "share": "disabled",
                    "autoupdate": False,
                    "provider": {
                        "openai": {
                            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
                            "models": {"policy": {}, "small": {}},
                        }
                    },
                })
            },
        },
    ),
    Framework(
        name="Qwen Code",
        packages=("npm:@qwen-code/qwen-code@0.15.10",),
        command=("qwen", "--yolo", "--auth-type=openai", "--model={model}", "--prompt={prompt}"),
        turns=(call("run_shell_command", command=_WRITE, description="write", is_background=False), "42"),
    ),
    Framework(
        name="Codex",
        packages=("npm:@openai/codex@0.169.0",),
        command=(
            "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            "--config=model={model}", "--config=model_provider=rayapp",
            (
                '--config=model_providers.rayapp={name="rayapp",base_url="{url}/v1",env_key="OPENAI_API_KEY",'
                'wire_api="responses"}'
            ),
            '--config=web_search="disabled"', "--config=features.multi_agent=false", "{prompt}",
        ),
        turns=(call("exec_command", cmd=_WRITE), "42"),
        unsupported="web search and sub-agents, which OpenAI's servers run",
    ),
    Framework(
        name="mini-swe-agent",
        packages=("mini-swe-agent==2.4.6", "mcp"),
        command=(
            "mini", "--task={prompt}", "--model=openai/{model}", "--environment-class=local", "--config=mini.yaml",
            "--yolo", "--exit-immediately",
        ),
        turns=(
            call("bash", command=_WRITE),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer"),
        ),
        external={"env": {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}},
    ),
)  # fmt: skip
BY_NAME = {each.name.lower().replace(" ", "-"): each for each in FRAMEWORKS}


def install(framework: Framework, cache: Path) -> Path:
    """Install a framework into a folder of its own, unless it is there; return the folder of its programs.

    Raises:
        subprocess.CalledProcessError: a package can't be installed.
    """
    key = framework.packages[0].removeprefix("npm:").replace("/", "+")
    folder = (cache / key).absolute()
    programs = folder / ("node_modules/.bin" if framework.of_npm else "bin")
    if (folder / "installed").exists():
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    if framework.of_npm:
        names = [each.removeprefix("npm:") for each in framework.packages]
        _run(["npm", "install", "--no-audit", "--no-fund", *names], folder)
    else:
        _run([sys.executable, "-m", "venv", "."], folder)
        _run(["bin/python", "-m", "pip", "install", "--quiet", *framework.packages], folder)
    (folder / "installed").touch()
    return programs


def _run(command: Sequence[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=900)


async def play(framework: Framework, programs: Path, tokenizer: Any) -> Trajectory:
    """Play the task with an installed framework over the real gateway."""
    first, *rest = framework.command
    own = [str(programs / "python"), str(PROGRAMS / first)] if first.endswith(".py") else [str(programs / first)]
    external = {"command": [*own, *rest], "answer_file": "answer", "timeout_s": 300.0, **framework.external}
    config = Config.model_validate(
        {
            "agent": {"name": "external_agent", "max_assistant_turns": 9, "external": external},
            "rollout": {"max_prompt_tokens": 400_000, "max_completion_tokens": 9_000},
            "learner": {"max_tokens_per_microbatch": 500_000},
        }
    )
    said = iter(framework.turns)
    engine = ScriptedEngine(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
        lambda request_id, prompt_ids: "A title" if request_id.side >= 0 else next(said),
        end_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    limits = SessionLimits(max_tokens=config.max_model_tokens, max_turns=config.agent.max_assistant_turns)
    formats = Formats(tokenizer, model="scripted", template=load_template("chatml_hermes"))
    agent = ExternalAgent(config.agent.external, limits, formats, None)
    await agent.started()
    try:
        row = DataRow(messages=({"role": "user", "content": TASK},), data_source="openai/gsm8k", ground_truth=ANSWER)
        return await agent.play(
            problem_of_row(row, AnswerRewards()),
            engine=engine,
            sampling=SamplingParams(max_tokens=9_000),
            request_id=RequestId("group", 0),
        )
    finally:
        await agent.close()


def problem_of(framework: Framework, played: Trajectory) -> str:
    """Return why the framework did not solve the task; empty if it did."""
    if played.completion_text.strip() == ANSWER and len(played.turns) == len(framework.turns):
        return ""
    return (
        f"{framework.name}: status {played.status}, {len(played.turns)} turns, answer {played.completion_text!r}\n"
        f"{played.reward.detail}\n{played.agent_output[-3000:]}"
    )


def row_of(framework: Framework, played: Trajectory) -> str:
    """Return the framework's line of the table."""
    settings = {key: value for key, value in framework.external.items() if key != "env"}
    told = ", ".join(f"`{key}: {value}`" for key, value in settings.items())
    reasons = sorted(name.removeprefix("forks/") for name in played.agent_counts if name.startswith("forks/"))
    forks = f"{len(played.forks)} ({', '.join(reasons)})" if played.forks else "0"
    lines = framework.num_glue_lines or "command"
    return f"| {framework.name} | {framework.version} | {lines} | {told} | {forks} | {framework.unsupported} |"


HEAD = (
    "| framework | version | glue lines | `agent.external` | forks | not supported |",
    "|---|---|---|---|---|---|",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BY_NAME))
    parser.add_argument("--model", default="models/smollm2-135m", help="folder of the model whose tokenizer is used")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BY_NAME]:
        parser.error(f"there is no framework {unknown[0]}; there are: {', '.join(BY_NAME)}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows, failed = list[str](), list[str]()
    for framework in [BY_NAME[name] for name in options.names] or FRAMEWORKS:
        played = asyncio.run(play(framework, install(framework, CACHE), tokenizer))
        if problem := problem_of(framework, played):
            failed.append(framework.name)
            print(problem, flush=True)
        else:
            rows.append(row_of(framework, played))
            print(rows[-1], flush=True)
    if failed:
        raise SystemExit(f"the table is not written: {', '.join(failed)} did not solve the task")
    if not options.names:
        page = PAGE.read_text()
        before, _, rest = page.partition(MARKS[0])
        PAGE.write_text(before + MARKS[0] + "\n".join([*HEAD, *rows]) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2])


if __name__ == "__main__":
    main()
