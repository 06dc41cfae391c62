"""What operations use is counted once, with their results; what is kept, by project."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tinsmith.features.usage import counts
from tinsmith.operations import OptimStepOutput
from tinsmith.store import CheckpointWritten, Completion, RequestStore, Usage
from tinsmith.testing.store_records import BASE, a_checkpoint, a_model, a_sample, an_operation, claim, complete


async def test_what_an_operation_used_is_counted_once(store: RequestStore) -> None:
    await a_model(store)
    steps = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (1, 2)]
    sample = await store.submit(a_sample(tenant="bob"))
    await claim(store)
    completions = [
        Completion(request_id=steps[0], result=OptimStepOutput(), usage=Usage(trained_tokens=5, engine_s=0.5)),
        Completion(
            request_id=steps[1],
            result=OptimStepOutput(),
            effects=(CheckpointWritten(record=a_checkpoint(size_bytes=2**40)),),
            usage=Usage(trained_tokens=7, engine_s=0.25),
        ),
        Completion(request_id=sample, result=OptimStepOutput(), usage=Usage(prefilled_tokens=3, sampled_tokens=2)),
    ]
    for _ in range(2):  # the answer to the first may have been lost
        await complete(store, completions)
    ann = counts.UsageRecord(
        tenant="ann", base_model=BASE, trained_tokens=12, checkpoints=1, stored_bytes=2**40, engine_s=0.75
    )
    bob = counts.UsageRecord(tenant="bob", base_model=BASE, prefilled_tokens=3, sampled_tokens=2)
    assert await store.read(counts.in_all, None) == [ann, bob]
    assert await store.read(counts.in_all, "bob") == [bob]
    now, hour = datetime.now(UTC), timedelta(hours=1)
    (hourly,) = await store.read(counts.hourly, "ann", first=now - hour, last=now)
    assert hourly.hour is not None
    assert replace(hourly, hour=None) == ann
    assert hourly.hour in {each.replace(minute=0, second=0, microsecond=0) for each in (now, now - hour)}
    assert await store.read(counts.hourly, "ann", first=hourly.hour, last=hourly.hour) == [hourly]
    for other in (hourly.hour - hour, hourly.hour + hour):
        assert await store.read(counts.hourly, None, first=other, last=other) == []


async def test_what_is_kept_is_told_by_project(store: RequestStore) -> None:
    await a_model(store)
    await store.update_session("s1", project_id="p")
    await store.add_checkpoint(a_checkpoint("a"))
    await store.add_checkpoint(replace(a_checkpoint("b"), model_id="imported"))
    await store.add_checkpoint(a_checkpoint("c", tenant="bob"))
    of_project = counts.StoredCheckpoints(tenant="ann", project_id="p", number=1, num_bytes=2**40)
    assert await store.read(counts.stored, "ann", project_id="p") == [of_project]
    assert {each.project_id for each in await store.read(counts.stored, "ann")} == {"p", None}
    assert {each.tenant for each in await store.read(counts.stored, None)} == {"ann", "bob"}
