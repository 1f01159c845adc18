"""Fetches pictures that data rows name by an address (`data.image_urls`): over https, from public hosts only."""

from __future__ import annotations

import http.client
import ipaddress
import ssl
import urllib.request

from rayapp.core.errors import InputError, one_line
from rayapp.storage.media import MAX_BYTES, check_bytes

_TIMEOUT_S = 30.0


class _Connection(http.client.HTTPSConnection):
    """A connection to a public address, checked after the name is resolved."""

    def connect(self) -> None:
        if "https" in urllib.request.getproxies():
            super().connect()  # to the proxy
            return
        http.client.HTTPConnection.connect(self)
        if not ipaddress.ip_address(address := self.sock.getpeername()[0]).is_global:
            self.close()
            raise OSError(f"{self.host} has the address {address}, which is not public")
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        raise OSError(f"{req.full_url!r:.80} is not an https:// address")


def fetched(url: str) -> bytes:
    """Return a picture's encoded bytes. Every hop of redirects is checked. InputError: it can't be fetched."""
    try:
        with urllib.request.build_opener(_Https, _Http).open(url, timeout=_TIMEOUT_S) as answer:
            return check_bytes(answer.read(MAX_BYTES + 1))
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"picture {url!r:.80} can't be fetched: {one_line(error)}") from None
