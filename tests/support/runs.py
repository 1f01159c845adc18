"""Made-up runs to look at: hostile texts for the tests of the page, and any number of trajectories.

Used by tests and benchmarks/view.py.
"""

from __future__ import annotations

import numpy as np

from rayapp.core.types import CallRecord, Group, Prompt, Reward, RolloutStatus, Trajectory, TurnRecord

HOSTILE_TEXTS = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "</pre></script><svg onload=\"document.title='owned'\"><a href=\"javascript:document.title='owned'\">click</a>",
    "\x1b[2J\x1b[31mred\x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \u202egnirts desrever\u202c \x00\x07\x7f",
    "x" * 400_000,
    "\n".join(["{{constructor.constructor('document.title=`owned`')()}}", "${document.title='owned'}"] * 3000),
)
"""Markup, text that breaks out of elements, terminal codes and reordering marks, one huge line, very many lines."""


def hostile_group(group_id: int) -> Group:
    """Return a group with a hostile text in every field that a model or a task can write."""
    bad = HOSTILE_TEXTS[0]
    prompt = Prompt(
        task=f"task {bad}", text=f"<|im_start|>user\n{bad}", token_ids=np.array([1, 2], np.int32), prefill=bad
    )
    return Group(
        group_id=group_id,
        prompt=prompt,
        trajectories=tuple(_hostile(index, text) for index, text in enumerate(HOSTILE_TEXTS)),
    )


def _hostile(index: int, text: str) -> Trajectory:
    bad = HOSTILE_TEXTS[1]
    return Trajectory(
        token_ids=np.array([1, 2, 3, 4], np.int32),
        response_mask=np.array([False, False, True, True]),
        rollout_log_probs=np.array([0, 0, -0.5, -np.inf], np.float32),
        completion_text=text,
        reward=Reward(value=float(index), terms={f"term {bad}": 1.0}, status=f"scored {bad}", detail=bad),
        status=RolloutStatus.COMPLETED,
        min_policy_version=0,
        max_policy_version=0,
        turns=(_hostile_turn(bad),),
    )


def _hostile_turn(bad: str) -> TurnRecord:
    call = CallRecord(name=bad, arguments=bad, output=HOSTILE_TEXTS[2] + bad, failure=bad, duration_s=1.0)
    return TurnRecord(
        start=2,
        end=4,
        text=bad,
        finish_reason="stop",
        policy_version=0,
        started_at_s=0.0,
        queued_s=0.0,
        generate_s=0.0,
        calls=(call,),
    )
