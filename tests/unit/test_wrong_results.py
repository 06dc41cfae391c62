"""A backend that returns what its contract does not allow: nothing of it is recorded as a success."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, ModelState, Snapshot
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.engine.failures import EngineFailedError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import OperationState, StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine
from tinsmith.testing.model_driver import random_datum

Lie = Callable[[Any], Any]
NUM_PROMPT = 5
TOP = 2


class LyingBackend(ToyBackend):
    """The toy backend. `lie` changes what it returns."""

    def __init__(self, directory: Path) -> None:
        losses = {loss.name: loss for loss in BUILTIN_LOSSES}
        super().__init__(
            ToyConfig(), BackendContext(model_name="toy", model_path=None, cache_dir=directory, losses=losses)
        )
        self.lie: Lie = _truth

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        return self.lie(super().forward_backward(ops))

    def optim_step(self, ops: Sequence[ops.OptimStep]) -> Any:
        return self.lie(super().optim_step(ops))

    def capture_state(self, model_id: str) -> ModelState:
        return self.lie(super().capture_state(model_id))

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        return self.lie(super().publish(model_id, snapshot_id))

    async def sample(self, op: ops.Sample) -> Any:
        return self.lie(await super().sample(op))


def _truth(result: Any) -> Any:
    return result


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


def first(change: Lie) -> Lie:
    """Change the first result of a batch."""
    return lambda results: [change(results[0]), *results[1:]]


def outputs(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Lie:
    """Change what a pass returns for its first datum."""
    return first(
        lambda r: replace(r, loss_fn_outputs=(change(dict(r.loss_fn_outputs[0])), *r.loss_fn_outputs[1:])),
    )


def logprobs(change: Lie) -> Lie:
    return outputs(lambda each: {**each, "logprobs": change(each["logprobs"])})


def metrics(**values: Any) -> Lie:
    return first(
        lambda r: replace(r, metrics={**r.metrics, **{f"{name}:sum": value for name, value in values.items()}})
    )


PASSES: dict[str, Lie] = {
    "nothing": lambda _: None,
    "no result": lambda _: [],
    "a result too many": lambda results: [*results, *results],
    "None for a result": first(lambda _: None),
    "a step's result": first(lambda _: ops.OptimStepOutput()),
    "a sample's result": first(lambda _: ops.SampleOutput(sequences=())),
    "data missing": first(lambda r: replace(r, loss_fn_outputs=r.loss_fn_outputs[1:])),
    "no data": first(lambda r: replace(r, loss_fn_outputs=())),
    "None for data": first(lambda r: replace(r, loss_fn_outputs=None)),
    "None for a datum": first(lambda r: replace(r, loss_fn_outputs=(None, *r.loss_fn_outputs[1:]))),
    "no logprobs": outputs(lambda _: {}),
    "short logprobs": logprobs(lambda a: a[1:]),
    "logprobs of another shape": logprobs(lambda a: a[:, None]),
    "float64": logprobs(lambda a: a.astype(np.float64)),
    "integers": logprobs(lambda a: a.astype(np.int32)),
    "a list": logprobs(lambda a: a.tolist()),
    "objects": logprobs(lambda a: a.astype(object)),
    "objects of its own": outputs(lambda each: {**each, "more": np.array([{}, None])}),
    "strings": outputs(lambda each: {**each, "more": np.array(["a"])}),
    "a name that is none": outputs(lambda each: {**each, 7: each["logprobs"]}),
    "metrics missing": first(lambda r: replace(r, metrics={})),
    "metrics None": first(lambda r: replace(r, metrics=None)),
    "a metric that is text": metrics(loss="0.5"),
    "a metric that is an array": metrics(loss=np.zeros(1, np.float32)),
    "a metric that is None": metrics(extra=None),
    "a metric of NumPy": metrics(loss=np.float64(0.5)),
    "a metric beyond 64 bits": metrics(loss=2**70),
    "a failure without text": first(lambda _: ops.Failed(message=None)),  # type: ignore[arg-type]
    "a failure of nobody": first(lambda _: ops.Failed(message="no", category="nobody")),  # type: ignore[arg-type]
}
STEPS: dict[str, Lie] = {
    "nothing": lambda _: None,
    "no result": lambda _: [],
    "a pass's result": first(lambda _: ops.ForwardBackwardOutput(loss_fn_outputs=(), metrics={"loss:sum": 0.0})),
    "metrics None": first(lambda r: replace(r, metrics=None)),
    "a metric that is text": metrics(norm="1"),
    "a metric whose name is none": first(lambda r: replace(r, metrics={**r.metrics, 7: 1.0})),
}
STATES: dict[str, Lie] = {"nothing": lambda _: None, "a negative step": lambda s: replace(s, step=-1)}


def sequences(change: Lie) -> Lie:
    return lambda out: replace(out, sequences=(change(out.sequences[0]), *out.sequences[1:]))


def field(name: str, change: Lie) -> Lie:
    return lambda out: replace(out, **{name: change(getattr(out, name))})


def top(name: str, change: Lie) -> Lie:
    return lambda value: replace(value, **{name: change(getattr(value, name))})


def at(sequence: ops.SampledSequence, places: Sequence[int]) -> ops.SampledSequence:
    """Take the tokens at these places, with all that belongs to them."""
    top, where = sequence.top_logprobs, np.array(places, int)
    assert top is not None
    return replace(
        sequence,
        tokens=sequence.tokens[where],
        logprobs=sequence.logprobs[where],
        top_logprobs=replace(top, token_ids=top.token_ids[where], logprobs=top.logprobs[where]),
    )


def alternatives(length: int) -> ops.TopLogprobs:
    return ops.TopLogprobs(token_ids=np.zeros((length, TOP), np.int32), logprobs=np.zeros((length, TOP), np.float32))


SAMPLES: dict[str, Lie] = {
    "nothing": lambda _: None,
    "a pass's result": lambda _: ops.ForwardBackwardOutput(loss_fn_outputs=(), metrics={"loss:sum": 0.0}),
    "a sequence missing": field("sequences", lambda s: s[1:]),
    "a sequence too many": field("sequences", lambda s: (*s, *s)),
    "None for sequences": field("sequences", lambda _: None),
    "None for a sequence": sequences(lambda _: None),
    "a token beyond the vocabulary": sequences(field("tokens", lambda t: t + 10_000)),
    "a negative token": sequences(field("tokens", lambda t: t - 10_000)),
    "no tokens": sequences(lambda s: at(s, [])),
    "more tokens than asked for": sequences(lambda s: at(s, [*range(len(s.tokens))] * 9)),
    "tokens that are no integers": sequences(field("tokens", lambda t: t.astype(np.float32))),
    "tokens that are objects": sequences(field("tokens", lambda t: t.astype(object))),
    "a list of tokens": sequences(field("tokens", lambda t: t.tolist())),
    "short logprobs": sequences(field("logprobs", lambda a: a[1:])),
    "logprobs of float64": sequences(field("logprobs", lambda a: a.astype(np.float64))),
    "no logprobs": sequences(field("logprobs", lambda _: None)),
    "a stop reason of its own": sequences(field("stop_reason", lambda _: "bored")),
    "no alternatives": sequences(field("top_logprobs", lambda _: None)),
    "too few alternatives": sequences(field("top_logprobs", top("token_ids", lambda a: a[:, 1:]))),
    "alternatives beyond the vocabulary": sequences(field("top_logprobs", top("token_ids", lambda a: a + 10_000))),
    "short alternatives": sequences(field("top_logprobs", top("logprobs", lambda a: a[1:]))),
    "experts of another shape": sequences(field("routed_experts", lambda _: np.zeros((1, 1), np.uint16))),
    "a list of experts": sequences(field("routed_experts", lambda _: [[[0]]])),
    "short prompt logprobs": field("prompt_logprobs", lambda a: a[1:]),
    "no prompt logprobs": field("prompt_logprobs", lambda _: None),
    "no alternatives of the prompt": field("top_prompt_logprobs", lambda _: None),
    "alternatives of another prompt": field("top_prompt_logprobs", top("token_ids", lambda a: a[1:])),
    "targets of another shape": field("target_prompt_logprobs", lambda a: a[:, 1:]),
    "no targets": field("target_prompt_logprobs", lambda _: None),
    "a layout": field("target_layout", lambda _: ops.SparseLayout(crow_indices=None, col_indices=None)),  # type: ignore[arg-type]
    "more cached than there is": field("prompt_cache_hit_tokens", lambda _: NUM_PROMPT + 1),
    "cached text": field("prompt_cache_hit_tokens", lambda _: "3"),
    "a failure without text": lambda _: ops.Failed(message=None),  # type: ignore[arg-type]
    "a failure of nobody": lambda _: ops.Failed(message="no", category="nobody"),  # type: ignore[arg-type]
}
UNASKED: dict[str, Lie] = {
    "alternatives": sequences(field("top_logprobs", lambda _: alternatives(4))),
    "prompt logprobs": field("prompt_logprobs", lambda _: np.zeros(NUM_PROMPT, np.float32)),
    "alternatives of the prompt": field("top_prompt_logprobs", lambda _: alternatives(NUM_PROMPT)),
    "targets": field("target_prompt_logprobs", lambda _: np.zeros((NUM_PROMPT - 1, 2), np.float32)),
}


def a_pass(client: EngineDriver) -> ops.ForwardBackward:
    return ops.ForwardBackward(model_id=client.model_id(), data=(random_datum(0, 6, 60), random_datum(1, 9, 60)))


def a_step(client: EngineDriver) -> ops.OptimStep:
    return ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())


def a_save(client: EngineDriver) -> ops.SaveState:
    return ops.SaveState(model_id=client.model_id(), path=client.path("saved"))


def a_snapshot(client: EngineDriver) -> ops.SaveForSampler:
    return ops.SaveForSampler(model_id=client.model_id(), path=client.path("saved", "sampler_weights"))


def a_sample(client: EngineDriver) -> ops.Sample:
    return ops.Sample(
        sampling_session_id=f"{client.session_id}:sample:0",
        snapshot_id=None,
        prompt_P=np.arange(NUM_PROMPT, dtype=np.int32),
        params=ops.SamplingParams(max_tokens=4, seed=1, stop_at_eos=False),
        num_samples=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=TOP,
        topk_sample_logprobs=TOP,
        target_prompt_logprobs=np.ones((NUM_PROMPT - 1, 2), np.int64),
    )


def a_plain_sample(client: EngineDriver) -> ops.Sample:
    return replace(
        a_sample(client),
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        topk_sample_logprobs=0,
        target_prompt_logprobs=None,
    )


def replace_id(snapshot: Any) -> Any:
    snapshot.snapshot_id = "another"
    return snapshot


SNAPSHOTS: dict[str, Lie] = {"nothing": lambda _: None, "another id": replace_id}
TRAINING = {
    f"{make.__name__}: {name}": (make, lie)
    for make, lies in ((a_pass, PASSES), (a_step, STEPS), (a_save, STATES), (a_snapshot, SNAPSHOTS))
    for name, lie in lies.items()
}


@pytest.mark.parametrize(("make", "lie"), TRAINING.values(), ids=TRAINING)
async def test_a_wrong_result_of_training_ends_the_engine(
    store: SqlStore, tmp_path: Path, make: Callable[[EngineDriver], Any], lie: Lie
) -> None:
    """It stays running in the store: the next engine rebuilds the models and retries it alone."""
    backend, client = LyingBackend(tmp_path), EngineDriver(store, "toy")
    await client.open_session()
    task = asyncio.create_task((await make_engine(store, backend, tmp_path, sampler=backend)).run())
    await client.result(await client.create_model())
    await client.run(a_pass(client))
    backend.lie = lie
    request_id = await client.submit(make(client))
    with pytest.raises(EngineFailedError, match="breaks its contract"):
        await asyncio.wait_for(task, WAIT_S)
    assert (await store.get_operation(request_id)).state == OperationState.RUNNING


SAMPLING = {
    f"{make.__name__}: {name}": (make, lie)
    for make, lies in ((a_sample, SAMPLES), (a_plain_sample, UNASKED))
    for name, lie in lies.items()
}


@pytest.mark.parametrize(("make", "lie"), SAMPLING.values(), ids=SAMPLING)
async def test_a_wrong_result_of_a_sampler_fails_its_request_and_names_the_sampler(
    store: SqlStore, tmp_path: Path, make: Callable[[EngineDriver], Any], lie: Lie
) -> None:
    backend, client = LyingBackend(tmp_path), EngineDriver(store, "toy")
    await client.open_session()
    engine = await make_engine(store, backend, tmp_path, sampler=backend)
    task = asyncio.create_task(engine.run())
    assert isinstance(await client.run(make(client)), ops.SampleOutput)
    backend.lie = lie
    failure = await client.failure(await client.submit(make(client)))
    assert failure.category == "server"
    assert "the sampler LyingBackend breaks its contract" in failure.message
    backend.lie = _truth
    assert isinstance(await client.run(make(client)), ops.SampleOutput)
    engine.stop()
    await asyncio.wait_for(task, WAIT_S)


async def test_numbers_that_are_not_finite_are_results(store: SqlStore, tmp_path: Path) -> None:
    """They are what a model that has diverged has."""
    backend, client = LyingBackend(tmp_path), EngineDriver(store, "toy")
    await client.open_session()
    engine = await make_engine(store, backend, tmp_path, sampler=backend)
    task = asyncio.create_task(engine.run())
    await client.result(await client.create_model())
    for number in (float("nan"), float("inf")):
        backend.lie = metrics(loss=number)
        assert isinstance(await client.run(a_pass(client)), ops.ForwardBackwardOutput)
        backend.lie = logprobs(lambda a, number=number: np.full_like(a, number))
        assert isinstance(await client.run(a_pass(client)), ops.ForwardBackwardOutput)
    engine.stop()
    await asyncio.wait_for(task, WAIT_S)
