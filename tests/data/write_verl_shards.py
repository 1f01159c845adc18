"""One of two ranks that train a step under FSDP2 over gloo and save with verl's own checkpoint manager.

Called by tests/unit/storage/test_verl_checkpoints.py with a model, a folder, a rank and a port. Rank 0 also saves the
whole weights, to compare with.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

MODEL, FOLDER, RANK, PORT = sys.argv[1:]
WORLD_SIZE = 2
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "RANK": RANK, "WORLD_SIZE": str(WORLD_SIZE)}
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.arange(3, 15)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()

manager = FSDPCheckpointManager(model, optimizer, processing_class=AutoTokenizer.from_pretrained(MODEL))
manager.save_checkpoint(str(Path(FOLDER) / "global_step_1" / "actor"), global_step=1)
whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
if RANK == "0":
    torch.save(whole, Path(FOLDER) / "whole.pt")
dist.destroy_process_group()
