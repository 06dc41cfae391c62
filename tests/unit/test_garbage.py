"""A server does not look at all its objects whenever a quarter more of them have become old."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from tinsmith.processes import garbage


@pytest.fixture
def collections() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collections")
async def test_old_objects_are_looked_at_every_few_minutes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage.collect_rarely()
    looks = [each["collections"] for each in gc.get_stats()]
    kept = [[number] for number in range(20_000 * 25)]
    young, survived, old = (each["collections"] - before for each, before in zip(gc.get_stats(), looks, strict=True))
    assert young >= 20
    assert survived >= 1
    assert old == 0, f"all objects were looked at because of {len(kept)} new ones"
    monkeypatch.setattr(garbage, "OLD_EVERY_S", 0.0)
    task = asyncio.create_task(garbage.collect_old())
    while gc.get_stats()[2]["collections"] == looks[2]:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    task.cancel()
