"""Five tasks in Harbor's public layout, each on an image of a real registry: the solution earns 1, no work earns 0."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rayapp.cli.main import run
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.types import Prompt
from rayapp.extras.repositories.task import as_answer
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.loading import load_source
from support.harbor_tasks import TASKS, debian_image, write_harbor_tasks
from support.images import real_registry

pytestmark = [
    pytest.mark.long,  # debootstrap takes minutes
    pytest.mark.usefixtures("namespaces"),
    pytest.mark.timeout(2400),
]
NEEDED = ("debootstrap", "buildah", "skopeo", "docker-registry")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the sandboxes' user may enter."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"needs Debian's {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    folder = Path(tempfile.mkdtemp(prefix="rayapp-harbor-"))
    folder.chmod(0o755)
    insecure = '[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n'
    (folder / "registries.conf").write_text(insecure)
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(folder / "registries.conf"))
    monkeypatch.setenv("STORAGE_DRIVER", "vfs")
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


async def test_five_tasks_on_images_pay_their_solutions_and_nothing_else(work: Path) -> None:
    providers = [{"type": "local", "image_cache": str(work / "cache")}]
    config = SandboxConfig.model_validate({"providers": providers, "max_leases": 2})
    with real_registry(work) as host:
        write_harbor_tasks(work / "tasks", debian_image(work, host))
        (work / "config.yaml").write_text(f"sandbox: {{providers: [{{type: local, image_cache: {work}/cache}}]}}\n")
        built = ["images", "build", str(work / "tasks/git-recover"), "--tool", "buildah"]
        assert run([*built, "--config", str(work / "config.yaml")]) == 0

        tasks = load_source(f"{work}/tasks?trust_test_scripts=true")
        earned: dict[str, list[float | str]] = {}
        async with open_pool(config, "harbor") as (sandboxes, _):
            for task in tasks:
                assert task.spec.template.startswith("image:")
                prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))
                answers = [await task.solve(sandboxes) or "", as_answer({})]
                rewards = [await task.score(prompt, answer, sandboxes, seed=0) for answer in answers]
                earned[task.name] = [each.value if each.valid else each.detail for each in rewards]

    assert earned == {name: [1.0, 0.0] for name in TASKS}
