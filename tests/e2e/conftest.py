"""What the tests of whole runs share: a configuration that takes seconds, a Ray that goes on between them, and a look
at what a run leaves behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.ports import free_port
from support.stubs.e2b_stub import API_KEY

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "data" / "stand_ins"
SCRIPTED = ROOT / "tests" / "data" / "with_scripted_servers.py"
PR_SET_CHILD_SUBREAPER = 36
KEYS = {"E2B_API_KEY": API_KEY, "JUDGE_KEY": "sk-of-the-judge-5678", "RAYAPP_SANDBOX_API_KEY": "key-of-the-tools"}
"""In the environment of every process of a Ray that runs share."""
Descendants = Callable[[], dict[int, str]]


@pytest.fixture(scope="session")
def short_run(tiny_model: Path, letter_tasks: list[str]) -> Callable[..., dict[str, Any]]:
    """Makes the configuration of a run of the tiny model: `short_run(output_dir, train={"num_steps": 9})`."""

    def make(output_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "run": {"output_dir": str(output_dir)},
            "model": {"path": str(tiny_model)},
            "tasks": letter_tasks,
            "cluster": {"device": "cpu"},
            "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16},
            "train": {"groups_per_step": 2},
            "learner": {
                "max_tokens_per_microbatch": 256,
                "compute_dtype": "float32",
                "optimizer": {"lr": 3e-3},
                "cpu_threads": 1,
            },
            "server": {"kv_cache_gib": 0.1, "cpu_threads": 1},
            "checkpoint": {"every_steps": 2},
        }
        return config | {name: config.get(name, {}) | changes for name, changes in sections.items()}

    return make


@pytest.fixture(scope="session")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with ChatML's tokens and room for what a prompt tells of tools. Its heads are as small as vLLM's
    attention on a CPU can take: 32.
    """
    from transformers import AutoTokenizer

    from support.learners import save_llama

    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(folder)
    return save_llama(
        folder, dtype="bfloat16", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )  # fmt: skip


@pytest.fixture(scope="session")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, float]], Path]:
    """Makes a policy whose next token depends on the last one only: after a line's end it says one of these texts, each
    with the probability that follows from its logit, and after any of them it ends its turn."""

    def make(said: Mapping[str, float]) -> Path:
        return save_policy(tmp_path_factory.mktemp("models") / "policy", said)

    return make


