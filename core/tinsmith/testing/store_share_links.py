"""The part of the store contract about links by which others read the curves of a run."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tinsmith.errors import NotFoundError
from tinsmith.operations import ModelUnloaded
from tinsmith.store import RequestStore, RunState, RunStateChanged, ShareLink
from tinsmith.testing.store_records import NOW, a_model, claim, complete, done
from tinsmith.testing.store_suite import StoreSuite

_MODEL = "s1:train:0"
_LINK = ShareLink(share_id="a", digest="of a", model_id=_MODEL, created_at=NOW)


class ShareLinksContract(StoreSuite):
    async def test_a_link_is_found_by_its_digest_until_it_is_deleted(self, store: RequestStore) -> None:
        await a_model(store)
        later = replace(_LINK, share_id="b", digest="of b", created_at=NOW + timedelta(seconds=1), expires_at=NOW)
        await store.add_share_link(later)
        await store.add_share_link(_LINK)
        assert await store.find_share_link("of a") == _LINK
        assert await store.find_share_link("of b") == later
        assert await store.find_share_link("a") is None
        assert await store.list_share_links(_MODEL) == [_LINK, later]
        assert await store.delete_share_link("another", "a") is False
        assert await store.delete_share_link(_MODEL, "a") is True
        assert await store.delete_share_link(_MODEL, "a") is False
        assert await store.find_share_link("of a") is None
        assert await store.list_share_links(_MODEL) == [later]

    async def test_a_link_needs_a_run(self, store: RequestStore) -> None:
        with pytest.raises(NotFoundError, match="s1:train:0"):
            await store.add_share_link(_LINK)
        assert await store.list_share_links(_MODEL) == []

    async def test_the_links_of_a_run_are_deleted_with_it(self, store: RequestStore) -> None:
        await a_model(store)
        await a_model(store, "s2:train:0", tenant="bob")
        await store.add_share_link(_LINK)
        kept = replace(_LINK, share_id="b", digest="of b", model_id="s2:train:0")
        await store.add_share_link(kept)
        await store.end_session("s1", "success", None)
        for request_id in await claim(store):
            unloaded = RunStateChanged(model_id=_MODEL, state=RunState.UNLOADED)
            await complete(store, [done(request_id, ModelUnloaded(model_id=_MODEL), unloaded)])
        later = NOW.replace(year=NOW.year + 9)
        await store.prune(later)
        assert await store.find_share_link("of a") == _LINK
        await store.forget_sessions(later)
        assert await store.find_share_link("of a") is None
        assert await store.find_share_link("of b") == kept
