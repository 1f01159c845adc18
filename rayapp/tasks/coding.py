"""A coding task: the policy writes one function, and hidden tests score it.

    prompt -> policy -> completion -> screen (text process) -> sandbox: call_function(inputs) -> values -> compare

Only the answer's code and the inputs enter the sandbox of the verdict. An agent's workspace is another sandbox, with
the task's files and public tests.
"""

from __future__ import annotations

import ast
import asyncio
import time
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayapp.core import syntax
from rayapp.core.errors import InputError
from rayapp.core.protocols import Sandbox, SandboxSource, Tokenizer
from rayapp.core.types import AgentStart, Prompt, PublicVerdict, Reward, SandboxSpec
from rayapp.core.validation import explain
from rayapp.tasks.banned import normal_pattern, screen
from rayapp.tasks.cases import Case, CaseSource
from rayapp.tasks.grading import failure, grade, public_tests_file, public_verdict, read_public_test
from rayapp.tasks.text_process import TextReadingFailedError, TextTooCostlyError, on_text
from rayapp.tasks.verdict import judged_in_sandbox

VALIDATION_SEEDS = range(3)  # with which a task's reference is checked when the task is loaded

CODING_TOOLS = ("bash", "edit", "python", "submit")
RUN_TESTS = "run_tests"
PUBLIC_TESTS_FILE = "test_public.py"

PromptFormat = Literal["chat", "chat_prefill", "completion"]
_DEFAULT_STOP: dict[PromptFormat, tuple[str, ...]] = {
    "chat": (),
    "chat_prefill": ("```",),
    "completion": ("\n```", "\nif __name__", "\nprint("),
}


def _checked_pattern(pattern: str) -> str:
    normal_pattern(pattern)
    return pattern


def _checked_expression(expression: str) -> str:
    try:
        syntax.expression(expression)
    except SyntaxError as error:
        raise ValueError(f"{expression.strip()!r} is not a Python expression: {error.msg}") from None
    return expression


def _checked_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} must be a relative path inside the workspace")
    return path


Expression = Annotated[str, AfterValidator(_checked_expression)]
FilePath = Annotated[str, AfterValidator(_checked_path)]


