"""Who may look, and what a browser may do with it: pure ASGI around the application. Nothing in here knows about runs.

The page shows text that a model wrote, so the browser is told to run nothing but our own files, and to send nothing
anywhere. A page in another tab can't read ours: on loopback only our own host names are answered (a foreign name that
resolves to 127.0.0.1 is refused), and anywhere else a token is asked for.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
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
COOKIE = "rayapp_view_"
"""Begins the cookie's name: browsers share cookies among the ports of a host, so each viewer has a name of its own."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Read only, with a token where one is set, and with strict headers on every answer.

    Args:
        app: what is guarded.
        token: who brings it may look; empty lets everybody who reaches a loopback address.
    """

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
        """The token goes from the address, where it would be copied with a link, into a cookie."""
        # One slash: an address that begins with two is another host's.
        response = RedirectResponse("/" + scope["path"].lstrip("/"), status_code=303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        return response

    def _matches(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(), self._token.encode())


def _host_name(host: str) -> str:
    """Example: `[::1]:8080` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""
