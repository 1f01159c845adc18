"""Building blocks for tests of the learner: small models, trajectories, a learner without actors. Used by tests
only."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from rayapp.sandbox.local.levels import kernel
from support.ports import free_port

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from torch.distributed.tensor import DTensor

    from rayapp.config.config import Config
    from rayapp.core.types import FloatArray, Group
    from rayapp.engine.weights.buckets import WeightBucket
    from rayapp.learner.distributed import Ranks
    from rayapp.learner.step import PolicyLearner


def import_learner(*families: str) -> None:
    """Import the modules of learners in a process that is going to fork them; otherwise each learner spends 5 seconds
    on imports.

    Args:
        families: further model families, besides Llama, by the names of their folders in transformers.
    """
    from torch.distributed import checkpoint, fsdp  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

    for family in ("llama", *families):
        import_module(f"transformers.models.{family}.modeling_{family}")

    from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: F401
    from verl.workers.config import actor  # noqa: F401

    from rayapp.learner import build, supervised  # noqa: F401
    from rayapp.learner.memory import idle  # noqa: F401
    from rayapp.learner.state import checkpoint as saving  # noqa: F401
    from rayapp.learner.state import export  # noqa: F401


Run = Callable[[int, int, Callable[[], int]], None]


def fork_ranks(world_size: int, run: Run) -> None:
    """Run a world of learners, each in a fork of this process.

    Args:
        run: called in each fork with the world size, its rank, and a function that returns the port of the next store,
            the same for all ranks. The port is chosen only at that call: another program could take a port chosen
            earlier.

    Raises:
        SystemExit: a rank failed. The others, which would wait for it, are ended.
    """
    fork = multiprocessing.get_context("fork")
    ports: list[SimpleQueue[int]] = [fork.SimpleQueue() for _ in range(world_size)]

    def next_port(rank: int) -> int:
        if rank == 0:
            port = free_port()
            for queue in ports:
                queue.put(port)
        return ports[rank].get()

    ranks = [
        fork.Process(target=_run_rank, args=(run, world_size, rank, partial(next_port, rank)))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    while running := [process for process in ranks if process.exitcode is None]:
        wait([process.sentinel for process in running])
        for rank, process in enumerate(ranks):
            if process.exitcode:
                for other in running:
                    other.kill()
                raise SystemExit(f"rank {rank} of {world_size} ended with status {process.exitcode}")


def _run_rank(run: Run, world_size: int, rank: int, next_port: Callable[[], int]) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    run(world_size, rank, next_port)


def whole_weights(learner: PolicyLearner) -> dict[str, NDArray[np.float32]]:
    """Return copies of all weights, by name. A collective call: every rank gets all of them."""
    parameters = cast("Iterable[tuple[str, DTensor]]", learner.model.named_parameters())
    return {name: parameter.full_tensor().detach().numpy().copy() for name, parameter in parameters}


def take_sgd(learner: PolicyLearner) -> None:
    """Replace the optimizer by plain SGD with learning rate 1, so that a step moves the weights by their gradient."""
    import torch

    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)  # type: ignore[assignment]
    section = learner.config.learner
    section = section.model_copy(update={"optimizer": section.optimizer.model_copy(update={"lr": 1.0})})
    learner.config = learner.config.model_copy(update={"learner": section})


SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def save_llama(folder: Path, *, dtype: str = "float32", **shape: float | bool | None) -> Path:
    """Save a Llama with random weights, without a tokenizer, as a Hugging Face folder.

    Args:
        shape: fields of its `LlamaConfig`, added to SHAPE or replacing some of it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | shape)))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def take_step(learner: PolicyLearner, groups: Sequence[Group], number: int = 1) -> dict[str, float]:
    """Train this step on this rank's share of the groups. Return its metrics. Collective."""
    from rayapp.core.trajectories import summarize_group
    from rayapp.learner.shares import deal

    summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
    ranks = learner.ranks
    mine = deal(summaries, learner.config, ranks.world_size // ranks.num_parts)[ranks.data_rank]
    return learner.train_step(number, summaries, mine, [groups[share.position] for share in mine])


@contextmanager
def counted_operators() -> Iterator[Counter[str]]:
    """Yield the number of calls of each of torch's operators in the block, by name, such as `aten::mm.dtype`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = Counter[str]()

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(func._schema).partition("(")[0]] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        yield counts


@contextmanager
def learner_alone(config: Config) -> Iterator[tuple[PolicyLearner, Ranks]]:
    """Yield a learner that is the only rank, in this process."""
    from rayapp.learner.build import build_learner
    from rayapp.learner.distributed import only_rank

    with only_rank(config) as ranks:
        yield build_learner(config, ranks), ranks


MAX_LOG_PROB_DIFFERENCE = 0.05
"""bfloat16 has 8 bits of mantissa: logits of size 4 differ by up to 1/64 between two orders of summation."""


def plain_log_probs(folder: Path, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the log-probs of every token but the first, (T - 1,), as plain transformers computes them in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].float().log_softmax(-1)
    return cast("NDArray[np.float32]", scores.gather(1, ids[0, 1:, None])[:, 0].numpy())


def save_moved(source: Path, folder: Path, *, noise: float, dtype: str = "bfloat16") -> Path:
    """Save a copy of a model, all of whose weights are moved by random numbers of this size."""
    import torch
    from transformers import AutoModelForCausalLM

    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder)
    return folder


def exported(
    config: Config, tokens: Sequence[int], *, version: int = 0, bucket_bytes: int = 1 << 20
) -> tuple[list[WeightBucket], FloatArray]:
    """Return what a learner sends as this version, and its log-probs of the tokens after the first four."""
    from actors.learner import Learner
    from support import make

    learner = Learner(config, 0, 1, "", 0)
    try:
        group = make.group(make.trajectory(tokens, 4))
        return list(learner.export_weights(version, bucket_bytes)), learner.log_probs_of(group)[0]
    finally:
        learner.close()
