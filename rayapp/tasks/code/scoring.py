"""The rule `code_tests`: scores the code in an answer by tests that run in sandboxes.

    answer -> screen (text process) -> code (compiled, if it is not Python) -> one execution per test -> Reward

Expected results never enter the sandbox. Tests that earlier completions of the problem failed run first: if one failed
test decides, most wrong answers cost only one execution.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from rayapp.config.agent import CodeSection
from rayapp.core.errors import SandboxConfigError
from rayapp.core.protocols import Sandbox, SandboxSource
from rayapp.core.types import ExecResult, Reward, SandboxSpec
from rayapp.sandbox.verdict.codec import off_the_loop
from rayapp.sandbox.verdict.compare import shown
from rayapp.tasks.code.assembling import (
    ENTRY,
    IMPORTS,
    RECURSION,
    Screened,
    callable_code,
    checked_code,
    screen_answer,
    with_preamble,
)
from rayapp.tasks.code.formats import read_tests
from rayapp.tasks.code.hidden_cases import CallTest, CodeTests, Comparison, InsideTest, StdinTest, Test
from rayapp.tasks.code.languages import MISSING, Language, screen_program
from rayapp.tasks.text_process import TextReadingFailedError, TextTooCostlyError, holds, on_text
from rayapp.tasks.verdict import LEASE_TIMEOUT_S, judged_in_sandbox

_MOST_CALLS_TOLD = 3
_MOST_TOLD_CHARS = 300
COMPILE_TIMEOUT_S = 30.0  # time limit of compiling an answer that is not Python, once before its tests


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblem:
    """One problem and the rules for scoring it: `CodeProblem(ground_truth='{"inputs": ["1 2"], "outputs": ["3"]}')`."""

    ground_truth: str  # JSON text in one of the formats of `formats.py`
    comparison: Comparison = "lines"
    rules: CodeSection = field(default_factory=CodeSection)

    async def tests(self) -> CodeTests:
        """Return the tests. A run checks all rows for an InputError before it starts."""
        return await off_the_loop(len(self.ground_truth), partial(read_tests, self.ground_truth, self.comparison))

    async def fenced(self, code: str) -> str:
        """Return code in the problem's language as an answer."""
        language = (await self.tests()).language
        return f"```{language.fences[0] if language else 'python'}\n{code.rstrip()}\n```\n"

    async def score(self, final_text: str, sandboxes: SandboxSource, *, seed: int, prefill: str = "") -> Reward:
        """Return the reward of an answer. The answer's text and failed sandboxes never cause an exception.

        Terms: `score` and `pass_rate`, both the reward's value; `solved`; `format`, 1 if the answer has code that
        parses; `verdict/forgeable`, if tests ran beside the candidate's code. `seed`, equal within a group, draws the
        tests; `prefill` is the part of the answer in the prompt. SandboxConfigError: no sandbox can ever be had.
        """
        started = time.monotonic()
        tests = await self.tests()
        try:
            candidate = await self._candidate(final_text, tests, prefill)
            if candidate.screened.status:
                verdict = _failed(candidate.screened.status, candidate.screened.detail)
            else:
                judge = partial(self._judge, candidate, tests, seed)
                verdict = await judged_in_sandbox(sandboxes, self._spec(tests), judge)
        except TextTooCostlyError as error:
            verdict = _failed(error.kind, str(error))
        except TextReadingFailedError as error:
            verdict = Reward.invalid(error.kind, str(error))
        return replace(verdict, time_score_s=time.monotonic() - started)

    def _spec(self, tests: CodeTests) -> SandboxSpec:
        return spec_of(tests.language, self.rules.memory_mib)

    async def _candidate(self, final_text: str, tests: CodeTests, prefill: str) -> _Candidate:
        if (language := tests.language) is not None:
            code, status, detail = await on_text(screen_program, final_text, language.fences)
            screened = Screened(code=code, status=status, detail=detail, line=0, needs_imports=False)
            return _Candidate(screened=screened, code=code, tests=tests, rules=self.rules)
        found = Screened(*await on_text(screen_answer, final_text, tests.function, prefill))
        return _Candidate(screened=found, code=_with_imports(found, tests), tests=tests, rules=self.rules)

    async def _judge(self, candidate: _Candidate, tests: CodeTests, seed: int, sandbox: Sandbox) -> Reward:
        if problem := await candidate.compile(sandbox):
            return _failed("compile_error", problem)
        chosen = self._chosen(tests, seed)
        stops_early = self.rules.score == "all"
        num_passed, first_problem, left_s = 0, "", self.rules.total_timeout_s
        for index in _failures.first(self.ground_truth, chosen) if stops_early else chosen:
            problem, took_s = f"out of time: the earlier tests took {self.rules.total_timeout_s:g} s", 0.0
            if left_s > 0:
                problem, took_s = await candidate.run(tests.tests[index], sandbox, left_s)
            left_s -= took_s
            num_passed += not problem
            first_problem = first_problem or problem
            if problem and stops_early:
                _failures.note(self.ground_truth, index)
                break
        solved = num_passed == len(chosen)
        share = float(solved) if stops_early else num_passed / len(chosen)
        terms = {"score": share, "solved": float(solved), "pass_rate": share, "format": 1.0}
        if any(isinstance(tests.tests[index], InsideTest) for index in chosen):
            terms["verdict/forgeable"] = 1.0
        return Reward(value=share, terms=terms, detail=first_problem)

    def _chosen(self, tests: CodeTests, seed: int) -> list[int]:
        count, most = len(tests.tests), self.rules.max_tests
        if not most or count <= most:
            return list(range(count))
        return sorted(random.Random(f"code-tests/{seed}").sample(range(count), most))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Code that the policy wrote, with methods that compile it and run it on each kind of test."""

    screened: Screened
    code: str  # with its preamble and imports
    tests: CodeTests
    rules: CodeSection

    async def compile(self, sandbox: Sandbox) -> str:
        """Compile the code, if it is not Python. Return the compiler's first error messages; empty on success."""
        if (language := self.tests.language) is None:
            return ""
        await write_program(language, self.code, sandbox)
        ran = await compile_program(language, self.code, sandbox, timeout_s=COMPILE_TIMEOUT_S)
        return "" if ran.ok else f"{language.name}: {ran.stdout.strip()[:_MOST_TOLD_CHARS] or _problem(ran)}"

    async def run(self, test: Test, sandbox: Sandbox, left_s: float) -> tuple[str, float]:
        """Run one test. Return the reason of failure (empty if it passed), and the seconds that it took."""
        timeout_s = min(left_s, self.rules.test_timeout_s)
        match test:
            case StdinTest():
                return await self._run_program(test, sandbox, timeout_s)
            case CallTest():
                return await self._run_calls(test, sandbox, timeout_s)
            case InsideTest():
                return await self._run_check(test, sandbox, timeout_s)

    async def _run_program(self, test: StdinTest, sandbox: Sandbox, timeout_s: float) -> tuple[str, float]:
        if (language := self.tests.language) is None:
            run = partial(sandbox.run_code, self.code)
        else:
            argv = language.run_command(language.main_class(self.code), self.rules.memory_mib)
            run = partial(sandbox.run_command, argv)
        ran = await run(timeout_s=timeout_s, stdin=test.stdin, max_output_bytes=test.max_output_bytes)
        if problem := _problem(ran):
            return problem, ran.duration_s
        is_right = await off_the_loop(len(ran.stdout), partial(test.is_expected, ran.stdout))
        if is_right:
            return "", ran.duration_s
        told = f"wrong output: input {shown(test.stdin)}: got {shown(ran.stdout)}, expected {shown(test.expected)}"
        return told, ran.duration_s

    async def _run_calls(self, test: CallTest, sandbox: Sandbox, timeout_s: float) -> tuple[str, float]:
        code = callable_code(self.code, self.tests.function, may_be_method=self.tests.may_be_method)
        report = await sandbox.call_function(code, ENTRY, test.calls, timeout_s=timeout_s)
        problem = _problem(report.exec) or next((call.error for call in report.calls if not call.ok), "")
        if not problem and not await holds(test.condition, [call.value for call in report.calls]):
            called = (
                f"({', '.join(map(shown, args))}) gave {shown(call.value)}"
                for args, call in zip(test.calls, report.calls, strict=True)
            )
            problem = f"wrong value: {'; '.join(islice(called, _MOST_CALLS_TOLD))}"
        return problem, report.exec.duration_s

    async def _run_check(self, test: InsideTest, sandbox: Sandbox, timeout_s: float) -> tuple[str, float]:
        token, answer = secrets.token_hex(8), secrets.token_hex(16)
        code = checked_code(self.code, self.screened.line, self.tests.function, test.check, test.modules, token)
        report = await sandbox.call_function(code, ENTRY, [[answer]], timeout_s=timeout_s)
        (call,) = report.calls
        problem = _problem(report.exec) or call.error
        return problem or ("" if call.value == answer else "wrong value"), report.exec.duration_s


