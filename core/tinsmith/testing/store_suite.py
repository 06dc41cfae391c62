"""The fixtures that all suites of request stores share."""

from collections.abc import AsyncIterator

import pytest

from tinsmith.store import RequestStore
from tinsmith.testing.store_records import MakeStore


class StoreSuite:
    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Override: how another process opens the same, initially empty database."""
        msg = f"{type(self).__name__} must override the fixture 'make_store' and return what makes a RequestStore"
        raise NotImplementedError(msg)

    @pytest.fixture
    async def store(self, make_store: MakeStore) -> AsyncIterator[RequestStore]:
        store = make_store()
        await store.open()
        yield store
        await store.close()

    @pytest.fixture
    async def other(self, make_store: MakeStore, store: RequestStore) -> AsyncIterator[RequestStore]:
        """Another process's view of the same database."""
        other = make_store()
        await other.open()
        yield other
        await other.close()
