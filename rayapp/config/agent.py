"""Sections `data`, `agent`, `reward` and `sources`; an entry of `sources` overrides the other three. No logic, except
the defaults of sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from rayapp.config.base import FrozenModel
from rayapp.config.other_models import ClientSection, plain_url

AGENTS = ("tool_agent", "single_turn_agent")
EXTERNAL_AGENT = "external_agent"  # a user's program or function (docs/agents.md)


DATA_FILES = (".parquet", ".jsonl", ".json")
BENCHMARK = "benchmark:"  # a benchmark, which may name its own file: benchmark:humaneval=FILE.jsonl
SWE = "swe:"  # tasks in SWE-bench's form: swe:FILE.parquet?mirrors=FOLDER
GENERATED = "reasoning_gym:"  # a generator of tasks: reasoning_gym:chain_sum?size=200
TRUST = "trust_test_scripts=true"  # a task folder whose test.sh may judge: FOLDER?trust_test_scripts=true
AUTO: Final = "auto"


def is_data_file(reference: str) -> bool:
    """True for a file of rows among `tasks` or `eval.tasks`, False for any other task."""
    is_file = reference.endswith(DATA_FILES) or reference.startswith(("s3://", "hf://"))
    return is_file and not reference.startswith((BENCHMARK, SWE))


class DataSection(FrozenModel):
    """Reading of the rows of data files (docs/data.md). `tasks` and `eval.tasks` name the files."""

    shuffle: bool = True
    """Shuffle the rows again in each epoch, with run.seed. false: keep the order of the files."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than rollout.max_prompt_tokens. false: `truncation` applies."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Part to cut from a prompt that is longer than rollout.max_prompt_tokens: its beginning (left), end (right) or
    middle. error: refuse the prompt before the first step."""
    image_urls: bool = False
    """Fetch pictures that rows name by an https:// address, once, into cache_dir. false: such rows are left out."""
    cache_dir: Path = Path("data/cache")
    """Folder on each machine for copies of remote files and of a model on s3://."""


class EndpointSection(ClientSection):
    """Model that answers an agent's calls under other models' names, if `agent.external.models` is endpoint."""

    base_url: str = ""
    """Base URL for OpenAI or Anthropic clients, ending in /v1 for most servers, e.g. https://api.openai.com/v1. Calls
    are sent on as they are, so the endpoint must offer the API that the agent uses. run://NAME: one of model_servers,
    a frozen model that the run starts."""
    model: str = ""
    """The model's name at base_url; with run://NAME it is NAME. Empty: the name in the call."""
    api_key_env: str = ""
    """Environment variable of the rollout workers that holds the key; agents never see it. Empty: no key."""

    @field_validator("base_url", mode="after")
    @classmethod
    def _plain_url(cls, value: str) -> str:
        return plain_url(value) if value else value


class ExternalSection(FrozenModel):
    """The user's own agent, which calls the policy through OpenAI's or Anthropic's API (docs/agents.md)."""

    command: tuple[str, ...] = ()
    """Program and arguments, run once per trajectory on the rollout worker's node. {prompt}, {task_file}, {folder},
    {model} and {url} are filled in. Give either this or entry."""
    entry: str = ""
    """Async function to call in place of a program: package.module:function or file.py:function."""
    answer_file: str = ""
    """File in the agent's folder that holds its answer when it ends. Empty: the return value of entry, else the
    policy's last message."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Time limit of the agent in one trajectory. At the limit the agent is ended, and its answer so far is scored."""
    on_failure: Literal["fail", "score"] = "fail"
    """A trajectory whose program exits with a status other than 0, or whose function raises, before a limit. fail: no
    reward, excluded from baseline and loss. score: score its answer, e.g. for frameworks that raise on text they can't
    parse."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, besides those with the policy's address. The program sees no variables of
    the trainer."""
    files: dict[str, Path] = Field(default_factory=dict)
    """Text files to copy into the agent's folder: relative path there -> file, e.g. {agent.py: my/agent.py}."""
    models: Literal["train", "untrained", "endpoint", "refuse"] = "train"
    """Calls that name another model than RAYAPP_MODEL, e.g. of a title generator. train: record them like all others.
    untrained: the policy answers, but not as a turn of the trajectory. endpoint: the model of `endpoint` answers,
    outside the trajectory. refuse: the error model_not_found."""
    endpoint: EndpointSection = EndpointSection()
    structured: Literal["refuse", "free", "guide"] = "refuse"
    """Calls that ask for JSON of a form (response_format, text.format) or a tool call (tool_choice). refuse: an error.
    free: sample without the form (metric agent/structured_dropped). guide: sample only tokens that the form allows, and
    train the distribution over them (metric agent/structured_guided)."""
    inside: bool = False
    """Run the program in a local sandbox for this trajectory, from which it can reach only the policy."""


