"""What a run says at its start about who can watch it, against pages that a real HTTP server gives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rayapp.ray_session import RaySession
from rayapp.ray_watched import metrics_port_is_anothers, prometheus_answers

OURS, OTHERS = "session_2026-11-21_17-40-02_101292_31005", "session_2026-11-21_09-00-00_000001_77"
PAGE = 'ray_node_mem_used{{Version="2.60.0",SessionName="{}",NodeAddress="127.0.0.1"}} 1.0\n'
Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Call it with a status and a text: the port of a server that answers so."""
    servers: list[HTTPServer] = []

    def start(status: int, text: str) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_request(self, code: object = "-", size: object = "-") -> None: ...

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1].server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "text", "is_anothers"),
    [
        (200, PAGE.format(OURS), False),
        (200, PAGE.format(OTHERS), True),
        (200, PAGE.format(OTHERS) + PAGE.format(OURS), False),
        (200, "", False),  # a Ray that has just started
        (404, "no such page", True),
    ],
)
def test_port_that_shows_another_rays_metrics_or_none_at_all_is_not_ours(
    serve: Serve, status: int, text: str, is_anothers: bool
) -> None:
    assert metrics_port_is_anothers("127.0.0.1", serve(status, text), OURS) == is_anothers


def test_program_that_speaks_no_http_is_not_ours_and_a_port_where_nobody_listens_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert metrics_port_is_anothers("127.0.0.1", port, OURS)
        thread.join(timeout=60)
    assert not metrics_port_is_anothers("127.0.0.1", port, OURS)


@pytest.mark.parametrize(("status", "answers"), [(200, True), (500, False), (401, True)])
def test_dashboard_that_can_not_reach_prometheus_answers_500(serve: Serve, status: int, answers: bool) -> None:
    assert prometheus_answers(f"127.0.0.1:{serve(status, '')}", {}) == answers


def test_first_lines_name_the_taken_port_and_the_way_out(serve: Serve) -> None:
    port = serve(200, PAGE.format(OTHERS))
    session = RaySession(dashboard_url="", is_own=False, node="127.0.0.1", metrics_port=port, name=OURS)

    first, second = session.first_lines()

    assert first == "Ray has no dashboard"
    assert second.startswith(f"Ray's metrics port {port} is another Ray's or another program's: ")
    assert second.endswith("ray start --head --metrics-export-port=PORT")
