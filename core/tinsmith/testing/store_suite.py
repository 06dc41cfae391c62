"""Fixtures shared by the suites of request stores."""

from collections.abc import AsyncIterator

import pytest

from tinsmith.store import RequestStore
from tinsmith.testing.store_records import MakeStore


class StoreSuite:
    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Override: return a function that opens the same, initially empty database as another process would."""
        msg = f"{type(self).__name__} must override the fixture 'make_store' with one that returns a function"
        raise NotImplementedError(msg)

    @pytest.fixture
    async def store(self, make_store: MakeStore) -> AsyncIterator[RequestStore]:
        store = make_store()
        await store.open()
        yield store
        await store.close()

    @pytest.fixture
    async def other(self, make_store: MakeStore, store: RequestStore) -> AsyncIterator[RequestStore]:
        """The same database, as another process opens it."""
        other = make_store()
        await other.open()
        yield other
        await other.close()
