"""`rayapp init`: write a project folder; `rayapp try tool`: try your own tool without a model and without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayapp.core.errors import EXIT_FAILED, InputError
from rayapp.core.files import write_text

app = typer.Typer(help="Try a tool without training.", no_args_is_help=True)
init_app = typer.Typer()
Data = Annotated[Path | None, typer.Option(metavar="FILE", help="Parquet file with rows to train on")]
ConfigOption = Annotated[Path | None, typer.Option(help="Take sandbox and reward settings from this config")]


@app.callback()  # without it typer would drop the name of the only command
def _group() -> None:
    """Try a tool without training."""


@app.command(
    epilog="Examples:\n\n"
    "  rayapp try tool dice.py:Dice                                    (prints the schema that the policy sees)\n\n"
    "  rayapp try tool dice.py:Dice roll '{\"sides\": 6}'\n\n"
    '  rayapp try tool configs/tools/gsm8k_python.yaml python \'{"code": "x = 2"}\' python \'{"code": "print(x)"}\''
)
def tool(
    target: Annotated[
        str, typer.Argument(metavar="TOOL", help="Tool file, FILE.py:CLASS, or the name of a shipped tool")
    ],
    calls: Annotated[
        list[str] | None, typer.Argument(metavar="NAME ARGUMENTS", help="Calls of one trajectory: name, JSON, name, …")
    ] = None,
    data: Data = None,
    row: Annotated[int, typer.Option(min=0, help="Row of --data whose tools_kwargs configure the tools")] = 0,
    create_kwargs: Annotated[str, typer.Option(help="JSON object to pass to every tool's create")] = "",
    config: ConfigOption = None,
) -> None:
    """Call tools as the agent loop does, with its checks and deadlines. Prints one JSON line per call, then the
    verdicts; without a call, the tools' schemas.
    """
    from rayapp.cli.trial import ToolTrial, try_tool

    trial = ToolTrial(target=target, data=data, row=row, create_kwargs=create_kwargs, config=config)
    raise typer.Exit(0 if try_tool(trial, calls or []) else EXIT_FAILED)


_CONFIG = """\
# Trains on one coding task and on the rows of data/train.parquet. `rayapp config show config.yaml` prints every key.
run:
  name: {name}
model:
  path: models/smollm2-135m
sources:
  - {name: code, ratio: 1, tasks: [tasks/double.yaml]}
  - {name: rows, ratio: 1, tasks: [data/train.parquet]}
reward:
  custom: rewards.py:compute_score # scores the rows; the task's own tests score the task
cluster:
  device: cpu
server:
  engine_args: {block_size: 32}
rollout:
  group_size: 8
  max_prompt_tokens: 160
  max_completion_tokens: 96
train:
  num_steps: 20
  groups_per_step: 2
learner:
  max_tokens_per_microbatch: 4096
  optimizer:
    lr: 3.0e-5
"""
_TASK = """\
# The policy's function runs in a sandbox on these inputs; expected values come from the reference, outside the sandbox.
prompt: Write a Python function `double(x)` that returns twice the integer x. Do not use the operator *.
func_name: double
signature: "def double(x):"
banned_patterns: ["*"]
tests: ["0", "-3", "rng.randint(-1000, 1000)", "rng.randint(-1000, 1000)"]
reference: "2 * x"
"""
_ROWS = """\
{"prompt": "What is 3 plus 4? Answer with the number only.", "answer": "7"}
{"prompt": "What is 9 minus 4? Answer with the number only.", "answer": "5"}
{"prompt": "What is 2 plus 6? Answer with the number only.", "answer": "8"}
{"prompt": "What is 7 minus 6? Answer with the number only.", "answer": "1"}
"""
_REWARDS = '''\
"""The reward of the rows. It runs in the rollout worker: never `eval` what the policy wrote."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 for the right number alone, 0.5 if the answer contains it; other entries are shown as terms."""
    words = solution_str.replace(".", " ").split()
    score = 1.0 if words == [ground_truth] else 0.5 if ground_truth in words else 0.0
    return {"score": score, "words": float(len(words))}
'''
_MAKEFILE = """\
# make train    fetch the model, prepare the rows, train        make try     score answers without training
# make view     the curves and every completion
.PHONY: train try view

train: data/train.parquet
\trayapp model fetch smollm2-135m
\trayapp train config.yaml $(ARGS)

try: data/train.parquet
\trayapp score rewards.py:compute_score --data data/train.parquet
\trayapp model fetch smollm2-135m
\trayapp doctor config.yaml

view:
\trayapp view outputs

data/train.parquet: data/rows.jsonl
\trayapp data rows data/rows.jsonl --out data
"""
_README = """\
# {name}

| file | what to change |
|---|---|
| `config.yaml` | model, steps, sizes; the keys are in rayapp's `docs/configure.md` |
| `tasks/double.yaml` | a coding task with hidden tests |
| `data/rows.jsonl` | prompts and answers; `make train` converts them when they change |
| `rewards.py` | the reward of the rows |

Run in this folder, in an environment with `rayapp[cpu]`:

    make try                              # score answers without training
    make train ARGS="train.num_steps=2"   # two steps, then without ARGS
    make view

Later: `rayapp plan config.yaml cluster.device=gpu --gpu h100`, and `rayapp view outputs/A outputs/B`.
"""
FILES = {
    "config.yaml": _CONFIG,
    "tasks/double.yaml": _TASK,
    "data/rows.jsonl": _ROWS,
    "rewards.py": _REWARDS,
    "Makefile": _MAKEFILE,
    "README.md": _README,
    ".gitignore": "outputs/\nmodels/\ndata/*.parquet\n",
}


@init_app.command(epilog="Examples:\n\n  rayapp init mine && cd mine && make try")
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make; its name becomes the run's name")],
) -> None:
    """Write a project folder that trains as it is: config, task, rows, reward, README, Makefile."""
    if taken := [name for name in FILES if (folder / name).exists()]:
        raise InputError(f"{folder / taken[0]} exists already: nothing was written. Give a new folder.")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text.replace("{name}", folder.resolve().name))
        typer.echo(str(folder / name))
    typer.echo(f"\nNext: cd {folder} && make try, then make train")
