"""The command `tinsmith megatron-plan`."""

from pathlib import Path
from typing import Annotated

import typer

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import DecoderShape, known_config
from tinsmith_checkpoints.huggingface.known_shapes import KNOWN_SHAPES
from tinsmith_megatron.architecture import architecture_of, read_architecture
from tinsmith_megatron.parallel import Work
from tinsmith_workbench.layouts.choosing import planned
from tinsmith_workbench.layouts.machine import Machine
from tinsmith_workbench.layouts.report import nothing_fits, report

_WORK, _GPU = Work(), Machine()


def megatron_plan(
    model: Annotated[str, typer.Option(help="a directory with config.json, or Qwen3-30B-A3B, Llama-3-70B, ...")],
    gpus: Annotated[int, typer.Option(min=1, help="all of them, on all machines")],
    memory_gb: Annotated[float, typer.Option(min=1, help="of each GPU, in 10^9 bytes")] = _GPU.memory_gb,
    tenants: Annotated[int, typer.Option(min=1, help="LoRA models in training, all in one call")] = _WORK.tenants,
    rank: Annotated[int, typer.Option(min=0, help="of each adapter; 0: full fine-tuning of one model")] = _WORK.rank,
    tokens: Annotated[int, typer.Option(min=64, help="of a micro-batch of one rank (max_batch_tokens)")] = _WORK.tokens,
    context: Annotated[int, typer.Option(min=64, help="tokens of the longest sequence")] = _WORK.context,
    step_tokens: Annotated[int, typer.Option(min=64, help="of a step, over all ranks and tenants")] = _WORK.step_tokens,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a machine")] = _GPU.gpus_per_node,
    reserve_gb: Annotated[
        float, typer.Option(min=0, help="kept free on each GPU for CUDA, NCCL and fragments: assumed")
    ] = _GPU.reserve_gb,
    tflops: Annotated[float, typer.Option(min=1, help="peak of a GPU in bfloat16; default H100 SXM")] = _GPU.tflops,
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1, help="share of it that is achieved: assumed")
    ] = _GPU.efficiency,
    node_gb_s: Annotated[
        float, typer.Option(min=0.1, help="a GPU receives from its own machine; default NVLink 4, one direction")
    ] = _GPU.node_gb_s,
    network_gb_s: Annotated[
        float, typer.Option(min=0.1, help="a GPU receives from others; default a card of 400 Gbit/s for each GPU")
    ] = _GPU.network_gb_s,
    top: Annotated[int, typer.Option(min=1, help="layouts to list")] = 8,
) -> None:
    """Say which layouts fit, what they hold, send and take, and print the fastest as configuration."""
    if context > tokens:
        msg = f"--context {context} is more than --tokens {tokens}: a sequence stays in one micro-batch, raise --tokens"
        raise ConfigError(msg)
    work = Work(tenants=tenants, rank=rank, tokens=tokens, context=context, step_tokens=step_tokens)
    machine = Machine(
        memory_gb=memory_gb,
        reserve_gb=reserve_gb,
        gpus_per_node=gpus_per_node,
        tflops=tflops,
        efficiency=efficiency,
        node_gb_s=node_gb_s,
        network_gb_s=network_gb_s,
    )
    found = planned(read_shape(model), gpus, work, machine)
    if not found[0].fits:
        raise ConfigError(nothing_fits(found, machine))
    typer.echo(report(found, model, work, machine, top=top))


def read_shape(name: str) -> DecoderShape:
    """Return a shape by its name, or from a directory with config.json. Raise ConfigError for neither."""
    if Path(name).is_dir():
        return read_architecture(Path(name)).shape
    config = known_config(name)
    if config is None:
        msg = f"no model named {name!r}: give a directory with config.json, or one of {', '.join(KNOWN_SHAPES)}"
        raise ConfigError(msg)
    return architecture_of(config, Path(name)).shape