def save_policy(folder: Path, said: Mapping[str, float]) -> Path:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<pad>", "\n", *(chr(code) for code in range(32, 127))]
    plain = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in said])
    tokenizer.save_pretrained(folder)
    eos_id, start_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "\n"])

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    logits = torch.zeros(len(tokenizer), len(tokenizer))  # next token x last token
    for text, logit in said.items():
        text_id = tokenizer.convert_tokens_to_ids(text)
        logits[text_id, start_id], logits[eos_id, text_id] = logit, 16.0
    with torch.no_grad():
        # The layers add nothing, so what the head sees is the last token's embedding, of length sqrt(128).
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        directions = torch.linalg.qr(torch.randn(128, 128))[0][: len(tokenizer)]
        model.model.embed_tokens.weight.copy_(directions)
        model.lm_head.weight.copy_(logits @ directions / 128**0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def descendants() -> Iterator[Descendants]:
    """Living processes that came from this one: pid and command line.

    While the module's tests run, a process whose parent ends becomes a child of this one instead of init's, whatever
    session, user or namespace it is in: so none can hide. Ask only when no `Popen` of the test is waiting to be waited
    for.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield lambda: {pid: line for pid, line in living().items() if pid not in before}
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def living() -> dict[int, str]:
    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = " ".join(child.cmdline()) or child.name()
            elif child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return found


@pytest.fixture(scope="session")
def settled() -> Callable[[Descendants], dict[int, str]]:
    """What is still there once nothing ends any more: processes that were told to end take a moment."""

    def wait(descendants: Descendants, timeout_s: float = 60.0) -> dict[int, str]:
        deadline = time.monotonic() + timeout_s
        while (left := descendants()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    return wait


LOOK = """
import json, sys, time, ray
address, what, name, timeout_s = sys.argv[1:]
ray.init(address=address, logging_level="ERROR")
deadline = time.monotonic() + float(timeout_s)
while True:
    named = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    if time.monotonic() > deadline or not any(name in each for each in named):
        break
    time.sleep(0.1)
if what == "task":
    print(ray.get(ray.remote(num_cpus=0)(lambda: 41 + 1).remote(), timeout=100))
else:
    print(json.dumps([each for each in named if name in each]))
"""


@dataclass(frozen=True)
class RunningRay:
    """What `ray start --head` makes, on ports of its own."""

    address: str
    program: tuple[str, ...]
    """What trains on it, as arguments of Python."""
    environment: dict[str, str] = field(repr=False)
    """Of what attaches to it, as of its own processes."""

    def train(self, *arguments: str, log: Path, **variables: str) -> subprocess.Popen[str]:
        """Begin a training on it, with what `rayapp train` takes; what it prints is in `log`."""
        return self.run(*self.program, *arguments, log=log, **variables)

    def run(self, *arguments: str, log: Path, **variables: str) -> subprocess.Popen[str]:
        """Python with these arguments."""
        with log.open("w") as sink:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdout=sink,
                stderr=sink,
                text=True,
                cwd=ROOT,
                env=self.environment | {"RAY_ADDRESS": self.address} | variables,
                start_new_session=True,
            )

    def actors(self) -> list[str]:
        """Names of those that live."""
        return self._look("actors")  # type: ignore[no-any-return]

    def computes(self) -> bool:
        """Whether it runs a task and gives back what that returned."""
        return self._look("task") == 42

    def _look(self, what: str, name: str = "", timeout_s: float = 0.0) -> Any:
        command = [sys.executable, "-c", LOOK, self.address, what, name, str(timeout_s)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def wait_until_gone(self, name: str = "") -> None:
        """Until no actor has this in its name. After a driver was killed, all: the next run would find its actors."""
        assert self._look("actors", name, 150.0) == []


@contextmanager
def started_ray(
    folder: Path, program: tuple[str, ...], path: tuple[Path, ...], **variables: str
) -> Iterator[RunningRay]:
    log = folder / "ray.log"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # Ray starts its workers at nice 15: beside another test they would get a tenth of the processor.
    kept |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    kept |= {"RAY_prestart_worker_first_driver": "0"}  # as `ray_session` has it
    kept |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(map(str, path))} | variables
    while True:
        port, head = start_head(log, kept)
        try:
            while "--block" not in log.read_text() and head.poll() is None:
                time.sleep(0.05)
            if head.poll() is None:
                yield RunningRay(f"127.0.0.1:{port}", program, kept)
                return
        finally:
            stop_head(head)
        # The node has 30 s to start, which nothing changes: on a busy machine it takes several tries.
        assert "timed out during startup" in log.read_text(), log.read_text()


def start_head(log: Path, environment: dict[str, str]) -> tuple[int, subprocess.Popen[bytes]]:
    port = free_port()
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        # Short: a Unix socket's path has to fit in 107 bytes.
        f"--temp-dir=/tmp/ra{os.getpid()}", "--num-cpus=4", "--num-gpus=0", "--object-store-memory=200000000",
        "--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--ray-client-server-port={free_port()}",
        # It reads the logs of every process for drivers that would show them, and takes as much as a learner.
        "--disable-usage-stats", "--include-log-monitor=false",
    ]  # fmt: skip
    with log.open("w") as sink:
        return port, subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)


def stop_head(head: subprocess.Popen[bytes]) -> None:
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def start_ray() -> Callable[..., AbstractContextManager[RunningRay]]:
    """Call it with a folder for its log, what trains on it, and where that looks for modules."""
    return started_ray


@pytest.fixture(scope="session")
def standing_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRay]:
    """One Ray for all runs whose servers are scripted, one after the other: none of its workers finds vLLM.

    Its processes have the keys of the E2B stub, of judges and of tools."""
    path = STAND_INS, ROOT, ROOT / "tests"
    with started_ray(tmp_path_factory.mktemp("ray"), (str(SCRIPTED), "train"), path, **KEYS) as ray:
        yield ray


@pytest.fixture(scope="module", params=["scripted", pytest.param("vllm", marks=pytest.mark.long)])
def running_ray(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRay]:
    """One that nobody's run started: on every run the standing one, and with -m long one whose servers are vLLM's."""
    if request.param == "scripted":
        yield request.getfixturevalue("standing_ray")
        return
    folder = tmp_path_factory.mktemp("ray")
    with started_ray(folder, ("-m", "rayapp", "train"), (ROOT,), **KEYS) as ray:
        yield ray
