"""`tinsmith plan`: where trainers and samplers would run, and their room for models and samples. Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from tinsmith.commands.options import (
    Backend,
    BaseModel,
    ConfigFile,
    ModelAndSettings,
    plugins_of,
    settings_of,
)
from tinsmith.errors import ConfigError
from tinsmith.placement.components import model_config
from tinsmith.placement.machine import Machine, this_machine
from tinsmith.placement.plan import make_plan, with_rank
from tinsmith.placement.report import described
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import Settings
from tinsmith_checkpoints.huggingface.known_shapes import KNOWN_SHAPES


def plan(
    context: typer.Context,
    model: ModelAndSettings = None,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    backend: Backend = None,
    sampler: Annotated[str | None, typer.Option(help="installed sampler of the first model")] = None,
    cards: Annotated[int | None, typer.Option(min=0, help="number of GPUs; default: this machine's")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="memory of each GPU, or of a machine without GPUs, such as `80GiB`; default: this machine's"),
    ] = None,
    tenants: Annotated[int, typer.Option(min=1, help="models in training at a time")] = 1,
    rank: Annotated[int | None, typer.Option(min=1, help="their LoRA rank; default: the largest served rank")] = None,
) -> None:
    """Print where trainers and samplers would run, what each needs its memory for, and what fits. Starts nothing.

    MODEL may also be the name of a well-known model that is not on this machine.
    """
    plugins = plugins_of(context)
    settings = settings_of(
        context,
        config,
        ("--sampler", "models.0.sampler.plugin", sampler),
        arguments=model,
        base_model=base_model,
        backend=backend,
        needs_models=False,
    )
    settings = _located(settings, plugins)
    if rank is not None:
        settings = with_rank(settings, plugins, rank)
    machine = _machine(cards, memory)
    found = make_plan(settings, plugins, machine, [each.name for each in settings.models])
    if not found:
        msg = (
            "there is nothing to plan: this machine has no GPU, and the configured plugins report no demand on a "
            "CPU; for a machine with GPUs give --cards and --memory, such as --cards 1 --memory 80GiB"
        )
        raise ConfigError(msg)
    for line in described(found, machine, tenants=tenants):
        typer.echo(line)


def _machine(cards: int | None, memory: str | None) -> Machine:
    here = this_machine() if cards is None or memory is None else Machine()
    devices = here.devices if cards is None else tuple(map(str, range(cards)))
    size: int | None = None if memory is None else _bytes(memory)
    if not devices:
        return Machine(host_bytes=size or here.host_bytes)
    if size is None and here.device_bytes is None:
        msg = "the memory of this machine's GPUs is not known: give --memory, such as --memory 80GiB"
        raise ConfigError(msg)
    return Machine(devices=devices, device_bytes=size or here.device_bytes, others_alike=True)


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        msg = f"--memory: {text!r} is not a size; give one such as 80GiB"
        raise ConfigError(msg) from error


def _located(settings: Settings, plugins: Plugins) -> Settings:
    """Find the models' directories. Raise ConfigError if nothing is known of a model's sizes."""
    if not settings.models:
        msg = "no model to plan for; give `tinsmith plan MODEL`, or --config FILE"
        raise ConfigError(msg)
    models = []
    for model in settings.models:
        found: Path | None = model.path or plugins.resolve_base_model(model.source)
        models.append(model.model_copy(update={"path": found}))
        if model_config(models[-1]) is None:
            msg = (
                f"{model.name!r} is not on this machine and is not a well-known model; give a Hugging Face "
                f"directory, or one of {', '.join(KNOWN_SHAPES)}"
            )
            raise ConfigError(msg)
    return settings.model_copy(update={"models": tuple(models)})
