"""An agent's program in the trajectory's own sandbox: it reaches the policy, and nothing else.

    sandbox: program -- TCP to 127.0.0.1 --> the sandbox's loopback (`rayapp.sandbox.loopback`)
    this process:       the gateway accepts there, and lets into this trajectory's session alone

No tunnel, no port that is open to others, no egress.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from rayapp.config.agent import ExternalSection
from rayapp.core.errors import SandboxError
from rayapp.core.protocols import Sandbox, SandboxSource
from rayapp.core.types import ExecResult, SandboxSpec, StopCause
from rayapp.rollout.external.call import AgentCall
from rayapp.rollout.external.program import Playing
from rayapp.sandbox.loopback import Accept, loopback_of

LEASE_TIMEOUT_S = 300.0
_SPEC = SandboxSpec(memory_mib=2048, disk_mib=64, max_processes=64)
"""Of a trajectory whose task asks for none."""
_MOST_OUTPUT_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 1 << 20
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
_IN_FOLDER = ("sh", "-c", 'cd "$0" && exec env "$@"')
Admit = Callable[[Accept], AbstractAsyncContextManager[None]]


async def play(
    call: AgentCall,
    settings: ExternalSection,
    playing: Playing,
    *,
    sandboxes: SandboxSource,
    spec: SandboxSpec | None,
    admit: Admit,
) -> None:
    """Run the program to its end, and read its answer.

    Args:
        spec: what the task asks for.
        admit: lets whoever connects into the trajectory's session, for the length of a block.
    Raises:
        SandboxError: the sandbox failed, or there is none.
    """
    spec = replace(spec or _SPEC, loopback=True)
    async with sandboxes.lease(spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
        async with loopback_of(sandbox) as loopback, admit(loopback.accept):
            call = replace(call, folder=loopback.folder, url=f"http://127.0.0.1:{loopback.port}{call.url}")
            done = await _run(sandbox, call, settings)
        playing.output.add(f"{done.stdout}{done.stderr}".encode())
        playing.ran_out = done.stopped_for is StopCause.TIMEOUT
        if not done.ok and not playing.ran_out:
            why = done.stopped_for or done.exit_code
            playing.failure = f"the agent's program ended with {why}: {playing.output.last_line}"
        elif settings.answer_file:
            playing.answer = await _answer(sandbox, str(call.folder / settings.answer_file))


async def _run(sandbox: Sandbox, call: AgentCall, settings: ExternalSection) -> ExecResult:
    for name, text in call.content.items():
        await sandbox.write_file(str(call.folder / name), text.encode())
    here = {"HOME": str(call.folder), "TMPDIR": str(call.folder)}
    environment = _ENVIRONMENT | here | call.environment | dict(settings.env)
    assignments = [f"{name}={value}" for name, value in environment.items()]
    return await sandbox.run_command(
        # Not in the sandbox's spec: it would be another one for each trajectory, and none could be made ahead.
        [*_IN_FOLDER, str(call.folder), *assignments, *(call.filled_in(argument) for argument in settings.command)],
        timeout_s=settings.timeout_s,
        max_output_bytes=_MOST_OUTPUT_BYTES,
    )


async def _answer(sandbox: Sandbox, path: str) -> str:
    """Empty where the agent has left none."""
    try:
        return (await sandbox.read_file(path, max_bytes=_MAX_ANSWER_BYTES)).decode("utf-8", "replace")
    except OSError as error:
        if isinstance(error, SandboxError):
            raise
        return ""
