"""Text that somebody else wrote (a model, a tool, a data row, a sandbox, a service) on its way to a terminal or a log.

A terminal obeys what it is shown: such text could clear the screen, rewrite lines above it, retitle the window, or put
a command on the clipboard. Everything of ours that prints foreign text prints `visible(text)`; what is printed as JSON
needs none of it, as `json.dumps` escapes these characters itself.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from types import TracebackType

_COLOUR = r"\x1b\[[0-9;]*m"
# Controls of C0 and C1 but newline and tab; marks that reorder text or end a line; surrogates, which can't be encoded.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR_OR_CONTROL = re.compile(f"{_COLOUR}|{_CONTROL.pattern}")


def visible(text: str, *, keeps_colours: bool = False) -> str:
    r"""`text` with its control characters as Python writes them; newlines and tabs stay. Idempotent.

    Args:
        keeps_colours: leaves whole colour sequences, for the log of a job, which Ray colours.

    Example: an escape character becomes `\x1b`, the mark U+202E becomes `\u202e`.
    """
    return (_COLOUR_OR_CONTROL if keeps_colours else _CONTROL).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    text = found.group()
    return text if len(text) > 1 else text.encode("unicode_escape").decode()


class _VisibleRecord(logging.LogRecord):
    """A log record whose message and traceback are visible, whichever handler writes it."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        return visible(super().getMessage())


def make_logs_visible() -> None:
    """Make every logger's lines visible in this process from now on, those of libraries too. Idempotent."""
    make = logging.getLogRecordFactory()
    if getattr(make, "is_visible", False):
        return

    def make_visible(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        # The factory in place is kept, as it may be Ray's, which notes the time; so the record exists already.
        record.__class__ = _VisibleRecord
        if record.exc_info:
            # Formatters take it from here instead of writing their own.
            record.exc_text = visible(logging.Formatter().formatException(record.exc_info))
        return record

    make_visible.is_visible = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_visible)


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: an unexpected error's message may quote what a model wrote."""
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))
