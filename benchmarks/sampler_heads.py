"""What an adapter of the output head costs vLLM's sampler on a CPU: tokens per second of its process, with and without.

    python benchmarks/sampler_heads.py [vocabulary ...]

Times are those of the CPU, so other work on the machine disturbs little. Medians of five rounds, in turns.
"""

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil

from tinsmith import (
    BUILTIN_LOSSES,
    Array,
    BackendContext,
    HostSnapshot,
    LoraConfig,
    Sample,
    SampleOutput,
    SamplingParams,
)
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.sampler import VllmSampler

RANK, SEQUENCES, TOKENS, ROUNDS = 16, 16, 32, 5
HIDDEN, INNER, LAYERS = 512, 1024, 4
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.v_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
KINDS = {"base model": None, "without head": False, "with head": True}
SETTINGS = {
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_bytes": 128 << 20,
    "max_loras": 4,
    "max_lora_rank": RANK,
}


def adapter(name: str, vocabulary: int, *, head: bool) -> HostSnapshot:
    rng = np.random.default_rng(len(name))
    modules = {f"model.layers.{layer}.{name}": sizes for layer in range(LAYERS) for name, sizes in MODULES.items()}
    weights: dict[str, Array] = {}
    for module, (into, out) in {**modules, **({"lm_head": (HIDDEN, vocabulary)} if head else {})}.items():
        for side, shape in (("A", (RANK, into)), ("B", (out, RANK))):
            drawn = 0.02 * rng.normal(size=shape)
            weights[f"base_model.model.{module}.lora_{side}.weight"] = drawn.astype(np.float32)
    return HostSnapshot(name, LoraConfig(rank=RANK, seed=0, train_unembed=head), weights)


async def measured(sampler: VllmSampler, vocabulary: int) -> dict[str, float]:
    (pid,) = sampler.process_ids
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind, head in KINDS.items():
        for number in range(0 if head is None else 2):
            await sampler.load_snapshot(adapter(f"{kind} {number}", vocabulary, head=bool(head)))
    for _ in range(1 + ROUNDS):
        for kind, head in KINDS.items():
            before = sum(psutil.Process(pid).cpu_times()[:2])
            outputs = await asyncio.gather(
                *(sampler.sample(sample(n, None if head is None else f"{kind} {n % 2}")) for n in range(SEQUENCES))
            )
            assert all(isinstance(output, SampleOutput) for output in outputs), outputs[0]
            found[kind].append(SEQUENCES * TOKENS / (sum(psutil.Process(pid).cpu_times()[:2]) - before))
    return {kind: statistics.median(rates[1:]) for kind, rates in found.items()}


def sample(seed: int, snapshot_id: str | None) -> Sample:
    prompt_P = np.random.default_rng(seed).integers(3, 300, 8).astype(np.int32)
    params = SamplingParams(max_tokens=TOKENS, seed=seed, stop_at_eos=False)
    return Sample(sampling_session_id="s", snapshot_id=snapshot_id, prompt_P=prompt_P, params=params)


def main() -> None:
    for vocabulary in map(int, sys.argv[1:] or ["16384", "65536"]):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model"
            shape = TinyShape(
                vocab_size=vocabulary,
                hidden_size=HIDDEN,
                intermediate_size=INNER,
                num_layers=LAYERS,
                num_heads=8,
                num_kv_heads=4,
                head_dim=64,
            )
            write_tiny_model(path, shape)
            losses = {spec.name: spec for spec in BUILTIN_LOSSES}
            context = BackendContext(model_name="m", model_path=path, cache_dir=Path(directory), losses=losses)
            sampler = VllmSampler(VllmConfig.model_validate(SETTINGS), context)
            rates = asyncio.run(measured(sampler, vocabulary))
            sampler.close()
        print(vocabulary, {kind: round(rate) for kind, rate in rates.items()}, flush=True)
        print(f"  an adapter's head leaves {rates['with head'] / rates['without head']:.2f} of the speed")


if __name__ == "__main__":
    main()
