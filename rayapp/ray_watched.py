"""Whether those who watch a Ray see what its runs report: a Prometheus behind the dashboard, a metrics port of its own.

Called by `rayapp.ray_session` when a run has connected, and said in the run's first line. Both take a few seconds at
most and never raise: a run needs neither.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus

DASHBOARD_TIMEOUT_S = 10.0
METRICS_TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20
SESSION = re.compile(r'[{,]SessionName="([^"]+)"')
"""The label of each metric that Ray reports itself, whatever runs."""


def prometheus_answers(dashboard_url: str, headers: Mapping[str, str]) -> bool:
    """Whether the dashboard reaches its Prometheus (RAY_PROMETHEUS_HOST). True when that can't be told.

    Args:
        dashboard_url: without `http://`.
        headers: the dashboard's token, where it asks for one.
    """
    request = urllib.request.Request(f"http://{dashboard_url}/api/prometheus_health", headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=DASHBOARD_TIMEOUT_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except urllib.error.HTTPError as error:
        return error.code != HTTPStatus.INTERNAL_SERVER_ERROR
    except OSError:
        return True


def metrics_port_is_anothers(node: str, port: int, session: str) -> bool:
    """Whether another Ray, or another program, answers at the port where this node should show its metrics.

    Ray starts without metrics when the port is taken, and says so in its agent's log only. False when that can't be
    told: nothing answers, or a Ray that has just started and has not reported yet.

    Args:
        session: Ray's name for itself, e.g. `session_2026-11-21_17-40-02_101292_31005`.
    """
    try:
        with urllib.request.urlopen(f"http://{node}:{port}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
            sessions = set(SESSION.findall(answer.read(MAX_BYTES).decode(errors="replace")))
    except (urllib.error.HTTPError, http.client.HTTPException):
        return True
    except OSError:
        return False
    return bool(sessions) and session not in sessions
