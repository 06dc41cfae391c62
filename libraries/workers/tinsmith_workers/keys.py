"""The secret that the engine and workers of other machines share."""

from collections.abc import Mapping
from typing import Final

from tinsmith.errors import ConfigError
from tinsmith.settings.environment import WORKER_KEY

KEY: Final = WORKER_KEY
"""Environment variable: the secret that the engine and its workers share."""

_MIN_CHARACTERS: Final = 32  # of 16 different ones, as in hexadecimal, they are 128 bits
_MIN_DIFFERENT: Final = 8  # a random one of that length hardly ever has fewer


def shared_key(environment: Mapping[str, str]) -> str:
    """Return the secret. Raises ConfigError if it is missing, or short enough to be guessed from a recorded proof."""
    key = environment.get(KEY)
    remedy = "set it to the same output of `openssl rand -hex 32` for the engine and its workers on all machines"
    if key is None:
        msg = f"{KEY} is not set: {remedy}"
        raise ConfigError(msg)
    if len(key) < _MIN_CHARACTERS:
        msg = f"{KEY} has {len(key)} characters, and must have at least {_MIN_CHARACTERS}: {remedy}"
        raise ConfigError(msg)
    if len(set(key)) < _MIN_DIFFERENT:
        msg = f"{KEY} has {len(set(key))} different characters, and must have at least {_MIN_DIFFERENT}: {remedy}"
        raise ConfigError(msg)
    return key
