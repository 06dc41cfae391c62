"""The part of the store contract about rollouts, and the rewards that clients log for them."""

from datetime import UTC, datetime

import pytest

from tinsmith.errors import NotFoundError, UserError
from tinsmith.operations import Failed, ModelUnloaded, OptimStepOutput, SampleOutput
from tinsmith.store import OF_CLIENT, RequestStore, RolloutsTrained, RunState, RunStateChanged, SamplingSessionRecord
from tinsmith.store.rollouts import MOST_REWARDS, decode_rewards, row_bytes
from tinsmith.testing.store_records import BASE, NOW, a_model, a_sample, an_operation, claim, complete, done
from tinsmith.testing.store_suite import StoreSuite

_MODEL = "s1:train:0"
_ROOM = 10_000


async def _trained(
    store: RequestStore, seq_id: int, step: int, content: bytes = b"rollouts", max_bytes: int = _ROOM
) -> None:
    """Complete a pass of the model, with its rollouts."""
    request_id = await store.submit(an_operation(seq_id=seq_id))
    await claim(store)
    effect = RolloutsTrained(model_id=_MODEL, step=step, seq_id=seq_id, number=4, content=content, max_bytes=max_bytes)
    await complete(store, [done(request_id, OptimStepOutput(), effect)])


async def _rows(store: RequestStore, step: int) -> list[tuple[int, int, bytes]]:
    return [(each.seq_id, each.number, each.content) for each in await store.read_rollouts(_MODEL, step)]


class RolloutsContract(StoreSuite):
    async def test_rollouts_are_there_with_the_result_of_their_pass(self, trained: RequestStore) -> None:
        await _trained(trained, 1, 0, b"one")
        await _trained(trained, 2, 0, b"two")
        await _trained(trained, 3, 5, b"three")
        assert await trained.rollout_steps(_MODEL) == [0, 5]
        assert await _rows(trained, 0) == [(1, 4, b"one"), (2, 4, b"two")]
        assert await _rows(trained, 1) == []
        assert await trained.rollout_steps("nobody") == []
        assert await trained.read_rollouts("nobody", 0) == []
        kept = sum(row_bytes(_MODEL, content) for content in (b"one", b"two", b"three"))
        assert (await trained.get_run(_MODEL)).rollout_bytes == kept
        assert (await trained.kept_bytes("ann"))[0].metrics == kept

    async def test_the_oldest_steps_go_first(self, trained: RequestStore) -> None:
        room = 2 * row_bytes(_MODEL, bytes(100))
        for seq_id, step in enumerate((7, 3, 8), start=1):
            await _trained(trained, seq_id, step, bytes(100), max_bytes=room)
        assert await trained.rollout_steps(_MODEL) == [7, 8]
        assert (await trained.get_run(_MODEL)).rollout_bytes == room
        await trained.log_rewards(_MODEL, 8, {b"a": 1.0}, room)
        assert await trained.rollout_steps(_MODEL) == [8]

    async def test_rewards_join_their_step_and_repeats_change_nothing(self, trained: RequestStore) -> None:
        await trained.log_rewards(_MODEL, 2, {b"a": 1.0, b"b": 2.0}, _ROOM)  # before the pass
        assert await trained.rollout_steps(_MODEL) == []
        await _trained(trained, 1, 2)
        for _ in range(2):
            await trained.log_rewards(_MODEL, 2, {b"b": 3.0, b"c": 4.0}, _ROOM)
        rewards, rollouts = await trained.read_rollouts(_MODEL, 2)
        assert (rewards.seq_id, rewards.number) == (OF_CLIENT, 0)
        assert decode_rewards(rewards.content) == {b"a": 1.0, b"b": 3.0, b"c": 4.0}
        assert rollouts.seq_id == 1
        kept = row_bytes(_MODEL, rewards.content) + row_bytes(_MODEL, rollouts.content)
        assert (await trained.get_run(_MODEL)).rollout_bytes == kept

    async def test_a_step_has_a_limited_number_of_rewards(self, trained: RequestStore) -> None:
        many = {str(number).encode(): 0.0 for number in range(MOST_REWARDS)}
        await trained.log_rewards(_MODEL, 0, many, 1 << 20)
        with pytest.raises(UserError, match=f"step 0 would have {MOST_REWARDS + 1} rewards"):
            await trained.log_rewards(_MODEL, 0, {b"more": 1.0}, 1 << 20)
        with pytest.raises(NotFoundError, match="nobody"):
            await trained.log_rewards("nobody", 0, {b"a": 1.0}, _ROOM)

    async def test_samples_of_a_run_are_those_that_its_tenant_took_from_its_weights(
        self, trained: RequestStore
    ) -> None:
        """With payloads and results, by the time of their end, and only so many as fit."""
        of = {"s1:sample:0": ("ann", _MODEL), "s1:sample:1": ("ann", None), "s2:sample:0": ("bob", _MODEL)}
        for name, (tenant, model_id) in of.items():
            session_id = name.partition(":")[0]
            sampler = SamplingSessionRecord(
                sampling_session_id=name,
                session_id=session_id,
                tenant=tenant,
                base_model=BASE,
                created_at=NOW,
                model_id=model_id,
            )
            await trained.create_sampling_session(sampler)
            await trained.submit(a_sample(subject_id=name, tenant=tenant))
        later, failed = [await trained.submit(a_sample(number)) for number in (1, 2)]
        output = SampleOutput(sequences=())
        for request_id in await claim(trained):
            result = Failed(message="no", category="user") if request_id == failed else output
            await complete(trained, [done(request_id, result)])
        ends = datetime.now(UTC)
        first = (await trained.samples_of(_MODEL, after=NOW, until=ends, max_bytes=_ROOM))[0][0]
        second = await trained.get_operation(later)
        assert first.finished_at is not None
        found, more = await trained.samples_of(_MODEL, after=NOW, until=ends, max_bytes=_ROOM)
        assert ([each.request_id for each in found], more) == ([first.request_id, later], False)
        assert (first.subject_id, first.payload) == ("s1:sample:0", b"s1:sample:0 0")
        assert (first.result_kind, first.result) == (second.result_kind, second.result)
        assert first.payload is not None
        assert first.result is not None
        cut = await trained.samples_of(_MODEL, after=NOW, until=ends, max_bytes=len(first.payload) + len(first.result))
        assert ([each.request_id for each in cut[0]], cut[1]) == ([first.request_id], True)
        of_second = await trained.samples_of(_MODEL, after=first.finished_at, until=ends, max_bytes=_ROOM)
        assert [each.request_id for each in of_second[0]] == [later]
        of_first = await trained.samples_of(_MODEL, after=NOW, until=first.finished_at, max_bytes=_ROOM)
        assert [each.request_id for each in of_first[0]] == [first.request_id]

    async def test_rollouts_go_with_their_run(self, trained: RequestStore) -> None:
        await _trained(trained, 1, 0)
        await trained.end_session("s1", "success", None)
        for request_id in await claim(trained):
            unloaded = RunStateChanged(model_id=_MODEL, state=RunState.UNLOADED)
            await complete(trained, [done(request_id, ModelUnloaded(model_id=_MODEL), unloaded)])
        await trained.prune(NOW.replace(year=NOW.year + 9))
        assert await trained.rollout_steps(_MODEL) == [0]  # the log is gone, the rollouts are not
        await trained.forget_sessions(NOW.replace(year=NOW.year + 9))
        assert await trained.rollout_steps(_MODEL) == []

    @pytest.fixture
    async def trained(self, store: RequestStore) -> RequestStore:
        await a_model(store)
        return store
