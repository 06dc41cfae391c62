"""What a tenant may have, decided on a real store, with a clock that only the test moves."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tinsmith.errors import CapacityError, StoreError
from tinsmith.server.limits.counts import Tallies, TokenBuckets
from tinsmith.server.limits.quotas import Quotas
from tinsmith.settings import QuotaSettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import PendingCounts, SessionRecord, StoreContext
from tinsmith.store.disk_room import DiskSpace
from tinsmith.store.refusals import described_bytes
from tinsmith.testing.store_records import NOW, a_checkpoint, a_model, a_sample, a_session, an_operation


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


class WatchedStore(SqlStore):
    reads = 0

    async def pending(self, tenant: str) -> PendingCounts:
        self.reads += 1
        return await super().pending(tenant)


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("migrated")

    async def migrate() -> None:
        store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=directory))
        await store.open()
        await store.close()

    asyncio.run(migrate())
    return directory / "tinsmith.db"


@pytest.fixture
async def store(tmp_path: Path, migrated: Path) -> AsyncIterator[WatchedStore]:
    shutil.copy(migrated, tmp_path)
    store = WatchedStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


def test_a_bucket_gives_its_burst_and_then_its_rate(clock: Clock) -> None:
    buckets = TokenBuckets(clock)
    take = [buckets.take("ann", per_s=0.5) for _ in range(3)]
    assert take == [0.0, 0.0, 1.0]
    clock.now_s += 1.0
    assert [buckets.take("ann", per_s=0.5) for _ in range(2)] == [0.0, 2.0]
    clock.now_s += 1000.0
    assert [buckets.take("ann", per_s=0.5) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert [buckets.take("slow", per_s=0.1) for _ in range(2)] == [0.0, 10.0]  # at least one at once


def test_buckets_that_have_filled_up_are_forgotten(clock: Clock) -> None:
    buckets = TokenBuckets(clock)
    for number in range(5000):
        buckets.take(f"key-{number}", per_s=1.0)
        clock.now_s += 5.0
    assert len(buckets) <= 1001


async def test_a_tenant_that_sends_too_much_learns_when_to_come_again(store: WatchedStore, clock: Clock) -> None:
    settings = QuotaSettings.model_validate({"tenants": {"slow": {"requests_per_s": 0.1}}})
    quotas = Quotas(store, settings, clock=clock)
    quotas.admit_request("slow", lambda: None)
    with pytest.raises(CapacityError, match=r"more than 0.1 requests per second.*\(quotas.requests_per_s\)") as refused:
        quotas.admit_request("slow", lambda: None)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    quotas.admit_request("other", lambda: None)


async def test_each_key_of_a_tenant_can_have_a_rate(store: WatchedStore, clock: Clock) -> None:
    quotas = Quotas(store, QuotaSettings(key_requests_per_s=0.1, requests_per_s=0.2), clock=clock)
    quotas.admit_request("ann", lambda: "laptop")
    clock.now_s += 5.0
    with pytest.raises(CapacityError, match=r"0.1 requests per second.*\(quotas.key_requests_per_s\)"):
        quotas.admit_request("ann", lambda: "laptop")
    quotas.admit_request("ann", lambda: "cluster")
    quotas.admit_request("bob", lambda: "laptop")
    with pytest.raises(CapacityError, match=r"\(quotas.requests_per_s\)"):
        quotas.admit_request("ann", lambda: None)


async def test_what_waits_is_limited_by_number(store: WatchedStore, clock: Clock) -> None:
    quotas = Quotas(store, QuotaSettings(pending_samples=2, pending_operations=2), clock=clock)
    await store.submit(a_sample(0))
    await quotas.admit_sample(a_sample(1))
    with pytest.raises(CapacityError, match=r"at most 2 samples may wait .* \(quotas.pending_samples\).*; send this"):
        await quotas.admit_sample(a_sample(2))
    await quotas.admit_sample(a_sample(2, tenant="bob"))
    clock.now_s += 1.1  # what was admitted above was never submitted
    await quotas.admit_sample(a_sample(2))


async def test_what_waits_is_limited_by_size(store: WatchedStore, clock: Clock) -> None:
    quotas = Quotas(store, QuotaSettings(queued_bytes=100), clock=clock)
    await quotas.admit_sample(a_sample(0, payload=b"x" * 1000))  # alone
    with pytest.raises(CapacityError, match="100 bytes of requests may wait"):
        await quotas.admit_sample(a_sample(1))
    clock.now_s += 1.1
    await store.submit(a_sample(0, payload=b"x" * 90))
    with pytest.raises(CapacityError, match="queued_bytes"):
        await quotas.admit_operation(an_operation(seq_id=1, payload=b"x" * 11))
    await quotas.admit_operation(an_operation(seq_id=1, payload=b"x" * 10))


async def test_a_request_that_others_wait_for_is_admitted_in_any_case(store: WatchedStore, clock: Clock) -> None:
    await a_model(store)
    for seq_id in (2, 3):
        await store.submit(an_operation(seq_id=seq_id))
    quotas = Quotas(store, QuotaSettings(pending_operations=2), clock=clock)
    with pytest.raises(CapacityError, match="pending_operations"):
        await quotas.admit_operation(an_operation(seq_id=4))
    await quotas.admit_operation(an_operation(seq_id=1))
    await quotas.admit_operation(an_operation(seq_id=1))
    with pytest.raises(CapacityError, match="pending_operations"):  # twice the quota
        await quotas.admit_operation(an_operation(seq_id=1))


async def test_a_refused_request_takes_no_room_from_others(store: WatchedStore, clock: Clock) -> None:
    """What is free is read once a second: until then, a tenant that sends again at once would use it up."""
    limits = QuotaSettings(pending_samples=1, pending_operations=1)
    quotas = Quotas(store, limits, read_space=lambda: DiskSpace(2**40, 2**39), clock=clock)
    await store.submit(a_sample(0))
    await a_model(store)
    await store.submit(an_operation(seq_id=1))
    before = await quotas.disk.space()
    for _ in range(3):
        with pytest.raises(CapacityError, match="pending_samples"):
            await quotas.admit_sample(a_sample(1, payload=b"x" * 1000))
        with pytest.raises(CapacityError, match="pending_operations"):
            await quotas.admit_operation(an_operation(seq_id=2, payload=b"x" * 1000))
    assert await quotas.disk.space() == before


async def test_a_request_without_room_on_the_disk_does_not_count_as_waiting(store: WatchedStore, clock: Clock) -> None:
    """Or a tenant that has to free space could not: what does so may have to wait, too."""
    limits = QuotaSettings(pending_operations=2, disk_bytes=100)
    quotas = Quotas(store, limits, read_space=lambda: DiskSpace(2**40, 2**39), clock=clock)
    for seq_id in range(2, 6):
        with pytest.raises(CapacityError, match="disk_bytes"):
            await quotas.admit_operation(an_operation(seq_id=seq_id, payload=b"x" * 1000))
    await quotas.admit_operation(an_operation(seq_id=6, kind="unload_model"))
    await quotas.admit_operation(an_operation(seq_id=7, kind="unload_model"))


async def test_models_and_sessions_are_limited(store: WatchedStore, clock: Clock) -> None:
    await a_model(store)
    quotas = Quotas(store, QuotaSettings(live_models=1, sessions=1), clock=clock)
    with pytest.raises(CapacityError, match=r"at most 1 models .*\(quotas.live_models\).*; end sessions"):
        await quotas.admit_model("ann")
    with pytest.raises(CapacityError, match=r"at most 1 sessions .*\(quotas.sessions\).*; close the clients"):
        await quotas.admit_session("ann")
    await quotas.admit_session("bob")


async def test_what_a_client_says_of_its_sessions_counts(store: WatchedStore, clock: Clock) -> None:
    """Whoever is over its share may begin a session all the same, to delete something."""
    quotas = Quotas(store, QuotaSettings(disk_bytes=100_000), read_space=lambda: DiskSpace(2**40, 2**39), clock=clock)
    large = SessionRecord(session_id="s2", tenant="ann", created_at=NOW, last_seen_at=NOW, tags=("x" * 1000,) * 90)
    size = described_bytes(*large.described)
    await quotas.admit_session("ann", size)
    await store.create_session(large, idempotency_key=None)
    assert (await store.kept_bytes("ann"))[0].descriptions == size
    clock.now_s += 60
    with pytest.raises(CapacityError, match="disk_bytes"):
        await quotas.admit_session("ann", size)
    with pytest.raises(CapacityError, match="disk_bytes"):
        await quotas.admit_model("ann", size)
    await quotas.admit_session("ann", 100)
    await quotas.admit_session("bob", size)


async def test_a_save_fails_when_too_much_is_kept_or_being_saved(store: WatchedStore, clock: Clock) -> None:
    quotas = Quotas(store, QuotaSettings(checkpoints=2, stored_bytes=2**41), clock=clock)
    await store.add_checkpoint(a_checkpoint("a"))
    assert await quotas.why_no_checkpoint("ann") is None
    await a_model(store)
    await store.submit(an_operation(seq_id=1, kind="save_state"))
    clock.now_s += 1.1
    assert "quotas.checkpoints" in str(await quotas.why_no_checkpoint("ann"))
    roomy = Quotas(store, QuotaSettings(stored_bytes=2**41), clock=clock)
    assert await roomy.why_no_checkpoint("ann") is None
    await store.add_checkpoint(a_checkpoint("b"))
    clock.now_s += 1.1
    assert "quotas.stored_bytes" in str(await roomy.why_no_checkpoint("ann"))
    assert await roomy.why_no_checkpoint("bob") is None


async def test_requests_that_come_together_are_counted_with_one_read(store: WatchedStore, clock: Clock) -> None:
    quotas = Quotas(store, QuotaSettings(), clock=clock)
    await asyncio.gather(*(quotas.admit_sample(a_sample(number)) for number in range(50)))
    assert store.reads == 1
    clock.now_s += 1.1
    await quotas.admit_sample(a_sample(50))
    assert store.reads == 2


async def test_old_tallies_are_forgotten_but_not_while_they_are_read(clock: Clock) -> None:
    may_read = asyncio.Event()

    async def read(tenant: str) -> Counter[str]:
        if tenant == "slow":
            await may_read.wait()
        return Counter({tenant: 1})

    tallies = Tallies(read, clock)
    slow = asyncio.create_task(tallies.of("slow"))
    await asyncio.sleep(0)
    for number in range(5000):
        await tallies.of(f"tenant-{number}")
        clock.now_s += 0.01
    assert len(tallies) <= 1200
    may_read.set()
    (await slow)["slow"] += 1
    assert await tallies.of("slow") == {"slow": 2}


async def test_a_tally_that_cannot_be_read_fails_for_all_who_wait_and_is_read_again(clock: Clock) -> None:
    reads = 0

    async def read(_tenant: str) -> Counter[str]:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        if reads == 1:
            msg = "away"
            raise StoreError(msg)
        return Counter()

    tallies = Tallies(read, clock)
    found = await asyncio.gather(*(tallies.of("ann") for _ in range(50)), return_exceptions=True)
    assert {type(each) for each in found} == {StoreError}
    assert reads == 1
    assert await tallies.of("ann") == {}
    assert reads == 2


def test_null_is_no_limit_and_what_a_tenant_omits_is_as_for_all() -> None:
    settings = QuotaSettings.model_validate({"sessions": 7, "tenants": {"ann": {"sessions": None, "live_models": 3}}})
    assert (settings.of("ann").sessions, settings.of("ann").live_models) == (None, 3)
    assert (settings.of("bob").sessions, settings.of("bob").live_models) == (7, 256)
    assert settings.of("ann").checkpoints == settings.of("bob").checkpoints == 100_000


async def test_what_is_done_no_longer_counts(store: WatchedStore) -> None:
    await store.create_session(a_session("s9"), idempotency_key=None)
    await store.end_session("s9", "success", None)
    assert await store.count_live_sessions("ann") == 0
    request_id = await store.submit(a_sample(0))
    await store.cancel(request_id)
    assert await store.pending("ann") == PendingCounts(by_kind={}, num_bytes=0)