async def write_program(language: Language, code: str, sandbox: Sandbox) -> None:
    file = language.file.replace("{}", language.main_class(code).rpartition(".")[2])
    await sandbox.write_file(file, code.encode(errors="replace"))


async def compile_program(language: Language, code: str, sandbox: Sandbox, *, timeout_s: float) -> ExecResult:
    """Compile the source file, or check its syntax. The first messages are on standard output."""
    command = language.compile_command(language.main_class(code))
    ran = await sandbox.run_command(command, timeout_s=timeout_s, max_output_bytes=1 << 20)
    if ran.exit_code == MISSING:
        raise SandboxConfigError(missing_compiler(language, sandbox.provider))
    return ran


def spec_of(language: Language | None, memory_mib: int) -> SandboxSpec:
    if language is None:
        return SandboxSpec(memory_mib=memory_mib)
    return SandboxSpec(
        memory_mib=max(language.compile_mib, memory_mib + language.extra_mib),
        disk_mib=language.disk_mib,
        max_processes=language.max_processes,
        own_files=True,
    )


def missing_compiler(language: Language, provider: str) -> str:
    program = language.compile_command("")[3]
    place = "on this machine, in /usr/bin" if provider == "local" else "in the template of the sandboxes"
    return (
        f"{language.name}: sandboxes of {provider} have no {program}, which compiles and runs its programs: install it "
        f"{place}"
    )