class AgentSection(FrozenModel):
    """The agent that plays tasks, its tools and its limits (docs/tools.md)."""

    tool_file: str = ""
    """File that lists the tools the policy may call (docs/tools.md); verl's format is accepted. Empty: only the tools
    that a task brings."""
    name: Literal["auto", "tool_agent", "single_turn_agent", "external_agent"] = AUTO
    """Agent that plays tasks: tool_agent (turns and tools), single_turn_agent (one answer, no tools), or external_agent
    (your own program). A row's column agent_name may name another. auto: tool_agent for rows, single_turn_agent for
    other tasks."""
    external: ExternalSection = ExternalSection()
    tool_parser: str = "auto"
    """vLLM's name of the model's tool parser, e.g. hermes for Qwen2.5 and Qwen3. auto: find a parser that reads the
    calls in the model's chat template; the parsers of the model's family are tried first (docs/models.md)."""
    chat_template: str = ""
    """Chat template to use if the model's own template doesn't support tools: a .jinja file, or the shipped
    chatml_hermes."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}  # noqa: RUF012 - pydantic copies it
    """Variables for the chat template, e.g. {enable_thinking: false}; for every prompt of training and
    evaluation."""
    max_assistant_turns: int = Field(5, ge=1)
    """Maximum number of turns of the policy in one trajectory. Tool calls in the last turn are not run, unless one of
    them submits the answer."""
    max_calls_per_turn: int = Field(8, ge=1)
    """Maximum number of tool calls of one turn; they run in parallel. Further calls get an error as their result."""
    max_tool_output_chars: int = Field(1024, ge=16)
    """Longest tool result that the policy reads; longer results are cut in the middle."""


class CodeSection(FrozenModel):
    """Tests of code in an answer (docs/datasets.md)."""

    sources: tuple[str, ...] = ()
    """Further data sources whose rows are code problems, besides the built-in ones."""
    score: Literal["all", "share"] = "all"
    """Score of an answer. all: 1 if every test passes, else 0; testing stops at the first failure. share: tests passed
    / tests."""
    max_tests: int = Field(20, ge=0)
    """Maximum number of tests to run per problem, drawn again for each group; 0: all."""
    test_timeout_s: float = Field(6.0, gt=0.0, le=600.0)
    """Time limit of one test, not counting its wait for a processor. All tests of a completion together have ten times
    as long (with max_tests 0 thirty times); tests that did not run within it count as failed."""
    memory_mib: int = Field(512, ge=64)
    """Memory limit of all processes of one test together, in MiB."""

    @property
    def total_timeout_s(self) -> float:
        """Time limit for all tests of a completion."""
        return (10 if self.max_tests else 30) * self.test_timeout_s


class RewardSection(FrozenModel):
    """Reward of an answer. The verdict on a data row is score + format_weight * format + tool_weight * tool; for tasks
    with the tool agent, only the last term is added to the task's score. With judges, the reward is verdict_weight *
    verdict + the weighted sum of the judges' scores."""

    method: Literal["strict", "flexible"] = "strict"
    """Form of an answer that GSM8K's rule reads. strict: `#### N`. flexible: the last number."""
    format_weight: float = 0.0
    """Weight of the term format, which is 1 if the answer has exactly one `#### N`, at its very end."""
    tool_weight: float = 0.0
    """Weight of the term tool: the sum of the rewards that tools give for single calls."""
    reads_thoughts: bool = False
    """Let verl's rules (GSM8K, MATH, DAPO, search) read the whole completion, as verl does. false: they read only the
    answer after `</think>`, as all other rules, tests and judges do."""
    custom: str = ""
    """Your own reward function in place of the data source's rule: package.module:function or file.py:function."""
    code: CodeSection = CodeSection()
    judges: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    """Judges that score answers, for rows and all other tasks: name in `judges` -> weight. With weight 0 the judge's
    score is recorded but not added to the reward."""
    verdict_weight: float = Field(1.0, allow_inf_nan=False)
    """Weight of the verdict in the reward, if there are judges. 0: only judges count; rows whose data source has no
    rule are then accepted."""


