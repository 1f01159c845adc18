"""`rayapp render-k8s`. Called by `rayapp.cli.main`; loads Helm only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayapp.core.errors import InputError

app = typer.Typer()


@app.command(
    name="render-k8s",
    epilog="Examples:\n\n"
    "  rayapp render-k8s configs/coding_8gpu.yaml --out manifests --name my-run\n\n"
    "  rayapp render-k8s configs/coding_8gpu.yaml --out manifests --values configs/kuberay/examples/kueue.yaml "
    "--set queue.name=team-a",
)
def render_k8s(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's config")],
    out: Annotated[Path, typer.Option(help="Folder to write into; made if missing")],
    name: Annotated[str, typer.Option(help="Of the RayJob and the run")] = "rayapp",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace")] = "default",
    values: Annotated[
        list[Path] | None, typer.Option(help="Helm values, e.g. configs/kuberay/examples/kueue.yaml")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One Helm value, e.g. head.gpus=4")] = None,
    chart: Annotated[Path | None, typer.Option(help="Another chart than configs/kuberay/chart")] = None,
) -> None:
    """Write the Kubernetes manifests of a run as plain YAML, for `kubectl apply -f FOLDER`. Needs no cluster."""
    from rayapp.cli.kuberay.before_apply import before_apply
    from rayapp.cli.kuberay.render import CHART, Release, read_values, render
    from rayapp.config.loading import load_config

    files = render(
        load_config(config),
        Release(name=name, namespace=namespace),
        read_values(values or (), settings or ()),
        chart=chart or CHART,
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in sorted(files.items()):
            (out / file).write_text(text)
    except OSError as error:
        raise InputError(f"{out} can't be written: {error.strerror}") from None
    for file in sorted(files):
        typer.echo(str(out / file))
    needed = "".join(f"\n  - {line}" for line in before_apply(files, namespace))
    typer.echo(f"before `kubectl apply --namespace {namespace} -f {out}` there must be:{needed}", err=True)
