"""The two backends of a model, made as its settings say: who trains it, and who samples from it."""

from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tinsmith.backend import BackendContext, Capabilities, Isolation, Progress, SamplingBackend, TrainingBackend
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings

_WEAKNESS: Final[dict[Isolation, int]] = {"bitwise": 0, "close": 1, "none": 2}


def make_backends(
    model: ModelSettings, plugins: Plugins, data_dir: Path, progress: Progress
) -> tuple[TrainingBackend, SamplingBackend | None]:
    """Return trainer and sampler, which may be one object. Call it in the thread from which the trainer is used."""
    section = model.backend
    spec = plugins.default_backend() if section is None else plugins.backends.get(section.plugin)
    config = spec.config.model_validate({} if section is None else section.options())
    samples = model.sampler is None
    backend = spec.create(config, _context(model, plugins, data_dir, spec.name, progress, samples=samples))
    if model.sampler is None:
        can = isinstance(backend, SamplingBackend) and backend.capabilities.sampling
        return backend, backend if can and isinstance(backend, SamplingBackend) else None
    sampler_spec = plugins.samplers.get(model.sampler.plugin)
    sampler_config = sampler_spec.config.model_validate(model.sampler.options())
    context = _context(model, plugins, data_dir, sampler_spec.name, progress, samples=True)
    try:
        return backend, sampler_spec.create(sampler_config, context)
    except BaseException:
        backend.close()
        raise


def _context(
    model: ModelSettings, plugins: Plugins, data_dir: Path, plugin: str, progress: Progress, *, samples: bool
) -> BackendContext:
    cache_dir = data_dir / "cache" / plugin / quote(model.name, safe="")
    cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return BackendContext(
        model_name=model.name,
        model_path=model.path or plugins.resolve_base_model(model.name),
        cache_dir=cache_dir,
        losses=plugins.losses.all(),
        samples=samples,
        progress=progress,
    )


def capabilities_of(backend: TrainingBackend, sampler: SamplingBackend | None) -> Capabilities:
    """Describe the pair: what is said of sampling is the sampler's, and isolation is as good as the weaker one's."""
    training = backend.capabilities
    if sampler is None:
        return replace(training, sampling=False)
    sampling = sampler.capabilities
    weaker = max(training, sampling, key=lambda each: (_WEAKNESS[each.isolation], each.isolation_error))
    return replace(
        training,
        isolation=weaker.isolation,
        isolation_error=weaker.isolation_error,
        max_context_tokens=min(training.max_context_tokens, sampling.max_context_tokens),
        sampling=True,
        prompt_logprobs=sampling.prompt_logprobs,
        target_prompt_logprobs=sampling.target_prompt_logprobs,
        max_topk_logprobs=sampling.max_topk_logprobs,
        stop_strings=sampling.stop_strings,
    )
