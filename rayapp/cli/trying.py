"""`rayapp try`: try your own reward or tool without a model and without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayapp.cli.arguments import EXIT_FAILED

app = typer.Typer(help="Try a reward or a tool without training.", no_args_is_help=True)
Data = Annotated[Path | None, typer.Option(metavar="FILE", help="Parquet file with rows to train on")]
ConfigOption = Annotated[Path | None, typer.Option(help="Take sandbox and reward settings from this config")]


@app.command(
    epilog="Examples:\n\n"
    "  rayapp try reward rewards.py:compute_score --data data/mine/train.parquet      (its first rows)\n\n"
    "  rayapp try reward rewards.py:compute_score --ground-truth 4 --answer 'It is 4' --answer 5\n\n"
    "  rayapp try reward openai/gsm8k --ground-truth 72 answers.jsonl         (a rule that ships)"
)
def reward(
    name: Annotated[str, typer.Argument(metavar="NAME", help="FILE.py:FUNCTION, package.module:function, or a rule")],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Answers: .txt, .py, .jsonl, or - for stdin")
    ] = None,
    data: Data = None,
    row: Annotated[int | None, typer.Option(min=0, help="Score only this row of --data, counted from 0")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Score this many rows of --data, from the first")] = 3,
    ground_truth: Annotated[str, typer.Option(help="Without --data: the ground truth to compare answers with")] = "",
    answer: Annotated[list[str] | None, typer.Option(help="An answer; may be given more than once")] = None,
    seed: Annotated[int, typer.Option(help="Seed that draws the tests of code problems")] = 0,
    config: ConfigOption = None,
) -> None:
    """Score answers as training does: one JSON line each, with every term of the reward.

    Without an answer, the ground truth itself and an empty text are scored: the ground truth should earn more.
    """
    from rayapp.cli.trial import Trial, try_reward

    given = range(row, row + 1) if row is not None else range(rows)
    trial = Trial(name=name, data=data, rows=given, ground_truth=ground_truth, seed=seed, config=config)
    raise typer.Exit(0 if try_reward(trial, answer or [], files or []) else EXIT_FAILED)


@app.command(
    epilog="Examples:\n\n"
    "  rayapp try tool dice.py:Dice                                    (prints the schema that the policy sees)\n\n"
    "  rayapp try tool dice.py:Dice roll '{\"sides\": 6}'\n\n"
    '  rayapp try tool configs/tools/gsm8k_python.yaml python \'{"code": "x = 2"}\' python \'{"code": "print(x)"}\''
)
def tool(
    target: Annotated[
        str, typer.Argument(metavar="TOOL", help="Tool file, FILE.py:CLASS, or the name of a shipped one")
    ],
    calls: Annotated[
        list[str] | None, typer.Argument(metavar="NAME ARGUMENTS", help="Calls of one trajectory: name, JSON, name, …")
    ] = None,
    data: Data = None,
    row: Annotated[int, typer.Option(min=0, help="Row of --data whose tools_kwargs configure the tools")] = 0,
    create_kwargs: Annotated[str, typer.Option(help="JSON object passed to every tool's create instead")] = "",
    config: ConfigOption = None,
) -> None:
    """Call tools as the agent loop does, with its checks and deadlines. Prints one JSON line per call, then the
    verdicts; without a call, the tools' schemas.
    """
    from rayapp.cli.trial import ToolTrial, try_tool

    trial = ToolTrial(target=target, data=data, row=row, create_kwargs=create_kwargs, config=config)
    raise typer.Exit(0 if try_tool(trial, calls or []) else EXIT_FAILED)
