"""Sections of the configuration for runs on data files: the files, the tools that the policy has, the rewards.

A part of the schema in `config.py`, which says what holds for all sections. Data only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rayapp.config.base import FrozenModel
from rayapp.core.names.plugins import check_name

AGENTS = ("tool_agent", "single_turn_agent")
"""Agents that ship."""
EXTERNAL_AGENT = "external_agent"
"""No loop of ours: a program or function of the user's plays, for all rows and tasks of a source (docs/agents.md)."""


class DataSection(FrozenModel):
    train_files: tuple[str, ...] = ()
    """Parquet files in verl's schema (docs/data.md), local or s3://. A run has either these or `tasks`, or
    several of both in `sources`."""
    eval_files: tuple[str, ...] = ()
    """Files that evaluation samples, in their order. Never trained on."""
    max_eval_rows: int = Field(0, ge=0)
    """Evaluate only so many rows, the first ones; 0 takes all."""
    shuffle: bool = True
    """Each epoch in an order of its own, from run.seed. False: the order of the files."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than rollout.max_prompt_tokens. False: do as `truncation` says."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What is cut away from a prompt that is too long: its beginning (left), end (right) or middle. error: refuse it
    before the first step."""
    cache_dir: Path = Path("data/cache")
    """Folder where each machine keeps copies of remote files, and of a model on s3://."""


class ExternalSection(FrozenModel):
    """An agent of the user's own, which asks the policy through the API that it already speaks (docs/agents.md)."""

    command: tuple[str, ...] = ()
    """Program and arguments, run once a trajectory, beside the rollout worker. {prompt}, {task_file}, {folder}, {model}
    and {url} are filled in. Either this or entry."""
    entry: str = ""
    """An async function in place of a program: package.module:function or file.py:function."""
    answer_file: str = ""
    """File in the agent's folder that holds its answer when it ends. Empty: what entry returned, else what the policy
    said last."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Time of a trajectory's agent; then it is ended, and what is there is scored."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the program, beside those that lead it to the policy. It sees none of the trainer's."""
    max_output_chars: int = Field(16384, ge=0)
    """The end of what the program writes that is kept with its trajectory."""
    files: dict[str, Path] = Field(default_factory=dict)
    """Texts of its own that lie in its folder, by relative path there, e.g. {agent.py: my/agent.py}."""
    inside: bool = False
    """Run the program in a sandbox of the trajectory's own (local, E2B or Daytona), from where it reaches the policy
    and nothing else."""


class AgentSection(FrozenModel):
    """How the policy and its tools take turns."""

    tool_file: str = ""
    """Tool file (docs/tools.md), also in verl's format. Empty: no tools but those that a coding task brings."""
    default_agent: str = "tool_agent"
    """Agent of rows without agent_name: tool_agent (turns and tools), single_turn_agent (one answer, no tools), or a
    plug-in's name (docs/plugins.md). external_agent plays all rows, whatever they name."""
    task_agent: str = "single_turn_agent"
    """The same of tasks."""
    external: ExternalSection = ExternalSection()
    tool_parser: str = "auto"
    """vLLM's name of the parser that fits the model, e.g. hermes for Qwen2.5 and Qwen3. auto: the one that reads what
    the model's chat template writes, those of its family first (docs/models.md)."""
    chat_template: str = ""
    """A .jinja file or the shipped chatml_hermes, where the model's own template has no place for tools."""
    max_assistant_turns: int = Field(5, ge=1)
    """Times the policy speaks. Calls in its last turn are not run, unless one of them hands in the answer."""
    max_calls_per_turn: int = Field(8, ge=1)
    """Tool calls of one turn that are run, side by side; more get an error as their result."""
    max_tool_output_chars: int = Field(1024, ge=16)
    """Length that a longer tool result is cut to."""
    tool_output_keeps: Literal["left", "right", "middle"] = "middle"
    """The part that stays of a result that is cut: its beginning (left), its end (right), or both (middle)."""

    @field_validator("default_agent", "task_agent", mode="after")
    @classmethod
    def _known_agent(cls, value: str) -> str:
        check_name("agents", value, (*AGENTS, EXTERNAL_AGENT))
        return value


class CodeSection(FrozenModel):
    """How code in an answer is tested (docs/datasets.md)."""

    sources: tuple[str, ...] = ()
    """Further data sources whose rows are code problems, beside those that are known."""
    score: Literal["all", "share"] = "all"
    """all: 1 where every test is passed, else 0; testing stops at the first failure. share: tests passed / tests."""
    max_tests: int = Field(20, ge=0)
    """Tests of a problem that are run at most; 0 runs all."""
    choose_tests: Literal["seeded", "first"] = "seeded"
    """Which ones, where there are more: drawn anew for each group of completions, or always the first."""
    test_timeout_s: float = Field(6.0, gt=0.0, le=600.0)
    """For one test, waiting for a processor not counted."""
    total_timeout_s: float = Field(60.0, gt=0.0, le=3600.0)
    """For all tests of a completion. Those that are left are failed."""
    memory_mib: int = Field(512, ge=64)
    """Memory of a test's processes."""


class RewardSection(FrozenModel):
    """What an answer to a data row is worth: score + format_weight * format + tool_weight * tool +
    tool_verdict_weight * tool_verdict. Of these a task that the tool agent plays takes the last two. All of it is the
    verdict: with judges the reward is verdict_weight * verdict + the weighted sum of what they say."""

    method: Literal["strict", "flexible"] = "strict"
    """GSM8K: strict wants `#### N`, flexible takes the last number."""
    format_score: float = 0.0
    """GSM8K: score of a wrong answer that could be read."""
    correct_score: float = 1.0
    """GSM8K: score of a right answer."""
    format_weight: float = 0.0
    """Weight of the term format: 1 where the answer has one `#### N`, at its very end."""
    tool_weight: float = 0.0
    """Weight of the term tool: the sum of what the tools gave for single calls."""
    tool_verdict_weight: float = 0.0
    """Weight of the term tool_verdict: the sum of the tools' verdicts on the whole trajectory (their `reward`)."""
    custom: str = ""
    """A function of your own in place of the data source's rule: package.module:function or file.py:function."""
    code: CodeSection = CodeSection()
    custom_timeout_s: float = Field(30.0, gt=0)
    """Deadline of one call of it."""
    judges: dict[str, float] = Field(default_factory=dict)
    """Name of one of the run's judges -> its weight, also for tasks. 0: asked and recorded, worth nothing."""
    verdict_weight: float = Field(1.0, allow_inf_nan=False)
    """Weight of the verdict beside judges. 0: they alone count, also where no rule scores the data source."""
