"""Access control and browser restrictions: pure ASGI around the application, independent of runs.

The page shows text that a model wrote, so the browser may run only our own files, and may send nothing elsewhere. Pages
in other tabs can't read ours: on loopback only our own host names are accepted (a foreign name that resolves to
127.0.0.1 is refused), and elsewhere a token is required. Requests of other pages are refused before any work is done.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
COOKIE = "rayapp_view_"  # Browsers share cookies among the ports of a host, so each viewer's cookie has its own name.
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Allows only reading, requires the token if one is set, and sets strict headers on every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        self._cookie = COOKIE + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page is read only", status_code=405)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if _is_sent_by_another_page(scope["path"], headers):
            return PlainTextResponse("another site's page may not send requests to this page", status_code=403)
        if not self._token:
            if _host_name(headers.get("host", "")) in LOCAL_NAMES:
                return None
            return PlainTextResponse("open this page as http://127.0.0.1 or http://localhost", status_code=403)
        offered = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if offered and self._matches(offered):
            return self._welcome(scope)
        if self._matches(_cookie(headers.get("cookie", ""), self._cookie)):
            return None
        return PlainTextResponse("open the address that `rayapp view` printed: it has the token", status_code=401)

    def _welcome(self, scope: Scope) -> Response:
        """Move the token from the URL, where it would be copied with a link, into a cookie."""
        # Begin with exactly one slash: two slashes would redirect to another host.
        response = RedirectResponse("/" + scope["path"].lstrip("/"), status_code=303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        return response

    def _matches(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(), self._token.encode())


def _is_sent_by_another_page(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a page of another site or port sent this; links to the page itself are allowed from anywhere."""
    if headers.get("sec-fetch-site", "none") in ("cross-site", "same-site"):
        return path != "/" or headers.get("sec-fetch-mode") != "navigate"
    origin = headers.get("origin", "")
    return bool(origin) and origin.partition("://")[2] != headers.get("host", "")


def _host_name(host: str) -> str:
    """Return the host without port, e.g. `[::1]:8080` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""
