"""Column types that hold the store's values as they are: aware times, enumerations, tuples and frozen dataclasses."""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import JSON, BigInteger, Dialect, String, TypeDecorator
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class Microseconds(TypeDecorator[datetime]):
    """An aware time as microseconds since 1970: the same order, bits and meaning in every database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        del dialect
        return None if value is None else (value - _EPOCH) // _MICROSECOND

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:  # Any: the driver's int
        del dialect
        return None if value is None else _EPOCH + value * _MICROSECOND


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
    """A frozen dataclass or tuple as JSON, checked when it is read."""

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


class DatabaseNow(FunctionElement[datetime]):
    """The time by the database's own clock, which is the same for all machines; exact to a millisecond at least."""

    type = Microseconds()
    inherit_cache = True


@compiles(DatabaseNow, "sqlite")
def _now_in_sqlite(element: DatabaseNow, compiler: object, **options: object) -> str:
    del element, compiler, options
    return "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"


@compiles(DatabaseNow, "postgresql")
def _now_in_postgresql(element: DatabaseNow, compiler: object, **options: object) -> str:
    del element, compiler, options
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"
