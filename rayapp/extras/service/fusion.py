"""Serves SandboxFusion's HTTP protocol in the sandbox service, for verl, the `sandbox-fusion` package and other
clients.

POST /run_code   one program in a new sandbox: its output and status
POST /submit     a completion and its hidden tests: runs the code, and compares results outside the sandbox
GET /v1/ping     "pong"

If no sandbox is free in time, `/run_code` answers with status 504, after which SandboxFusion's clients retry. A request
to `/submit` must have the row in `config.provided_data`, because the service has no data sets.

The types follow those of `sandbox_fusion` 0.3.7, and verl 0.9.1, `utils/reward_score/sandbox_fusion`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rayapp.config.agent import CodeSection
from rayapp.core.errors import InputError, SandboxConfigError, SandboxError, SandboxUnavailableError
from rayapp.core.protocols import Sandbox
from rayapp.core.types import ExecResult, SandboxSpec, StopCause
from rayapp.extras.service.calls import CALL_HEADER, Calls
from rayapp.extras.service.sessions import Sessions
from rayapp.sandbox.verdict.codec import off_the_loop
from rayapp.tasks.code.languages import Language, language_of
from rayapp.tasks.code.scoring import CodeProblem, compile_program, spec_of, write_program
from rayapp.tasks.text_process import TextReadingFailedError, TextTooCostlyError

_MAX_FILES, _MAX_FILE_BYTES, _MAX_OUTPUT_BYTES = 64, 16 << 20, 1 << 20
_MIN_MEMORY_MIB, _MAX_MEMORY_MIB = 64, 4096
_RUN_TIMEOUT_S = 20.0  # of a submission that gives none
_NOT_FOUND = 127  # exit status of a shell that does not find a program; a program may also end with it
T = TypeVar("T", bound=BaseModel)
Seconds = Annotated[float, Field(gt=0, le=600)]
Path = Annotated[str, Field(min_length=1, max_length=512)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RunCode(_Request):
    code: Annotated[str, Field(max_length=4 << 20)]
    language: Annotated[str, Field(max_length=64)] = "python"
    stdin: str | None = None
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_mib: Annotated[int | None, Field(ge=-1, le=1 << 20, alias="memory_limit_MB")] = None
    """Memory limit in MiB. None, 0 and -1 stand for the service's default."""
    files: dict[Path, str | None] = Field(default={}, max_length=_MAX_FILES)
    """Path -> base64 of the file's bytes, or None for an empty file."""
    fetch_files: list[Path] = Field(default=[], max_length=_MAX_FILES)


class SubmitConfig(_Request):
    dataset_type: str | None = None
    language: str | None = None
    run_timeout: Seconds | None = None
    provided_data: dict[str, Any] | list[dict[str, Any]] | None = None


class Submit(_Request):
    dataset: str = ""
    id: int | str = 0
    completion: Annotated[str, Field(max_length=4 << 20)]
    config: SubmitConfig = SubmitConfig()


def fusion_routes(sessions: Sessions, calls: Calls) -> list[Route]:
    fusion = _Fusion(sessions, calls)
    return [
        Route("/run_code", fusion.run_code, methods=["POST"]),
        Route("/submit", fusion.submit, methods=["POST"]),
        Route("/v1/ping", _ping, methods=["GET"]),
    ]


async def _ping(request: Request) -> Response:
    return PlainTextResponse("pong")


