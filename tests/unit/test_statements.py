"""Named SQL texts give what their rows say, on both databases."""

from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
import sqlalchemy
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from tinsmith.sql_store.statements import Change, Query, insert_into


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Thing(NamedTuple):
    id: int
    made_at: datetime | None
    colour: Colour | None
    broken: bool


NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
RED = {"made_at": NOON, "colour": Colour.RED, "broken": True}
BLUE = {"made_at": None, "colour": Colour.BLUE, "broken": False}
INSERT = Change(insert_into("things", "made_at", "colour", "broken"))
BY_ID = Query("SELECT id, colour, made_at, broken FROM things WHERE id IN :ids ORDER BY id FOR UPDATE", Thing)
REPAINT = Change("UPDATE things SET colour = :new, made_at = :at WHERE id = :key")


@pytest.fixture(params=["sqlite", "postgresql"])
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    url, key = "sqlite://", "INTEGER PRIMARY KEY"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url").replace("postgresql:", "postgresql+psycopg:")
        key = "BIGSERIAL PRIMARY KEY"
    engine = create_engine(url)
    with engine.begin() as connection:
        columns = f"id {key}, made_at BIGINT, colour TEXT UNIQUE, broken BOOLEAN"
        connection.execute(sqlalchemy.text(f"CREATE TABLE things ({columns})"))
        yield connection
    engine.dispose()


def test_an_insert_returns_its_key_and_rows_have_the_types_of_their_fields(connection: Connection) -> None:
    assert [INSERT.insert(connection, each) for each in (RED, BLUE)] == [1, 2]
    red, blue = Thing(1, NOON, Colour.RED, broken=True), Thing(2, None, Colour.BLUE, broken=False)
    for ids, expected in (([1], [red]), ([2, 1], [red, blue]), ([1, 2, 3], [red, blue]), ([], []), ([2], [blue])):
        found = BY_ID.all(connection, ids=ids)
        assert found == expected
        assert [tuple(map(type, each)) for each in found] == [tuple(map(type, each)) for each in expected]
    assert BY_ID.first(connection, ids=[1]) == red
    assert BY_ID.first(connection, ids=[3]) is None


def test_lists_may_be_named_alike_and_come_twice(connection: Connection) -> None:
    INSERT.run_each(connection, [RED, BLUE])
    text = "SELECT * FROM things WHERE id IN :id AND (colour IN :ids OR colour IN :id_of_colour) OR NOT id IN :id"
    found = Query(text, Thing).all(connection, id=[2], ids=["blue"], id_of_colour=["red"])
    assert sorted(each.id for each in found) == [1, 2]


def test_a_change_is_made_once_for_each_of_the_values(connection: Connection) -> None:
    INSERT.run_each(connection, [RED, {**BLUE, "colour": None}])
    told: list[tuple[Any, ...]] = []
    event.listen(connection, "before_cursor_execute", lambda *arguments: told.append(arguments[3:]))
    REPAINT.run_each(connection, [{"key": 1, "new": None, "at": NOON}, {"key": 2, "new": Colour.RED, "at": None}])
    REPAINT.run_each(connection, [])
    REPAINT.run(connection, key=1, new=Colour.BLUE, at=None)
    noon = 1767355200000000
    assert [(parameters, many) for parameters, _, many in told] == [
        ([{"key": 1, "new": None, "at": noon}, {"key": 2, "new": "red", "at": None}], True),
        ({"key": 1, "new": "blue", "at": None}, False),
    ]
    assert [each.colour for each in BY_ID.all(connection, ids=[1, 2])] == [Colour.BLUE, Colour.RED]


def test_errors_are_those_of_sqlalchemy(connection: Connection) -> None:
    INSERT.run(connection, **RED)
    with pytest.raises(IntegrityError), connection.begin_nested():
        INSERT.run(connection, **RED)
    with pytest.raises((OperationalError, ProgrammingError), match="missing"), connection.begin_nested():
        Change("DELETE FROM missing").run(connection)
