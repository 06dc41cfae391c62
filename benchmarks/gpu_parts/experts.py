"""The megatron backend on one GPU: whole steps of one and of sixteen tenants on a mixture of experts.

The shape is that of Qwen3-30B-A3B with twelve layers: sixteen adapters of experts then take 73 GB of the card, by the
formula of `tinsmith megatron-plan`. Ranks read their weights from files, so these are written first. One rank. Packed
sequences of 100 to 2000 tokens.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from gpu_parts.common import Options, Report, matmul_limit, measured_again, needs, operations, seconds
from gpu_parts.training import LOSSES, TENANTS
from tinsmith.backend import BackendContext, TrainingBackend
from tinsmith.operations import AdamParams, CreateModel, Failed, LoraConfig, OptimStep
from tinsmith.plugins.loading import Plugins
from tinsmith_checkpoints.huggingface import DecoderShape, decoder_shape, known_config
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

MODEL, LAYERS = "Qwen3-30B-A3B", 12
TINY = TinyShape(family="qwen3_moe", vocab_size=512, num_layers=2)


def run(options: Options) -> Report:
    needs("megatron", "tinsmith_megatron", "transformers")
    limit = matmul_limit(options)
    with tempfile.TemporaryDirectory() as directory:
        shape = _write(options, Path(directory) / "model")
        report: Report = {"layers": shape.num_layers, "active_parameters": active_parameters(shape)}
        with _trainer(options, Path(directory)) as trainer:
            for tenants in TENANTS:
                report[f"tenants: {tenants}"] = _step(trainer, options, shape, tenants, limit)
    return measured_again(report, limit, matmul_limit(options))


def active_parameters(shape: DecoderShape) -> int:
    """Return the number of weights that a token is multiplied with: not the embedding, and of experts those chosen."""
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None
    attention = 2 * hidden * (shape.q_size + shape.kv_size)
    chosen = 3 * experts.top_k * hidden * experts.intermediate_size
    return shape.num_layers * (attention + hidden * experts.num_experts + chosen) + hidden * shape.vocab_size


def _write(options: Options, directory: Path) -> DecoderShape:
    write_tiny_model(directory, TINY)
    path = directory / "config.json"
    if not options.toy:
        sizes = known_config(MODEL)
        assert sizes is not None, MODEL
        path.write_text(json.dumps({**json.loads(path.read_text()), **sizes, "num_hidden_layers": LAYERS}))
        options.write_weights(directory)
    return decoder_shape(json.loads(path.read_text()), path, supported=["Qwen3MoeForCausalLM"])


@contextmanager
def _trainer(options: Options, directory: Path) -> Iterator[TrainingBackend]:
    spec = Plugins.load().backends.get("megatron")
    settings = {
        "device": options.device.type,
        "nproc_per_node": 1,
        "max_models": max(TENANTS),
        "max_lora_rank": options.rank,
        "max_context_tokens": 2048,
        "max_batch_tokens": max(2048, options.tokens),
        "isolation": "fast",
    }
    context = BackendContext(
        model_name="experts",
        model_path=directory / "model",
        cache_dir=directory / "cache",
        losses=LOSSES,
    )
    backend = spec.create(spec.config.model_validate(settings), context)
    try:
        yield backend
    finally:
        backend.close()


def _step(trainer: TrainingBackend, options: Options, shape: DecoderShape, tenants: int, limit: float) -> Report:
    """Measure forward_backward and optim_step of all models together, with the way to the rank and back."""
    models = [f"{tenants}-{index}" for index in range(tenants)]
    for index, model_id in enumerate(models):
        trainer.create_model(CreateModel(model_id=model_id, lora=LoraConfig(rank=options.rank, seed=index)))
    passes = operations(models, shape.vocab_size, options.tokens, seed=0)
    steps = [OptimStep(model_id=model_id, adam=AdamParams()) for model_id in models]
    tokens = sum(len(datum.tokens_T) for op in passes for datum in op.data)
    pass_s = seconds(lambda: _succeeded(trainer.forward_backward(passes)), options.device, options.repeats)
    step_s = seconds(lambda: _succeeded(trainer.optim_step(steps)), options.device, options.repeats)
    free, total = torch.cuda.mem_get_info(options.device) if options.device.type == "cuda" else (0, 0)
    for model_id in models:
        trainer.unload_model(model_id)
    return {
        "tokens": tokens,
        "forward_backward_s": pass_s,
        "optim_step_s": step_s,
        "tokens_per_s": tokens / (pass_s + step_s),
        # forward and the input's gradient; a frozen base has none of its own
        "share_of_matmul_limit": 4 * active_parameters(shape) * tokens / limit / pass_s,
        "used_gib": (total - free) / 2**30 if total else None,
    }


def _succeeded(results: Sequence[object]) -> None:
    failed = [result for result in results if isinstance(result, Failed)]
    if failed:
        raise RuntimeError(failed[0].message)
