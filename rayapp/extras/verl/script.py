"""Finds the verl command of a launch script by running the script with bash in a sandbox. Called by `importing.py`.

    script --stdin--> launch.bash in a local sandbox --> one line for each call of a stub (python3, torchrun, ray, ...)

In the sandbox there are no network and no files of this machine; programs other than bash's usual helpers don't run.
An error names the values that could not be computed.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.aio import run_until_done
from rayapp.core.errors import ConfigError, SandboxError, first_line
from rayapp.core.types import ExecResult, SandboxSpec
from rayapp.sandbox.pool.build import open_pool

log = logging.getLogger(__name__)
# Last part of the names of modules that train with GRPO or a similar algorithm.
TRAINERS = ("main_ppo", "main_ppo_sync", "main_dapo", "main_entropy")
# Keys of `trainer` that only name a run or its folders; their parts that can't be computed are left out.
_LABELS = ("experiment_name", "project_name", "default_local_dir", "rollout_data_dir", "validation_data_dir")
_UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001?")  # Output of a program that did not run, as launch.bash marks it.
_BOX = "/tmp/box"
_MOST_BYTES = 1 << 20
LEASE_TIMEOUT_S, TIMEOUT_S = 120.0, 20.0
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW")
_WITHOUT = "Give the overrides of its command without the script: --verl KEY=VALUE ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    module: str
    arguments: tuple[str, ...]  # Hydra's options and overrides.


def read_script(path: Path, environment: Mapping[str, str] | None = None, overridden: Collection[str] = ()) -> Launch:
    """Return the one command of a script that starts a trainer of verl.

    Args:
        environment: environment variables of the script; None takes those of this process.
        overridden: keys whose values in the script don't matter.
    Raises ConfigError: there is no such command or several, or it uses values that can't be computed (all are named).
    """
    text, known = _text(path), os.environ if environment is None else environment
    calls, ended = _calls(path, text, known)
    launches = list(dict.fromkeys(launch for words in calls if (launch := _launch(words))))
    launches = [launch for launch in launches if _trains(launch)] or launches
    if len(launches) != 1:
        found = f"{len(launches)} commands start a trainer" if launches else f"it starts no `python -m verl...`{ended}"
        raise ConfigError(f"verl script {path}: {found}. {_WITHOUT}")
    _check_known(path, text, launches[0], overridden)
    if others := [" ".join(words) for words in calls if not _launch(words)]:
        log.warning("verl script %s: taken as successful without running them: %s", path, "; ".join(others)[:300])
    return launches[0]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"verl script {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"verl script {path} has more than {_MOST_BYTES} bytes. {_WITHOUT}")
    return text


def _calls(path: Path, text: str, known: Mapping[str, str]) -> tuple[list[tuple[str, ...]], str]:
    """Run a script; return the words of each call that did not run, and how the script ended, if it failed."""
    named = {name: known[name] for name in re.findall(r"\$\{?(\w+)", text) if name in known}
    shown = {name: "hidden" if _SECRET.search(name) else value for name, value in named.items()}
    env = shown | {"HOME": known.get("HOME", "/root"), "PATH": "/usr/bin:/bin"}
    spec = SandboxSpec(env=tuple(env.items()), max_processes=64, own_files=True)
    argv = ["bash", "-c", (Path(__file__).parent / "launch.bash").read_text(), "bash", str(path.resolve())]
    try:
        ran = run_until_done(_run([*argv, str(Path.cwd())], spec, text))
    except SandboxError as error:
        raise ConfigError(
            f"verl script {path}: bash can't run in a sandbox: {first_line(error)}. {_WITHOUT}"
        ) from error
    if not ran.ok or ran.truncated:
        why = ran.stopped_for or ran.error or f"it printed more than {len(ran.stdout)} characters"
        raise ConfigError(f"verl script {path} was stopped in its sandbox: {why}. {_WITHOUT}")
    lines = ran.stdout.splitlines()
    code = lines.pop() if lines and lines[-1].startswith("exit ") else "no end"
    said = " ".join(ran.stderr.replace(_BOX, "").split())
    return list(_words(lines)), "" if code == "exit 0" else f" ({code}: {said})"


async def _run(argv: Sequence[str], spec: SandboxSpec, text: str) -> ExecResult:
    name = f"verl-script-{os.getpid()}"
    async with (
        open_pool(SandboxConfig().without_stock, name) as (sandboxes, _),
        sandboxes.lease(spec, timeout_s=LEASE_TIMEOUT_S) as box,
    ):
        return await box.run_command(argv, timeout_s=TIMEOUT_S, stdin=text)


def _words(lines: list[str]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        try:
            words = base64.b64decode(line, validate=True).decode().split("\0")
        except (binascii.Error, UnicodeDecodeError):
            continue  # the script's own output on the stubs' channel
        yield tuple(word.replace(_BOX, "") for word in words[:-1])


def _launch(words: tuple[str, ...]) -> Launch | None:
    at = words.index("-m") if "-m" in words else len(words)
    if at + 1 >= len(words) or not (words[at + 1].startswith("verl.") or words[at + 1].endswith(TRAINERS)):
        return None
    return Launch(module=words[at + 1], arguments=tuple(map(_labelled, words[at + 2 :])))


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~")


def _labelled(argument: str) -> str:
    key = _key(argument)
    is_label = key.startswith("hydra.") or key in {f"trainer.{label}" for label in _LABELS}
    return _UNKNOWN.sub("", argument) if is_label else argument


def _trains(launch: Launch) -> bool:
    return launch.module.rpartition(".")[2] in TRAINERS


def _check_known(path: Path, text: str, launch: Launch, overridden: Collection[str]) -> None:
    if not _trains(launch):
        raise ConfigError(
            f"verl script {path} runs {launch.module}, which is not one of {', '.join(TRAINERS)}. Use `rayapp sft` for "
            "supervised training, `rayapp eval` for generation, and rayapp.train.max_staleness=1 for an asynchronous "
            "run."
        )
    keys = {_key(word): word for word in launch.arguments if _key(word) not in overridden}
    unknown = [
        f"{key}: {' '.join(what.split())} did not run" for key, word in keys.items() for what in _UNKNOWN.findall(word)
    ]
    given = re.findall(r"([\w.]+)=(\S*\$\S*)", text)
    unknown += [f"{key}: {raw} is empty" for key, raw in given if keys.get(key, "").endswith("=")]
    if unknown:
        raise ConfigError(
            f"verl script {path} uses values that can't be computed in a sandbox. Export the variables, or give these "
            "keys as overrides after the script:\n  " + "\n  ".join(dict.fromkeys(unknown))
        )
