"""`rayapp config`: what a configuration says, and what one of verl's means here."""

from __future__ import annotations

import typer

from rayapp.cli import verl
from rayapp.cli.arguments import OptionalConfigFile, Overrides

app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(verl.app)


@app.command(
    name="show",
    epilog="Examples:\n\n"
    "  rayapp config show configs/coding_cpu.yaml\n\n"
    "  rayapp config show configs/coding_cpu.yaml rollout.group_size=8",
)
def config_show(config: OptionalConfigFile = None, overrides: Overrides = None) -> None:
    """Print the configuration with every default filled in, after checking it."""
    from rayapp.config.loading import load_config, to_yaml

    typer.echo(to_yaml(load_config(config, overrides or ())), nl=False)
