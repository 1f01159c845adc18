"""Writes configs/kuberay/rendered/: the manifests of one example as plain YAML, for readers. `rayapp render-k8s`
renders the manifests of other runs.

The dashboard and its alerts are left out: they equal chart/files/, and are longer than all other manifests.

After a change of the chart, its examples or the config's schema, run `python -m scripts.kuberay_examples`. A test finds
stale files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rayapp.cli.kuberay.render import Release, read_values, render
from rayapp.config.loading import load_config

FOLDER = Path(__file__).parents[1] / "configs" / "kuberay"
CONFIGS: dict[str, Path] = {
    "single-node-ack": FOLDER / "coding_8gpu_kruise.yaml",
    "head-worker-s3": FOLDER.parent / "coding_8gpu.yaml",
    "autoscaling": FOLDER.parent / "coding_8gpu.yaml",
    "kueue": FOLDER.parent / "coding_8gpu.yaml",
    "volcano": FOLDER.parent / "coding_8gpu.yaml",
}
"""Example (a file in the chart's examples/) -> config of its run."""
STORED = FOLDER / "rendered" / "single-node-ack"
"""Folder of the stored example, which has every kind of document."""


def render_example(name: str) -> dict[str, str]:
    """Render an example. Return file name -> YAML."""
    values = read_values([FOLDER / "examples" / f"{name}.yaml"], ())
    return render(load_config(CONFIGS[name]), Release(name="rayapp", namespace="default"), values)


def stored_example() -> dict[str, str]:
    """Return file name -> YAML of the files in `STORED`."""
    return {file: text for file, text in render_example(STORED.name).items() if file != "monitoring.yaml"}


def main() -> None:
    shutil.rmtree(STORED, ignore_errors=True)
    STORED.mkdir(parents=True)
    for file, text in stored_example().items():
        (STORED / file).write_text(text)


if __name__ == "__main__":
    main()
