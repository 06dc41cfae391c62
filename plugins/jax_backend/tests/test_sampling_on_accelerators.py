"""Sampling as accelerators compute it, all tiles at a time, run on the CPU: against one tile after the other.

The kernels for GPUs run as plain JAX.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jax_harness import add_model
from sampling_harness import make_sample, prompt, sample_all

from tinsmith import BackendContext, HostSnapshot, LoraConfig, SampledSequence, SampleOutput
from tinsmith_jax import native, sampling_device
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxSamplerConfig
from tinsmith_jax.sampling_only import JaxSampler

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCHED = {"one_by_one": False, "prefill_tiles": (2,)}
TRITON = BATCHED | {"triton": True, "interpret": True}
LORAS = {"a": LoraConfig(rank=4, seed=1), "b": LoraConfig(rank=8, seed=2)}


@pytest.fixture(
    params=[
        pytest.param(BATCHED, id="by XLA"),
        # test_sampling_kernels.py has the kernels, one by one
        pytest.param(TRITON, id="kernels for GPUs", marks=pytest.mark.thorough),
    ]
)
async def batched(
    request: pytest.FixtureRequest,
    contract_backend: JaxBackend,
    contract_model: Path,
    jax_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[JaxSampler]:
    """A sampler in the form for accelerators, with the snapshots of the shared backend."""
    monkeypatch.setattr(native, "loaded", lambda: False)  # kernels in C++ would take precedence
    shape_of = sampling_device.sampling_shape
    monkeypatch.setattr(sampling_device, "sampling_shape", lambda *a, **k: replace(shape_of(*a, **k), **request.param))
    config = JaxSamplerConfig(warm_up=False, max_context_tokens=128, max_lora_rank=8, decode_slots=4)
    context = BackendContext(model_name="tiny", model_path=contract_model, cache_dir=jax_cache, losses={})
    sampler = JaxSampler(config, context)
    for name, lora in LORAS.items():
        add_model(contract_backend, name, lora, random_B=True)
        published = contract_backend.publish(name, name)
        await contract_backend.load_snapshot(published)
        await sampler.load_snapshot(HostSnapshot(name, lora, published.adapter_weights()))
    yield sampler
    for name in LORAS:
        await contract_backend.drop_snapshot(name)
        contract_backend.unload_model(name)
    sampler.close()


async def test_all_tiles_at_a_time_are_one_after_the_other(batched: JaxSampler, contract_backend: JaxBackend) -> None:
    """Prompts that end within a page and at its end; a group that shares one; tokens drawn across a page's end."""
    ops = [
        make_sample(prompt(70), "a", session="a", num_samples=3, max_tokens=20),
        make_sample(prompt(64), "b", session="b", temperature=0.0, max_tokens=9),
        make_sample(prompt(60), None, session="c", max_tokens=12, top_p=0.9),
        make_sample(prompt(1), "b", session="d", max_tokens=70),
    ]
    ours, expected = await sample_all(batched, ops), await sample_all(contract_backend, ops)
    for one, other in zip(sequences(ours), sequences(expected), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def sequences(outputs: Sequence[SampleOutput]) -> list[SampledSequence]:
    return [sequence for output in outputs for sequence in output.sequences]
