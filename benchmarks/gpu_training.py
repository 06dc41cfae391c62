"""Measure the fsdp backend's training step on a GPU: tokens per second, and the share of the card's matmul limit.

    python benchmarks/gpu_training.py --out gpu_training.json            # the 8B shape, 16 tenants, bfloat16
    python benchmarks/gpu_training.py --toy                              # the same code on a CPU in seconds

G1: one multi-LoRA linear layer, forward and backward, against the base layer alone. G3: the whole forward_backward and
optim_step of a Qwen3-8B-shaped model with random weights, packed, sequences of 100 to 2000 tokens.
One process, one rank: no data is downloaded, the model is written to a temporary directory in the shape asked for.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tinsmith.huggingface import DecoderShape
from tinsmith.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import AdamParams, Array, Datum, ForwardBackward, LoraConfig
from tinsmith.workers import alone, deal, segments
from tinsmith_fsdp import batching
from tinsmith_fsdp.adapter_pack import AdapterPack
from tinsmith_fsdp.architecture import read_architecture
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.layout import AdapterLayout
from tinsmith_fsdp.lora import MultiLoraLinear
from tinsmith_fsdp.mesh import Mesh, make_mesh
from tinsmith_fsdp.messages import Setup, Step
from tinsmith_fsdp.trainer import Trainer

LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
TOY = TinyShape(vocab_size=512, num_layers=2)


def main() -> None:
    options = parse_options()
    device = torch.device("cpu") if options.toy else torch.device("cuda", 0)
    dtype = torch.float32 if options.toy else torch.bfloat16
    limit = matmul_limit(device, dtype, 512 if options.toy else 8192)
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "matmul_tflops": limit / 1e12,
        "G1": linear(device, dtype, options),
    }
    with tempfile.TemporaryDirectory() as directory, alone() as worker:
        mesh = make_mesh(worker, device, 1)
        write_model(Path(directory), options)
        report["G3"] = step(Path(directory), mesh, dtype, limit, options)
        dist.destroy_process_group()
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure multi-LoRA training on a GPU.")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU: checks that this script runs")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, help="of one forward_backward; default 16384, toy 512")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", help="write the report here as JSON")
    options = parser.parse_args()
    options.tokens = options.tokens or (512 if options.toy else 16384)
    return options


def write_model(directory: Path, options: argparse.Namespace) -> None:
    """Write config.json; weights are made on the device instead of read."""
    write_tiny_model(directory, TOY)
    if options.toy:
        return
    config = json.loads((directory / "config.json").read_text())
    config.update(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
        max_position_embeddings=40_960,
    )  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Run twice to warm up, then give the median."""
    times = []
    for number in range(repeats + 2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def matmul_limit(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Measure what the device really multiplies, in FLOP per second, on random data."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device, 10)


def linear(device: torch.device, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, float]:
    """G1: what adapters add to a linear layer, forward and backward."""
    hidden = 128 if options.toy else 4096
    shape = DecoderShape(
        class_name="Qwen3ForCausalLM", vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_layers=1,
        num_heads=hidden // 32, num_kv_heads=hidden // 32, head_dim=32, max_position=2048, tied=False,
    )  # fmt: skip
    layer = MultiLoraLinear(torch.nn.Linear(hidden, 3 * hidden, bias=False), "model.layers.0.mlp.up_proj")
    layer = layer.to(device, dtype).requires_grad_(requires_grad=False)
    lora = LoraConfig(rank=options.rank, seed=0, train_attn=False, train_unembed=False)
    layout = AdapterLayout(lora, shape)
    each = options.tokens // options.tenants
    adapters = [(layout, torch.zeros(layout.size, device=device)) for _ in range(options.tenants)]
    pack = AdapterPack(adapters, dtype, backward=True)
    ends = torch.arange(1, options.tenants + 1, dtype=torch.int32, device=device) * each
    x = torch.randn(1, each * options.tenants, hidden, device=device, dtype=dtype, requires_grad=True)

    def work() -> None:
        y = layer(x)
        y.backward(torch.ones_like(y))

    layer.factors = pack.factors(ends)[layer.module]
    adapted = seconds(work, device, options.repeats)
    layer.factors = None
    plain = seconds(work, device, options.repeats)
    return {"base_s": plain, "with_adapters_s": adapted, "adapters_add": adapted / plain - 1}


def step(
    directory: Path, mesh: Mesh, dtype: torch.dtype, limit: float, options: argparse.Namespace
) -> dict[str, float]:
    """G3: forward_backward and optim_step of all tenants."""
    architecture = read_architecture(directory)
    setup = Setup(
        config=FsdpConfig(reshard_after_forward=False),
        architecture=architecture,
        model_path=str(directory),
        losses=LOSSES,
        dtype=str(dtype).removeprefix("torch."),
        strict=False,
        checkpointing=not options.toy,
        compile=not (options.toy or options.no_compile),
    )
    base = BaseModel(setup, mesh)
    for part in base.parts:
        part.local.normal_(0, 0.02) if len(part.shape) > 1 else part.local.fill_(1.0)
    trainer = Trainer(base, mesh, setup)
    models = [f"tenant-{index}" for index in range(options.tenants)]
    for index, model_id in enumerate(models):
        trainer.create_model(model_id, LoraConfig(rank=options.rank, seed=index))
    work = list(segments(operations(models, architecture.vocab_size, options.tokens), LOSSES))
    tokens = sum(segment.num_tokens for segment in work)
    micros = list(deal(work, 1, tokens))
    shares, owners = [micro[0] for micro in micros], [batching.owners(micro) for micro in micros]
    passes = seconds(lambda: trainer.run(shares, owners, True), mesh.device, options.repeats)
    adam = [Step(model_id=model_id, adam=AdamParams()) for model_id in models]
    steps = seconds(lambda: trainer.optim_step(adam), mesh.device, options.repeats)
    flops = 4 * matmul_parameters(architecture) * tokens  # forward and dX; the frozen base has no dW
    return {
        "tokens": tokens,
        "forward_backward_s": passes,
        "optim_step_s": steps,
        "tokens_per_s": tokens / (passes + steps),
        "share_of_matmul_limit": flops / passes / limit,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if mesh.device.type == "cuda" else 0.0,
    }


def operations(models: list[str], vocab_size: int, tokens: int) -> list[ForwardBackward]:
    """Give each tenant its part of the tokens, in sequences of 100 to 2000."""
    rng = np.random.default_rng(0)
    made = []
    for model_id in models:
        left, data = tokens // len(models), []
        while left > 0:
            length = min(left, int(rng.integers(100, 2001)))
            sequence = rng.integers(0, vocab_size, length + 1)
            inputs: dict[str, Array] = {
                "target_tokens": sequence[1:].astype(np.int64),
                "weights": np.ones(length, np.float32),
            }
            data.append(Datum(tokens_T=sequence[:-1].astype(np.int32), loss_inputs=inputs))
            left -= length
        made.append(ForwardBackward(model_id=model_id, data=tuple(data)))
    return made


def matmul_parameters(architecture: DecoderShape) -> int:
    shapes = architecture.linear_shapes()
    head = shapes.pop("lm_head")
    return architecture.num_layers * sum(a * b for a, b in shapes.values()) + head[0] * head[1]


if __name__ == "__main__":
    main()
