"""Pictures that rows name by an address: only public hosts are asked, and only over https."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rayapp.core.errors import InputError
from rayapp.extras.pictures.fetching import fetched
from rayapp.tasks.data.pictures import PictureFiles


def test_an_address_of_a_private_host_is_not_fetched_and_none_without_tls(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/a.png"
        with pytest.raises(InputError, match=r"can't be fetched: .*127\.0\.0\.1, which is not public"):
            PictureFiles(tmp_path / "cache", fetches=True).read(url, tmp_path)
    with pytest.raises(InputError, match="is not an https:// address"):  # as after a redirect
        fetched("http://example.com/a.png")
