"""vLLM's transports between GPUs, on a machine without one: learners' ranks and engines' workers as forked processes.

    python cuda_transports.py MODEL OUT DEADLINE_S nccl ipc nccl-order ...

Our sender and vLLM's packers, trainer engines and worker engines run as they are. What they need of CUDA is replaced:
device memory by the host's, a stream by a thread that does what is queued on it in order, NCCL by gloo, an IPC handle
by a file. As on a GPU, a gather or broadcast is only queued when the call returns, so a wrong order hangs or garbles.

A case is a transport, and maybe what goes wrong in it: `order`, one learner walks its tensors backwards; `buckets`, the
workers cut them otherwise than the learners. Each process of a case writes OUT/CASE/NAME.json: the collectives in the
order in which its streams did them, and CRCs of the tensors. OUT/CASE/status is 0 if all ended, 1 if one failed, 3 if
some still waited at the deadline; who waited, and for what, is printed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.multiprocessing.reductions as reductions
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

import rayapp.learner.state.sender as sender
from actors.learner import Learner
from rayapp.config.config import Config
from rayapp.engine.weights.sync import TransferRanks, transfer_plan
from support.gloo import GlooGroup
from support.ports import free_port

LEARNERS, ENGINES, TP = 8, 4, 2
BUCKET_BYTES = 1 << 12
"""Several buckets for a tiny model; a larger tensor than this makes them as large."""


class Stream:
    """A CUDA stream: what is queued runs in this order, in a thread of its own."""

    def __init__(self, device: Any = None, name: str = "") -> None:
        self._tasks: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue()
        self._name = name or f"stream {id(self) % 9973}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            what, task = self._tasks.get()
            Cuda.now[self._name] = what
            try:
                task()
            except Exception as error:  # gloo notices what NCCL does not, and NCCL waits for ever
                tell(f"{Cuda.uuid}, {what}: {str(error).splitlines()[0]}")
                threading.Event().wait()
            Cuda.done.append(what)
            del Cuda.now[self._name]
            self._tasks.task_done()

    def put(self, what: str, task: Callable[[], None]) -> None:
        self._tasks.put((what, task))

    def synchronize(self) -> None:
        self._tasks.join()


class Cuda:
    """The device of this process."""

    uuid = ""
    done: ClassVar[list[str]] = []
    """Collectives that have ended, in their order."""
    now: ClassVar[dict[str, str]] = {}
    """By stream, the collective that it is in."""
    default: Stream
    current = threading.local()

    @classmethod
    def start(cls, uuid: str) -> None:
        """Replace what the transports use of torch. Streams are threads, so after the fork."""
        cls.uuid, cls.default = uuid, Stream(name="default stream")
        OnHost().__enter__()
        cuda: Any = torch.cuda
        cuda.is_available, cuda.Stream, cuda.stream = lambda: True, Stream, cls.within
        cuda.current_stream = lambda device=None: getattr(cls.current, "stream", cls.default)
        cuda.default_stream = lambda device=None: cls.default
        cuda.synchronize = torch.accelerator.synchronize = cls.default.synchronize
        cuda.ipc_collect = lambda: None
        cuda.get_device_properties = lambda device: SimpleNamespace(uuid=cls.uuid)
        torch.accelerator.current_device_index = lambda: 0
        torch._C._accelerator_setAllocatorSettings = lambda settings: None
        packed_tensor.reduce_tensor = shared_file
        reductions.rebuild_cuda_tensor = lambda *args: torch.from_file(
            args[0], shared=True, size=args[1], dtype=torch.uint8
        )
        nccl_common.stateless_init_process_group = nccl_engine.stateless_init_process_group = Communicator
        DTensor.full_tensor = queued_gather
        torch.Tensor.record_stream = lambda self, stream: None

    @classmethod
    @contextmanager
    def within(cls, stream: Stream) -> Iterator[None]:
        before = getattr(cls.current, "stream", cls.default)
        cls.current.stream = stream
        yield
        cls.current.stream = before


class OnHost(TorchFunctionMode):
    """Whatever is asked for on a GPU is made on the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return function(*args, **kwargs or {})
        args = tuple(on_host(value) for value in args)
        return function(*args, **{name: on_host(value) for name, value in (kwargs or {}).items()})


