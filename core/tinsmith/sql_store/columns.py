"""Column types for the store's values: aware times, enumerations, tuples and frozen dataclasses."""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import msgspec
from sqlalchemy import JSON, BigInteger, Dialect, String, TypeDecorator

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

NOW_IN: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)",
}
"""The time by the database's clock, which all machines share, in microseconds: to the millisecond or better."""

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def to_microseconds(time: datetime) -> int:
    """Return how a time is stored: as microseconds since 1970, exact and the same in every database."""
    return (time - _EPOCH) // _MICROSECOND


def from_microseconds(stored: int) -> datetime:
    return _EPOCH + stored * _MICROSECOND


class Microseconds(TypeDecorator[datetime]):
    """An aware time."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        del dialect
        return None if value is None else to_microseconds(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:  # Any: the driver's int
        del dialect
        return None if value is None else from_microseconds(value)


class AsText(TypeDecorator[E], Generic[E]):
    """An enumeration by its value."""

    impl = String
    cache_ok = True

    def __init__(self, enum: type[E]) -> None:
        super().__init__()
        self.enum = enum

    def process_bind_param(self, value: E | None, dialect: Dialect) -> str | None:
        del dialect
        return None if value is None else str(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> E | None:  # Any: the driver's str
        del dialect
        return None if value is None else self.enum(value)


class AsJson(TypeDecorator[T], Generic[T]):
    """A frozen dataclass or tuple as JSON. Reading validates it."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def __init__(self, python: type[T]) -> None:
        super().__init__()
        self.python = python

    def process_bind_param(self, value: T | None, dialect: Dialect) -> Any | None:  # Any: JSON
        del dialect
        return None if value is None else msgspec.to_builtins(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> T | None:  # Any: JSON
        del dialect
        return None if value is None else msgspec.convert(value, self.python)
