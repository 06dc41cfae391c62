"""Secrets in settings: one type, whose value no printer shows, and `cleaned`, for text that others have written.

A process remembers the value of every secret that it reads. Whatever it prints, logs or reports goes through `cleaned`.
"""

import logging
import re
from collections.abc import Callable
from typing import Annotated, Final
from urllib.parse import unquote

from pydantic import AfterValidator, SecretStr

MASK: Final = "**********"

_WORDS: Final = frozenset(
    {"apikey", "auth", "authorization", "credential", "credentials", "key", "keys"}
    | {"passphrase", "passwd", "password", "pwd", "secret", "secrets", "token"}
)
"""A text is a secret if the name of its key, or of one above it, contains such a word: `hf_token`, not `max_tokens`."""

_PLACES: Final = frozenset({"file", "path"})
"""Suffixes of names that say where a secret is: `api_keys_file`."""

_FEWEST_CHARS: Final = 5
"""Shorter values are masked where they are, but not looked for in other text, which would become unreadable."""

_IN_URL: Final = re.compile(
    r"(?P<before>://[^/?#\s:@]*:)(?P<password>[^/?#\s]+)(?=@)"
    r"|(?P<name>[?&](?:\w*(?:password|passwd|secret|token|key))=)(?P<value>[^&#\s]+)",
    re.IGNORECASE,
)

_KEY_PREFIX: Final = "tml-"
_NOT_KEYS: Final = ("tenant", "admin")  # beside `key`

known: dict[str, None] = {}  # the values of this process; a dict, since it keeps its order while threads add to it


class SecretUrl(SecretStr):
    """A URL with a password in it, which is masked alone."""

    def __str__(self) -> str:
        return _IN_URL.sub(lambda found: f"{found['before'] or found['name']}{MASK}", self.get_secret_value())

    def __repr__(self) -> str:
        return f"SecretUrl({str(self)!r})"


def remember(secret: SecretStr) -> SecretStr:
    """Make `cleaned` remove this secret from now on."""
    text = secret.get_secret_value()
    passwords = [found["password"] or found["value"] for found in _IN_URL.finditer(text)]
    for each in (text, *passwords, *map(unquote, passwords)):
        if len(each) >= _FEWEST_CHARS:
            known[each] = None
    return secret


Secret = Annotated[SecretStr, AfterValidator(remember)]
"""The type of a setting that is a secret."""


def hidden(value: object, name: str = "") -> object:
    """Return a value of a plugin's section with its secrets as SecretStr, and remember them. `name` is its key."""
    match value:
        case SecretStr():
            return remember(value)
        case str() if is_secret_name(name):
            return remember(SecretStr(value))
        case str() if _IN_URL.search(value):
            return remember(SecretUrl(value))
        case dict():
            return {key: hidden(each, name if is_secret_name(name) else str(key)) for key, each in value.items()}
        case list() | tuple():
            return type(value)(hidden(each, name) for each in value)
        case _:
            return value


def revealed(value: object) -> object:
    """Return what `hidden` was given."""
    return _replaced(value, SecretStr.get_secret_value)


def shown(value: object) -> object:
    """Return a value as it may be printed."""
    return _replaced(value, lambda secret: str(secret) or MASK)


def _replaced(value: object, replace: Callable[[SecretStr], str]) -> object:
    match value:
        case SecretStr():
            return replace(value)
        case dict():
            return {key: _replaced(each, replace) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_replaced(each, replace) for each in value)
        case _:
            return value


def remember_keys(value: object) -> None:
    """Remember every possible key in a malformed `server.api_keys`, in which no field tells which values are keys."""
    match value:
        case str():
            remember(SecretStr(value))
        case dict():
            for name, each in value.items():
                if name not in _NOT_KEYS or str(each).startswith(_KEY_PREFIX):
                    remember_keys(each)
                if name not in {"key", *_NOT_KEYS}:
                    remember_keys(name)
        case list() | tuple():
            for each in value:
                remember_keys(each)


def is_secret_name(name: str) -> bool:
    words = re.split(r"[^a-z]+", name.lower())
    return words[-1] not in _PLACES and not _WORDS.isdisjoint(words)


def cleaned(text: str) -> str:
    """Return the text without the secrets that this process knows."""
    for secret in sorted(known, key=len, reverse=True):  # one may begin like another
        text = text.replace(secret, MASK)
    return text


class CleanFormatter(logging.Formatter):
    """Formats log records, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return cleaned(super().format(record))