def on_host(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if is_device else value


full_tensor = DTensor.full_tensor


def queued_gather(sharded: Any) -> torch.Tensor:
    whole = torch.full(sharded.shape, torch.nan, dtype=sharded.dtype)

    def run() -> None:
        whole.copy_(full_tensor(sharded))

    torch.cuda.current_stream().put(f"gather {tuple(sharded.shape)}", run)
    return whole


class Communicator:
    """vLLM's NCCL communicator over gloo."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, device: Any) -> None:
        self._group = GlooGroup(address, port, rank=rank, world_size=world_size, timeout_s=120)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        def run() -> None:
            self._group.broadcast(tensor, src)

        (stream or torch.cuda.current_stream()).put(f"broadcast {tensor.numel()}", run)
        # What is queued behind it on a GPU runs on the host here.
        if Cuda.uuid.startswith("worker"):
            torch.cuda.current_stream().synchronize()

    def destroy(self) -> None:
        self._group.destroy()


def shared_file(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """An IPC handle: device memory becomes a file, and the device's index is the seventh value."""
    path = str(OUT / f"{Cuda.uuid}-{time.monotonic_ns()}")
    size = tensor.numel()
    tensor.set_(torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
    return None, (path, size, None, None, None, None, 0)


def opened_file(path: str, size: int, *_: Any) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class Model(torch.nn.Module):
    """Takes weights as a worker's model does, and keeps their CRCs."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = {}

    def load_weights(self, weights: Any) -> None:
        self.held |= {name: crc(tensor) for name, tensor in weights}


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def worker(name: str, rank: int, calls: Connection) -> None:
    """One tensor-parallel rank of an engine: vLLM's receiver, and the calls that reach it."""
    # Colocated workers are on the GPU of the learner of their number.
    Cuda.start(name if TRANSPORT == "nccl" else f"gpu-{rank}")
    model = Model()
    record_metadata_for_reloading(model)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=TP, rank=rank % TP)
    kind = nccl_engine.NCCLWeightTransferEngine if TRANSPORT == "nccl" else ipc_engine.IPCWeightTransferEngine
    settings: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine: Any = kind(None, settings, torch.device("cuda", 0), model)  # type: ignore[arg-type]
    actions: dict[str, Callable[..., Any]] = {
        "init": lambda info: engine.init_transfer_engine(engine.parse_init_info(info)),
        "start": engine.start_weight_update,
        "update": engine.update_weights,
        "finish": engine.finish_weight_update,
    }
    while (call := calls.recv()) is not None:
        what, *args = call
        calls.send(actions[what](*args))
    write(name, model.held)


class Engines:
    """All workers, as vLLM's trainer engines call them."""

    def __init__(self, plan: TransferRanks, workers: Sequence[Connection]) -> None:
        self._plan, self._workers = plan, workers

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        if FAULT == "buckets":
            info = info | {"packed_buffer_size_bytes": info["packed_buffer_size_bytes"] // 2}
        offsets = [offset for offset in self._plan.rank_offsets for _ in range(TP)]
        infos = [info | {"rank_offset": offset} if "rank_offset" in info else info for offset in offsets]
        self._all([("init", own) for own in infos])

    def start_weight_update(self) -> None:
        self._all([("start",)] * len(self._workers))

    def update_weights(self, info: Any) -> None:
        self._all([("update", info)] * len(self._workers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all([("finish",)] * len(self._workers))

    def _all(self, calls: list[tuple[Any, ...]]) -> None:
        for connection, call in zip(self._workers, calls, strict=True):
            connection.send(call)
        for connection in self._workers:
            connection.recv()


class Backwards(sender.LearnerSource):
    """A rank that walks its tensors from the last one to the first."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in reversed(list(self._model.causal_lm.named_parameters())):
            yield name, parameter.full_tensor()


def config() -> Config:
    return Config.model_validate(
        {
            "model": {"path": MODEL}, "cluster": {"device": "cpu"},
            "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 32},
            "server": {"num_servers": ENGINES, "tensor_parallel_size": TP},
            "learner": {"num_learners": LEARNERS, "max_tokens_per_microbatch": 256, "cpu_threads": 1},
        }
    )  # fmt: skip


def learner(name: str, rank: int, ports: tuple[int, int], workers: Sequence[Connection]) -> None:
    """One rank of the learners, with our sender over vLLM's trainer engine."""
    settings = config()
    made = Learner(settings, rank, LEARNERS, "127.0.0.1", ports[0])
    Cuda.start(f"gpu-{rank}")
    model, lora = made._learner.model, settings.learner.lora
    kind = Backwards if FAULT == "order" and rank == 3 else sender.LearnerSource
    source = kind(model, lora, torch.device("cuda", 0))
    plan = replace(transfer_plan(settings.server, "nccl" if TRANSPORT == "nccl" else "ipc"), bucket_bytes=BUCKET_BYTES)
    client = Engines(plan, workers)
    address = ("127.0.0.1", ports[1])
    sending = sender.WeightSender(plan, source, rank=rank, client=client, address=address, timeout_s=DEADLINE_S)
    for _ in range(2):
        sending.send()
    write(name, {given: crc(tensor) for given, tensor in source})
    for connection in workers:
        connection.send(None)


def write(name: str, tensors: dict[str, int]) -> None:
    (OUT / f"{name}.json").write_text(json.dumps({"order": Cuda.done, "tensors": tensors}))


def in_fork(run: Callable[..., None], name: str, *args: Any) -> None:
    """Ends as soon as it is done: streams and groups may wait for ever. Tells at the deadline what it is in."""

    def end_late() -> None:
        time.sleep(DEADLINE_S)
        waits = ", ".join(f"{what} on {stream}" for stream, what in Cuda.now.items()) or "no stream"
        tell(f"{name} waits after {len(Cuda.done)} collectives: in {waits}")
        os._exit(3)

    threading.Thread(target=end_late, daemon=True).start()
    try:
        run(name, *args)
    except BaseException:  # printed for whoever reads the test's output
        tell(f"{name}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def tell(text: str) -> None:
    """Without Python's buffers, whose locks may have been held at the fork."""
    os.write(1, f"{text}\n".encode())


def run_case() -> int:
    fork, ports = multiprocessing.get_context("fork"), (free_port(), free_port())
    pipes = [fork.Pipe() for _ in range(ENGINES * TP)]
    ends = [end for end, _ in pipes]
    roles: list[tuple[Any, ...]] = [(worker, f"worker-{rank}", rank, end) for rank, (_, end) in enumerate(pipes)]
    roles += [(learner, f"learner-{rank}", rank, ports, () if rank else ends) for rank in range(LEARNERS)]
    processes = [fork.Process(target=in_fork, args=role) for role in roles]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(process.exitcode or 0 for process in processes)


if __name__ == "__main__":
    MODEL, DEADLINE_S = sys.argv[1], float(sys.argv[3])
    for case in sys.argv[4:]:
        OUT = Path(sys.argv[2], case)
        OUT.mkdir()
        TRANSPORT, _, FAULT = case.partition("-")
        (OUT / "status").write_text(str(run_case()))
