"""Runs TRL's GRPOTrainer for `grpo_step.py`, one step at a time, in its own environment. It imports no module of
rayapp.

The script reads one JSON object from its arguments (model, prompts, stop, sizes), and then, on stdin, a line `step` for
each step. On stdout it writes JSON lines: {"ready"}; {"score": [...]}, which the parent answers with a line of rewards;
and after each step {"step": seconds, ...}. The settings are the fastest: bfloat16 parameters (float32 if asked), no
gradient checkpointing, no KL; on a CPU TRL's own generation, on a GPU vLLM in the same process.
"""

import functools
import json
import os
import sys
import time

CHANNEL = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # keep output of libraries out of the JSON lines

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

WORK = json.loads(sys.argv[1])


def send(message):
    CHANNEL.write(json.dumps(message) + "\n")
    CHANNEL.flush()


class Clock:
    """Counts the seconds of named parts within one step."""

    def __init__(self):
        self.seconds, self.started, self.num_tokens = {}, 0.0, 0

    def wrap(self, name, function):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


CLOCK = Clock()


def reward(prompts, completions, completion_ids, index, **_):
    """Ask the parent process for the rewards. It scores the completions in sandboxes."""
    CLOCK.num_tokens = sum(len(ids) for ids in completion_ids)
    started = time.perf_counter()
    send({"score": [{"index": i, "text": text} for i, text in zip(index, completions, strict=True)]})
    rewards = json.loads(sys.stdin.readline())
    CLOCK.seconds["score"] = time.perf_counter() - started
    return rewards


class OneStepAtATime(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if sys.stdin.readline().strip() != "step":
            raise SystemExit(0)
        CLOCK.seconds, CLOCK.started = {}, time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        step_s = time.perf_counter() - CLOCK.started
        send({"step": step_s, "completion_tokens": CLOCK.num_tokens, "parts": CLOCK.seconds})


def main():
    torch.set_num_threads(WORK["threads"])
    tokenizer = AutoTokenizer.from_pretrained(WORK["model"])
    on_gpu, has_masters = WORK["device"] == "gpu", WORK["weights"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(WORK["model"], dtype=getattr(torch, WORK["weights"]))
    sampling = {"stop" if on_gpu else "stop_strings": WORK["stop"]} if WORK["stop"] else None
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": WORK["gpu_memory_utilization"],
        "vllm_max_model_length": WORK["max_model_tokens"],
        "vllm_importance_sampling_correction": False,
    }
    dataset = Dataset.from_list([{"prompt": text, "index": i} for i, text in enumerate(WORK["prompts"])])
    config = GRPOConfig(
        output_dir=WORK["output_dir"],
        use_cpu=not on_gpu,
        bf16=has_masters,  # autocast would only cost time where the parameters are already bfloat16
        # Generate all prompts together, but compute the gradient group by group, because all groups at once need 13 GB.
        per_device_train_batch_size=WORK["group_size"],
        gradient_accumulation_steps=WORK["groups_per_step"],
        num_generations=WORK["group_size"],
        max_completion_length=WORK["max_completion_tokens"],
        temperature=1.0,
        beta=0.0,
        learning_rate=WORK["lr"],
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        max_steps=10_000,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=WORK["seed"],
        generation_kwargs=sampling,
        **(vllm if on_gpu else {}),
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=config,
        reward_funcs=reward,
        train_dataset=dataset,
        callbacks=[OneStepAtATime()],
    )
    if on_gpu:
        trainer.vllm_generation.generate = CLOCK.wrap("generate", trainer.vllm_generation.generate)
        trainer.vllm_generation.sync_weights = CLOCK.wrap("weight_sync", trainer.vllm_generation.sync_weights)
    elif WORK["stop"]:
        # transformers needs the tokenizer to find stop strings, and TRL does not pass it on.
        trainer.model.generate = functools.partial(trainer.model.generate, tokenizer=tokenizer)
    trainer.model.generate = CLOCK.wrap("generate", trainer.model.generate)
    trainer.accelerator.backward = CLOCK.wrap("backward", trainer.accelerator.backward)
    trainer.compute_loss = CLOCK.wrap("forward", trainer.compute_loss)
    send({"ready": True, "model": str(trainer.model.dtype)})
    trainer.train()


main()