class CodingTask(BaseModel):
    """A task to write one function.

    Example: `CodingTask(name="add", prompt="Write add(a, b).", func_name="add", signature="def add(a, b):",
    tests=["(rng.randint(0, 9), 1)"], reference="a + b")`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    prompt: str = Field(min_length=1)
    """Text of the user message; with `prompt_format: completion` the beginning of a Python file, up to the function's
    `def` line (and docstring)."""
    func_name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    signature: str = ""
    """The function's `def` line. Not needed if the prompt contains this line."""
    prompt_format: PromptFormat = "chat_prefill"
    """chat: the prompt in the model's chat template. chat_prefill: in addition, the beginning of the answer up to the
    signature, for small models that otherwise answer in prose. completion: the prompt unchanged, for base models."""
    system: str = ""
    """System message of the chat. If empty, the chat template's default is used, if it has one."""
    prefill: str = ""
    """Beginning of the answer with `chat_prefill`. If empty, a code fence and the signature are used."""
    stop: tuple[str, ...] | None = None
    """Texts that end a completion. Default: the closing fence for `chat_prefill`; for `completion` texts that typically
    follow a function in a script."""
    banned_patterns: tuple[Annotated[str, AfterValidator(_checked_pattern)], ...] = ()
    """Names and operators that the code must not use; see `banned.py`."""
    tests: tuple[Expression, ...] = Field(min_length=1)
    """Expressions over `rng`, a seeded random.Random: each draws a test's argument, or a tuple of several. With more
    varied tests, lucky guesses and constants score lower."""
    reference: Expression
    """Expression for the expected output, over the parameters' names (or `args`, the tuple of all arguments)."""
    helpers: str = ""
    """Python source of functions for `tests` and `reference`. All three are trusted, and run in the trainer."""
    timeout_s: float = Field(2.0, gt=0.0, le=600.0)
    """Time limit in seconds for the definition of the function and all calls together; beyond it an answer scores
    -1."""
    packages: tuple[str, ...] = ()
    """Packages that the sandbox imports in advance, e.g. numpy."""
    demonstrations: tuple[str, ...] = ()
    """Solutions for a supervised warm-up (docs/sft.md), never part of the prompt. Give several different ones, so that
    GRPO still has alternatives to choose from."""
    public_tests: tuple[str, ...] = ()
    """Tests that an agent may see and run, in the form `name(input, …) == output` with literal values."""
    files: dict[FilePath, str] = Field(default_factory=dict)
    """Relative path -> text of the files in an agent's workspace at the start."""
    tools: tuple[str, ...] = CODING_TOOLS
    """Tools that an agent gets besides those of `agent.tool_file`, and `run_tests` if there are public tests."""

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(explain(error, type(self))) from error

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.prompt_format == "completion" and f"def {self.func_name}" not in self.prompt:
            raise ValueError(
                f"prompt_format is completion, but the prompt has no `def {self.func_name}`: it must end in the line "
                f"`def {self.func_name}(…):`"
            )
        if self.prefill and self.prompt_format != "chat_prefill":
            raise ValueError(
                f"prefill is given, but prompt_format is {self.prompt_format}. Leave prefill out, or set "
                "prompt_format: chat_prefill"
            )
        self.parameters  # noqa: B018  (raises when the signature can't be read)
        self.demonstrated_completions  # noqa: B018  (raises when a demonstration does not continue the prompt)
        self.public_cases  # noqa: B018  (raises when a public test can't be parsed)
        if self.public_tests and PUBLIC_TESTS_FILE in self.files:
            raise ValueError(
                f"files has {PUBLIC_TESTS_FILE}, which is also made from public_tests: leave out one of the two"
            )
        return self

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the function's parameters. ValueError: its `def` line is missing or can't be parsed."""
        for source in (self.signature, *self.prompt.splitlines()):
            line = source.strip()
            if line.startswith((f"def {self.func_name}(", f"async def {self.func_name}(")):
                return _parameters(line)
        raise ValueError(
            f"neither signature nor prompt has a line `def {self.func_name}(…):`. Set signature to the function's "
            "`def` line"
        )

    @property
    def cases(self) -> CaseSource:
        return CaseSource(
            task=self.name,
            tests=self.tests,
            reference=self.reference,
            parameters=self.parameters,
            helpers=self.helpers,
        )

    @property
    def public_cases(self) -> tuple[Case, ...]:
        """The public tests, parsed. ValueError: one does not have the form of `public_tests`."""
        return tuple(read_public_test(test, self.func_name, len(self.parameters)) for test in self.public_tests)

    def check(self) -> None:
        """Draw tests with a few seeds, and run the reference on the public tests. InputError: one fails."""
        for seed in VALIDATION_SEEDS:
            self.cases.draw(seed)
        for number, case in enumerate(self.public_cases):
            self.cases.check(case, f"public test {number + 1}, `{self.public_tests[number]}`")

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """Return the prompt; its `prefill` is the part of the answer that the prompt already contains."""
        is_chat = self.prompt_format != "completion"
        prefill = self.answer_prefix
        text = _chat(tokenizer, self) + prefill if is_chat else self.prompt
        # A chat template writes its own special tokens; for a plain prompt the tokenizer adds them.
        token_ids = tokenizer.encode(text, add_special_tokens=not is_chat)
        stop = _DEFAULT_STOP[self.prompt_format] if self.stop is None else self.stop
        return Prompt(
            task=self.name,
            text=text,
            token_ids=np.asarray(token_ids, np.int32),
            prefill=prefill,
            stop=stop,
            messages=_messages(self),
        )

    def agent_start(self) -> AgentStart:
        """Return what an agent starts with: the prompt without prefill, the workspace's files, and the tools."""
        files = dict(self.files)
        tools, tools_kwargs = self.tools, {}
        if self.public_tests:
            files[PUBLIC_TESTS_FILE] = public_tests_file(self.func_name, self.public_tests)
            tools = (*tools, *({RUN_TESTS} - {*tools}))
            tools_kwargs = {RUN_TESTS: {"create_kwargs": {"check": self.check_public}}}
        told = self.prompt + (f"\n\nFiles in your workspace: {', '.join(sorted(files))}." if files else "")
        return AgentStart(
            messages=_messages(self, told),
            files=files,
            packages=self.packages,
            tools=tools,
            tools_kwargs=tools_kwargs,
        )

    async def check_public(self, answer: str, sandbox: Sandbox) -> PublicVerdict:
        """Run the public tests on an answer, whose code is extracted as in `score`."""
        try:
            code, status, detail = await on_text(screen, answer, self.func_name, "", self.banned_patterns)
        except (TextTooCostlyError, TextReadingFailedError) as error:
            return PublicVerdict(pass_rate=0.0, text=str(error))
        if status:
            return PublicVerdict(pass_rate=0.0, text=f"{status}: {detail}")
        cases = self.public_cases
        inputs = [case.args for case in cases]
        report = await sandbox.call_function(code, self.func_name, inputs, timeout_s=self.timeout_s)
        return public_verdict(report, cases, self.public_tests)

    @property
    def answer_prefix(self) -> str:
        """Part of the answer that the prompt already contains."""
        match self.prompt_format:
            case "chat":
                return ""
            case "completion":
                return self.prompt
            case "chat_prefill":
                # Don't end with a newline: tokenizers merge a newline with the indent that follows. After a separate
                # newline, the policy would have to sample a token that was rare in its training.
                return self.prefill or f"```python\n{self.signature.strip() or self._signature_in_prompt()}"

    def _signature_in_prompt(self) -> str:
        lines = (line.strip() for line in self.prompt.splitlines())
        return next(line for line in lines if line.startswith(f"def {self.func_name}("))

    @property
    def demonstrated_completions(self) -> tuple[str, ...]:
        """The demonstrations, as completions of the prompt. With `chat_prefill` they end in the stop text."""
        return tuple(self._completion_of(number, code) for number, code in enumerate(self.demonstrations, start=1))

    def _completion_of(self, number: int, code: str) -> str:
        code = code.strip()
        text = code if self.prompt_format == "completion" else f"```python\n{code}\n```"
        if syntax.parse(code) is None:
            raise ValueError(f"demonstration {number} is not Python: {code[:80]!r}")
        if not text.startswith(self.answer_prefix):
            raise ValueError(
                f"demonstration {number} begins with {text[: len(self.answer_prefix) + 20]!r}: it must begin with "
                f"{self.answer_prefix!r}, the part of the answer that is already in the prompt"
            )
        return text[len(self.answer_prefix) :]

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Return the fraction of the seed's tests that pass, or -1 if the code can't be tested (`grading.py`)."""
        started = time.monotonic()
        try:
            code, status, detail = await on_text(
                screen, completion_text, self.func_name, prompt.prefill, self.banned_patterns
            )
            verdict = failure(status, detail) if status else await self._tested(code, sandboxes, seed=seed)
        except TextTooCostlyError as error:
            verdict = failure(error.kind, str(error))
        except TextReadingFailedError as error:
            verdict = Reward.invalid(error.kind, str(error))
        return replace(verdict, time_score_s=time.monotonic() - started)

    async def _tested(self, code: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        # Draw tests in a thread: the reference may be slow and would block other trajectories.
        cases = await asyncio.to_thread(self.cases.draw, seed)

        async def judge(sandbox: Sandbox) -> Reward:
            inputs = [case.args for case in cases]
            return grade(await sandbox.call_function(code, self.func_name, inputs, timeout_s=self.timeout_s), cases)

        return await judged_in_sandbox(sandboxes, SandboxSpec(packages=self.packages), judge)


def _parameters(line: str) -> tuple[str, ...]:
    tree = syntax.parse(f"{line} pass" if line.endswith(":") else line)
    if tree is None or not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError(f"signature {line!r} is not a `def` line of Python")
    arguments = tree.body[0].args
    is_async = isinstance(tree.body[0], ast.AsyncFunctionDef)
    if is_async:
        raise ValueError(f"signature {line!r}: the function must not be async, because tests call it directly")
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
        raise ValueError(
            f"signature {line!r}: all parameters must be positional (no *args, **kwargs or keyword-only ones), because "
            "tests pass one argument for each parameter"
        )
    names = tuple(argument.arg for argument in [*arguments.posonlyargs, *arguments.args])
    if not names:
        raise ValueError(
            f"signature {line!r} has no parameter: without inputs, tests can't tell a right answer from a constant"
        )
    return names


def _messages(task: CodingTask, told: str = "") -> tuple[dict[str, str], ...]:
    system = ({"role": "system", "content": task.system},) if task.system else ()
    return (*system, {"role": "user", "content": told or task.prompt})


def _chat(tokenizer: Tokenizer, task: CodingTask) -> str:
    try:
        return tokenizer.apply_chat_template(list(_messages(task)), tokenize=False, add_generation_prompt=True)
    except ValueError as error:
        raise InputError(
            f"task {task.name}: prompt_format is {task.prompt_format}, but the model's chat template can't render the "
            f"prompt: {error}. For a base model set prompt_format: completion"
        ) from error
