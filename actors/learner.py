"""`learner-N`: one rank of the policy's training. A thin actor around `rayapp.learner`.

Every method but `log_probs_before`, `profile` and `log_probs_of` is collective. PyTorch is imported where it
is used: the driver imports this module, too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from actors.handles import VllmServerHandle
from actors.progress import Progress
from actors.spawn import free_address
from rayapp.config.config import Config
from rayapp.core.errors import LearnerError, RayappError, WeightSyncError, first_line
from rayapp.core.logs import about, label_logs
from rayapp.core.timing import Profile
from rayapp.core.types import FloatArray, Group, GroupSummary, Trajectory
from rayapp.engine.weights.buckets import WeightBucket
from rayapp.engine.weights.sync import TransferRanks
from rayapp.learner.shares import Shares
from rayapp.storage.models.fetch import with_local_model
from rayapp.storage.models.nf4 import shape_of

if TYPE_CHECKING:
    import torch

    from rayapp.learner.state.checkpoint import SaveInProgress
    from rayapp.learner.state.sender import LearnerSource, WeightSender
    from rayapp.learner.step import PolicyLearner


class ServersClient:
    """Client through which learner 0 calls the servers during a weight sync, with a deadline and with distinct ranks.

    vLLM's own client for Ray waits without a deadline and gives all engines the same ranks. The methods are the four
    control calls of vLLM's `VLLMWeightSyncClient`, called from plain threads.
    """

    def __init__(self, servers: Sequence[VllmServerHandle], plan: TransferRanks, timeout_s: float) -> None:
        self._servers = servers
        self._plan = plan
        self._timeout_s = timeout_s
        self._version = 0
        self._source: LearnerSource | None = None
        self.num_loaded = 0  # tensors of the last update, the same on every server

    def announce(self, version: int, source: LearnerSource) -> None:
        """Set the version that the next `finish_weight_update` sends, with the checksums of `source`."""
        self._version, self._source = version, source

    def check(self) -> None:
        """Raise WeightSyncError if a server is not up: vLLM's rendezvous over NCCL waits 300 s for one that is gone."""
        self._all("ping", [server.actor.ping.remote() for server in self._servers])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all(
            "join_weight_group",
            [server.actor.join_weight_group.remote(info) for server, info in self.init_infos(init_info)],
        )

    def init_infos(self, init_info: dict[str, Any]) -> list[tuple[VllmServerHandle, dict[str, Any]]]:
        """Return each server with its init info. Ranks in it are distinct; vLLM gives rank 1 to every server."""
        if "rank_offset" not in init_info:
            return [(server, init_info) for server in self._servers]
        offsets = self._plan.rank_offsets
        return [(s, init_info | {"rank_offset": offset}) for s, offset in zip(self._servers, offsets, strict=True)]

    def start_weight_update(self) -> None:
        self._all("begin_update", [server.actor.begin_update.remote() for server in self._servers])

    def update_weights(self, update_info: Any) -> None:
        self._all("receive_weights", [server.actor.receive_weights.remote(update_info) for server in self._servers])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._source is not None, "announce comes first"
        checksums, num_sent = self._source.sums.read(), self._source.sums.num_tensors
        refs = [server.actor.finish_update.remote(self._version, checksums) for server in self._servers]
        loaded = self._all("finish_update", refs)
        if set(loaded) != {num_sent}:
            raise WeightSyncError(f"the servers loaded {loaded} tensors, and {num_sent} were sent")
        self.num_loaded = num_sent

    def _all(self, what: str, refs: list[Any]) -> list[Any]:
        # Ends when one has failed: the others may be waiting for it.
        name_of = {ref: server.name for server, ref in zip(self._servers, refs, strict=True)}
        deadline, late, answers = time.monotonic() + self._timeout_s, refs, []
        while late:
            answered, late = ray.wait(late, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
            if not answered:
                raise WeightSyncError(
                    f"{', '.join(f'{name_of[ref]}.{what}' for ref in late)} did not answer within "
                    f"{self._timeout_s:g} s (a fifth of server.start_timeout_s)"
                )
            for ref in answered:
                try:
                    answers.append(ray.get(ref, timeout=self._timeout_s))
                except (RayError, RayappError) as error:
                    reason = str(error).strip().splitlines()[-1]
                    raise WeightSyncError(f"{name_of[ref]}.{what}: {reason}") from error
        return answers


log = logging.getLogger(__name__)


class Learner:
    """Actor of one learner rank. The other ranks reach rank 0 at `master_address`, `master_port`."""

    def __init__(self, config: Config, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        self._rank = rank  # set it first, because Ray calls __repr__ even if __init__ fails
        from rayapp.learner.build import import_ahead
        from rayapp.learner.memory.idle import IdleMemory

        label_logs(config.run.name)
        if config.cluster.device != "cpu":
            import_ahead(compiles=config.compiles(on_gpu=True))
        self._config = with_local_model(config)
        self._world_size, self._master_address, self._master_port = world_size, master_address, master_port
        self._idle = IdleMemory()
        self._is_first = True  # until the first step is trained, whose memory is compared with the plan
        self._saving: SaveInProgress | None = None
        self._sender: WeightSender | None = None
        self._client: ServersClient | None = None

    @cached_property
    def _learner(self) -> PolicyLearner:
        """The learner of this rank, loaded when all ranks first use it."""
        from torch.distributed import DistError

        from rayapp.learner.build import build_learner
        from rayapp.learner.distributed import end_ranks, start_ranks

        address, port = self._master_address, self._master_port
        try:
            ranks = start_ranks(self._config, self._rank, self._world_size, address, port)
        except DistError as error:
            raise LearnerError(
                f"learner {self._rank} of {self._world_size} did not find the other learners at {address}:{port}: "
                f"{first_line(error)}. Ray's logs of the other learners (dashboard, Actors) show whether they ended, "
                "and why. If another program took that port, start the run again: every start uses another port."
            ) from None
        try:
            learner = build_learner(self._config, ranks)
        except BaseException:
            end_ranks()
            raise
        if self._rank == 0:
            learner.on_micro_batch = Progress().tell
        return learner

    def __repr__(self) -> str:
        return f"learner-{self._rank}"

    @contextmanager
    def _borrowing_gpu(self, *, weights: bool = True, trains: bool = False) -> Iterator[None]:
        """Frees the GPU's memory at the end, for a server that shares it. The computation needs the model's `weights`,
        or (`trains`) also the optimizer's state and the frozen models."""
        from rayapp.learner.memory.idle import moments_of, weights_of

        learner = self._learner
        try:
            if weights:
                self._idle.fetch(weights_of(learner.model, *(learner.frozen.values() if trains else ())))
            if trains:
                self._idle.fetch(moments_of(learner.optimizer))
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        # When every rank has released its GPU memory, the driver wakes the servers.
        from rayapp.learner.distributed import give_back_memory
        from rayapp.learner.memory.idle import moments_of, weights_of

        learner = self._learner
        if self._config.learner.offload_when_idle:
            self._idle.park(weights_of(learner.model, *learner.frozen.values()))
            self._idle.park(moments_of(learner.optimizer))
        give_back_memory(self._config.cluster, learner.ranks.device)

    def ready(self) -> dict[str, Any]:
        """Load the model, and free the GPU's memory for a server that shares it."""
        self._rest()
        parameters = sum(shape_of(parameter).numel() for parameter in self._learner.model.parameters())
        ranks = self._learner.ranks
        return {"rank": ranks.rank, "device": str(ranks.device), "num_parameters": parameters}

    def train_step(
        self, step: int, summaries: tuple[GroupSummary, ...], shares: Shares, *groups: Group
    ) -> dict[str, float]:
        """Train one step on all groups of `summaries`; `groups` are those of `shares[data rank]`, in its order. Metrics
        of rank 0 cover all ranks."""
        from rayapp.learner.memory.token_budget import beside_plan

        learner, memory = self._learner, dict[str, float]()
        is_first, self._is_first = self._is_first, False
        with about(step=step), self._borrowing_gpu(trains=True):
            with beside_plan(learner.config, learner.ranks.device, memory) if is_first else nullcontext():
                metrics = learner.train_step(step, summaries, shares[learner.ranks.data_rank], groups)
            log.info("trained on %d groups: loss %.4g", len(groups), metrics.get("learner/loss", math.nan))
        return metrics | memory

    def supervised_step(
        self, step: int, rows: tuple[Trajectory, ...], pictures: Mapping[str, bytes]
    ) -> dict[str, float]:
        """Take one optimizer step on demonstrations, of which `rows` is this rank's part."""
        from rayapp.learner.supervised import supervised_step

        with about(step=step), self._borrowing_gpu(trains=True):
            metrics = supervised_step(self._learner, step, rows, pictures)
            log.info("learned from %d demonstrations: loss %.4g", len(rows), metrics["sft/loss"])
        return metrics

    def supervised_loss(self, rows: tuple[Trajectory, ...], pictures: Mapping[str, bytes]) -> float:
        from rayapp.learner.supervised import supervised_loss

        with self._borrowing_gpu():
            return supervised_loss(self._learner, rows, pictures)

    def log_probs_before(self) -> dict[int, FloatArray]:
        return self._learner.log_probs_before

    def profile(self) -> Profile | None:
        return self._learner.profile

    def export_weights(self, version: int, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Yield the weights of a version by their Hugging Face names. All ranks gather; only rank 0 yields."""
        from rayapp.learner.state.export import export_buckets

        rank, lora = self._learner.ranks.rank, self._config.learner.lora
        with self._borrowing_gpu():
            yield from export_buckets(self._learner.model, bucket_bytes, self._formats(version), rank=rank, lora=lora)

    def _formats(self, version: int) -> tuple[torch.dtype, ...]:
        # After the last step servers get the weights of `final/`, so that the last evaluation is of the model that is
        # saved.
        from rayapp.learner.policy import DTYPES

        config = self._learner.config
        is_last = version == config.train.num_steps
        names = [*([config.checkpoint.final_dtype] if is_last else []), config.server.dtype]
        return tuple(DTYPES[name] for name in names)

    def free_address(self) -> tuple[str, int]:
        return free_address()

    def open_weight_group(
        self, servers: tuple[VllmServerHandle, ...], plan: TransferRanks, address: tuple[str, int], timeout_s: float
    ) -> None:
        """Form the group through which `send_weights` reaches the engines. Rank 0 listens at `address`."""
        # Import the sender here: it imports vLLM, which learners with other transports don't need.
        from rayapp.learner.state.sender import LearnerSource, WeightSender

        if self._sender is not None:
            self._sender.close()
        self._client = ServersClient(servers, plan, timeout_s)
        if self._learner.ranks.rank == 0:
            self._client.check()
        self._sender = WeightSender(
            plan,
            LearnerSource(
                self._learner.model, self._config.learner.lora, self._learner.ranks.device, *self._formats(0)
            ),
            rank=self._learner.ranks.rank,
            client=self._client,
            address=address,
            timeout_s=timeout_s,
        )

    def send_weights(self, version: int) -> dict[str, float]:
        """Send the current weights to every server of the group, as policy version `version`. WeightSyncError: a server
        did not get all; the group can't be used any more."""
        assert self._sender is not None, "open_weight_group comes first"
        assert self._client is not None
        started, source = time.monotonic(), self._sender.source
        source.formats = self._formats(version)
        self._client.announce(version, source)
        with self._borrowing_gpu():
            self._sender.send()
        seconds = time.monotonic() - started
        num_loaded = float(self._client.num_loaded)
        return {"bytes": float(source.sums.num_bytes), "seconds": seconds, "num_loaded": num_loaded}

    def begin_checkpoint(self, folder: str, version: int) -> None:
        """Copy the state to host memory and start to write it; call `checkpoint_done` next. Collective."""
        from rayapp.learner.state.checkpoint import begin_save

        assert self._saving is None, "a checkpoint is still being written"
        # Parked state is saved from host memory: a server's KV cache may occupy the GPU.
        with self._borrowing_gpu(weights="hf_model" in self._config.checkpoint.save_contents):
            self._saving = begin_save(self._learner, folder, version, self._idle.on_host)

    def checkpoint_done(self) -> bool:
        """Return whether this rank's part of the checkpoint is written."""
        assert self._saving is not None, "no checkpoint has begun"
        if not self._saving.is_done():
            return False
        saving, self._saving = self._saving, None
        saving.wait()
        return True

    def load_checkpoint(self, folder: str) -> int:
        """Load a checkpoint that any number of ranks wrote; return its policy version."""
        from rayapp.learner.state.checkpoint import load_learner

        with self._borrowing_gpu(trains=True):
            return load_learner(self._learner, folder)

    def export_hf(self, folder: str) -> None:
        from rayapp.learner.state.export import export_hf

        with self._borrowing_gpu():
            export_hf(self._config, self._learner.model, Path(folder), self._learner.ranks)

    def log_probs_of(self, group: Group) -> list[FloatArray]:
        """Return log-probs of each trajectory's response tokens under the current weights. Collective when sharded."""
        from rayapp.learner.supervised import log_probs_of

        with self._borrowing_gpu():
            return log_probs_of(self._learner, group)

    def close(self) -> None:
        from rayapp.learner.distributed import end_ranks

        if self._sender is not None:
            self._sender.close()
        end_ranks()
