"""vLLM sleeps on GPUs, which no test has. Here a CPU stands in for one: see sleepy.py."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from os import kill
from pathlib import Path

import pytest
from vllm_harness import LOSSES, blank_adapter, op, prompt, settings

from tinsmith import BackendContext, ConfigError, Placement, SampleOutput
from tinsmith.testing import in_one_loop
from tinsmith.testing.sampling_sleep import SamplerSleepContract
from tinsmith_checkpoints.huggingface import known_config
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.demand import demand
from tinsmith_vllm.plugin import create
from tinsmith_vllm.replica import Replica
from tinsmith_vllm.sampler import VllmSampler

WAIT_S = 400


def make(model: Path, cache: Path, **changed: object) -> VllmSampler:
    context = BackendContext(model_name="tiny", model_path=model, cache_dir=cache, losses=LOSSES, sleeps=True)
    sampler = create(VllmConfig.model_validate(settings(**changed)), context)
    assert isinstance(sampler, VllmSampler)
    return sampler


def stand_in(directory: Path, program: str) -> Path:
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$3"\n')
    python.chmod(0o755)
    return python


def until_it_is_gone(replica: Replica) -> None:
    while replica.is_running:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def sleepy(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    directory = tmp_path_factory.mktemp("sleepy")
    python = stand_in(directory, str(Path(__file__).with_name("sleepy.py")))
    with closing(make(tiny_models["qwen3"], directory, python=python, dtype="float32", enforce_eager=True)) as sampler:
        yield sampler


@pytest.mark.slow
@pytest.mark.thorough  # it starts vLLM
class TestVllmSleep(SamplerSleepContract):
    @pytest.fixture
    def backend(self, sleepy: VllmSampler) -> VllmSampler:
        return sleepy

    @pytest.fixture
    def adapter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: array.shape for name, array in blank_adapter().adapter_weights().items()}


@pytest.mark.slow
@pytest.mark.thorough
@in_one_loop
async def test_a_process_that_dies_in_its_sleep_comes_back_when_it_is_woken(sleepy: VllmSampler) -> None:
    """Not earlier: it would take the memory that is lent."""
    before = await sleepy.sample(op(prompt(1)))
    (dead,) = sleepy.process_ids
    await sleepy.sleep_sampler()
    kill(dead, signal.SIGKILL)
    (replica,) = sleepy.all_replicas
    await asyncio.to_thread(until_it_is_gone, replica)
    assert sleepy.process_ids == [dead]
    await asyncio.wait_for(sleepy.wake_sampler(), WAIT_S)
    assert sleepy.process_ids != [dead]
    after = await sleepy.sample(op(prompt(1)))
    assert isinstance(before, SampleOutput)
    assert isinstance(after, SampleOutput)
    assert after.sequences[0].tokens.tolist() == before.sequences[0].tokens.tolist()


@pytest.mark.slow
def test_vllm_for_cpus_is_refused_by_name(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="turns of the model are enabled, and vllm for CPUs cannot sleep"):
        make(tiny_models["qwen3"], tmp_path)


def test_asleep_it_keeps_what_it_takes_for_itself() -> None:
    model = known_config("Qwen3-8B")
    on_card = demand(VllmConfig(), model, Placement(devices=("0",), device_bytes=80 << 30))
    assert on_card.asleep_bytes == on_card.fixed["vLLM itself"] > 0
    assert demand(VllmConfig(), model, Placement()).asleep_bytes == 0
