"""Log lines of the server and its engines, and text from outside on a terminal.

Names of files and tensors, metadata, and what plugins and tenants say may hold control characters and markup. What any
client can cause, such as a malformed request, must not flood the log.
"""

import io
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich import markup
from rich.console import Console

from tinsmith.log_fields import FIELDS, of_request
from tinsmith.settings.secrets import CleanFormatter, cleaned

_UNBOUNDED: Final = 10_000  # columns
EVERY_S: Final = 60.0


class StderrHandler(logging.Handler):
    """Looks up `sys.stderr` for each line: while progress is shown, that is the console that shows it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler: whoever logs is not disturbed
            self.handleError(record)


class JsonFormatter(logging.Formatter):
    """Formats a log record as an object on one line, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = {**of_request(), **vars(record)}
        fields |= {name: str(known[name]) for name in FIELDS if name in known}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: cleaned(value) for name, value in fields.items()})  # cleaned before it is escaped


def log_to_stderr(level: str, log_format: str = "text") -> None:
    """Log with time and logger name, and without secrets. A file, pipe or journal gets dates as well.

    Of others than tinsmith and its plugins (`tinsmith...`), log warnings and errors only. `log_format`: text or json.
    """
    handler = StderrHandler()
    times = "%H:%M:%S" if sys.stderr.isatty() else "%Y-%m-%dT%H:%M:%S%z"
    as_text = CleanFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt=times)
    handler.setFormatter(JsonFormatter() if log_format == "json" else as_text)
    handler.addFilter(_is_ours_or_grave)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _is_ours_or_grave(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith("tinsmith")


def console(*, stderr: bool = False) -> Console:
    """Return a console for people. It wraps lines on terminals only: files and pipes get each line whole."""
    made = Console(stderr=stderr, emoji=False, highlight=False)  # ids contain :train:, which would be an emoji
    if not made.is_terminal:
        made.width = _UNBOUNDED
    return made


class LogLines(io.TextIOBase):
    """A file for `Console` that logs each line at INFO."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._begun = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._log.info("%s", line.strip())
        return len(text)


def console_of(log: logging.Logger, log_format: str) -> Console:
    """Return the console for what a server shows on stderr. With `json` it writes lines of the log."""
    if log_format != "json":
        return console(stderr=True)
    return Console(file=LogLines(log), width=_UNBOUNDED, emoji=False, highlight=False)  # type: ignore[arg-type]  # IO[str] is no class


def printable(text: str) -> str:
    """Replace what a terminal would obey, such as escape sequences, by its number."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text
    )


def printable_lines(text: str) -> str:
    """Make text printable, and keep its lines."""
    return "\n".join(map(printable, text.split("\n")))


def escape(text: str) -> str:
    """Make text printable, and free of rich's markup."""
    return markup.escape(printable(text))


def escape_lines(text: str) -> str:
    """Make text printable and free of rich's markup, and keep its lines."""
    return markup.escape(printable_lines(text))


@dataclass(slots=True)
class _Shown:
    at_s: float
    left_out: int = 0


class RepeatedWarnings(logging.Filter):
    """For a logger: lets each kind of warning pass once a minute, and tells how many were left out since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._shown: dict[str, _Shown] = {}  # by the message before its arguments are filled in

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        kind, now = str(record.msg), self._clock()
        before = self._shown.get(kind)
        if before is not None and now - before.at_s < EVERY_S:
            before.left_out += 1
            return False
        if before is not None and before.left_out > 0:
            record.msg = f"{kind} ({before.left_out} more since the last such line)"
        self._shown[kind] = _Shown(now)
        return True
