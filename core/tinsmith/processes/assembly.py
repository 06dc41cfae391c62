"""Makes what the settings name: the request store, the scheduler, and the backends of a model."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tinsmith.backend import (
    AnyBackendSpec,
    BackendContext,
    Placement,
    Progress,
    SamplingBackend,
    TrainingBackend,
    overrides,
)
from tinsmith.engine.device_turns import DeviceTurns, sleepers
from tinsmith.errors import ConfigError
from tinsmith.figures import Figures
from tinsmith.placement.components import AnySpec, device_settings, own_options
from tinsmith.placement.machine import this_machine
from tinsmith.plugins.loading import Plugins
from tinsmith.scheduler import Scheduler
from tinsmith.settings import DataDir, ModelSettings, PluginSection, Settings
from tinsmith.store import DeviceTurn, EngineCapabilities, RequestStore, StoreContext, StoreSpec
from tinsmith.tracer import Tracer
from tinsmith_checkpoints.huggingface.hub_cache import HubReference
from tinsmith_checkpoints.huggingface.hub_download import download_model
from tinsmith_checkpoints.huggingface.whole_files import WITHOUT_TEXT, check_model_files, lacks_tokenizer

NO_SAMPLER: Final = "none"
"""The sampler of a model that is only trained."""

_log = logging.getLogger(__name__)


def make_store(settings: Settings, plugins: Plugins, figures: Figures | None = None) -> RequestStore:
    """Return the request store, not opened yet. It may time its commits in `figures`."""
    spec, config, context = store_parts(settings, plugins)
    return spec.create(config, context if figures is None else replace(context, figures=figures))


def hold_store(settings: Settings, plugins: Plugins) -> AbstractContextManager[None]:
    """Return what a server enters before it makes its store, and leaves after it has closed it."""
    spec, config, context = store_parts(settings, plugins)
    if spec.hold is not None:
        return spec.hold(config, context)
    settings.data_dir.scratch_store.unlink(missing_ok=True)  # what engines keep here is durable from now on
    return nullcontext()


def store_parts(settings: Settings, plugins: Plugins) -> tuple[StoreSpec[Any], Any, StoreContext]:
    """Return the offer of the configured store, its section, and what it gets from the core."""
    spec = plugins.stores.get(settings.store.plugin)
    config = spec.config.model_validate(settings.store.options())
    context = StoreContext(
        data_dir=settings.data_dir.root, shared=settings.server.share_data_dir, tables=plugins.make_tables()
    )
    return spec, config, context


def make_scheduler(settings: Settings, plugins: Plugins) -> Scheduler:
    spec = plugins.schedulers.get(settings.scheduler.plugin)
    return spec.create(spec.config.model_validate(settings.scheduler.options()))


def make_tracer(settings: Settings, plugins: Plugins, process: str) -> Tracer | None:
    """Return the configured tracer of a `server` or an `engine`."""
    if settings.tracing is None:
        return None
    spec = plugins.tracers.get(settings.tracing.plugin)
    return spec.create(spec.config.model_validate(settings.tracing.options()), process)


def make_backends(
    model: ModelSettings, plugins: Plugins, data_dir: DataDir, progress: Progress, figures: Figures | None = None
) -> tuple[TrainingBackend, SamplingBackend | None]:
    """Return trainer and sampler, which may be one object. Call it in the thread that will use the trainer.

    They may count in `figures`.
    """
    make = _Maker(model, plugins, data_dir, progress, figures or Figures())
    backend = make.trainer(samples=model.sampler is None)
    if model.sampler is None:
        return backend, backend if isinstance(backend, SamplingBackend) else None
    if model.sampler.plugin == NO_SAMPLER:
        return backend, None
    try:
        if model.turns.enabled:
            _check_sleep(model, backend)
            backend.sleep_trainer()  # while the sampler loads, it has the devices
        sampler = make.sampler(model.sampler)
    except BaseException:
        backend.close()
        raise
    return backend, sampler


def make_trainer(
    model: ModelSettings, plugins: Plugins, data_dir: DataDir, progress: Progress, *, samples: bool
) -> TrainingBackend:
    """Return the backend that trains; `samples` says whether it will be asked to sample as well."""
    return _Maker(model, plugins, data_dir, progress, Figures()).trainer(samples=samples)


@dataclass(frozen=True, slots=True)
class _Maker:
    """The values from which a model's backends are made."""

    model: ModelSettings
    plugins: Plugins
    data_dir: DataDir
    progress: Progress
    figures: Figures

    def trainer(self, *, samples: bool) -> TrainingBackend:
        spec, section = _trainer_spec(self.model, self.plugins), self.model.backend
        if spec.needs_model_path and (directory := model_directory(self.model, self.plugins, self.progress)):
            check_model_files(directory)
            if lacks_tokenizer(directory):
                _log.warning("%s: %s", self.model.name, WITHOUT_TEXT)
        return spec.create(_config(spec, section), self._context(spec, section, samples=samples))

    def sampler(self, section: PluginSection) -> SamplingBackend:
        spec = self.plugins.samplers.get(section.plugin)
        sampler = spec.create(_config(spec, section), self._context(spec, section, samples=True))
        if self.model.turns.enabled and not overrides(sampler, SamplingBackend.sleep_sampler):
            sampler.close()
            raise _cannot_sleep(self.model, f"the sampler {spec.name!r}")
        return sampler

    def _context(self, spec: AnySpec, section: PluginSection | None, *, samples: bool) -> BackendContext:
        cache_dir = self.data_dir.cache(spec.name, self.model.name)
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return BackendContext(
            model_name=self.model.name,
            model_path=model_directory(self.model, self.plugins, self.progress),
            cache_dir=cache_dir,
            losses=self.plugins.losses.all(),
            placement=_placement(section, spec, samples=samples),
            progress=self.progress,
            figures=self.figures,
            checkpoint_shard_bytes=self.model.checkpoint_shard_bytes,
            routing_replay=self.model.routing_replay.enabled,
            sleeps=self.model.turns.enabled,
        )


