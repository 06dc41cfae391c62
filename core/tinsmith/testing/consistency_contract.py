"""The contract of a trainer and a sampler as a pair: the consistency gate passes saves and catches planted faults.

Subclass `ConsistencyContract` and give it a `backend` fixture, the trainer; and a
`sampler` fixture if another object samples.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.checks import check_operation
from tinsmith.engine.probes import Probes
from tinsmith.errors import UserError
from tinsmith.operations import (
    AdamParams,
    Consistency,
    CreateModel,
    LoraConfig,
    Sample,
    SampleOutput,
    SamplingParams,
)
from tinsmith.settings import ConsistencySettings
from tinsmith.store import EngineCapabilities
from tinsmith.testing.contract import assert_same_state, need, need_float32
from tinsmith.testing.model_driver import ModelDriver, ragged_data
from tinsmith.testing.sampling_suite import in_one_loop
from tinsmith.testing.snapshot_faults import FAULTS, FaultySampler
from tinsmith.testing.training_suite import TrainingSuite

_A_STEP = AdamParams(learning_rate=1e-4)  # the API's default: one such step is the smallest adapter of interest
_A_LARGE_STEP = AdamParams(learning_rate=1e-2)

_FLAGS = ("train_attn", "train_mlp", "train_unembed")

_ids = count()


class _Pair:
    """A trainer, a sampler that may be faulty, and the probes that compare them."""

    def __init__(self, driver: ModelDriver, sampler: SamplingBackend) -> None:
        self.driver = driver
        self.sampler = FaultySampler(sampler)
        self.probes = Probes(driver.backend, self.sampler, ConsistencySettings(), call=_call)
        self._loaded: list[str] = []

    def train(self, model_id: str, adam: AdamParams = _A_STEP, *, seed: int = 0, steps: int = 1) -> None:
        for step in range(steps):
            self.driver.forward_backward(model_id, ragged_data(seed + step, self.driver.capabilities.vocab_size))
            self.driver.optim_step(model_id, adam)

    async def save(self, model_id: str) -> Consistency:
        snapshot_id = f"contract-consistency-{next(_ids)}"
        self._loaded.append(snapshot_id)
        snapshot = self.driver.backend.publish(model_id, snapshot_id)
        await self.sampler.load_snapshot(snapshot)
        found = await self.probes.compare(model_id, snapshot_id, snapshot.lora)
        assert found is not None
        return found

    async def drop_all(self) -> None:
        for snapshot_id in self._loaded:
            await self.sampler.drop_snapshot(snapshot_id)


class ConsistencyContract(TrainingSuite):
    @pytest.fixture
    def sampler(self, backend: TrainingBackend) -> SamplingBackend:
        """Override this if the trainer does not sample."""
        if not isinstance(backend, SamplingBackend):
            pytest.skip("override the fixture 'sampler' to have the pair tested")
        return backend

    @pytest.fixture
    def pair(self, driver: ModelDriver, sampler: SamplingBackend) -> _Pair:
        need(sampler.sampler_capabilities.prompt_logprobs, "prompt_logprobs")
        return _Pair(driver, sampler)

    @in_one_loop
    async def test_honest_saves_are_consistent(self, pair: _Pair) -> None:
        """Saves pass when untrained, after small steps and after large ones, for several models in turn."""
        models = [pair.driver.create(rank=4, seed=1), pair.driver.create_trained(rank=2, seed=2)]
        for adam in (_A_STEP, _A_STEP, _A_LARGE_STEP, _A_LARGE_STEP):
            for seed, model_id in enumerate(models):
                found = await pair.save(model_id)
                assert found.verdict == "consistent", found
                assert found.max_difference is not None
                assert found.base_difference is not None
                pair.train(model_id, adam, seed=seed)
        await pair.drop_all()

    @in_one_loop
    async def test_what_create_model_accepts_can_be_saved_and_sampled(self, pair: _Pair) -> None:
        """All sets of flags, and ranks up to the limits of both and beyond them: no save is the first to refuse one."""
        trainer, sampler = pair.driver.capabilities, pair.sampler.sampler_capabilities
        both, accepted = EngineCapabilities.of(trainer, sampler), 0
        limits = trainer.max_lora_rank, sampler.max_lora_rank
        for lora in _every_lora({0, 1, *limits, *(limit + 1 for limit in limits)}):
            try:
                check_operation(CreateModel(model_id="any", lora=lora), both, {})
            except UserError:
                continue
            model_id = pair.driver.create_with(lora)
            snapshot = pair.driver.backend.publish(model_id, f"contract-accepted-{next(_ids)}")
            await pair.sampler.load_snapshot(snapshot)
            output = await pair.sampler.sample(_a_token(snapshot.snapshot_id))
            assert isinstance(output, SampleOutput), (lora, output)
            await pair.sampler.drop_snapshot(snapshot.snapshot_id)
            pair.driver.unload(model_id)
            accepted += 1
        assert accepted

    @pytest.mark.parametrize("steps", [1, 5])
    @pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
    @pytest.mark.parametrize("fault", FAULTS)
    @in_one_loop
    async def test_a_fault_is_caught_at_its_first_save(self, pair: _Pair, fault: str, large: bool, steps: int) -> None:
        """Faults are caught even in the smallest adapter: after one step at the smallest usual learning rate."""
        if not large:
            need_float32(pair.driver.capabilities)
        adam = _A_LARGE_STEP if large else _A_STEP
        other, model_id = (pair.driver.create(rank=4, seed=seed) for seed in (3, 4))
        pair.train(other, adam, seed=50, steps=steps)
        assert (await pair.save(other)).verdict == "consistent"
        pair.train(model_id, adam, steps=steps)
        assert (await pair.save(model_id)).verdict == "consistent"
        pair.train(model_id, adam, seed=80)
        pair.sampler.fault = FAULTS[fault]
        found = await pair.save(model_id)
        assert found.verdict == "inconsistent", found
        assert found.reason
        pair.sampler.fault = None
        assert (await pair.save(model_id)).verdict == "consistent"
        await pair.drop_all()

    @in_one_loop
    async def test_a_check_changes_nothing(self, pair: _Pair) -> None:
        """Weights, moments and pending gradients stay unchanged, bit for bit."""
        model_id = pair.driver.create(rank=4, seed=5)
        pair.train(model_id)
        pair.driver.forward_backward(model_id, ragged_data(6, pair.driver.capabilities.vocab_size))
        before = pair.driver.state(model_id)
        await pair.save(model_id)
        assert_same_state(pair.driver.state(model_id), before, "after a check")
        await pair.drop_all()


def _every_lora(ranks: Iterable[int]) -> Iterator[LoraConfig]:
    yield from (LoraConfig(rank=rank, seed=1) for rank in sorted(ranks))
    for flags in product((False, True), repeat=len(_FLAGS)):
        yield LoraConfig(rank=2, seed=1, **dict(zip(_FLAGS, flags, strict=True)))


def _a_token(snapshot_id: str) -> Sample:
    params = SamplingParams(max_tokens=1, seed=1)
    prompt_P = np.array([1, 2, 3], np.int32)
    return Sample(sampling_session_id="contract", snapshot_id=snapshot_id, prompt_P=prompt_P, params=params)


async def _call(call: Callable[[], Any]) -> Any:
    return call()
