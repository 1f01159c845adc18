"""Conditions of every test: no network, no leftover settings, and GPU or provider tests only where they can run."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

# Set before transformers or Ray is imported: tests must not wait for an unreachable hub, nor report usage.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Three test files run at a time on two cores: two threads of one file would wait for each other in every operator.
# Passive: threads of programs that set their own number don't spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A separate Ray for every test, never one that happens to run on this machine.
os.environ["RAY_ADDRESS"] = "local"
os.environ["RAY_AUTH_MODE"] = "disabled"
# Test servers are on this machine: reach them without a proxy.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1,::1"
# Test programs import `support` too; pytest itself finds it by `pythonpath`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))))
# Tests read plain text, though some CI runners claim to be terminals.
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)

# Hypothesis' limits of 200 ms per example, and of a second to draw some, are too short on a busy machine.
suppressed = [HealthCheck.too_slow]
settings.register_profile("busy machine", settings.default, deadline=None, suppress_health_check=suppressed)
settings.load_profile("busy machine")

DATA = Path(__file__).parent / "data"
STAND_INS = DATA / "stand_ins"
"""Folder for PYTHONPATH: processes with it find stand-ins in place of vLLM's engine and tool parsers."""

LONGEST_FIRST = (
    "standing_ray",
    "vllm",
    "cluster/test_vllm_families.py",
    "unit/test_environments.py",
    "e2e/test_resume.py",
    "cluster/test_recovery.py",
    "cluster/test_jobs.py",
    "e2e",
    "cluster",
    "browser",
    "adversarial/test_attacks.py",
    "unit/test_families.py",
    "unit/test_provider.py",
    "unit/test_mirror.py",
    "contracts",
    "adversarial",
    "unit",
)
"""Groups, files and folders, longest first: short ones come last, so that all processes end at about the same time."""

SLOW_UNITS = frozenset(
    f"unit/test_{name}.py"
    for name in (
        "families", "provider", "mirror", "token_budget", "step", "audit", "bad_input", "traces", "packing",
        "supervised", "checkpoints", "trackers", "exactness", "kuberay",
        "view_server", "task_agents", "models_fetch_and_check", "doctor", "data_prepare", "models_prefetch", "algo",
        "imports", "external_agent", "server", "tutorial",
    )
)  # fmt: skip
"""Files of unit/ that take over ten seconds each, three quarters of the room's time: `make test-fast` leaves them
out."""

GROUPS = {
    "cluster": {
        "vllm": "tensor_parallel engine_in_flight weight_group vllm_adapter vllm_experts vllm_server vllm_gateway",
    },
    "contracts": {"vllm": "tool_parsers", "images": "sandbox_contract"},
    "adversarial": {"images": "attacks"},
    "unit": {
        "vllm": "vllm_adapter vllm_worker monitoring",
        "mlflow": "traces trackers",
        "images": "pull tree",
    },
    "e2e": {
        "standing_ray": (
            "attached judges sources sft coding_agent killed_driver bad_input tools_at_start namespace "
            "benchmarks tools trl smoke"
        ),
    },
}
"""By folder: files that one process runs one after the other. Importing vLLM takes longer than starting an engine, and
runs with scripted servers share one Ray. Sandboxes on images share a user, whose processes the attacks' test counts."""

TOGETHER = {
    f"{folder}/test_{name}.py": group
    for folder, groups in GROUPS.items()
    for group, names in groups.items()
    for name in names.split()
}


def pytest_configure() -> None:
    # Handle SIGTERM like Ctrl-C: fixtures end what they started. Otherwise `timeout` leaves whole Rays behind, and
    # their locks.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # `nohup`, a script's `make test &` and many CI runners start us with Ctrl-C ignored. Programs that tests start
    # would inherit that, as they would a blocked signal. A handler is not inherited: they begin as in a terminal.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    gc.disable()  # it would scan the thousands of imported modules again and again
    result = yield
    gc.enable()
    gc.freeze()
    return result


@pytest.hookimpl(optionalhook=True)  # of xdist, if it is enabled
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # xdist's own groups (`--dist loadgroup`) don't work: xdist 3.8 does not see them under pytest 9.2.
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Together(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.nodeid))
    for item in items:
        if _file(item.nodeid) in SLOW_UNITS:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _place(nodeid: str) -> int:
    """Return the place in LONGEST_FIRST of a test's group, else its file, else its folder; unlisted tests come
    first."""
    file = _file(nodeid)
    names = (_group(nodeid), file, file.partition("/")[0])
    return next((LONGEST_FIRST.index(name) for name in names if name in LONGEST_FIRST), -1)


def _group(nodeid: str) -> str:
    """Return the group of a test: one process runs the tests of a group one after the other. By default a group is a
    file."""
    return TOGETHER.get(_file(nodeid), nodeid.partition("::")[0])


