"""GRPO on one screen: the loop of `rayapp train`, written with the library's parts, in one process, without Ray and
vLLM.

    prompts -> completions -> verdicts from sandboxes -> advantages and a learner step -> weights to the sampler

    python examples/minimal.py configs/coding_cpu.yaml train.num_steps=5

A second copy of the model, from which transformers' `generate` samples, takes the place of the vLLM servers. A folder
on disk takes the place of the weight transfer. A run does the same with servers, rollout workers and learners in
separate processes (docs/concepts.md).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rayapp
from rayapp.api.learning import LocalLearner, trajectory
from rayapp.config.sections import RolloutSection
from rayapp.core.protocols import SandboxSource, Task
from rayapp.core.types import Prompt, Trajectory
from rayapp.tasks.loading import load_tasks
from rayapp.tasks.verdict import task_verdict


class Sampler:
    """Replacement for the servers: samples token ids with their log-probs, at temperature 1, without top_p and
    top_k.
    """

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def sample(self, prompt: Prompt, section: RolloutSection) -> list[tuple[list[int], list[float]]]:
        ids = torch.tensor([prompt.token_ids.tolist()] * section.group_size)
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": section.max_completion_tokens}
        found = self.model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
        sampled = found.sequences[:, ids.shape[1] :]
        log_probs = torch.stack(found.logits, 1).log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        sizes = [self._size(row, (*prompt.stop, self.tokenizer.eos_token)) for row in sampled.tolist()]
        return [(sampled[i, :n].tolist(), log_probs[i, :n].tolist()) for i, n in enumerate(sizes)]

    def _size(self, row: list[int], stop: tuple[str, ...]) -> int:
        """Return the number of tokens up to and including the first stop text."""
        texts = (self.tokenizer.decode(row[:size]) for size in range(1, len(row) + 1))
        return next((size for size, text in enumerate(texts, 1) if any(each in text for each in stop)), len(row))


async def rollout(
    task: Task, sampler: Sampler, boxes: SandboxSource, step: int, config: rayapp.Config
) -> list[Trajectory]:
    """Return a group: completions of one prompt, each with its reward. All are scored by the same hidden tests."""
    prompt = task.render(sampler.tokenizer)
    sampled = sampler.sample(prompt, config.rollout)
    texts = [sampler.tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in sampled]
    verdicts = await asyncio.gather(*(task_verdict(task, prompt, text, boxes, seed=step) for text in texts))
    return [
        trajectory(prompt.token_ids.tolist(), ids, reward=verdict.value, log_probs=log_probs)
        for (ids, log_probs), verdict in zip(sampled, verdicts, strict=True)
        if verdict.valid  # a sandbox that failed says nothing about the completion
    ]


async def train(config: rayapp.Config) -> list[float]:
    """Train on one group of each task in every step. Return the mean reward of each step."""
    tasks, sampler, rewards = load_tasks(config.tasks), Sampler(config.model.path), []
    with LocalLearner(config) as learner, tempfile.TemporaryDirectory() as folder:
        async with rayapp.SandboxPool(config) as boxes:
            for step in range(1, config.train.num_steps + 1):
                groups = [await rollout(task, sampler, boxes, step, config) for task in tasks]
                metrics = learner.step(groups)  # advantages within each group, then the policy loss, then AdamW
                learner.save(folder)
                sampler = Sampler(folder)
                values = [member.reward.value for group in groups for member in group]
                rewards.append(sum(values) / len(values))
                print(f"step {step}: reward {rewards[-1]:.3f}, grad_norm {metrics['learner/grad_norm']:.3f}")
    return rewards


if __name__ == "__main__":
    asyncio.run(train(rayapp.load_config(sys.argv[1], sys.argv[2:])))
