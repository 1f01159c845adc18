"""Serves SandboxFusion's `POST /run_code` in the sandbox service, for verl and other clients: one program in a new
sandbox, its output and status.

If no sandbox is free in time, it answers with status 504, after which SandboxFusion's clients retry.

The types follow those of `sandbox_fusion` 0.3.7, and verl 0.9.1, `utils/reward_score/sandbox_fusion`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rayapp.core.errors import InputError, SandboxConfigError, SandboxError, SandboxUnavailableError
from rayapp.core.protocols import Sandbox
from rayapp.core.types import ExecResult, SandboxSpec, StopCause
from rayapp.extras.service.calls import CALL_HEADER, Calls
from rayapp.extras.service.sessions import Sessions
from rayapp.sandbox.verdict.codec import off_the_loop
from rayapp.tasks.code.languages import Language, language_of
from rayapp.tasks.code.scoring import compile_program, spec_of, write_program

_MAX_OUTPUT_BYTES = 1 << 20
_MIN_MEMORY_MIB, _MAX_MEMORY_MIB = 64, 4096
_NOT_FOUND = 127  # exit status of a shell that does not find a program; a program may also end with it
Seconds = Annotated[float, Field(gt=0, le=600)]


class RunCode(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    code: Annotated[str, Field(max_length=4 << 20)]
    language: Annotated[str, Field(max_length=64)] = "python"
    stdin: str | None = None
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_mib: Annotated[int | None, Field(ge=-1, le=1 << 20, alias="memory_limit_MB")] = None
    """Memory limit in MiB. None, 0 and -1 stand for the service's default."""
    files: dict[str, str | None] = Field(default={}, max_length=0)
    fetch_files: list[str] = Field(default=[], max_length=0)


def fusion_routes(sessions: Sessions, calls: Calls) -> list[Route]:
    fusion = _Fusion(sessions, calls)
    return [Route("/run_code", fusion.run_code, methods=["POST"])]


class _Fusion:
    def __init__(self, sessions: Sessions, calls: Calls) -> None:
        self._sessions = sessions
        self._calls = calls

    async def run_code(self, request: Request) -> Response:
        try:
            asked = await _read(request)
            language = language_of(asked.language)
            memory_mib = _memory_mib(asked)
            spec = _spec(language, memory_mib)

            async def work() -> tuple[ExecResult | None, ExecResult | None]:
                async with self._sessions.once(spec) as sandbox:
                    return await _run(sandbox, asked, language, memory_mib)

            compiled, ran = await self._calls.unless_hung_up(request.headers[CALL_HEADER], work())
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
        return _answer(200, "Success" if is_success else "Failed", "", **results)


def _memory_mib(asked: RunCode) -> int:
    if asked.memory_mib is None or asked.memory_mib <= 0:
        return SandboxSpec().memory_mib
    # Round up to a power of two, because the pool keeps sandboxes separately for each distinct spec.
    wanted = max(_MIN_MEMORY_MIB, 1 << (asked.memory_mib - 1).bit_length())
    return min(wanted, _MAX_MEMORY_MIB)


async def _read(request: Request) -> RunCode:
    body = await request.body()
    return await off_the_loop(len(body), lambda: RunCode.model_validate_json(body))


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


def _answer(code: int, status: str, message: str, **fields: Any) -> JSONResponse:
    body = {"status": status, "message": message, "compile_result": None, "run_result": None, "files": {}, **fields}
    return JSONResponse(body, status_code=code)


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