def _file(nodeid: str) -> str:
    """Return `unit/test_x.py`, for whatever subfolder of unit/ the file is in."""
    parts = nodeid.partition("::")[0].removeprefix("tests/").split("/")
    return f"{parts[0]}/{parts[-1]}"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where no namespaces can be made, as in an ordinary container: code in a sandbox then writes no files and
    starts no programs."""
    from rayapp.sandbox.local.doctor import examine

    report = asyncio.run(examine(levels=("ns",)))
    if report.level == "none":
        pytest.skip(f"no namespaces: {report.refused}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[Any]:
    """A pool of two local sandboxes, for the tests of a module that share one event loop."""
    from rayapp.config.sandbox import SandboxConfig
    from rayapp.sandbox.pool.build import open_pool

    async with open_pool(SandboxConfig(max_leases=2), "tests") as (source, _):
        yield source


@pytest.fixture(scope="module")
def stand_in_engines() -> Iterator[None]:
    """Let processes that the module's tests start find stand-ins in place of vLLM."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(STAND_INS), prepend=os.pathsep)
        environment.setenv("RAY_prestart_worker_first_driver", "0")  # as in `ray_session`
        yield


TASK = '''
"""Pays for the letter a: a reward that random weights get some of, and more after a few steps."""

from dataclasses import dataclass

import numpy as np

from rayapp.core.types import Prompt, Reward, SandboxSpec


@dataclass(frozen=True)
class Letters:
    name: str

    def render(self, tokenizer):
        text = f"{self.name}: write"
        return Prompt(task=self.name, text=text, token_ids=np.array(tokenizer.encode(text), np.int32))

    async def score(self, prompt, completion_text, sandboxes, *, seed):
        code = "def count(text):\\n    return text.count('a')"
        async with sandboxes.lease(SandboxSpec(), timeout_s=60.0) as sandbox:
            report = await sandbox.call_function(code, "count", [(completion_text,)], timeout_s=20.0)
        count = report.calls[0].value
        return Reward(value=count / 4, terms={"pass_rate": min(1.0, count / 4), "solved": float(count >= 4)})


TASK = Letters(name="NAME")
'''


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers and four heads with random weights, over single characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from support.learners import save_llama

    folder = tmp_path_factory.mktemp("models") / "tiny"
    letters = ["<pad>", "<eos>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return save_llama(
        folder,
        dtype="bfloat16",
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


@pytest.fixture(scope="session")
def images() -> Iterator[Any]:
    """Images with this machine's programs; see `support.images`."""
    from support.images import machine_images

    if not (shutil.which("skopeo") and shutil.which("umoci")):
        pytest.skip("needs Debian's skopeo and umoci")
    with machine_images() as found:
        yield found


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """An S3 service: each test that stores something makes a bucket of its own."""
    pytest.importorskip("moto", reason="needs the development package moto[server]")
    from support.storage.moto_server import MotoServer

    server = MotoServer()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3_environment(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def letter_tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two task files."""
    folder = tmp_path_factory.mktemp("tasks")
    paths = [folder / "first.py", folder / "second.py"]
    for path in paths:
        path.write_text(TASK.replace("NAME", path.stem))
    return [str(path) for path in paths]


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """Return a tokenizer with bytes as tokens, and ChatML's two control tokens: any text is kept. No chat template."""
    return byte_tokenizer("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class ChatFamily:
    """A tokenizer with the control tokens of a model family, and a chat template in its form."""

    tokenizer: Any
    template: str


CONTROL_TOKENS: dict[str, tuple[str, str]] = {
    "llama": (
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|> <|eom_id|> <|eot_id|>",
        "",
    ),
    "deepseek_v3": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        (
            "<｜User｜> <｜Assistant｜> <｜tool▁sep｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> "
            "<｜tool▁call▁end｜> <｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek_v31": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        (
            "<｜User｜> <｜Assistant｜> <｜tool▁sep｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> "
            "<｜tool▁call▁end｜> <｜tool▁calls▁end｜> <think> </think>"
        ),
    ),
    "pythonic": ("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>", ""),
    "glm45": (
        "<|user|> <|assistant|> <|observation|> <|endoftext|>",
        "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "qwen3_coder": ("<|im_start|> <|endoftext|> <|im_end|>", "<tool_call> </tool_call> <think> </think>"),
    "mistral": ("<s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] </s>", ""),
    "gpt_oss": ("<|start|> <|channel|> <|message|> <|constrain|> <|call|> <|end|> <|return|>", ""),
}
"""By family in tests/data/chat_templates: special tokens, of which the last ends a turn, and tokens that are only
added."""


@pytest.fixture(scope="session")
def chat_family() -> Callable[[str], ChatFamily]:
    """A model family by name."""

    @cache
    def family(name: str) -> ChatFamily:
        special, added = CONTROL_TOKENS[name]
        template = (Path(__file__).parent / "data" / "chat_templates" / f"{name}.jinja").read_text()
        return ChatFamily(byte_tokenizer(*special.split(), added=added.split()), template)

    return family


def byte_tokenizer(*special: str, added: Sequence[str] = ()) -> Any:
    """Return a tokenizer with bytes as tokens, control tokens of which the last ends a turn, and added tokens that are
    not marked as special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[-1], additional_special_tokens=list(special)
    )
