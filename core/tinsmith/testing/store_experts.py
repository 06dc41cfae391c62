"""The part of the store contract about the experts of sampled sequences. Stores that do not keep them skip it."""

from datetime import UTC, datetime, timedelta

import pytest

from tinsmith.operations import SampleOutput
from tinsmith.store import ExpertsSampled, RequestStore
from tinsmith.testing.store_records import a_model, a_sample, claim, complete, done
from tinsmith.testing.store_suite import StoreSuite

_MODEL = "s1:train:0"


async def _sampled(
    store: RequestStore, seq_id: int, sequences: dict[bytes, bytes], tenant: str = "ann", max_bytes: int = 1000
) -> None:
    """Complete a sample of the model, with the experts of its sequences."""
    request_id = await store.submit(a_sample(seq_id))
    await claim(store)
    effect = ExpertsSampled(tenant=tenant, model_id=_MODEL, sequences=sequences, max_bytes=max_bytes)
    await complete(store, [done(request_id, SampleOutput(sequences=()), effect)])


class RoutedExpertsContract(StoreSuite):
    async def test_experts_are_found_by_tenant_model_and_tokens(self, keeping: RequestStore) -> None:
        await _sampled(keeping, 0, {b"one": b"1", b"two": b"2"})
        await _sampled(keeping, 1, {b"one": b"of bob"}, tenant="bob")
        assert await keeping.find_routed_experts("ann", _MODEL, [b"two", b"one", b"none"]) == {
            b"one": b"1",
            b"two": b"2",
        }
        assert await keeping.find_routed_experts("bob", _MODEL, [b"two", b"one"]) == {b"one": b"of bob"}
        assert await keeping.find_routed_experts("ann", "s1:train:1", [b"one"]) == {}
        assert await keeping.find_routed_experts("ann", _MODEL, []) == {}

    async def test_the_newest_experts_of_the_same_tokens_count(self, keeping: RequestStore) -> None:
        await _sampled(keeping, 0, {b"one": b"old", b"two": b"2"})
        await _sampled(keeping, 1, {b"one": b"new"})
        assert await keeping.find_routed_experts("ann", _MODEL, [b"one", b"two"]) == {b"one": b"new", b"two": b"2"}

    async def test_a_tenant_keeps_so_many_bytes_of_its_newest_experts(self, keeping: RequestStore) -> None:
        names = [f"{number:04d}".encode() for number in range(8)]
        await _sampled(keeping, 0, {b"of bob": bytes(100)}, tenant="bob")
        for number, name in enumerate(names):
            await _sampled(keeping, number + 1, {name: bytes(10)}, max_bytes=35)
        assert sorted(await keeping.find_routed_experts("ann", _MODEL, names)) == names[-3:]
        assert await keeping.find_routed_experts("bob", _MODEL, [b"of bob"])
        await _sampled(keeping, 9, {b"too large": bytes(36)}, max_bytes=35)
        assert await keeping.find_routed_experts("ann", _MODEL, [*names, b"too large"]) == {}

    async def test_experts_are_pruned_with_the_results_of_their_time(self, keeping: RequestStore) -> None:
        await _sampled(keeping, 0, {b"one": b"1"})
        await keeping.prune(datetime.now(UTC) - timedelta(hours=1))
        assert await keeping.find_routed_experts("ann", _MODEL, [b"one"])
        await keeping.prune(datetime.now(UTC) + timedelta(hours=1))
        assert await keeping.find_routed_experts("ann", _MODEL, [b"one"]) == {}

    @pytest.fixture
    async def keeping(self, store: RequestStore) -> RequestStore:
        await a_model(store)
        return store
