"""Statements that go to SQLite's driver directly give what SQLAlchemy gives."""

from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Integer,
    MetaData,
    Table,
    bindparam,
    create_engine,
    event,
)
from sqlalchemy.exc import IntegrityError, OperationalError

from tinsmith.sql_store.columns import AsJson, AsText, Microseconds
from tinsmith.sql_store.prepared import Prepared


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


THINGS = Table(
    "things",
    MetaData(),
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("made_at", Microseconds),
    Column("colour", AsText(Colour), unique=True),
    Column("broken", Boolean),
    Column("parts", AsJson(tuple[int, ...])),
)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
RED = {"made_at": NOON, "colour": Colour.RED, "broken": True, "parts": (1, 2)}
BLUE = {"made_at": None, "colour": Colour.BLUE, "broken": False, "parts": None}
BY_ID = sqlalchemy.select(THINGS).where(THINGS.c.id.in_(bindparam("ids", expanding=True))).order_by(THINGS.c.id)
REPAINT = (
    THINGS.update().where(THINGS.c.id == bindparam("key")).values(colour=bindparam("new"), made_at=bindparam("at"))
)
INSERT = Prepared(THINGS.insert().values(broken=sqlalchemy.literal(1) == bindparam("one", type_=Integer)))


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        THINGS.metadata.create_all(connection)
        yield connection
    engine.dispose()


def test_an_insert_returns_its_key(connection: Connection) -> None:
    insert = Prepared(THINGS.insert())
    assert [insert.insert(connection, RED), insert.insert(connection, BLUE)] == [1, 2]
    assert [row._asdict() for row in connection.execute(sqlalchemy.select(THINGS))] == [
        {"id": 1, **RED},
        {"id": 2, **BLUE},
    ]


def test_parameters_beside_the_columns_are_bound(connection: Connection) -> None:
    values = {name: value for name, value in RED.items() if name != "broken"}
    assert INSERT.insert(connection, {**values, "one": 1}) == 1
    assert connection.execute(sqlalchemy.select(THINGS.c.broken)).scalar_one() is True


def test_rows_have_the_types_of_their_columns_and_lists_any_length(connection: Connection) -> None:
    connection.execute(THINGS.insert(), [RED, BLUE])
    query = Prepared(BY_ID)
    for ids in ([1], [2, 1], [1, 2, 3], [], [2]):
        expected = [row._asdict() for row in connection.execute(BY_ID, {"ids": ids})]
        assert [row._asdict() for row in query.all(connection, {"ids": ids})] == expected
    first: Any = query.first(connection, {"ids": [1]})
    assert first.made_at == NOON
    assert query.first(connection, {"ids": [3]}) is None


def test_constants_are_bound_as_their_column(connection: Connection) -> None:
    connection.execute(THINGS.insert(), [RED, BLUE])
    blue = Prepared(
        sqlalchemy.select(THINGS.c.id).where(THINGS.c.colour == Colour.BLUE, THINGS.c.id > bindparam("over"))
    )
    assert [tuple(row) for row in blue.all(connection, {"over": 0})] == [(2,)]


def test_a_change_is_made_once_for_each_of_the_values(connection: Connection) -> None:
    connection.execute(THINGS.insert(), [RED, {**BLUE, "colour": None}])
    told: list[tuple[Any, ...]] = []
    event.listen(connection, "before_cursor_execute", lambda *arguments: told.append(arguments[3:]))
    repaint = Prepared(REPAINT)
    repaint.run(connection, {"key": 1, "new": None, "at": NOON}, {"key": 2, "new": Colour.RED, "at": None})
    repaint.run(connection, {"key": 1, "new": Colour.BLUE, "at": None})
    assert [(parameters, many) for parameters, _, many in told] == [
        ([(1767355200000000, None, 1), (None, "red", 2)], True),
        ((None, "blue", 1), False),
    ]
    colours = connection.execute(sqlalchemy.select(THINGS.c.colour).order_by(THINGS.c.id)).scalars().all()
    assert colours == [Colour.BLUE, Colour.RED]


def test_errors_are_those_of_sqlalchemy(connection: Connection) -> None:
    insert = Prepared(THINGS.insert())
    insert.insert(connection, RED)
    with pytest.raises(IntegrityError, match="UNIQUE"):
        insert.insert(connection, RED)
    connection.exec_driver_sql("DROP TABLE things")
    with pytest.raises(OperationalError, match="no such table"):
        insert.insert(connection, RED)
