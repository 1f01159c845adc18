"""Set up log lines with the ids of run, step and group, as text or JSON, and make foreign text safe to print.

From `ray.init` on, Ray writes the lines; before it, this module does. Foreign text (of a model, tool, row, sandbox or
service) could clear a terminal's screen or put a command on the clipboard: print `visible(text)`, except in JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType

_STEPS = 10  # lines of progress without a terminal
_COLOUR = r"\x1b\[[0-9;]*m"
# C0 and C1 controls except newline and tab; marks that reorder text or end a line; surrogates, which can't be encoded.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR_OR_CONTROL = re.compile(f"{_COLOUR}|{_CONTROL.pattern}")


def visible(text: str, *, keeps_colours: bool = False) -> str:
    r"""Return `text` with control characters as Python's escapes; newlines and tabs stay. Idempotent. `keeps_colours`:
    for the log of a Ray job, which Ray colours."""
    return (_COLOUR_OR_CONTROL if keeps_colours else _CONTROL).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    text = found.group()
    return text if len(text) > 1 else text.encode("unicode_escape").decode()


class _VisibleRecord(logging.LogRecord):
    """A log record whose message and traceback have no control characters, whichever handler writes it."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        return visible(super().getMessage())


def make_logs_visible() -> None:
    """Apply `visible` to all log lines of this process from now on, also those of libraries. Idempotent."""
    make = logging.getLogRecordFactory()
    if getattr(make, "is_visible", False):
        return

    def make_visible(*args: object, **kwargs: object) -> logging.LogRecord:
        record = _VisibleRecord(*args, **kwargs)  # type: ignore[arg-type]
        # The existing factory may be Ray's, which records the time.
        record.__dict__.update(make(*args, **kwargs).__dict__)
        if record.exc_info:
            # Formatters use exc_text if it is set.
            record.exc_text = visible(logging.Formatter().formatException(record.exc_info))
        return record

    make_visible.is_visible = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_visible)


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback safely (for `sys.excepthook`): an error's message may quote a model's text."""
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


# Ids in each JSON line, if known; for a group, `step` is the one for which it was started.
FIELDS = ("run", "step", "group")
_ids: ContextVar[Mapping[str, int]] = ContextVar("what log lines are about", default={})  # noqa: B039 - never written to


@contextmanager
def about(**ids: int) -> Iterator[None]:
    """Add these ids (of `FIELDS`) to the lines that this thread or task, and tasks that it starts, log in the block."""
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


class Labels(logging.Filter):
    """Handler filter that adds run, step and group to each record, except fields that the log call gave as `extra`:
    with a record factory `logging` would raise KeyError for these."""

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self._run_name = run_name

    def filter(self, record: logging.LogRecord) -> bool:
        for key, value in {"run": self._run_name, **_ids.get()}.items():
            record.__dict__.setdefault(key, value)
        return True


class _Faults(logging.FileHandler):
    """Log handler that writes errors with their tracebacks to a file, made with the first error."""

    def __init__(self, file: Path, note: Callable[[str], None]) -> None:
        super().__init__(file, delay=True)
        self.setLevel(logging.ERROR)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self._note: Callable[[str], None] | None = note

    def filter(self, record: logging.LogRecord) -> bool:
        """Write errors to the file and drop them, so that console handlers don't get them."""
        if record.levelno < self.level:
            return True
        self.emit(record)
        if self._note is not None:
            self._note(f"tracebacks of the lost calls are in {self.baseFilename}")
            self._note = None
        return False


@contextmanager
def tracebacks_in(file: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Write errors of abandoned calls to a file during the block: after a process died, they fill pages. `note` gets a
    message that names the file."""
    faults = _Faults(file, note)
    loggers = [logging.getLogger(name) for name in ("asyncio", "ray._private.worker")]
    for logger in loggers:
        logger.addFilter(faults)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(faults)
        faults.close()


class JsonLines(logging.Formatter):
    """Formatter that writes one JSON object per line, with the keys of Ray's own JSON lines."""

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
    """Set up the driver's logs before anything is logged. With `log_format="text"` the CLI's handler stays."""
    # Otherwise transformers prints advice between a run's lines. Its errors are raised in any case.
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
    """Remove the driver's own log handler when Ray begins to write the lines. Idempotent."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h.formatter, JsonLines)]:
        root.removeHandler(handler)


def label_logs(run_name: str) -> None:
    """Add the ids to all lines of this process's root logger, and escape control characters. Idempotent."""
    make_logs_visible()
    for handler in logging.getLogger().handlers:
        for old in [f for f in handler.filters if isinstance(f, Labels)]:
            handler.removeFilter(old)
        handler.addFilter(Labels(run_name))


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows progress: call it with (split, rows done, rows in all)."""
    if not sys.stderr.isatty():
        yield _print_tenths
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        tasks = {}

        def show(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bars.add_task(split, total=total)
            bars.update(tasks[split], completed=done)

        yield show


def _print_tenths(split: str, done: int, total: int) -> None:
    if total and done * _STEPS // total != (done - 1) * _STEPS // total:
        print(f"{split}: {done} of {total}", file=sys.stderr, flush=True)
