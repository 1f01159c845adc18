"""Ray workers of tests are forked from a process that has imported what they do, instead of started: Ray itself,
PyTorch and transformers are one to five seconds of the processor, for each of the two hundred of `make test`.

`python forked_workers.py SOCKET` is that process, which does nothing but import and fork, so it has no threads. Ray
goes on to start a process for each worker: `stand_ins/sitecustomize.py`, in its first moment, asks for a fork instead
and waits for the fork's end. A worker is told from a started one by its parent only: it has the arguments, the
environment, the folder and the outputs that Ray gave to that process, and ends when that one is killed.
"""

from __future__ import annotations

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

from rayapp.sandbox.local.levels import kernel
from rayapp.testing.learners import import_learner, import_models

_MAX_JOBS = 4
"""Each takes 100 MB."""


class Request(NamedTuple):
    arguments: list[str]
    """A script of Ray's, and what it is given."""
    environment: dict[str, str]
    folder: str
    blocked: list[int]
    """Signals that Ray keeps from its workers."""


def main() -> None:
    """What all workers import is imported once. Ray reads its variables when it is imported, a job's id among them: so
    there is a fork for each job, which imports Ray and what needs it, and is forked for the job's workers."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    own = {str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(os.pathsep)}
    path = [folder for folder in sys.path if folder not in own]
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen(64)
    request, connection = _forked_of_job(_forked_for_job(listening, path))
    _take(request.environment)
    ray = importlib.import_module("ray._private.worker")
    ray.global_worker.__init__()  # it knows the GPUs that this worker may see
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    os.setpgid(0, 0)  # Ray ends a worker's whole group
    os.chdir(request.folder)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    sys.argv[:] = request.arguments
    runpy.run_path(request.arguments[0], run_name="__main__")


def _forked_for_job(listening: socket.socket, path: list[str]) -> socket.socket:
    """Fork for each job that somebody asks for a worker of. Returns in each fork, with where it is asked."""
    jobs: dict[frozenset[tuple[str, str]], socket.socket] = {}
    while True:
        connection, _ = listening.accept()
        text, outputs = _receive(connection, 2)
        files = [connection.detach(), *outputs]
        if text:
            if not jobs:
                import_models()
                gc.freeze()
            request = Request(*json.loads(text))
            job = frozenset(each for each in request.environment.items() if each[0].startswith(("RAY_", "PYTHONPATH")))
            if job not in jobs:
                ours, its = socket.socketpair()
                if os.fork() == 0:
                    for each in (listening, ours, *jobs.values()):
                        each.close()
                    _close(files)
                    _adopt(request, path)
                    return its
                its.close()
                if len(jobs) == _MAX_JOBS:
                    jobs.pop(next(iter(jobs))).close()  # the oldest ends
                jobs[job] = ours
            _send(jobs[job], text, files)
        _close(files)


def _forked_of_job(asked: socket.socket) -> tuple[Request, socket.socket]:
    """Fork for each worker of a job. Returns in each fork, with what was asked for, and by whom."""
    import ray._private.workers.default_worker  # noqa: F401

    import actors.rollout_worker
    import actors.sandbox_pool
    import actors.stand_ins  # noqa: F401

    import_learner()
    gc.freeze()
    while True:
        text, files = _receive(asked, 3)
        if not text:
            sys.exit()
        if os.fork() == 0:
            connection, *outputs = files
            for number, output in enumerate(outputs, start=1):
                os.dup2(output, number)
            _close(outputs)
            asked.close()
            return Request(*json.loads(text)), socket.socket(fileno=connection)
        _close(files)


def _close(files: list[int]) -> None:
    for each in files:
        os.close(each)


def _receive(source: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """A text and so many open files; nothing from who has ended."""
    size, files, *_ = socket.recv_fds(source, 8, count)
    return source.recv(int.from_bytes(size), socket.MSG_WAITALL) if size else b"", files


def _send(target: socket.socket, text: bytes, files: list[int]) -> None:
    socket.send_fds(target, [len(text).to_bytes(8)], files)
    target.sendall(text)


def _take(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _adopt(request: Request, path: list[str]) -> None:
    """Take the environment and the path that Python would have started with."""
    _take(request.environment)
    folders = request.environment.get("PYTHONPATH", "")
    sys.path[:] = [str(Path(request.arguments[0]).parent), *filter(None, folders.split(os.pathsep)), *path]
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _end_with(connection: socket.socket) -> None:
    """End this process when the one that asked for it is gone."""
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