SECTIONS = ("data", "agent", "reward")  # that a source may override


class SourceRollout(FrozenModel):
    """Limits of a source. They can't exceed the run's limits, because servers, learners and watchdogs are configured
    for those."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; longer prompts are refused. null: rollout.max_prompt_tokens."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Maximum number of completion tokens of a trajectory. null: rollout.max_completion_tokens."""
    group_deadline_s: float | None = Field(None, gt=0)
    """Deadline of a group; a group that misses it is a failed rollout. null: rollout.group_deadline_s."""

    @model_validator(mode="before")
    @classmethod
    def _one_temperature(cls, values: Any) -> Any:
        if isinstance(values, dict) and "temperature" in values:
            raise ValueError(
                "temperature can't be set for a source: learners compute all log-probs at one temperature, and the "
                "importance ratio needs log-probs of the engine at the same temperature. Set rollout.temperature for "
                "the whole run."
            )
        return values


class SourceEval(FrozenModel):
    """Evaluation settings of a source. The run's section eval sets when sources are evaluated."""

    tasks: tuple[str, ...] = ()
    """Tasks or data files of this source to evaluate, as in the run's eval.tasks."""
    max_problems: int | None = Field(None, ge=0)
    """Maximum number of tasks or rows to evaluate; the first ones are taken. 0: all. null: eval.max_problems."""
    samples_per_task: int | None = Field(None, ge=1)
    """Completions per task or data row. null: eval.samples_per_task."""
    temperature: float | None = Field(None, ge=0.0)
    """Sampling temperature; 0 is greedy. null: eval.temperature."""


class SourceSection(FrozenModel):
    """Tasks of one kind, with their share of the run's groups and their own settings (docs/tasks.md#mix-sources)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Unique name, used in metrics, trajectories and filters."""
    ratio: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    """Weight of this source: a source of ratio 2 gets twice as many groups as one of ratio 1."""
    tasks: tuple[str, ...] = ()
    """Tasks or data files, as in the run's `tasks`."""
    data: DataSection = DataSection()
    """Overrides of the run's section `data`; omitted keys keep the run's values."""
    agent: AgentSection = AgentSection()
    """Overrides of the run's section `agent`; omitted keys keep the run's values."""
    reward: RewardSection = RewardSection()
    """Overrides of the run's section `reward`; omitted keys keep the run's values."""
    rollout: SourceRollout = SourceRollout()
    eval: SourceEval = SourceEval()


def filled_in(sources: Any, run: Mapping[str, Any]) -> Any:
    """Return the list `sources` of an unvalidated configuration. A key that a source omits has the run's value."""
    if not isinstance(sources, list | tuple):
        return sources
    return [_one_filled_in(source, run) for source in sources]


def _one_filled_in(source: Any, run: Mapping[str, Any]) -> Any:
    if not isinstance(source, dict):
        return source
    own = {name: _mapping(source.get(name, {})) for name in SECTIONS}
    shared = {name: _mapping(run.get(name, {})) for name in SECTIONS}
    merged = {
        name: {**shared[name], **own[name]}
        for name in SECTIONS
        if isinstance(own[name], dict) and isinstance(shared[name], dict)
    }
    return source | merged


def _mapping(section: Any) -> Any:
    return section.model_dump(exclude_unset=True) if isinstance(section, BaseModel) else section
