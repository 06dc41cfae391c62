"""Which fields clients have sent that this server does not know, as `/metrics` shows them."""

import re
import threading
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from tinsmith.protocol.unknown_fields import UnknownField

MOST_NAMES: Final = 100
"""That are shown; clients make them up, and each takes memory here and wherever metrics are kept."""

OTHER: Final = "(other)"

_SHOWN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}|[0-9]{1,9}")


class UnknownFieldCounts:
    """Counts by message and field. Names come in the order in which they were first seen; later ones are `(other)`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "tinsmith_unknown_fields",
            "requests refused because of a field that this server does not know",
            ["message", "field"],
            registry=registry,
        )
        self._named: set[UnknownField] = set()
        self._lock = threading.Lock()

    def count(self, fields: Iterable[UnknownField]) -> None:
        for field in fields:
            self._counter.labels(message=field.message, field=field.name if self._shows(field) else OTHER).inc()

    def _shows(self, field: UnknownField) -> bool:
        with self._lock:
            if field not in self._named and len(self._named) < MOST_NAMES and _SHOWN.fullmatch(field.name):
                self._named.add(field)
            return field in self._named
