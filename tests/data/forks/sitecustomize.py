"""On PYTHONPATH of what tests start: a process whose imports take seconds is a fork of one that has them, see
../forked_processes.py. After that, what `hidden.py` hides, where that is on the path too."""

import contextlib
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

FORKS = os.environ.get("RAYAPP_TEST_FORKS")
REGISTRY = "vllm.model_executor.models.registry"


def what_to_fork():
    """Arguments and environment of a process that is to be forked; None for all others.

    Those are Ray's workers, or what sets variables and runs one in its place; children of `multiprocessing`; and what
    vLLM starts to look at a model's class.
    """
    arguments = sys.orig_argv[1:]
    if arguments[-1:] == ["--multiprocessing-fork"] or arguments[:2] == ["-m", REGISTRY]:
        while arguments[0] not in ("-c", "-m"):
            del arguments[0]  # options of the interpreter
        return arguments, {}
    if not arguments or "/ray/_private/workers/" not in arguments[0]:
        return None
    context, rest = {}, []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language" and not name.endswith("/setup_worker.py"):
            rest.append(argument)
    variables = context.get("env_vars", {})
    is_plain = not context.get("command_prefix") and "$" not in "".join(variables.values())
    return (rest, variables) if rest[0].endswith("/default_worker.py") and is_plain else None


def open_files():
    found = []
    for number in sorted(int(file.name) for file in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # what listed them is closed
            if not stat.S_ISDIR(os.fstat(number).st_mode):
                found.append(number)
    return found


def be_a_fork(arguments, variables):
    """Have this process forked, and end when and as the fork does."""
    parent, blocked = os.getppid(), [*signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    files = open_files()
    environment = dict(os.environ) | variables
    request = json.dumps([arguments, environment, str(Path.cwd()), os.getpgrp(), blocked, files]).encode()
    with socket.socket(socket.AF_UNIX) as forks:
        forks.connect(FORKS)
        socket.send_fds(forks, [len(request).to_bytes(8)], files)
        forks.sendall(request)
        fork = int.from_bytes(forks.recv(8, socket.MSG_WAITALL))
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: pass_on(fork, number))
        status = b""
        forks.settimeout(0.2)
        while True:
            try:
                answer = forks.recv(1)
            except TimeoutError:
                if os.getppid() != parent:
                    # A worker ends with Ray. And who ends an engine ends what is below it, which a fork is not.
                    os._exit(0)
                continue
            except ConnectionResetError:
                answer = b""
            if not answer:
                break
            status = answer
    if not status:
        os.kill(os.getpid(), signal.SIGKILL)  # as the fork was
    os._exit(status[0])


def pass_on(fork, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(fork, number)


if FORKS and (what := what_to_fork()):
    try:
        be_a_fork(*what)
    except OSError as error:  # Python would go on without this module
        print(f"nothing to fork a process from: {error}", file=sys.stderr, flush=True)
        os._exit(1)

with contextlib.suppress(ModuleNotFoundError):
    import hidden  # noqa: F401
