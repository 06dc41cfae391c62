"""The part of the store contract about API keys that were made over HTTP."""

from dataclasses import replace
from datetime import timedelta

from tinsmith.store import IssuedKey, RequestStore
from tinsmith.testing.store_records import NOW
from tinsmith.testing.store_suite import StoreSuite

_KEY = IssuedKey(key_id="a", tenant="ann", name="laptop", note="mine", made_with="root", created_at=NOW)
_SECOND = timedelta(seconds=1)


class ApiKeysContract(StoreSuite):
    async def test_a_key_is_found_by_its_id_until_it_is_deleted(self, store: RequestStore) -> None:
        later = replace(_KEY, key_id="b", created_at=NOW + _SECOND, expires_at=NOW + 2 * _SECOND, made_with="")
        bobs = replace(_KEY, key_id="c", tenant="bob", created_at=NOW + 2 * _SECOND)
        for each in (_KEY, later, bobs):
            await store.add_api_key(each)
        assert [await store.find_api_key(name) for name in ("a", "b", "c", "d")] == [_KEY, later, bobs, None]
        assert await store.list_api_keys("ann", limit=9, offset=0) == [later, _KEY]
        assert await store.list_api_keys(None, limit=1, offset=1) == [later]
        assert [await store.count_api_keys(tenant) for tenant in ("ann", "bob", "eve")] == [2, 1, 0]
        assert await store.delete_api_key("a", tenant="bob") is False
        assert await store.delete_api_key("a", tenant="ann") is True
        assert await store.delete_api_key("a", tenant="ann") is False
        assert await store.delete_api_key("c", tenant=None) is True
        assert [await store.find_api_key(name) for name in ("a", "b", "c")] == [None, later, None]

    async def test_an_expired_key_is_deleted_when_results_are(self, store: RequestStore) -> None:
        await store.add_api_key(replace(_KEY, expires_at=NOW))
        await store.add_api_key(replace(_KEY, key_id="b"))
        await store.prune(NOW)
        assert await store.count_api_keys("ann") == 2
        await store.prune(NOW + _SECOND)
        assert [each.key_id for each in await store.list_api_keys("ann", limit=9, offset=0)] == ["b"]
