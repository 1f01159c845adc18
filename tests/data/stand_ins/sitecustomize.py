"""On PYTHONPATH of runs whose servers are stand-ins: what takes seconds to import is not found, or found as a module
of this folder.

vLLM is found nowhere: see `vllm.py`. In place of its tool parsers there is the one in `tool_parser.py`. A Ray worker is
a fork of a process that has imported what it needs, PyTorch too: see ../forked_workers.py. Of the processes
that are started, only learners find PyTorch; they are told by their environment (actors/environments/learner.yaml).
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
from pathlib import Path

FORKS = os.environ.get("RAYAPP_TEST_FORKS")


def have_forked():
    """In a process that is to be a worker of Ray's, or to set variables and run one in its place: have that one forked,
    and wait for its end. Returns where there is something else to do."""
    context, rest = {}, []
    for argument in sys.orig_argv[1:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language" and not name.endswith("/setup_worker.py"):
            rest.append(argument)
    variables = context.get("env_vars", {})
    if (
        not rest[0].endswith("/default_worker.py")
        or context.get("command_prefix")
        or "$" in "".join(variables.values())
    ):
        return
    parent, blocked = os.getppid(), [*signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    request = json.dumps([rest, dict(os.environ) | variables, str(Path.cwd()), blocked]).encode()
    with socket.socket(socket.AF_UNIX) as forks:
        try:
            forks.connect(FORKS)
            socket.send_fds(forks, [len(request).to_bytes(8)], [1, 2])
            forks.sendall(request)
            forks.settimeout(1.0)
            while os.getppid() == parent:  # what it started ends with Ray
                with contextlib.suppress(TimeoutError):
                    forks.recv(1)
                    break
        except OSError as error:  # Python would go on without this module
            print(f"nothing to fork a worker from: {error}", file=sys.stderr, flush=True)
    os._exit(0)


if FORKS and sys.orig_argv[1:] and "/ray/_private/workers/" in sys.orig_argv[1]:
    have_forked()

PARSERS = "rayapp.engine.vllm_tool_parser"


class Finder:
    """Of one module that is another one here."""

    def find_spec(self, name, path=None, target=None):
        file = Path(__file__).with_name("tool_parser.py")
        return importlib.util.spec_from_file_location(name, file) if name == PARSERS else None


sys.meta_path.insert(0, Finder())

if "torch" not in sys.modules and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
    sys.modules["torch"] = None
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
