"""Pictures that rows name by an address: only public hosts are asked, and only over https."""

from __future__ import annotations

import http.server
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayapp.core.errors import InputError
from rayapp.extras.pictures import fetching
from rayapp.extras.pictures.fetching import fetched
from rayapp.tasks.data.pictures import PictureFiles
from support.picture_models import picture


def test_an_address_of_a_private_host_is_not_fetched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/a.png"
        with pytest.raises(InputError, match=r"can't be fetched: .*127\.0\.0\.1, which is not public"):
            PictureFiles(tmp_path / "cache", fetches=True).read(url, tmp_path)


@pytest.mark.parametrize("protocol", ["http", "ftp"])
def test_a_redirect_to_another_protocol_is_not_followed(protocol: str) -> None:
    with pytest.raises(InputError, match="is not an https:// address"):
        fetched(f"{protocol}://127.0.0.1/a.png")


def test_a_host_that_the_proxy_is_not_for_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(InputError, match="which is not public"):
        fetched(f"https://127.0.0.1:{server.getsockname()[1]}/a.png")


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("8.8.8.8", True),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("2606:4700::1111", True),
        ("fec0::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::808:808", True),  # NAT64 of 8.8.8.8
        ("64:ff9b::a9fe:a9fe", False),  # and of 169.254.169.254
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
    ],
)
def test_an_address_is_public_only_if_the_one_in_it_is(address: str, is_public: bool) -> None:
    assert fetching._is_public(address) == is_public


def test_a_host_that_never_ends_its_answer_is_left_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_is_public", lambda address: True)
    monkeypatch.setattr(fetching, "_DEADLINE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(InputError, match="did not arrive in"):
        fetched(f"https://127.0.0.1:{server.getsockname()[1]}/a.png")


@pytest.mark.parametrize("url", ["https://[::1/a.png", f"https://{'a' * 300}/b.png", "https://127.0.0.1:x/a.png"])
def test_an_address_that_is_none_is_a_mistake_of_its_row(url: str) -> None:
    with pytest.raises(InputError, match="can't be fetched"):
        fetched(url)


class _Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/moved.png" else 200)
        self.send_header("Location", "/a.png")
        self.end_headers()
        self.wfile.write(picture())

    def log_message(self, *args: object) -> None: ...


@contextmanager
def served_with_tls(certificate: Path) -> Iterator[str]:
    """Serve a picture with a certificate that is made for `localhost` and signed by itself. Yield the address."""
    key = certificate.with_suffix(".key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://localhost:{server.server_address[1]}"
        server.shutdown()


def test_a_picture_is_fetched_once_over_tls_from_a_host_with_a_trusted_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_is_public", lambda address: True)
    files = PictureFiles(tmp_path / "cache", fetches=True)
    with served_with_tls(tmp_path / "certificate.pem") as url:
        with pytest.raises(InputError, match="CERTIFICATE_VERIFY_FAILED"):
            files.read(f"{url}/moved.png", tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        with pytest.raises(InputError, match="certificate is not valid for '127"):
            fetched(url.replace("localhost", "127.0.0.1"))
        assert files.read(f"{url}/moved.png", tmp_path) == (picture(), (56, 56))

    assert files.read(f"{url}/moved.png", tmp_path) == (picture(), (56, 56))
