"""Statements of the hottest transactions, given to SQLite's driver without what SQLAlchemy does around each execution.

It takes several times as long as what SQLite does. Each statement is compiled once. On other databases, where the
network takes longer, SQLAlchemy executes them as always.
"""

import sqlite3
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from sqlalchemy import Connection, Delete, Dialect, Executable, Insert, Update
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

Values = Mapping[str, Any]  # Any, here and below: values of any column
Process = Callable[[Any], Any]

_DIRECT: Final = "sqlite"


class Prepared:
    """A statement with named parameters, or an INSERT, whose columns are named by the values. Rows are named tuples."""

    def __init__(self, statement: Executable) -> None:
        self._statement = statement
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}  # by the values' names and the lengths of lists

    def all(self, connection: Connection, values: Values) -> Sequence[Any]:
        """Return the rows of a query."""
        if connection.dialect.name != _DIRECT:
            return connection.execute(self._statement, values).all()
        compiled = self._for(connection.dialect, values)
        return compiled.rows(_executed(connection, compiled.sql, compiled.bound(values)).fetchall())

    def first(self, connection: Connection, values: Values) -> Any | None:
        """Return the first row of a query, if there is one."""
        rows = self.all(connection, values)
        return rows[0] if rows else None

    def run(self, connection: Connection, *values: Values) -> None:
        """Execute what changes rows, once for each of the values, which all have the same names."""
        if connection.dialect.name != _DIRECT:
            connection.execute(self._statement, values)
            return
        compiled = self._for(connection.dialect, values[0])
        _executed(connection, compiled.sql, *map(compiled.bound, values))

    def insert(self, connection: Connection, values: Values) -> int:
        """Execute an INSERT, and return the integer that is the row's primary key."""
        if connection.dialect.name != _DIRECT:
            key = connection.execute(self._statement, values).inserted_primary_key
            assert key is not None
            return int(key[0])
        compiled = self._for(connection.dialect, values)
        inserted = _executed(connection, compiled.sql, compiled.bound(values)).lastrowid
        return int(inserted)

    def _for(self, dialect: Dialect, values: Values) -> "_Compiled":
        shape = (*values, *(len(each) for each in values.values() if isinstance(each, list)))
        if (compiled := self._compiled.get(shape)) is None:
            compiled = self._compiled[shape] = _Compiled(self._statement, dialect, values)
        return compiled


class _Compiled:
    """A statement in SQL for values of one shape."""

    def __init__(self, statement: Executable, dialect: Dialect, example: Values) -> None:
        changes = isinstance(statement, Insert | Update | Delete)
        names = list(example) if isinstance(statement, Insert) else None
        compiled = statement.compile(dialect=dialect, column_keys=names)  # type: ignore[attr-defined]
        assert isinstance(compiled, SQLCompiler)
        assert not compiled.prefetch  # nothing that SQLAlchemy would compute for each row
        state = compiled.construct_expanded_state(dict(example))
        assert state.positiontup is not None
        types = {name: parameter.type.dialect_impl(dialect) for parameter, name in compiled.bind_names.items()}
        expansion = {name: key for key, names in state.parameter_expansion.items() for name in names}
        places = {name: place for names in state.parameter_expansion.values() for place, name in enumerate(names)}
        self.sql = state.statement
        self._dialect = dialect
        self._columns = [] if changes else list(getattr(statement, "selected_columns", ()))
        self._constants: list[Any] = []
        self._bindings: list[tuple[int, str, int | None, Process | None]] = []
        for position, name in enumerate(state.positiontup):
            key = expansion.get(name, name)
            process = types[key].bind_processor(dialect)
            if key in example:
                self._bindings.append((position, key, places.get(name), process))
                self._constants.append(None)
            else:
                value = state.parameters[name]
                self._constants.append(process(value) if process else value)

    def bound(self, values: Values) -> tuple[Any, ...]:
        """Return the parameters in the order of the SQL."""
        bound = self._constants.copy()
        for position, key, place, process in self._bindings:
            value = values[key] if place is None else values[key][place]
            bound[position] = value if process is None else process(value)
        return tuple(bound)

    @cached_property
    def _row(self) -> Callable[..., Any]:
        return namedtuple("Row", [column.key for column in self._columns], rename=True)  # a literal has no name

    @cached_property
    def _converted(self) -> list[tuple[int, Process]]:
        found = ((n, column.type.dialect_impl(self._dialect)) for n, column in enumerate(self._columns))
        converters = ((n, each.result_processor(self._dialect, None)) for n, each in found)
        return [(n, convert) for n, convert in converters if convert is not None]

    def rows(self, fetched: Sequence[Sequence[Any]]) -> list[Any]:
        row, converted, made = self._row, self._converted, []
        for each in fetched:
            values = list(each)
            for n, convert in converted:
                values[n] = convert(values[n])
            made.append(row(*values))
        return made


def _executed(connection: Connection, sql: str, *parameters: tuple[Any, ...]) -> DBAPICursor:
    """Execute on the driver's connection. Whoever listens for statements is told, and errors are SQLAlchemy's."""
    driver: Any = connection.connection.driver_connection
    cursor: DBAPICursor = driver.cursor()
    several = len(parameters) > 1
    for listener in connection.dispatch.before_cursor_execute:
        listener(connection, cursor, sql, list(parameters) if several else parameters[0], None, several)
    try:
        if several:
            cursor.executemany(sql, parameters)
        else:
            cursor.execute(sql, parameters[0])
    except sqlite3.Error as error:
        raise DBAPIError.instance(sql, parameters[0], error, sqlite3.Error, dialect=connection.dialect) from error
    return cursor
