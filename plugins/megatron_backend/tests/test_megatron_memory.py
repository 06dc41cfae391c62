"""The formula of memory against what ranks really allocate, in float32 on CPU.

Experts are not equally busy, and the formula takes them to be: of ranks with the same stage, the mean counts. What the
formula does not know, such as scratch memory of libraries, is some megabytes: models and micro-batches are large enough
for it not to matter.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from measured_rank import MeasuredRank
from megatron_harness import VOCAB, make_backend, shape

from tinsmith import AdamParams, ForwardBackward, LoraConfig
from tinsmith.testing import ModelDriver, ragged_data, succeeded, write_tiny_model
from tinsmith_megatron.backend import MegatronBackend
from tinsmith_megatron.memory import on_stage
from tinsmith_megatron.parallel import Layout, Work
from tinsmith_workers.testing import Nursery

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

TENANTS, RANK = 2, 8
LENGTH = 256
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def measured_ranks() -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        nursery = Nursery("tinsmith_megatron.rank", "tinsmith_megatron.megatron_here", "measured_rank")
    yield nursery
    nursery.close()


def peaks(backend: MegatronBackend, work: Work, layout: Layout) -> list[int]:
    """Return the peak of each rank in a pass whose models have moments and a pending gradient."""
    driver = ModelDriver(backend)
    models = [driver.create_with(LoraConfig(rank=work.rank, seed=seed)) for seed in range(work.tenants)]
    count = work.step_tokens // LENGTH // len(models)
    ops = [
        ForwardBackward(model_id=model_id, data=tuple(ragged_data(seed, VOCAB, (LENGTH,) * count)))
        for seed, model_id in enumerate(models)
    ]
    succeeded(backend.forward_backward(ops))
    for model_id in models:
        driver.optim_step(model_id, AdamParams(learning_rate=1e-3))
    succeeded(backend.forward_backward(ops))
    backend.ranks.call(MeasuredRank.watch)
    succeeded(backend.forward_backward(ops))
    return backend.ranks.call(MeasuredRank.peak)


@pytest.mark.parametrize(
    ("family", "layout", "tokens"),
    [
        pytest.param("qwen3", Layout(tp=2, pp=1, ep=1, dp=1, recompute=False), 4096, id="tensor"),
        pytest.param("qwen3", Layout(tp=1, pp=2, ep=1, dp=1, recompute=False), 4096, id="pipeline"),
        pytest.param("qwen3_moe", Layout(tp=1, pp=1, ep=2, dp=2, recompute=False), 4096, id="experts"),
        pytest.param("qwen3_moe", Layout(tp=1, pp=1, ep=1, dp=1, recompute=True), 4096, id="recomputed"),
        pytest.param(
            "Qwen3_5MoeForCausalLM", Layout(tp=1, pp=1, ep=2, dp=2, recompute=False), 4096, id="experts of a hybrid"
        ),
        pytest.param(
            "Qwen3_5ForCausalLM", Layout(tp=2, pp=1, ep=1, dp=1, recompute=False), 4096, id="heads of a hybrid"
        ),
        pytest.param("DeepseekV3ForCausalLM", Layout(tp=2, pp=1, ep=2, dp=1, recompute=False), 4096, id="latents"),
        pytest.param("qwen3_moe", Layout(tp=2, pp=2, ep=2, dp=1, recompute=True), 4096, id="three kinds recomputed"),
    ],
)
def test_the_formula_is_within_a_tenth_of_the_measured_peaks(
    family: str, layout: Layout, tokens: int, measured_ranks: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "num_experts": 8}
    inner = 512 if family == "qwen3" else 192
    write_tiny_model(tmp_path / "model", shape(family, vocab_size=2048, intermediate_size=inner, **sizes))
    monkeypatch.setattr("tinsmith_megatron.backend.PROGRAM", "measured_rank:MeasuredRank")
    backend = make_backend(
        tmp_path / "model",
        tmp_path / "cache",
        measured_ranks.launch,
        nproc_per_node=layout.gpus,
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        expert_parallel=layout.ep,
        activation_checkpointing=layout.recompute,
        isolation="fast",
        max_context_tokens=LENGTH,
        max_batch_tokens=tokens,
    )
    work = Work(
        tenants=TENANTS, rank=RANK, tokens=tokens, context=LENGTH, step_tokens=2 * layout.pp * layout.dp * tokens,
        item=4, on_cpu=True,
    )  # fmt: skip
    try:
        found = peaks(backend, work, layout)
        for stage in range(layout.pp):
            measured = mean(
                peak for peak, each in zip(found, backend.loaded, strict=True) if each.coordinates.pp_rank == stage
            )
            formula = on_stage(backend.architecture.shape, layout, work, stage).total
            print(f"stage {stage}: measured {measured / 2**20:.1f} MiB, formula {formula / 2**20:.1f}")
            assert formula == pytest.approx(measured, rel=TOLERANCE), f"stage {stage}"
    finally:
        backend.close()