class _Fusion:
    def __init__(self, sessions: Sessions, calls: Calls) -> None:
        self._sessions = sessions
        self._calls = calls

    async def run_code(self, request: Request) -> Response:
        try:
            asked = await _read(RunCode, request)
            language = language_of(asked.language)
            num_bytes = sum(len(content or "") for content in asked.files.values())
            files = await off_the_loop(num_bytes, lambda: _decoded(asked.files))
            memory_mib = _memory_mib(asked)
            spec = _spec(language, memory_mib)

            async def work() -> tuple[ExecResult | None, ExecResult | None, dict[str, str]]:
                async with self._sessions.once(spec) as sandbox:
                    for path, content in files.items():
                        await sandbox.write_file(path, content)
                    compiled, ran = await _run(sandbox, asked, language, memory_mib)
                    return compiled, ran, await _fetched(sandbox, asked.fetch_files)

            compiled, ran, found = await self._calls.unless_hung_up(request.headers[CALL_HEADER], work())
        except (ValidationError, InputError, SandboxConfigError, OSError) as error:
            return _answer(400, "Failed", _first_problem(error))
        except SandboxUnavailableError as error:
            return _answer(504, "SandboxError", f"no sandbox was free in time: {error}")
        except SandboxError as error:
            return _answer(200, "SandboxError", f"the sandbox failed: {error}")
        results = {
            "compile_result": compiled and compile_result(compiled),
            "run_result": ran and command_result(ran),
        }
        is_success = ran is not None and ran.ok
        return _answer(200, "Success" if is_success else "Failed", "", **results, files=found)

    async def submit(self, request: Request) -> Response:
        try:
            asked = await _read(Submit, request)
        except (ValidationError, InputError) as error:
            return _answer(400, "Failed", _first_problem(error))
        try:
            problem = CodeProblem(
                ground_truth=ground_truth(asked),
                rules=CodeSection(test_timeout_s=asked.config.run_timeout or _RUN_TIMEOUT_S),
            )
            scoring = problem.each_test(asked.completion, self._sessions.sandboxes)
            told = await self._calls.unless_hung_up(request.headers[CALL_HEADER], scoring)
        except (InputError, SandboxConfigError) as error:
            return _answer(400, "Failed", str(error))
        except (TextTooCostlyError, TextReadingFailedError) as error:
            told = [(f"the completion can't be read: {error}", 0.0)]
        except SandboxUnavailableError as error:
            return _answer(504, "SandboxError", f"no sandbox was free in time: {error}")
        except SandboxError as error:
            return _answer(500, "SandboxError", f"the sandbox failed: {error}")
        return JSONResponse(
            {
                "id": asked.id,
                "accepted": all(not problem for problem, _ in told),
                "extracted_code": "",
                "tests": [_test_result(*each) for each in told],
            }
        )


def _memory_mib(asked: RunCode) -> int:
    if asked.memory_mib is None or asked.memory_mib <= 0:
        return SandboxSpec().memory_mib
    # Round up to a power of two, because the pool keeps sandboxes separately for each distinct spec.
    wanted = max(_MIN_MEMORY_MIB, 1 << (asked.memory_mib - 1).bit_length())
    return min(wanted, _MAX_MEMORY_MIB)


async def _read(kind: type[T], request: Request) -> T:
    body = await request.body()
    return await off_the_loop(len(body), lambda: kind.model_validate_json(body))


def _spec(language: Language | None, memory_mib: int) -> SandboxSpec:
    # Interpreted programs get the same kind as Python, which starts faster.
    if language is None or not language.is_compiled:
        return SandboxSpec(memory_mib=memory_mib + (language.extra_mib if language else 0))
    return spec_of(language, memory_mib)


async def _run(
    sandbox: Sandbox, asked: RunCode, language: Language | None, memory_mib: int
) -> tuple[ExecResult | None, ExecResult | None]:
    """Compile and run. Returns both results; None for a step that was not taken."""
    timeout_s, stdin = asked.run_timeout, asked.stdin or ""
    if language is None:
        ran = await sandbox.run_code(asked.code, timeout_s=timeout_s, stdin=stdin, max_output_bytes=_MAX_OUTPUT_BYTES)
        return None, ran
    compiled = None
    await write_program(language, asked.code, sandbox)
    compiling = partial(compile_program, language, asked.code, sandbox, timeout_s=asked.compile_timeout)
    if language.is_compiled and not (compiled := await compiling()).ok:
        return compiled, None
    argv = language.run_command(language.main_class(asked.code), memory_mib, is_test=language.is_compiled)
    ran = await sandbox.run_command(argv, timeout_s=timeout_s, stdin=stdin, max_output_bytes=_MAX_OUTPUT_BYTES)
    if ran.exit_code == _NOT_FOUND and not language.is_compiled:
        await compiling()  # says so if the interpreter is missing
    return compiled, ran


def compile_result(compiled: ExecResult) -> dict[str, Any]:
    """Return a compile step in SandboxFusion's form: the compiler's messages are standard error."""
    return command_result(compiled) | {"stdout": "", "stderr": compiled.stdout + compiled.stderr}


