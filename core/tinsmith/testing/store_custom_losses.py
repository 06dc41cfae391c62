"""The part of the store contract about losses that clients have sent."""

import pytest

from tinsmith.errors import ConflictError, NotFoundError
from tinsmith.store import RequestStore
from tinsmith.testing.store_records import NOW, a_session
from tinsmith.testing.store_suite import StoreSuite


class CustomLossesContract(StoreSuite):
    async def test_the_first_loss_of_a_number_is_kept(self, store: RequestStore) -> None:
        await store.create_session(a_session("s1"), idempotency_key="s1")
        for _ in range(2):
            await store.create_custom_loss("s1", 0, b"a graph")
        with pytest.raises(ConflictError, match="s1:loss:0"):
            await store.create_custom_loss("s1", 0, b"another")
        await store.create_custom_loss("s1", 1, b"another")
        assert await store.get_custom_loss("s1", 0) == b"a graph"
        assert await store.get_custom_loss("s1", 1) == b"another"
        with pytest.raises(NotFoundError, match="no custom loss 's1:loss:2'"):
            await store.get_custom_loss("s1", 2)

    async def test_losses_are_deleted_with_their_session(self, store: RequestStore) -> None:
        for session_id in ("s1", "s2"):
            await store.create_session(a_session(session_id), idempotency_key=session_id)
            await store.create_custom_loss(session_id, 0, b"a graph")
        await store.end_session("s1", "success", None)
        assert await store.get_custom_loss("s1", 0) == b"a graph"
        await store.forget_sessions(NOW.replace(year=NOW.year + 9))
        with pytest.raises(NotFoundError):
            await store.get_custom_loss("s1", 0)
        assert await store.get_custom_loss("s2", 0) == b"a graph"
