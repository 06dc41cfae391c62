"""The environment of processes that this one starts: no credential that it does not need, no imports from here."""

import os
from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import SecretStr

from tinsmith.settings.schema import Settings
from tinsmith.settings.secrets import remember
from tinsmith.settings.sources import environment_path

WORKER_KEY: Final = "TINSMITH_WORKER_KEY"
"""The secret that an engine and its workers share."""

HUB_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""The variables for downloading models."""

TRACE_HEADERS: Final = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
"""The variables that may hold the key of a collector of traces."""

_CLIENTS: Final = ("TINKER_API_KEY",)
_SECTIONS: Final = frozenset(Settings.model_fields)


def child_environment(environment: Mapping[str, str] | None = None, *, keep: Iterable[str] = ()) -> dict[str, str]:
    """Return this process's environment without settings and credentials, for a process that it starts.

    Neither that process nor what it starts imports from the current directory.

    Settings (`TINSMITH_SERVER__API_KEYS`, `TINSMITH_STORE__URL`) are left out in any case: they reach an engine in a
    file that only this user can read. `keep` names the credentials that the process needs.
    """
    left_out = {WORKER_KEY, *HUB_TOKENS, *TRACE_HEADERS, *_CLIENTS}.difference(keep)
    found = os.environ if environment is None else environment
    kept = {name: value for name, value in found.items() if name not in left_out and not names_setting(name)}
    return {**kept, "PYTHONSAFEPATH": "1"}


def remember_credentials() -> None:
    """Remove the credentials of this process's environment from all output."""
    for name in (WORKER_KEY, *HUB_TOKENS, *_CLIENTS):
        if name in os.environ:
            remember(SecretStr(os.environ[name]))
    for name in TRACE_HEADERS:
        for header in os.environ.get(name, "").split(","):
            if value := header.partition("=")[2].strip():
                remember(SecretStr(value))


def forget_settings() -> bool:
    """Remove settings from this process's environment, so that nothing that it starts inherits them.

    Return whether API keys may have been among them.
    """
    paths = {name: environment_path(name) for name in os.environ if names_setting(name)}
    for name in paths:
        del os.environ[name]
    return any(path is not None and path[:2] in (("server",), ("server", "api_keys")) for path in paths.values())


def names_setting(name: str) -> bool:
    """Return whether an environment variable is read as a setting."""
    path = environment_path(name)
    return path is not None and path[0] in _SECTIONS
