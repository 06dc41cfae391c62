"""What live runs wait for: each kind, from the store's rows and the engines' reports."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinsmith.backend import TrainerCapabilities
from tinsmith.operations import SampleOutput
from tinsmith.protocol.wire import WaitsFor
from tinsmith.server.waits import read_waits
from tinsmith.settings import QuotaSettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import (
    DeviceTurn,
    EngineCapabilities,
    EngineRecord,
    EngineState,
    RunState,
    SamplingSessionRecord,
    StoreContext,
)
from tinsmith.testing.store_records import (
    BASE,
    a_creation,
    a_model,
    a_run,
    a_sample,
    an_operation,
    claim,
    complete,
    done,
    heard,
    lease_of,
)

RUN = "s1:train:0"
TRAINER = TrainerCapabilities(vocab_size=64, max_context_tokens=64, max_batch_tokens=64, max_models=1)
READY = EngineRecord(
    base_model=BASE,
    state=EngineState.READY,
    updated_at=datetime.now(UTC),
    capabilities=EngineCapabilities(trainer=TRAINER, sampler=None),
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    await a_model(store)
    await heard(store)
    await report(store)
    yield store
    await store.close()


async def report(store: SqlStore, record: EngineRecord = READY) -> None:
    await store.report_engine(record, lease=await lease_of(store))


async def wait_of(store: SqlStore, model_id: str = RUN) -> WaitsFor:
    found = await maybe_wait_of(store, model_id)
    assert found is not None
    assert found.since_s >= 0
    return found


async def maybe_wait_of(store: SqlStore, model_id: str = RUN) -> WaitsFor | None:
    run = await store.get_run(model_id)
    waits = await read_waits(store, QuotaSettings())
    return waits.of(run, await store.get_session(run.session_id), operator=False)


async def test_nothing_is_pending(store: SqlStore) -> None:
    found = await wait_of(store)
    assert (found.kind, found.text) == ("client", "nothing is pending, so it is the client's turn")


async def test_the_client_has_gone(store: SqlStore) -> None:
    long_ago = datetime.now(UTC) - timedelta(minutes=5)
    session = replace(await store.get_session("s1"), last_seen_at=long_ago)
    waits = await read_waits(store, QuotaSettings())
    found = waits.of(await store.get_run(RUN), session, operator=False)
    assert found is not None
    assert found.text.endswith("; no heartbeat has come from it for more than 30 s")


async def test_a_parked_model(store: SqlStore) -> None:
    parked = replace(await store.get_run(RUN), state=RunState.PARKED)
    waits = await read_waits(store, QuotaSettings())
    found = waits.of(parked, await store.get_session("s1"), operator=False)
    assert found is not None
    assert found.text.endswith("client's turn; until then, the model is parked")


async def test_a_run_that_has_ended_waits_for_nothing(store: SqlStore) -> None:
    await store.end_session("s1", "success", None)
    assert await maybe_wait_of(store) is None
    await store.lose_run(await lease_of(store), RUN, "lost")
    assert await maybe_wait_of(store) is None


async def test_the_queue_and_what_is_in_front(store: SqlStore) -> None:
    await store.submit(an_operation(seq_id=1))
    found = await wait_of(store)
    assert (found.kind, found.text) == ("queue", "optim_step: 0 of your requests are ahead in the queue")


async def test_other_tenants_are_counted_but_not_named(store: SqlStore) -> None:
    await a_model(store, "s2:train:0", tenant="bob")
    await store.submit(an_operation("s2:train:0", 1, tenant="bob"))
    await claim(store)
    await store.submit(an_operation(seq_id=1))
    found = await wait_of(store)
    assert found.kind == "queue"
    assert found.text.endswith("ahead in the queue; the engine runs other tenants' requests as well")
    alone = await wait_of(store, "s2:train:0")
    assert (alone.kind, alone.text.partition(" for ")[0]) == ("run", "optim_step is running")
    assert "other" not in alone.text


async def test_a_program_is_compiled(store: SqlStore) -> None:
    await report(store, replace(READY, detail="compiling"))
    await store.submit(an_operation(seq_id=1))
    assert (await wait_of(store)).text.endswith("in the queue; the engine is compiling")
    await claim(store)
    found = await wait_of(store)
    assert (found.kind, found.text.partition(" for ")[0]) == ("compile", "optim_step is running")
    await report(store, replace(READY, detail="warming up", progress=1.0))
    assert (await wait_of(store)).kind == "run"


async def test_a_missing_number(store: SqlStore) -> None:
    await store.submit(an_operation(seq_id=3))
    found = await wait_of(store)
    assert (found.kind, found.text) == ("number", f"seq_id 1 of {RUN!r} has not arrived, and 3 comes after it")


async def test_a_place(store: SqlStore) -> None:
    waiting = a_run("s1:train:1", next_seq_id=-1)
    await store.create_run(waiting, a_creation("s1:train:1"))
    found = await wait_of(store, "s1:train:1")
    assert found.kind == "place"
    assert found.text.startswith(f"1 of the 1 places for models of {BASE!r} are taken")


async def test_the_devices(store: SqlStore) -> None:
    turn = DeviceTurn(side="sampling", since=datetime.now(UTC), waiting=True)
    await report(store, replace(READY, turn=turn))
    await store.submit(an_operation(seq_id=1))
    await claim(store)
    found = await wait_of(store)
    assert (found.kind, found.text.partition(":")[0]) == ("turn", "waits for its turn on the device")


async def test_samples_from_its_weights(store: SqlStore) -> None:
    """They wait for the sampler, and the run waits for them."""
    sampler = SamplingSessionRecord(
        sampling_session_id="s1:sample:0",
        session_id="s1",
        tenant="ann",
        base_model=BASE,
        created_at=datetime.now(UTC),
        model_id=RUN,
    )
    await store.create_sampling_session(sampler)
    sample = await store.submit(a_sample())
    await report(store, replace(READY, sampler_trouble="it starts again"))
    found = await wait_of(store)
    assert (found.kind, found.text) == ("sampler", f"nothing is sampled from {BASE!r} for now: it starts again")
    await report(store)
    await claim(store)
    assert (await wait_of(store)).text.startswith("sample is running for ")
    await complete(store, [done(sample, SampleOutput(sequences=()))])
    assert (await wait_of(store)).kind == "client"


async def test_an_engine_that_is_not_ready(store: SqlStore) -> None:
    await store.submit(an_operation(seq_id=1))
    await report(store, replace(READY, state=EngineState.LOADING, detail="loading weights", progress=0.5))
    found = await wait_of(store)
    assert (found.kind, found.text) == ("engine", f"the engine of {BASE!r} is loading: loading weights, 50%")