async def check_languages(languages: Iterable[Language], sandboxes: SandboxSource) -> None:
    """Raise SandboxConfigError unless sandboxes have each language's compiler."""
    for language in languages:
        async with sandboxes.lease(spec_of(language, CodeSection().memory_mib), timeout_s=LEASE_TIMEOUT_S) as sandbox:
            candidate = _Candidate(
                screened=Screened(code=language.nothing, status="", detail="", line=0, needs_imports=False),
                code=language.nothing,
                tests=CodeTests(tests=(), language=language),
                rules=CodeSection(),
            )
            if problem := await candidate.compile(sandbox):
                where = f"sandboxes of {sandbox.provider}"
                raise SandboxConfigError(f"{where} can't compile a program that does nothing: {problem}")


def _with_imports(found: Screened, tests: CodeTests) -> str:
    above = [tests.preamble]
    if tests.has_usual_imports:
        above = [RECURSION, *([IMPORTS] if found.needs_imports else ())]
    return with_preamble(found.code, found.line, "\n".join(above))


def _problem(ran: ExecResult) -> str:
    if ran.stopped_for is not None:
        return f"stopped for {ran.stopped_for.value} after {ran.duration_s:.2f} s"
    return "" if ran.ok else ran.error or f"exit status {ran.exit_code}"


def _failed(status: str, detail: str) -> Reward:
    terms = {"score": 0.0, "solved": 0.0, "pass_rate": 0.0, "format": 0.0}
    return Reward(value=0.0, terms=terms, status=status, detail=detail)


class _Failures:
    """Indices of the tests that answers failed, by problem, latest first: they order tests, never decide a verdict."""

    def __init__(self, most_problems: int = 1024) -> None:
        self._most = most_problems
        self._seen: OrderedDict[int, list[int]] = OrderedDict()

    def first(self, problem: str, chosen: Sequence[int]) -> list[int]:
        failed = [index for index in self._seen.get(hash(problem), ()) if index in chosen]
        return [*failed, *(index for index in chosen if index not in failed)]

    def note(self, problem: str, index: int) -> None:
        failed = self._seen.setdefault(hash(problem), [])
        if index in failed:
            failed.remove(index)
        failed.insert(0, index)
        self._seen.move_to_end(hash(problem))
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)


_failures = _Failures()
