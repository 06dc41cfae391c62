"""What is said of an id that does not exist. It is the same for what never existed, was deleted, or is another's."""

from typing import Final

_FORGOTTEN: Final = frozenset({"session", "model", "sampling session"})


def no_such(what: str, name: str) -> str:
    hint = "; it may have been deleted after its session had ended (server.session_retention_s)"
    return f"no {what} {name!r}{hint if what in _FORGOTTEN else ''}"
