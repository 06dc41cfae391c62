"""The table of links: found by their secrets, gone with their runs, and in the audit log."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tinsmith.errors import NotFoundError
from tinsmith.features.share_links import links
from tinsmith.operations import ModelUnloaded
from tinsmith.store import RequestStore, RunState, RunStateChanged
from tinsmith.testing.store_records import NOW, a_model, claim, complete, done

MODEL = "s1:train:0"
LINK = links.ShareLink(share_id="a", digest="of a", model_id=MODEL, created_at=NOW)


async def test_a_link_is_found_by_its_digest_until_it_is_deleted(store: RequestStore) -> None:
    await a_model(store)
    later = replace(LINK, share_id="b", digest="of b", created_at=NOW + timedelta(seconds=1), expires_at=NOW)
    for each in (later, LINK):
        await store.write(links.add, each, by={"actor": "ann"})
    assert await store.read(links.find, "of a") == LINK
    assert await store.read(links.find, "of b") == later
    assert await store.read(links.find, "a") is None
    assert await store.read(links.of_run, MODEL) == [LINK, later]
    deleted = [await store.write(links.delete, model, "a") for model in ("another", MODEL, MODEL)]
    assert deleted == [False, True, False]
    assert await store.read(links.of_run, MODEL) == [later]
    now, hour = datetime.now(UTC), timedelta(hours=1)
    audit = await store.read_audit("ann", since=now - hour, until=now + hour, resource="share_link", limit=9)
    assert [(each.event, each.details["share_id"], each.details.get("actor")) for each in audit] == [
        ("share_link_create", "b", "ann"),
        ("share_link_create", "a", "ann"),
        ("share_link_delete", "a", None),
    ]


async def test_a_link_needs_a_run(store: RequestStore) -> None:
    with pytest.raises(NotFoundError, match=MODEL):
        await store.write(links.add, LINK)
    assert await store.read(links.of_run, MODEL) == []


async def test_the_links_of_a_run_are_deleted_with_it(store: RequestStore) -> None:
    await a_model(store)
    await a_model(store, "s2:train:0", tenant="bob")
    await store.write(links.add, LINK)
    kept = replace(LINK, share_id="b", digest="of b", model_id="s2:train:0")
    await store.write(links.add, kept)
    await store.end_session("s1", "success", None)
    for request_id in await claim(store):
        unloaded = RunStateChanged(model_id=MODEL, state=RunState.UNLOADED)
        await complete(store, [done(request_id, ModelUnloaded(model_id=MODEL), unloaded)])
    later = NOW.replace(year=NOW.year + 9)
    await store.prune(later)
    assert await store.read(links.find, "of a") == LINK
    await store.forget_sessions(later)
    assert await store.read(links.find, "of a") is None
    assert await store.read(links.find, "of b") == kept
