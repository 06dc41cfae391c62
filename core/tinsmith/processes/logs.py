"""Where the server and its engines log."""

import logging
import sys

from tinsmith.settings.secrets import CleanFormatter


class StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the time of each line: while progress is shown, the console that shows it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler: whoever logs is not disturbed
            self.handleError(record)


def log_to_stderr(level: str) -> None:
    """Log with time and logger name, and without secrets."""
    handler = StderrHandler()
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
