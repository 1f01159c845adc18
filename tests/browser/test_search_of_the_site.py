"""The search of `make docs`' site, in a real browser: what a user types leads to the page that the user means."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / "build" / "docs-venv" / "bin" / "mkdocs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Builds the site and serves it; returns its address."""
    if not MKDOCS.is_file():
        pytest.skip("needs mkdocs: make docs")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([MKDOCS, "build", "--quiet", "--site-dir", folder], cwd=ROOT, env=environment, check=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("typed", "pages"),
    [
        ("learning rate", {"configure"}),
        ("custom dataset", {"tutorial", "data"}),
        ("reward function", {"tutorial", "data"}),
        ("out of memory", {"troubleshoot"}),
    ],
)
async def test_the_first_page_found_is_the_one_that_a_user_means(
    browser: Any, site: str, typed: str, pages: set[str]
) -> None:
    page = await browser.new_page()
    await page.goto(f"{site}/index.html")
    await page.locator("[data-md-component=search-query]").fill(typed)
    first = page.locator(".md-search-result__link").first
    await first.wait_for(state="attached")
    found = (await first.get_attribute("href")).partition("?")[0].rpartition("/")[2]

    assert found.partition(".html")[0] in pages
