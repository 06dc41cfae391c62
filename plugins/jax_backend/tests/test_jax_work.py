"""How much the host has the device do: calls per step and per token, padding. It depends on the code alone."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from few_programs import FEW_PROGRAMS
from jax_harness import add_model, local, make_op, sampling_of
from sampling_harness import make_sample, prompt, sample_all
from where_time_goes import STAGES, find

from tinsmith import AdamParams, Datum, Forward, ForwardBackward, LoraConfig, OptimStep
from tinsmith_jax import adapters
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.buckets import Buckets
from tinsmith_jax.packing import Piece, plan
from tinsmith_jax.tiles import TILE
from tinsmith_jax.training_device import TrainingDevice

MODELS = [f"m{number}" for number in range(8)]
MOST_PADDING = 0.18
"""The most of what is computed for the batches below; 0.175 today. Lower it when packing gets better."""


def counted(monkeypatch: pytest.MonkeyPatch, device: object, *names: str) -> Counter[str]:
    """Count the calls of these methods."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        method = getattr(device, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*args, **options)

        return call

    for name in names:
        monkeypatch.setattr(device, name, counting(name))
    return calls


@pytest.fixture
def models(contract_backend: JaxBackend) -> Any:
    for number, model in enumerate(MODELS):
        add_model(contract_backend, model, LoraConfig(rank=4, seed=number))
    yield MODELS
    for model in MODELS:
        contract_backend.unload_model(model)


def test_tenants_share_calls(
    contract_backend: JaxBackend, models: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = local(contract_backend).training
    calls = counted(monkeypatch, device, "gradients", "score", "step")
    ops = [make_op(model, seed, [12]) for seed, model in enumerate(models)]
    contract_backend.forward_backward(ops)
    assert calls == {"gradients": len(models) * TILE // FEW_PROGRAMS["max_batch_tokens"]}
    contract_backend.optim_step([OptimStep(model_id=model, adam=AdamParams()) for model in models])
    assert calls["step"] == 1


def test_calls_of_a_pass_grow_with_its_tokens(
    contract_backend: JaxBackend, models: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as much as a call holds, in short sequences or in long ones. A sequence takes whole tiles."""
    device = local(contract_backend).training
    calls = counted(monkeypatch, device, "gradients")
    tiles = FEW_PROGRAMS["max_batch_tokens"] // TILE
    contract_backend.forward_backward([make_op(models[0], 0, [16] * (3 * tiles))])
    contract_backend.forward_backward([make_op(models[1], 1, [tiles * TILE] * 3)])
    assert calls["gradients"] == 2 * 3


def test_a_compiled_program_is_found_by_its_key_alone(
    contract_backend: JaxBackend, models: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To describe its arguments takes as long as an optimizer step."""

    def train() -> None:
        op = make_op(models[0], 0, [16])
        contract_backend.forward_backward([op])
        contract_backend.forward([Forward(model_id=op.model_id, data=op.data, loss_fn=op.loss_fn)])
        contract_backend.optim_step([OptimStep(model_id=models[0], adam=AdamParams())])

    train()
    calls = counted(monkeypatch, adapters, "shapes")
    train()
    assert calls == {}


def test_a_save_for_sampling_copies_nothing(contract_backend: JaxBackend, models: Sequence[str]) -> None:
    device = local(contract_backend).training
    assert isinstance(device, TrainingDevice)
    snapshot: Any = contract_backend.publish(models[0], "a")
    assert snapshot.arrays is device.held(models[0]).adapters["weights"]


@pytest.mark.parametrize("together", [1, 4])
async def test_sequences_that_are_drawn_together_share_the_calls(
    contract_backend: JaxBackend, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """A group reads its prompt once, and four slots cost no more calls than one."""
    device = sampling_of(contract_backend)
    calls = counted(monkeypatch, device, "decode", "prefill")
    [output] = await sample_all(contract_backend, [make_sample(prompt(30), num_samples=together, max_tokens=16)])
    assert [len(sequence.tokens) for sequence in output.sequences] == [16] * together
    assert calls["prefill"] == 1
    assert calls["decode"] <= 16 / 4 + 1  # four tokens a call on CPU


def pieces(lengths: Sequence[int]) -> list[Piece]:
    made = []
    for number, length in enumerate(lengths):
        datum = Datum(tokens_T=np.zeros(length, np.int32), loss_inputs={})
        op = ForwardBackward(model_id=f"m{number % 8}", data=(datum,))
        targets_TK = np.zeros((length, 1), np.int64)
        made.append(Piece(op_index=number, op=op, datum=datum, scale=1.0, padded_rank=8, targets_TK=targets_TK))
    return made


def test_a_bounded_share_of_the_computed_tokens_is_padding() -> None:
    """Over batches as reinforcement learning makes them: 8 to 64 sequences of 16 to 512 tokens; sizes of a CPU."""
    buckets, rng = Buckets(max_tokens=2048, max_targets=64), np.random.default_rng(0)
    real = computed = 0
    for _ in range(30):
        lengths = rng.integers(16, 513, rng.integers(8, 65)).tolist()
        real += sum(lengths)
        computed += sum(micro.bucket(buckets).num_tokens for micro in plan(pieces(lengths), buckets, 32))
    assert 1 - real / computed < MOST_PADDING


def test_the_devices_stages_are_where_they_are_looked_for() -> None:
    for place, _, _ in STAGES:
        owner, name = find(place)
        assert callable(getattr(owner, name)), place
