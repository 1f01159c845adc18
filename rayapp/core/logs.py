"""Log lines that say which run, step and group they are about; as JSON where `tracking.log_format` says so.

    driver: start_logs -> ray.init(logging_config=…) -> hand_over      actors: label_logs in their constructors
                                                                       everyone: with about(step=3, group=12): …

From `ray.init` on the lines are Ray's, with the ids of job, node, actor and task; before it they are written here. Ids
travel in a context variable, so a line that a library or `rayapp.sandbox` logs carries them too. It never logs anything
itself.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from rayapp.core.terminal import make_logs_visible

FIELDS = ("run", "step", "group")
"""Ids on each JSON line, where they are known. A group's `step` is the one whose weights it was begun for."""
_ids: ContextVar[Mapping[str, int]] = ContextVar("what log lines are about", default={})  # noqa: B039 - never written to


@contextmanager
def about(**ids: int) -> Iterator[None]:
    """Lines logged within the block, by this thread or task and tasks made there, carry these ids (of `FIELDS`)."""
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


class Labels(logging.Filter):
    """Puts run, step and group on each record that passes a handler. What the caller gave as `extra` stays.

    A filter of handlers and not a record factory: `logging` raises KeyError for an `extra` that a factory set already.
    """

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self._run_name = run_name

    def filter(self, record: logging.LogRecord) -> bool:
        for key, value in {"run": self._run_name, **_ids.get()}.items():
            record.__dict__.setdefault(key, value)
        return True


class JsonLines(logging.Formatter):
    """A JSON object per line, with the keys that Ray's own JSON lines have."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "name": record.name,
        }
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        line |= {key: record.__dict__[key] for key in FIELDS if key in record.__dict__}
        return json.dumps(line)


def start_logs(run_name: str, log_format: str) -> None:
    """Set up the driver's logs, before anything is logged. With `text` the command line's lines stay. Idempotent."""
    # transformers writes its advice to stderr, in the middle of a run's lines; what is wrong it raises.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if log_format == "text":
        return
    logging.getLogger("rayapp").handlers.clear()
    hand_over()
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    label_logs(run_name)


def hand_over() -> None:
    """Stop writing lines in the driver once Ray writes them: else each would be there twice. Idempotent."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h.formatter, JsonLines)]:
        root.removeHandler(handler)


def label_logs(run_name: str) -> None:
    """Put the ids on all that this process's root logger writes, and make it visible. In every process. Idempotent."""
    make_logs_visible()
    for handler in logging.getLogger().handlers:
        for old in [f for f in handler.filters if isinstance(f, Labels)]:
            handler.removeFilter(old)
        handler.addFilter(Labels(run_name))
