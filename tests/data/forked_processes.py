"""Processes of tests are forked from one that has imported what they do, instead of started: Ray's workers, vLLM's
engines and servers, vLLM's look at a model's class. Ray, PyTorch, transformers and vLLM are one to twelve seconds of
the processor, for each of hundreds in `make test`.

`python forked_processes.py SOCKET [--with-vllm]` is that process, which does nothing but import and fork, so it has no
threads. Whoever wants a process goes on to start one: `forks/sitecustomize.py`, in its first moment, asks for a fork
instead, passes signals on, and ends as the fork does. A fork is told from a started process by its parent only: it has
the arguments, the environment, the folder and the open files of that process, and ends when that one is killed.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rayapp.core.names import UNUSED_BY_VLLM, large_imports
from rayapp.sandbox.local.levels import kernel
from support.learners import import_learner, import_models

_MAX_JOBS = 4
"""Each takes 100 MB."""
_MAX_FILES = 250
"""That one message may carry."""
_ABOVE = 1000
"""Numbers of files that no process asks for."""


class Request(NamedTuple):
    arguments: list[str]
    """Of Python: a script, `-m` or `-c`, and what it is given."""
    environment: dict[str, str]
    folder: str
    group: int
    """The process group of who asks."""
    blocked: list[int]
    """Signals that it was started with blocked."""
    numbers: list[int]
    """Of its open files, in the order in which they are sent."""

    @property
    def is_ray_worker(self) -> bool:
        return self.arguments[0].endswith("/default_worker.py")


class Asked(NamedTuple):
    """A request with what came with it; files as this process has them."""

    request: Request
    connection: int
    files: list[int]

    def close(self) -> None:
        for each in (self.connection, *self.files):
            os.close(each)


def main() -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    own = {str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(os.pathsep)}
    path = [folder for folder in sys.path if folder not in own]
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen(64)
    forked = _forked(listening, path)
    _become(_forked_of_job(forked) if isinstance(forked, socket.socket) else forked)


def _forked(listening: socket.socket, path: list[str]) -> Asked | socket.socket:
    """Import once what is asked for most, and fork for each who asks; for Ray's workers there is a fork for each job,
    which forks them. Returns in each fork: what was asked, or where a job's workers are asked for."""
    jobs: dict[frozenset[tuple[str, str]], socket.socket] = {}
    has_imported = False
    while True:
        connection, _ = listening.accept()
        received = _receive(connection)
        if received is None:
            connection.close()
            continue
        asked = Asked(received[0], connection.detach(), received[1])
        if not has_imported:
            _import_most()
            has_imported = True
        variables = asked.request.environment.items()
        # Ray reads its variables when it is imported, a job's id among them.
        job = frozenset(each for each in variables if each[0].startswith(("RAY_", "PYTHONPATH")))
        if not asked.request.is_ray_worker:
            if os.fork() == 0:
                _close(listening, *jobs.values())
                _adopt(asked.request, path)
                return asked
        elif job not in jobs:
            ours, its = socket.socketpair()
            if os.fork() == 0:
                _close(listening, ours, *jobs.values())
                _adopt(asked.request, path)
                asked.close()
                return its
            its.close()
            if len(jobs) == _MAX_JOBS:
                jobs.pop(next(iter(jobs))).close()  # the oldest ends
            jobs[job] = ours
        if asked.request.is_ray_worker:
            _send(jobs[job], asked)
        asked.close()


def _import_most() -> None:
    import_models()
    if "--with-vllm" in sys.argv:
        # vLLM looks whether Ray is there, which is for each job to import.
        with large_imports(*UNUSED_BY_VLLM, "ray"):
            import vllm.model_executor.models.registry
            import vllm.v1.worker.cpu_model_runner
            import vllm.v1.worker.cpu_worker  # noqa: F401

            import rayapp.engine.processes
            import rayapp.engine.vllm
            import rayapp.engine.vllm_worker  # noqa: F401
    gc.freeze()


def _forked_of_job(asked: socket.socket) -> Asked:
    """Fork for each worker of a job. Returns in each fork, with what was asked for."""
    import ray._private.workers.default_worker  # noqa: F401

    import actors.rollout_worker
    import actors.sandbox_pool
    import actors.vllm_server  # noqa: F401

    import_learner()
    gc.freeze()
    while True:
        received = _receive(asked)
        if received is None:
            sys.exit()
        request, (connection, *files) = received
        worker = Asked(request, connection, files)
        if os.fork() == 0:
            asked.close()
            return worker
        worker.close()


def _become(asked: Asked) -> None:
    """Be the process that was asked for, until it ends."""
    request = asked.request
    # Away from the numbers that its files are to have.
    connection = fcntl.fcntl(asked.connection, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for file in asked.files]
    asked.close()
    for file, number in zip(files, request.numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    _take(request.environment)
    os.chdir(request.folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    if threads := request.environment.get("OMP_NUM_THREADS"):
        importlib.import_module("torch").set_num_threads(int(threads))  # it reads this when it is imported
    if request.is_ray_worker:
        importlib.import_module("ray._private.worker").global_worker.__init__()  # it knows the GPUs that it may see
        os.setpgid(0, 0)  # Ray ends a worker's whole group
    else:
        with suppress(PermissionError):  # of another session
            os.setpgid(0, request.group)
    owner = socket.socket(fileno=connection)
    owner.sendall(os.getpid().to_bytes(8))
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    status = 1
    try:
        _run(request.arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        with suppress(OSError):
            owner.sendall(bytes([status & 255]))


def _run(arguments: list[str]) -> None:
    what, *rest = arguments
    if what == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        exec(rest[0], sys.modules["__main__"].__dict__)
    elif what == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(what, run_name="__main__")


def _receive(source: socket.socket) -> tuple[Request, list[int]] | None:
    """With open files; None from who has ended, or ended while it asked."""
    size, files, *_ = socket.recv_fds(source, 8, _MAX_FILES)
    text = source.recv(int.from_bytes(size), socket.MSG_WAITALL) if size else b""
    if not text or len(text) < int.from_bytes(size):
        for each in files:
            os.close(each)
        return None
    return Request(*json.loads(text)), files


def _send(target: socket.socket, asked: Asked) -> None:
    text = json.dumps(asked.request).encode()
    socket.send_fds(target, [len(text).to_bytes(8)], [asked.connection, *asked.files])
    target.sendall(text)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _take(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _adopt(request: Request, path: list[str]) -> None:
    """Take the environment and the path that Python would have started with."""
    _take(request.environment)
    what, folders = request.arguments[0], request.environment.get("PYTHONPATH", "")
    first = {"-c": "", "-m": request.folder}.get(what) if what.startswith("-") else str(Path(what).parent)
    sys.path[:] = [str(first), *filter(None, folders.split(os.pathsep)), *path]
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _end_with(owner: socket.socket) -> None:
    """End this process when the one that asked for it is gone."""
    owner.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
