"""Sets a program's clock a year ahead, to find tests that depend on the current date."""

from __future__ import annotations

from rayapp.core.syntax import parse
from rayapp.tasks.code.assembling import line_below_futures, with_preamble

CLOCK = """
def _rayapp_later():
    import datetime, time
    ahead, seconds, nanoseconds = 366 * 86400 + 7 * 3600, time.time, time.time_ns
    time.time = lambda: seconds() + ahead
    time.time_ns = lambda: nanoseconds() + ahead * 10**9
    def moved(function):
        return lambda at=None: function(time.time() if at is None else at)
    time.localtime, time.gmtime, time.ctime = map(moved, (time.localtime, time.gmtime, time.ctime))
    strftime = time.strftime
    time.strftime = lambda form, at=None: strftime(form, time.localtime() if at is None else at)
    class Moved(type):
        def __instancecheck__(self, value):
            return isinstance(value, self.__mro__[1])
    class date(datetime.date, metaclass=Moved):
        @classmethod
        def today(cls):
            return cls.fromtimestamp(time.time())
    class moment(datetime.datetime, metaclass=Moved):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)
        @classmethod
        def utcnow(cls):
            return cls.utcfromtimestamp(time.time())
        @classmethod
        def today(cls):
            return cls.now()
    for kind, name in ((date, "date"), (moment, "datetime")):
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = "datetime"
        setattr(datetime, name, kind)
_rayapp_later()
"""
"""Code that sets the clock of its process a year and some hours ahead."""


def a_year_later(code: str) -> str:
    """Return the code with lines added that set its clock a year and some hours ahead; unchanged if it does not
    parse."""
    tree = parse(code)
    return code if tree is None else with_preamble(code, line_below_futures(tree), CLOCK)
