"""Every provider is built from its section of a configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from pydantic import BaseModel

from rayapp.config.sandbox import DaytonaConfig, ProviderConfig, SandboxConfig
from rayapp.core.types import SandboxSpec
from rayapp.extras.providers import daytona
from rayapp.sandbox.providers import why_no_sandbox

ROOT = Path(__file__).parents[3]
SECTIONS: tuple[type[BaseModel], ...] = get_args(get_args(ProviderConfig)[0])


def test_a_run_has_one_provider() -> None:
    for providers in ([], [{"type": "local"}, {"type": "e2b"}]):
        with pytest.raises(ValueError, match="one provider"):
            SandboxConfig.model_validate({"providers": providers})


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_no_key_of_a_provider_is_without_a_reader(section: type[BaseModel]) -> None:
    folders = (ROOT / "rayapp/sandbox", ROOT / "rayapp/extras/providers", ROOT / "actors")
    paths = [path for folder in folders for path in folder.rglob("*.py") if path.name != "config.py"]
    text = "\n".join(path.read_text() for path in paths)
    unread = [key for key in section.model_fields if f".{key}" not in text]
    assert not unread


def test_an_mcp_section_has_no_rate_of_creations_which_the_pool_could_not_keep() -> None:
    """Sessions are opened by the workers that use them; the pool only counts them."""
    with pytest.raises(ValueError, match="creations_per_s"):
        SandboxConfig.model_validate({"providers": [{"type": "mcp", "url": "http://h/mcp", "creations_per_s": 1}]})


def test_an_image_that_a_task_names_is_the_providers_template_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # The SDK is not in every environment; here only which of its two requests is made with what matters.
    requests = dict.fromkeys(("CreateSandboxFromImageParams", "CreateSandboxFromSnapshotParams"), dict)
    monkeypatch.setattr(daytona, "sdk", lambda: SimpleNamespace(**requests))
    config = DaytonaConfig(images={"org/x:1": "snapshot-of-x"}, template="usual")
    service = object.__new__(daytona.DaytonaService)
    service._config = config
    asked = [
        service._params(SandboxSpec(template=template), {}, 60.0) for template in ("org/x:1", "org/y:2", "mine", "")
    ]

    assert [each.get("snapshot") for each in asked] == ["snapshot-of-x", None, "mine", "usual"]
    assert [each.get("image") for each in asked] == [None, "org/y:2", None, None]


def why(*providers: dict[str, object], template: str = "org/x:1") -> str:
    return why_no_sandbox(SandboxConfig.model_validate({"providers": providers}), template)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("provider", "template", "words"),
    [
        ({"type": "local"}, "image:org/x:1", ""),
        ({"type": "local", "images": {"org/x:1": "image:oci:/x"}}, "org/x:1", ""),
        ({"type": "local"}, "", ""),
        ({"type": "local"}, "org/x:1", "the local provider can use only images"),
        ({"type": "local"}, "image:Org/x", "not the name of an image"),
        ({"type": "daytona"}, "org/x:1", ""),
        ({"type": "daytona"}, "image:oci:/x", "provider daytona can't read oci:/x"),
        ({"type": "e2b", "images": {"org/x:1": "x"}}, "image:org/x:1", ""),
        ({"type": "e2b"}, "image:org/x:1", "Build one, and name it in sandbox.providers[].images: {org/x:1: …}"),
        ({"type": "e2b"}, "org/x:1", "Build one, and name it in sandbox.providers[].images: {org/x:1: …}"),
        ({"type": "e2b"}, "image:build:x", "provider e2b has no template for this image"),
        ({"type": "e2b", "api_url": "http://h/kruise/api"}, "image:x", "provider e2b has no template for this image"),
    ],
)
def test_a_run_that_no_provider_can_give_an_image_is_told_what_to_name(
    provider: dict[str, object], template: str, words: str
) -> None:
    told = why(provider, template=template)
    assert words in told
    assert bool(told) == bool(words)


def test_daytonas_sdk_is_loaded_with_its_client_and_not_within_the_first_calls_deadline() -> None:
    program = (
        "import sys\n"
        "from rayapp.extras.providers.daytona import sdk\n"
        "found, before = sdk(), len(sys.modules)\n"
        "found.AsyncDaytona, found.CreateSandboxFromSnapshotParams, found.ListSandboxesQuery, found.SandboxState\n"
        "print(len(sys.modules) - before)\n"
    )

    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True, timeout=240) == "0\n"
