"""`rayapp config show` prints a configuration with all defaults."""

from __future__ import annotations

import typer

from rayapp.cli.arguments import OptionalConfigFile, Overrides, loaded_config

app = typer.Typer(help="Look at configurations.", no_args_is_help=True)


@app.command(
    name="show",
    epilog="Examples:\n\n"
    "  rayapp config show configs/coding_cpu.yaml\n\n"
    "  rayapp config show configs/coding_cpu.yaml rollout.group_size=8",
)
def config_show(config: OptionalConfigFile = None, overrides: Overrides = None) -> None:
    """Print the configuration with every default filled in, after checking it."""
    from rayapp.config.loading import to_yaml

    typer.echo(to_yaml(loaded_config(config, overrides)), nl=False)
