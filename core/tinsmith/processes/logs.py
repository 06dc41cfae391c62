"""Where the server and its engines log."""

import logging

from tinsmith.settings.secrets import CleanFormatter


def log_to_stderr(level: str) -> None:
    """Log with time and logger name, and without secrets."""
    handler = logging.StreamHandler()
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
