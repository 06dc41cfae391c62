"""The statements: SQL texts with names, run on the database's driver.

SQLAlchemy's execution layer costs several times more than SQLite itself. A text is SQL as PostgreSQL
has it, with `:name` for a parameter, `IN :name` for a list, and `DATABASE_NOW` for the time by the database's clock.
SQLite gets it without the clause at its end that locks rows, since it has one writer.

Times are stored as microseconds since 1970, enumerations as their values, and structured values as JSON: dataclasses,
tuples and dictionaries.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache, cached_property, partial
from types import NoneType, UnionType
from typing import Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from sqlalchemy import Connection, CursorResult
from sqlalchemy.exc import DBAPIError

R = TypeVar("R")
T = TypeVar("T")

Values = Mapping[str, Any]  # Any, here and below: values of any column
Convert = Callable[[Any], Any]
_Columns = tuple[Sequence[str], Sequence[tuple[str, Convert]]]  # their names, and the converters of some

CHUNK: Final = 500  # values of one IN list

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NOW_IN: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)",
}
"""The time by the database's clock, which all machines share, in microseconds: to the millisecond or better."""
_PARAMETER: Final = re.compile(r"(?<![:\w]):(\w+)")
_LIST: Final = re.compile(r"\bIN :(\w+)")
_FIELDS: Final = re.compile(r"\b(\w+\.)?FIELDS\b")
_PLAIN: Final = frozenset({str, int, bool, bytes, NoneType})
_SCALARS: Final = frozenset({str, int, bytes, datetime})
_LOCKS: Final = re.compile(r"\s+FOR (UPDATE|SHARE|KEY SHARE)( OF \w+)?( SKIP LOCKED)?\s*$")


class _Statement:
    """A text, as each database's driver takes it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lists = sorted(set(_LIST.findall(text)))
        self._of_sqlite: dict[tuple[int, ...], str] = {}  # by the lengths of the lists

    def execute(self, connection: Connection, *rows: Values) -> Any:  # Any: a cursor with rows as tuples
        """Execute once per set of values. Statement listeners are notified, and errors are SQLAlchemy's."""
        in_sqlite = connection.dialect.name == "sqlite"
        bound = [_bound(each, self._lists if in_sqlite else ()) for each in rows]
        values: Any = bound if (several := len(bound) > 1) else bound[0]
        if not in_sqlite:
            return connection.exec_driver_sql(self._postgresql, values)
        sql = self._sqlite(rows[0])
        driver: Any = connection.connection.driver_connection
        cursor = driver.cursor()
        for listener in connection.dispatch.before_cursor_execute:
            listener(connection, cursor, sql, values, None, several)
        try:
            if several:
                cursor.executemany(sql, values)
            else:
                cursor.execute(sql, values)
        except sqlite3.Error as error:
            raise DBAPIError.instance(sql, values, error, sqlite3.Error, dialect=connection.dialect) from error
        return cursor

    @cached_property
    def _postgresql(self) -> str:
        text = _LIST.sub(r"= ANY(:\1)", self.text.replace("DATABASE_NOW", _NOW_IN["postgresql"]))
        return _PARAMETER.sub(r"%(\1)s", text)

    def _sqlite(self, values: Values) -> str:
        lengths = tuple(len(values[name]) for name in self._lists)
        if (text := self._of_sqlite.get(lengths)) is None:
            text = _LOCKS.sub("", self.text.replace("DATABASE_NOW", _NOW_IN["sqlite"]))
            text = _LIST.sub(lambda found: f"IN ({_members(found[1], len(values[found[1]]))})", text)
            self._of_sqlite[lengths] = text
        return text


class Query(_Statement, Generic[R]):
    """A text that reads rows.

    `row` is their class, a dataclass or named tuple whose fields are named as the columns. In the text, `FIELDS` stands
    for all of them, and `table.FIELDS` for those of a table. If there is one column only, `row` may be its type.
    """

    def __init__(self, text: str, row: type[R]) -> None:
        self._is_scalar = row in _SCALARS
        if not self._is_scalar:
            names = fields_of(row)
            text = _FIELDS.sub(lambda found: ", ".join(f"{found[1] or ''}{each}" for each in names), text)
        super().__init__(text)
        self._row = row
        self._columns: _Columns | None = None

    def all(self, connection: Connection, **values: Any) -> list[R]:
        found = self.execute(connection, values)
        if self._is_scalar:
            convert = _reading(self._row)
            return [value if convert is None else convert(value) for (value,) in found.fetchall()]
        names, converters = self._columns or self._read_columns(found)
        rows = []
        for row in found.fetchall():
            content = dict(zip(names, row, strict=True))
            for name, convert in converters:
                if content[name] is not None:
                    content[name] = convert(content[name])
            rows.append(self._row(**content))
        return rows

    def first(self, connection: Connection, **values: Any) -> R | None:
        """Return the first row, if there is one."""
        rows = self.all(connection, **values)
        return rows[0] if rows else None

    def one(self, connection: Connection, **values: Any) -> R:
        """Return the only row."""
        (row,) = self.all(connection, **values)
        return row

    def _read_columns(self, found: Any) -> _Columns:  # Any: a cursor
        names = found.keys() if isinstance(found, CursorResult) else [each[0] for each in found.description]
        kinds = get_type_hints(self._row)
        converters = [(name, convert) for name in names if (convert := _reading(kinds[name])) is not None]
        self._columns = tuple(names), converters
        return self._columns


