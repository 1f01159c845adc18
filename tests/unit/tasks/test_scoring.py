"""The reward of a completion, for everything that can happen between the policy and the verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np
import pytest

from rayapp.core.errors import InputError, SandboxConfigError, SandboxError, SandboxGoneError, SandboxUnavailableError
from rayapp.core.protocols import Sandbox, SandboxSource, Tokenizer
from rayapp.core.types import CallReport, CallResult, ExecOutcome, ExecResult, Prompt, SandboxSpec, StopCause
from rayapp.tasks.text_process import MAX_TEXT_CHARS, TextProcess
from support import make

TASK = make.double_task(tests=("1", "2", "3", "rng.randint(4, 9)"), banned_patterns=("sum",), packages=("numpy",))
GOOD = "\n    return 2 * x\n"


class ScriptedSandboxes:
    """A lender whose sandboxes answer as scripted, one entry per lease: an error, or values and errors of the calls."""

    def __init__(self, *script: SandboxError | Sequence[object] | CallReport) -> None:
        self.script = list(script)
        self.specs: list[SandboxSpec] = []
        self.calls: list[tuple[str, str, list[Sequence[object]]]] = []

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> Self:
        self.specs.append(spec)
        return self

    async def __aenter__(self) -> Sandbox:
        return cast(Sandbox, self)

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        self.calls.append((code, function, list(inputs)))
        answer = self.script.pop(0)
        if isinstance(answer, SandboxError):
            raise answer
        return answer if isinstance(answer, CallReport) else report(answer)


def report(values: Sequence[object], **execution: object) -> CallReport:
    fields = {"outcome": ExecOutcome.OK, "exit_code": 0, "stdout": "", "stderr": "", "duration_s": 0.1} | execution
    calls = tuple(
        CallResult(ok=False, error=str(value)) if isinstance(value, Exception) else CallResult(ok=True, value=value)
        for value in values
    )
    return CallReport(exec=ExecResult(**fields), calls=calls)  # type: ignore[arg-type]


def prompt() -> Prompt:
    return Prompt(task="double", text="", token_ids=np.zeros(1, np.int32), prefill=TASK.answer_prefix)


def expected(seed: int = 0) -> list[object]:
    return [case.expected for case in TASK.cases.draw(seed)]


async def score(sandboxes: ScriptedSandboxes, completion: str = GOOD, seed: int = 0):  # type: ignore[no-untyped-def]
    return await TASK.score(prompt(), completion, cast(SandboxSource, sandboxes), seed=seed)


async def test_reward_is_the_share_of_tests_passed_and_the_first_failed_one_is_told() -> None:
    first, second, third, _ = expected()

    right = await score(ScriptedSandboxes(expected()))
    wrong = await score(ScriptedSandboxes([first, "no", second, second]))
    raised = await score(ScriptedSandboxes([first, second, third, IndexError("list index out of range")]))
    floats = await score(ScriptedSandboxes([float(cast(int, value)) for value in expected()]))
    long = await score(ScriptedSandboxes([first, list(range(10**5)), second, second]))
    digits = await score(ScriptedSandboxes([first, 10**6000, second, second]))

    assert (right.value, right.status, right.valid) == (1.0, "scored", True)
    assert right.terms == {"pass_rate": 1.0, "solved": 1.0, "raised_rate": 0.0}
    assert wrong.value == wrong.terms["pass_rate"] == 0.25
    assert re.fullmatch(rf"test 2 of 4: input .*: got 'no', expected {second}", wrong.detail)
    assert (raised.value, raised.status, raised.terms["raised_rate"]) == (0.75, "scored", 0.25)
    assert re.match(r"test 4 of 4: input .*: raised list index out of range, expected ", raised.detail)
    assert (floats.value, floats.terms["solved"]) == (0.0, 0.0), "values of another type"
    assert len(long.detail) < 400
    assert "got a number too long to write out" in digits.detail


NAME_ERROR = report([], outcome=ExecOutcome.CODE_FAILED, exit_code=1, error="NameError: name 'y' is not defined")


@pytest.mark.parametrize(
    ("ran", "status"),
    [
        (NAME_ERROR, "error"),
        *((report([], outcome=ExecOutcome.CODE_STOPPED, exit_code=-9, stopped_for=each), each) for each in StopCause),
    ],
    ids=str,
)
async def test_a_definition_that_raises_or_is_stopped_is_named_after_the_cause(ran: CallReport, status: str) -> None:
    reward = await score(ScriptedSandboxes(ran))

    assert (reward.value, reward.status) == (-1.0, status)
    assert ran is not NAME_ERROR or reward.detail == NAME_ERROR.exec.error


async def test_function_that_raises_on_every_call_is_an_error() -> None:
    reward = await score(ScriptedSandboxes([ValueError("no")] * 4))

    assert (reward.value, reward.status, reward.valid) == (-1.0, "error", True)
    assert reward.detail.startswith("every call failed: test 1 of 4: input ")
    assert ": raised no, expected " in reward.detail
    assert reward.terms["raised_rate"] == 1.0


@pytest.mark.parametrize(
    ("completion", "status", "told"),
    [
        ("def f(:\n    return 1\n", "syntax_error", "line 1"),
        ("\n    return sum([x, x])", "banned", "sum"),
        ("\n    return getattr(x, str(x))", "banned", "getattr"),
        ("", "no_code", ""),
    ],
)
async def test_code_that_must_not_run_never_reaches_a_sandbox(completion: str, status: str, told: str) -> None:
    task = TASK if completion else TASK.model_copy(update={"prompt_format": "chat"})
    sandboxes = ScriptedSandboxes()
    asked = replace(prompt(), prefill=task.answer_prefix if completion else "")

    reward = await task.score(asked, completion or "I would double it.", cast(SandboxSource, sandboxes), seed=0)

    assert (reward.value, reward.status, reward.valid) == (-1.0, status, True)
    assert told in reward.detail
    assert sandboxes.specs == []


async def test_sandbox_that_fails_is_replaced_once() -> None:
    sandboxes = ScriptedSandboxes(SandboxGoneError("it died"), expected())

    reward = await score(sandboxes)

    assert reward.value == 1.0
    assert len(sandboxes.specs) == 2


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ((SandboxGoneError("it died"), SandboxUnavailableError("none left")), "sandbox_unavailable"),
        ((expected()[:3], expected()[:3]), "sandbox_protocol"),
    ],
    ids=["unavailable", "results missing"],
)
async def test_second_failure_of_the_sandbox_gives_no_verdict(script: tuple[Any, ...], kind: str) -> None:
    sandboxes = ScriptedSandboxes(*script, expected())
    reward = await score(sandboxes)

    assert (reward.valid, reward.failure_kind, reward.terms) == (False, kind, {})
    assert len(sandboxes.specs) == 2


async def test_sandbox_that_can_never_work_stops_the_run() -> None:
    with pytest.raises(SandboxConfigError, match="wrong key"):
        await score(ScriptedSandboxes(SandboxConfigError("wrong key")))


async def test_a_sandbox_has_the_tasks_packages_and_never_the_expected_values() -> None:
    task = TASK.model_copy(update={"tests": ("1000003",), "reference": "x * 7"})
    sandboxes = ScriptedSandboxes([0])

    await task.score(prompt(), GOOD, cast(SandboxSource, sandboxes), seed=0)

    assert sandboxes.calls == [("def double(x):\n    return 2 * x\n", "double", [(1000003,)])]
    assert sandboxes.specs == [SandboxSpec(packages=("numpy",))]


class PlainTokenizer:
    """One token per character; a chat template that writes each role."""

    has_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        if not self.has_template:
            raise ValueError("no chat template")
        turns = "".join(f"<{message['role']}>{message['content']}\n" for message in conversation)
        return turns + "<assistant>" * add_generation_prompt


def render(**changes: object) -> Prompt:
    return TASK.model_copy(update=changes).render(cast(Tokenizer, PlainTokenizer()))


def test_a_prefilled_chat_ends_in_the_signature_with_no_newline_and_a_bare_one_begins_no_answer() -> None:
    rendered = render(system="Be brief.")

    answer = "```python\ndef double(x):"
    assert rendered.text == f"<system>Be brief.\n<user>{TASK.prompt}\n<assistant>{answer}"
    assert (rendered.prefill, rendered.stop) == (answer, ("```",))
    assert rendered.token_ids.dtype == np.int32
    assert rendered.token_ids.tolist() == [ord(letter) for letter in rendered.text]
    bare = render(prompt_format="chat")
    assert bare.text.endswith("<assistant>")
    assert (bare.prefill, bare.stop) == ("", ())


def test_completion_is_the_prompt_itself_with_the_tokenizers_own_first_token() -> None:
    text = '# Doubles.\ndef double(x):\n    """Twice x."""\n'

    rendered = render(prompt_format="completion", prompt=text, signature="")

    assert rendered.text == rendered.prefill == text
    assert rendered.token_ids[0] == 1
    assert rendered.token_ids.size == len(text) + 1


def test_model_without_a_chat_template_is_told_the_way_out() -> None:
    tokenizer = PlainTokenizer()
    tokenizer.has_template = False

    with pytest.raises(InputError, match=r"task double: prompt_format is chat_prefill.*set prompt_format: completion"):
        TASK.render(cast(Tokenizer, tokenizer))


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("x" * (MAX_TEXT_CHARS + 1), "too_long"),
        # CPython joins the parts of a dotted import one by one: quadratic.
        ("\n    import a" + ".a" * 400_000, "unreadable"),
    ],
)
async def test_a_completion_that_costs_too_much_to_read_is_a_failed_answer(
    completion: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.tasks.text_process._shared", TextProcess(cpu_limit_s=0.1))

    reward = await score(ScriptedSandboxes(), completion)

    assert (reward.value, reward.valid, reward.status) == (-1.0, True, status)
    assert reward.terms["solved"] == 0.0
