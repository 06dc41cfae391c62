"""What the benchmarks of samplers share: a sampler on a random model of a given size, and adapters for it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tinsmith.backend import BackendContext, HostSnapshot, SamplingBackend
from tinsmith.operations import Array, LoraConfig, Sample, SampleOutput
from tinsmith.plugins.loading import Plugins
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

RANK = 8
OPTIONS = {"vllm": {"max_model_len": 256, "kv_cache_bytes": 1 << 28, "max_num_seqs": 64, "max_lora_rank": RANK}}


def shape_of(layers: int, hidden: int) -> TinyShape:
    return TinyShape(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_heads=max(4, hidden // 64),
        num_kv_heads=2,
        head_dim=32 if hidden < 256 else 64,
    )


@contextmanager
def made_sampler(name: str, shape: TinyShape) -> Iterator[SamplingBackend]:
    """Make a random model and a sampler of it; say what it is."""
    plugins = Plugins.load()
    spec = plugins.samplers.get(name)
    config = spec.config.model_validate(OPTIONS.get(name, {}))
    with tempfile.TemporaryDirectory() as directory:
        model_path, cache_dir = Path(directory) / "model", Path(directory) / "cache"
        parameters = write_tiny_model(model_path, shape)
        cache_dir.mkdir()
        losses = plugins.losses.all()
        context = BackendContext(model_name="tiny", model_path=model_path, cache_dir=cache_dir, losses=losses)
        sampler = spec.create(config, context)
        try:
            claimed = sampler.sampler_capabilities
            print(
                f"{name} on {claimed.device}, {claimed.dtype}, {parameters:,} parameters in {shape.num_layers} layers"
            )
            yield sampler
        finally:
            sampler.close()


def random_adapter(snapshot_id: str, shape: TinyShape, *, seed: int) -> HostSnapshot:
    """Make an adapter for all layers, of a size that training might reach."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    widths = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    modules = {f"model.layers.{n}.{name}": each for n in range(shape.num_layers) for name, each in widths.items()}
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for module, (into, out) in {**modules, "lm_head": (hidden, shape.vocab_size)}.items():
        a, b = rng.normal(size=(RANK, into)) / np.sqrt(into), 0.1 * rng.normal(size=(out, RANK))
        weights[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        weights[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    return HostSnapshot(snapshot_id, LoraConfig(rank=RANK, seed=0), weights)


async def draw(sampler: SamplingBackend, op: Sample) -> SampleOutput:
    output = await sampler.sample(op)
    assert isinstance(output, SampleOutput), output
    return output
