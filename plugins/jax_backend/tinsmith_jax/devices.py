"""The devices of a process: the base model, and the device side of training and of sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path

import jax

from tinsmith import Figures, LossSpec, Progress
from tinsmith.machine import FairLock
from tinsmith_jax import native, runtime
from tinsmith_jax.admission import Budget
from tinsmith_jax.buckets import Buckets
from tinsmith_jax.compilation import Program, Programs
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.families import read_config
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.loss_table import LossTables
from tinsmith_jax.memory import usable_bytes
from tinsmith_jax.mesh import device_name, make_layout
from tinsmith_jax.runtime import Limits
from tinsmith_jax.sampling_device import SamplingDevice, sampling_device
from tinsmith_jax.train_step import TrainPrograms
from tinsmith_jax.training_device import TrainingDevice
from tinsmith_jax.weights import load_base


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The model to load, and its settings."""

    config: JaxConfig
    model_directory: Path
    cache_dir: Path
    losses: Mapping[str, LossSpec]
    samples: bool
    routing_replay: bool = False
    memory_bytes: int | None = None  # of each device, that may be taken; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the devices for the engine."""

    name: str
    limits: Limits
    buckets: Buckets
    budget: Budget


class Devices:
    """The devices of this process, or if there is a mesh of several processes, its part of them."""

    def __init__(self, setup: Setup, progress: Progress, figures: Figures | None = None) -> None:
        """Load the model. Raise ConfigError if files or settings are at fault."""
        progress("starting jax", None)
        config = setup.config
        model = read_config(setup.model_directory)
        runtime.prepare(setup.cache_dir, kernels=native.suits(config, model))
        memory = usable_bytes(setup.memory_bytes)
        budget = runtime.divided(config, model, memory, trains=True, samples=setup.samples)
        limits = runtime.decide(config, model, budget=budget)
        layout = None if config.mesh is None else make_layout(config.mesh, model, exact=limits.exact)
        widens = limits.kernels.native and native.widens(model)
        base = load_base(setup.model_directory, model, limits.dtype, progress, layout, widens=widens)
        shapes = jax.tree.map(partial(_shape_of, on_mesh=layout is not None), base)
        losses = LossTables(setup.losses)
        self.train_programs = TrainPrograms(
            config=model,
            limits=limits,
            losses=losses,
            base_shapes=shapes,
            layout=layout,
            replays=setup.routing_replay and model.experts is not None,
        )
        self.programs = Programs(progress, alone=jax.process_count() == 1, figures=figures)
        device_lock = FairLock()
        self.training = TrainingDevice(base, self.train_programs, programs=self.programs, device_lock=device_lock)
        self.sampling: SamplingDevice | None = None
        if setup.samples:
            self.sampling = sampling_device(
                budget, limits, model, base, layout,
                programs=self.programs, device_lock=device_lock, routing_replay=setup.routing_replay,
            )  # fmt: skip
        self.facts = Facts(name=device_name(layout), limits=limits, buckets=self.train_programs.buckets, budget=budget)

    def start_warm_up(self) -> None:
        """Compile all programs in the background: a first step's, then training's and sampling's in turn."""
        of_training = self.train_programs.all()
        of_sampling = [] if self.sampling is None else self.sampling.all_programs()
        first: list[Program | None] = list(islice(of_training, self.train_programs.num_of_first_step))
        in_turn = chain(first, chain.from_iterable(zip_longest(of_training, of_sampling)))
        self.programs.start_warm_up([program for program in in_turn if program is not None])

    def close(self) -> None:
        """End the threads. The arrays are freed with the object."""
        self.programs.close()
        self.training.close()


def _shape_of(array: Jax, *, on_mesh: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding if on_mesh else None)