def command_result(ran: ExecResult) -> dict[str, Any]:
    """Return the result of an execution in SandboxFusion's form. Code that was stopped for its memory, output or
    processes counts as finished with a status other than 0, as if the system had killed it.
    """
    is_late = ran.stopped_for in (StopCause.TIMEOUT, StopCause.CPU)
    stderr = ran.stderr
    if ran.stopped_for is not None and not is_late:
        stderr += f"\nstopped: the limit of {ran.stopped_for.value} was reached"
    return {
        "status": "TimeLimitExceeded" if is_late else "Finished",
        "execution_time": ran.duration_s,
        "return_code": None if is_late else ran.exit_code or int(not ran.ok),
        "stdout": ran.stdout,
        "stderr": stderr,
    }


def ground_truth(asked: Submit) -> str:
    """Return the tests of a submission as the ground truth of a code problem (`rayapp.tasks.code.formats`)."""
    row = asked.config.provided_data
    if isinstance(row, list):
        row = next((each for each in row if each.get("id") == asked.id), None)
    if row is None:
        raise InputError(
            f"the request has no row {asked.id!r:.60} of dataset {asked.dataset!r}, and the service has no data sets. "
            "Send the row as config.provided_data"
        )
    match asked.config.dataset_type or asked.dataset:
        case "HumanEvalDataset" | "humaneval_python":
            labels = _struct(row.get("labels"))
            fields = {"prompt": row.get("content"), "entry_point": labels.get("entry_point"), "test": row.get("test")}
        case "MBPPDataset" | "mbpp":
            setup = _struct(row.get("labels")).get("test_setup_code")
            fields = {"test_list": _plain(row.get("test")), "test_setup_code": setup}
        case _:
            tests = _plain(row.get("test"))
            fields = _of_oj(tests) if isinstance(tests, list) else {**row}
            if language := asked.config.language or _struct(row.get("labels")).get("programming_language"):
                fields["language"] = language
    return json.dumps(fields)


def _of_oj(tests: Sequence[Any]) -> dict[str, Any]:
    pairs = [(_struct(_struct(test).get("input")), _struct(_struct(test).get("output"))) for test in tests]
    if any("stdin" not in given or "stdout" not in wanted for given, wanted in pairs):
        raise InputError("each element of test must have input.stdin and output.stdout")
    return {
        "inputs": [given["stdin"] for given, _ in pairs],
        "outputs": [wanted["stdout"] for _, wanted in pairs],
    }


def _plain(value: object) -> Any:
    """Return the value of a field. If the field is a JSON text, return the value that the text encodes."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InputError(f"a field of provided_data can't be read as JSON: {error}") from error


def _struct(value: object) -> Mapping[str, Any]:
    found = _plain(value) if value is not None else {}
    if not isinstance(found, dict):
        raise InputError(f"a field of provided_data must be a struct, not {found!r:.60}")
    return found


def _decoded(files: Mapping[str, str | None]) -> dict[str, bytes]:
    found = {}
    for path, content in files.items():
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise InputError(f"files: {path!r} must be relative and stay in the program's folder")
        try:
            found[path] = base64.b64decode(content or "", validate=True)
        except ValueError as error:
            raise InputError(f"files: {path!r} is not base64: {error}") from error
    if sum(map(len, found.values())) > _MAX_FILE_BYTES:
        raise InputError(f"files: all files together must have at most {_MAX_FILE_BYTES >> 20} MiB")
    return found


async def _fetched(sandbox: Sandbox, paths: Sequence[str]) -> dict[str, str]:
    """Return path -> base64 of files of the sandbox. Files that are missing or can't be read are left out."""
    found, left = {}, _MAX_FILE_BYTES
    for path in paths:
        try:
            content = await sandbox.read_file(path, max_bytes=left)
        except OSError:
            continue
        left = max(1, left - len(content))
        found[path] = base64.b64encode(content).decode()
    return found


def _test_result(problem: str, seconds: float) -> dict[str, Any]:
    status: Literal["Success", "Failed"] = "Failed" if problem else "Success"
    run = {"status": "Finished", "execution_time": seconds, "return_code": int(bool(problem)), "stderr": problem}
    return {"passed": not problem, "exec_info": {"status": status, "message": problem, "run_result": run, "files": {}}}


def _answer(code: int, status: str, message: str, **fields: Any) -> JSONResponse:
    body = {"status": status, "message": message, "compile_result": None, "run_result": None, "files": {}, **fields}
    return JSONResponse(body, status_code=code)


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