class Change(_Statement):
    """A text that changes rows."""

    def run(self, connection: Connection, **values: Any) -> int:
        """Return how many rows have changed."""
        return int(self.execute(connection, values).rowcount)

    def run_each(self, connection: Connection, rows: Sequence[Values]) -> None:
        """Run once for each of these values, if there are any."""
        if rows:
            self.execute(connection, *rows)

    def insert(self, connection: Connection, values: Values) -> int:
        """Insert a row whose key is the integer `id`. Return it."""
        if connection.dialect.name == "sqlite":
            return int(self.execute(connection, values).lastrowid)
        return int(self._returning.execute(connection, values).scalar_one())

    @cached_property
    def _returning(self) -> _Statement:
        return _Statement(f"{self.text} RETURNING id")


def query(text: str, row: type[R]) -> Query[R]:
    """Return the query of a text that depends on its arguments; equal texts share one query."""
    found: Query[R] = _query(text, row)
    return found


_query: Final[Callable[..., Any]] = cache(Query)


def wanted(**columns: str | None) -> tuple[str, dict[str, str]]:
    """Return the conditions that columns have these values, and the values. None stands for any."""
    given = {name: value for name, value in columns.items() if value is not None}
    return "".join(f" AND {name} = :{name}" for name in given), given


def walked(key: str, before: tuple[datetime, str] | None, **columns: str | None) -> tuple[str, dict[str, Any]]:
    """Return the end of a query for a page of a list, newest first, behind a position; and its values but `at_most`."""
    conditions, given = wanted(**columns)
    values: dict[str, Any] = dict(given)
    if before is not None:
        conditions += f" AND (created_at, {key}) < (:last_created_at, :last_key)"
        values |= {"last_created_at": before[0], "last_key": before[1]}
    return f"{conditions} ORDER BY created_at DESC, {key} DESC LIMIT :at_most", values


def chunks(keys: Sequence[T]) -> Iterator[list[T]]:
    """Divide what goes into an IN list."""
    return (list(keys[start : start + CHUNK]) for start in range(0, len(keys), CHUNK))


def fields_of(row: Any) -> tuple[str, ...]:  # Any: a dataclass or the class of named tuples
    return tuple(each.name for each in fields(row)) if is_dataclass(row) else row._fields


def values_of(record: Any) -> dict[str, Any]:  # Any: a dataclass
    return {field.name: getattr(record, field.name) for field in fields(record)}


def insert_into(table: str, *columns: str) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{each}' for each in columns)})"


def put_into(table: str, *columns: str, key: str) -> str:
    """Insert a row, or replace what the one with its key has in these columns."""
    changes = ", ".join(f"{each} = excluded.{each}" for each in columns)
    return f"{insert_into(table, *columns)} ON CONFLICT ({key}) DO UPDATE SET {changes}"


def add_to(table: str, *columns: str, key: Sequence[str]) -> str:
    """Insert a row, or add to these columns of the one with its key."""
    changes = ", ".join(f"{each} = {table}.{each} + excluded.{each}" for each in columns)
    return f"{insert_into(table, *key, *columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"


def total(number: str) -> str:
    """Sum up a whole number, 0 if there is none: PostgreSQL's own sum is a decimal number."""
    return f"CAST(coalesce(sum({number}), 0) AS BIGINT)"


def to_microseconds(time: datetime) -> int:
    """Return how a time is stored: exact, and the same in every database."""
    return (time - _EPOCH) // _MICROSECOND


def from_microseconds(stored: int) -> datetime:
    return _EPOCH + stored * _MICROSECOND


def _bound(values: Values, lists: Sequence[str]) -> dict[str, Any]:
    """Convert the values for a driver, and replace these lists by their members."""
    bound = {name: each if type(each) in _PLAIN else _converted(each) for name, each in values.items()}
    for name in lists:
        bound |= {f"{name}{n}": each for n, each in enumerate(bound.pop(name))}
    return bound


def _members(name: str, length: int) -> str:
    return ", ".join(f":{name}{n}" for n in range(length))


def _converted(value: Any) -> Any:
    if isinstance(value, datetime):
        return to_microseconds(value)
    if isinstance(value, StrEnum):
        return str(value)
    has_parts = isinstance(value, tuple | dict) or is_dataclass(value)
    return json.dumps(msgspec.to_builtins(value)) if has_parts else value


def _reading(kind: Any) -> Convert | None:  # Any: a type, or one of two
    """Return the converter of a column's value to this type; numbers, texts and bytes need none."""
    if get_origin(kind) in {Union, UnionType}:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if kind is datetime:
        return from_microseconds
    if kind in {str, int, float, bytes} or get_origin(kind) is Literal:
        return None
    is_simple = kind is bool or (isinstance(kind, type) and issubclass(kind, StrEnum))
    return kind if is_simple else partial(_from_json, kind)


def _from_json(kind: type, stored: Any) -> Any:
    """Read JSON, which PostgreSQL's driver has parsed."""
    return msgspec.convert(json.loads(stored) if isinstance(stored, str) else stored, kind)
