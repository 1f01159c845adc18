"""Fetches pictures that data rows name by an address (`data.image_urls`): over https, from public hosts only."""

from __future__ import annotations

import http.client
import ipaddress
import ssl
import urllib.request
from functools import partial

from rayapp.core.errors import InputError, one_line
from rayapp.core.own_thread import in_thread
from rayapp.storage.media import MAX_BYTES, check_bytes

_TIMEOUT_S = 30.0  # of each wait for the server
_DEADLINE_S = 120.0  # of all hops together
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL = ipaddress.ip_network("2000::/3")  # all that IPv6 routes publicly


class _Connection(http.client.HTTPSConnection):
    """A connection to a public address, checked after the name is resolved."""

    _tunnel_host: str | None

    def connect(self) -> None:
        if self._tunnel_host is not None:
            super().connect()  # to the proxy, which resolves the name
            return
        http.client.HTTPConnection.connect(self)
        if not _is_public(address := self.sock.getpeername()[0]):
            self.close()
            raise OSError(f"{self.host} has the address {address}, which is not public")
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        is_embedded = address in _NAT64
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if is_embedded else address.sixtofour
        return inner.is_global if inner else address in _GLOBAL and address.is_global
    return address.is_global


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Others(urllib.request.HTTPHandler, urllib.request.FTPHandler):
    """The other protocols to which urllib follows a redirect."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        raise OSError(f"{req.full_url!r:.80} is not an https:// address")

    ftp_open = http_open  # type: ignore[assignment]


def fetched(url: str) -> bytes:
    """Return a picture's encoded bytes. Every hop of redirects is checked. InputError: it can't be fetched."""
    try:
        return check_bytes(in_thread(partial(_read, url), name="picture").result(_DEADLINE_S))
    except TimeoutError:
        raise InputError(f"picture {url!r:.80} can't be fetched: it did not arrive in {_DEADLINE_S:g} s") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(f"picture {url!r:.80} can't be fetched: {one_line(error)}") from None


def _read(url: str) -> bytes:
    with urllib.request.build_opener(_Https, _Others).open(url, timeout=_TIMEOUT_S) as answer:
        data: bytes = answer.read(MAX_BYTES + 1)
    return data