def _trainer_spec(model: ModelSettings, plugins: Plugins) -> AnyBackendSpec:
    return plugins.default_backend() if model.backend is None else plugins.backends.get(model.backend.plugin)


def _trainer_of(model: ModelSettings, backend: TrainingBackend) -> str:
    """Name it in messages."""
    return type(backend).__name__ if model.backend is None else repr(model.backend.plugin)


def _config(spec: AnySpec, section: PluginSection | None) -> Any:  # of the plugin's own class
    return spec.config.model_validate(own_options(section, spec))


def _check_sleep(model: ModelSettings, backend: TrainingBackend) -> None:
    if not overrides(backend, TrainingBackend.sleep_trainer):
        raise _cannot_sleep(model, f"the backend {_trainer_of(model, backend)}")


def _cannot_sleep(model: ModelSettings, who: str) -> ConfigError:
    msg = (
        f"model {model.name!r}: its turns are enabled, but {who} cannot sleep; disable them, and divide the devices or "
        "their memory instead (How to use several GPUs)"
    )
    return ConfigError(msg)


def make_turns(
    model: ModelSettings,
    backend: TrainingBackend,
    sampler: SamplingBackend | None,
    thread: Executor,
    *,
    tell: Callable[[DeviceTurn], None],
) -> DeviceTurns | None:
    """Return the turns of these backends if they are enabled. `thread` is the trainer's."""
    if not model.turns.enabled:
        return None
    assert sampler is not None
    return DeviceTurns(sleepers(backend, sampler, thread), least_s=model.turns.least_s, tell=tell)


def model_directory(model: ModelSettings, plugins: Plugins, progress: Progress) -> Path | None:
    """Find a model's directory; download it if only the hub has it. Return None if the backend brings its own model.

    Raise ConfigError if only a person can help, ServerError if trying again may.
    """
    found = model.path or plugins.resolve_base_model(model.source)
    if found is not None or not _trainer_spec(model, plugins).needs_model_path:
        return found
    reference = HubReference.parse(model.source)
    return None if reference is None else download_model(reference, progress)


def check_routing_replay(model: ModelSettings, backend: TrainingBackend, sampler: SamplingBackend | None) -> None:
    """Raise ConfigError, with who lacks what, if the model's routing is to be replayed and cannot be."""
    if not model.routing_replay.enabled:
        return
    trainer = _trainer_of(model, backend)
    sampling = trainer if model.sampler is None else repr(model.sampler.plugin)
    returns = sampler is not None and sampler.sampler_capabilities.returns_routed_experts
    lacking = [
        *([] if backend.trainer_capabilities.replayed_experts else [f"the backend {trainer} does not replay experts"]),
        *([] if returns else [f"the sampler {sampling} does not return those of its samples"]),
    ]
    if lacking:
        msg = (
            f"model {model.name!r}: routing_replay is enabled, but {', and '.join(lacking)}; disable it, or see which "
            "do for models with experts (How to replay the routing)"
        )
        raise ConfigError(msg)


def _placement(section: PluginSection | None, spec: AnySpec, *, samples: bool) -> Placement:
    """Return what the plan has written into the section."""
    given = device_settings(section, spec)
    devices = given.devices if isinstance(given.devices, tuple) else ()
    known = this_machine().device_bytes if devices and given.memory is not None else None
    return Placement(devices=devices, memory_bytes=given.memory, device_bytes=known, samples=samples)


def capabilities_of(backend: TrainingBackend, sampler: SamplingBackend | None) -> EngineCapabilities:
    return EngineCapabilities.of(
        backend.trainer_capabilities, None if sampler is None else sampler.sampler_capabilities
    )
