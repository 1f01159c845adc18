"""A registry on loopback that serves a folder in OCI's layout, with a login as real ones have it."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class RegistryStub:
    """Answers for any repository and tag."""

    def __init__(self, folder: Path, *, login: str = "", wait: threading.Event | None = None) -> None:
        self.folder = folder
        self.login = login
        """`name:password`; empty: everybody may read."""
        self.wait = wait
        """Blobs are sent once it is set."""
        self.asked: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve, and yield the host and port."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: RegistryStub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        stub = self.stub
        if self.path.startswith("/token"):
            given = self.headers.get("Authorization", "")
            is_right = given == f"Basic {base64.b64encode(stub.login.encode()).decode()}"
            return self._say(200 if is_right else 401, json.dumps({"token": "right"} if is_right else {}).encode())
        if stub.login and self.headers.get("Authorization") != "Bearer right":
            realm = f'Bearer realm="http://{self.headers["Host"]}/token",service="stub"'
            return self._say(401, b"{}", {"Www-Authenticate": realm})
        if self.path == "/v2/":
            return self._say(200, b"{}")
        kind, _, name = self.path.rpartition("/")
        if kind.endswith("/manifests"):
            index = (stub.folder / "index.json").read_bytes()
            found: Any = json.loads(index)["manifests"] if not name.startswith("sha256:") else [{"digest": name}]
            return self._blob(found[0]["digest"]) if name != "missing" else self._say(404, b"{}")
        stub.asked[name] += 1
        return self._blob(name, is_layer=True)

    def _blob(self, digest: str, *, is_layer: bool = False) -> None:
        path = self.stub.folder / "blobs" / digest.replace(":", "/")
        if not path.is_file():
            return self._say(404, b"{}")
        data = path.read_bytes()
        if self.stub.wait is not None and is_layer and len(data) > 10_000:
            self.stub.wait.wait(120)
        kind = "application/octet-stream" if is_layer else "application/vnd.oci.image.manifest.v1+json"
        return self._say(200, data, {"Content-Type": kind})

    def _say(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
