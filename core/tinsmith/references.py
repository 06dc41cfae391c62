"""What only the operator may read: it goes to the log under a number, and everybody else gets the number.

Texts of exceptions, lines of logs and paths may tell about another tenant's work or about this machine.
"""

import logging
import secrets
from dataclasses import dataclass

from tinsmith.errors import StoreError, TinsmithError


@dataclass(frozen=True, slots=True)
class Told:
    """The public text about an error."""

    public: str
    cause: str = ""  # for the operator alone; empty if there is no more to say

    def to(self, *, operator: bool) -> str:
        return f"{self.public}: {self.cause}" if operator and self.cause else self.public


def log_privately(log: logging.Logger, text: str, *, error: BaseException | None = None) -> str:
    """Log `text`, with the traceback of `error`. Return how a message for tenants refers to it."""
    reference = secrets.token_hex(4)
    log.error("reference %s: %s", reference, text, exc_info=error)
    return f"reference {reference} in the operator's log"


def told(error: TinsmithError, log: logging.Logger, *, during: str) -> Told:
    """Divide an error's message. What tenants may not read is logged as well."""
    if error.public:
        return Told(str(error))
    known = isinstance(error, StoreError)  # there may be one for each request, and a traceback tells no more
    what = "the request store cannot be used now" if known else "something on our side failed"
    reference = log_privately(log, f"{during}: {error}", error=None if known else error)
    return Told(f"{what} ({reference})", str(error))
