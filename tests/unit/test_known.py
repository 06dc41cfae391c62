"""What never changes is looked up once, what does not exist each time, and no more is kept than there is room for."""

import pytest

from tinsmith.errors import NotFoundError
from tinsmith.server.kept import Known


class Store:
    def __init__(self) -> None:
        self.names = {"a", "b", "c"}
        self.asked: list[str] = []

    async def find(self, name: str) -> str:
        self.asked.append(name)
        if name not in self.names:
            msg = f"no {name!r}"
            raise NotFoundError(msg)
        return name.upper()


async def test_a_name_is_looked_up_once() -> None:
    store = Store()
    known = Known(store.find)
    assert [await known.get("a") for _ in range(3)] == ["A"] * 3
    assert store.asked == ["a"]


async def test_what_does_not_exist_is_looked_up_again() -> None:
    store = Store()
    known = Known(store.find)
    with pytest.raises(NotFoundError):
        await known.get("new")
    store.names.add("new")
    assert await known.get("new") == "NEW"


async def test_what_was_asked_for_longest_ago_makes_room() -> None:
    store = Store()
    known = Known(store.find, most=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert await known.get(name) == name.upper()
    assert store.asked == ["a", "b", "c", "b"]


async def test_what_was_noted_is_not_looked_up() -> None:
    store = Store()
    known = Known(store.find, most=2)
    known.note("x", "X")
    known.note("y", "Y")
    assert [await known.get(name) for name in ("x", "y", "a", "y")] == ["X", "Y", "A", "Y"]
    assert store.asked == ["a"]
