"""What only the operator may read: it goes to the log under a number, and everybody else gets the number.

Texts of exceptions, lines of logs and paths may tell about another tenant's work or about this machine.
"""

import logging
import secrets

from tinsmith.errors import StoreError, TinsmithError


def log_privately(log: logging.Logger, text: str, *, error: BaseException | None = None) -> str:
    """Log `text`, with the traceback of `error`. Return how a message for tenants refers to it."""
    reference = secrets.token_hex(4)
    log.error("reference %s: %s", reference, text, exc_info=error)
    return f"reference {reference} in the operator's log"


def public_text(error: TinsmithError, log: logging.Logger, *, during: str) -> str:
    """Return what tenants may read of an error. If that is not its message, log the message."""
    if error.public:
        return str(error)
    known = isinstance(error, StoreError)  # there may be one for each request, and a traceback tells no more
    what = "the request store cannot be used now" if known else "something on our side failed"
    return f"{what} ({log_privately(log, f'{during}: {error}', error=None if known else error)})"
