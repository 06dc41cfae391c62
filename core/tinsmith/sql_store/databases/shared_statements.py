"""Compiling each SQL statement once in a process, not once for every connection.

SQLAlchemy keeps compiled statements by their dialect, and makes a dialect for every engine. A store has an engine for
each of its connections, and an HTTP server that has just started would compile the same statements many times over.
"""

from typing import Any, Final

from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL
from sqlalchemy.util import LRUCache

_COMPILED: Final[Any] = LRUCache(1000)  # Any: SQLAlchemy's own types of keys and statements


class SharedStatements:
    """Mixed into a dialect, makes equal all its instances that compile alike."""

    server_version_info: tuple[Any, ...] | None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.server_version_info == self.server_version_info

    def __hash__(self) -> int:
        return hash(type(self))


def make_engine(url: URL, **options: Any) -> Engine:  # Any: as `create_engine`
    """Make an engine for a URL whose driver name is that of a dialect with shared statements."""
    execution_options = {**options.pop("execution_options", {}), "compiled_cache": _COMPILED}
    return create_engine(url, execution_options=execution_options, **options)
