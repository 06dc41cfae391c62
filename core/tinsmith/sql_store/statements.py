"""The statements of hot transactions: SQL texts with names, run on the database's driver.

SQLAlchemy's execution layer costs several times more than SQLite itself. A text is SQL as PostgreSQL
has it, with `:name` for a parameter, `IN :name` for a list, and `DATABASE_NOW` for the time by the database's clock.
SQLite gets it without the clause at its end that locks rows, since it has one writer.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, Generic, TypeVar, get_args, get_type_hints

from sqlalchemy import Connection, CursorResult
from sqlalchemy.exc import DBAPIError

from tinsmith.sql_store.columns import NOW_IN, from_microseconds, to_microseconds

R = TypeVar("R")
T = TypeVar("T")

Values = Mapping[str, Any]  # Any, here and below: values of any column
Convert = Callable[[Any], Any]
_Columns = tuple[Sequence[str], Sequence[tuple[str, Convert]]]  # their names, and the converters of some

CHUNK: Final = 500  # values of one IN list

_PARAMETER: Final = re.compile(r"(?<![:\w]):(\w+)")
_LIST: Final = re.compile(r"\bIN :(\w+)")
_PLAIN: Final = frozenset({str, int, bool, bytes, type(None)})
_SCALARS: Final = frozenset({str, int})
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
        text = _LIST.sub(r"= ANY(:\1)", self.text.replace("DATABASE_NOW", NOW_IN["postgresql"]))
        return _PARAMETER.sub(r"%(\1)s", text)

    def _sqlite(self, values: Values) -> str:
        lengths = tuple(len(values[name]) for name in self._lists)
        if (text := self._of_sqlite.get(lengths)) is None:
            text = _LOCKS.sub("", self.text.replace("DATABASE_NOW", NOW_IN["sqlite"]))
            text = _LIST.sub(lambda found: f"IN ({_members(found[1], len(values[found[1]]))})", text)
            self._of_sqlite[lengths] = text
        return text


class Query(_Statement, Generic[R]):
    """A text that reads rows.

    `row` is their class, a dataclass or named tuple whose fields are named as the columns. If there is one column only,
    `row` may be its type, int or str.
    """

    def __init__(self, text: str, row: type[R]) -> None:
        super().__init__(text)
        self._row = row
        self._columns: _Columns | None = None

    def all(self, connection: Connection, **values: Any) -> list[R]:
        found = self.execute(connection, values)
        if self._row in _SCALARS:
            return [value for (value,) in found.fetchall()]
        names, converters = self._columns or self._read_columns(found)
        rows = []
        for row in found.fetchall():
            fields = dict(zip(names, row, strict=True))
            for name, convert in converters:
                if fields[name] is not None:
                    fields[name] = convert(fields[name])
            rows.append(self._row(**fields))
        return rows

    def first(self, connection: Connection, **values: Any) -> R | None:
        """Return the first row, if there is one."""
        rows = self.all(connection, **values)
        return rows[0] if rows else None

    def _read_columns(self, found: Any) -> _Columns:  # Any: a cursor
        names = found.keys() if isinstance(found, CursorResult) else [each[0] for each in found.description]
        kinds = get_type_hints(self._row)
        converters = [(name, convert) for name in names if (convert := _reading(kinds[name])) is not None]
        self._columns = tuple(names), converters
        return self._columns


class Change(_Statement):
    """A text that changes rows."""

    def run(self, connection: Connection, **values: Any) -> None:
        self.execute(connection, values)

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


def chunks(keys: Sequence[T]) -> Iterator[Sequence[T]]:
    """Divide what goes into an IN list."""
    return (keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK))


def insert_into(table: str, *columns: str) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{each}' for each in columns)})"


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
    return str(value) if isinstance(value, StrEnum) else value


def _reading(kind: Any) -> Convert | None:  # Any: a type, or one of two
    """Return the converter of a column's value to this type; numbers, texts and bytes need none."""
    kind = next((each for each in get_args(kind) if each is not type(None)), kind)
    if kind is datetime:
        return from_microseconds
    return kind if kind is bool or (isinstance(kind, type) and issubclass(kind, StrEnum)) else None
