"""Named SQL texts give what their rows say, on both databases."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
import sqlalchemy
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, put_into, total, values_of


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Thing(NamedTuple):
    id: int
    made_at: datetime | None
    colour: Colour | None
    broken: bool


@dataclass(frozen=True)
class Part:
    size: int
    colour: Colour


@dataclass(frozen=True)
class Whole:
    name: str
    tags: tuple[str, ...]
    notes: dict[str, Any] | None = None
    part: Part | None = None


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
        columns = "name TEXT PRIMARY KEY, tags JSON, notes JSON, part JSON"
        connection.execute(sqlalchemy.text(f"CREATE TABLE wholes ({columns})"))
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


@pytest.mark.parametrize(
    "whole",
    [
        Whole(
            "w",
            ("a", "b"),
            {"äöü": [1, 2**70, None, {"deep": 0.1}], "quote": 'it\'s "so" %s :name'},
            Part(1, Colour.RED),
        ),
        Whole("w", (), {}),
        Whole("w", (), None),
    ],
)
def test_a_record_comes_back_as_it_was_put(connection: Connection, whole: Whole) -> None:
    put = Change(put_into("wholes", *fields_of(Whole), key="name"))
    for each in (Whole("w", ("before",), {"before": True}, Part(2, Colour.BLUE)), whole):
        put.run(connection, **values_of(each))
    assert Query("SELECT FIELDS FROM wholes", Whole).all(connection) == [whole]
    assert Query("SELECT one.FIELDS FROM wholes AS one, wholes AS other", Whole).one(connection) == whole
    nulls = "SELECT count(*) FROM wholes WHERE notes IS NULL AND part IS NULL"
    assert Query(nulls, int).one(connection) == (whole.notes is None)


def test_single_columns_have_their_type_and_changes_say_how_many(connection: Connection) -> None:
    INSERT.run_each(connection, [RED, BLUE])
    assert Query("SELECT made_at FROM things WHERE id = 1", datetime).all(connection) == [NOON]
    for condition, expected in (("TRUE", 3), ("FALSE", 0)):
        found = Query(f"SELECT {total('id')} FROM things WHERE {condition}", int).one(connection)
        assert (found, type(found)) == (expected, int)
    assert Change("DELETE FROM things WHERE id IN :ids").run(connection, ids=[2, 3]) == 1


def test_errors_are_those_of_sqlalchemy(connection: Connection) -> None:
    INSERT.run(connection, **RED)
    with pytest.raises(IntegrityError), connection.begin_nested():
        INSERT.run(connection, **RED)
    with pytest.raises((OperationalError, ProgrammingError), match="missing"), connection.begin_nested():
        Change("DELETE FROM missing").run(connection)
