"""Checks the configured models: their files, their backends, the memory they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tinsmith.backend import AnyBackendSpec, AnySamplerSpec, Device, Placement
from tinsmith.commands.doctor.machine import Finding, gigabytes
from tinsmith.commands.doctor.probe import Answer, probe
from tinsmith.errors import ConfigError, ServerError
from tinsmith.host import machine_memory
from tinsmith.placement.components import AnySpec, own_options
from tinsmith.placement.machine import Machine
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith_checkpoints.huggingface.fields import announced
from tinsmith_checkpoints.huggingface.hub_cache import HubReference, hub_endpoint, is_offline
from tinsmith_checkpoints.huggingface.hub_download import download_size
from tinsmith_checkpoints.huggingface.stopping import StopRules
from tinsmith_checkpoints.huggingface.whole_files import WITHOUT_TEXT, check_model_files, lacks_tokenizer

_UNREAD = "nothing, if the program that wrote them alone reads them"


def check_gpus(machine: Machine) -> Finding:
    """Show what the driver says of the GPUs."""
    number = len(machine.devices)
    if not number:
        return Finding("GPUs", "ok", "none: CUDA would see no NVIDIA GPU")
    if machine.device_bytes is not None:
        return Finding("GPUs", "ok", f"{number} of {gigabytes(machine.device_bytes)}, by nvidia-smi")
    remedy = "run nvidia-smi; it does not report the memory of divided GPUs (MIG)"
    return Finding("GPUs", "note", f"{number}, of unknown memory: nvidia-smi does not tell", remedy)


def check_backends(plugins: Plugins, machine: Machine) -> Iterator[Finding]:
    """Show the devices of every installed backend and sampler, for those who have not chosen one yet."""
    for name, spec in plugins.backends.unambiguous().items():
        if spec.diagnose is not None:
            yield _devices(f"backend {name}", spec, ModelSettings(name=name), None, machine)[0]
    for name, sampler in plugins.samplers.unambiguous().items():
        if sampler.diagnose is not None:
            finding = _sampler(f"sampler {name}", sampler, None, None, machine)
            yield replace(finding, status="ok" if finding.status == "ok" else "note")  # nothing is to use it yet


def check_model(model: ModelSettings, plugins: Plugins, machine: Machine) -> Iterator[Finding]:
    """Check one model of the configuration, which has its backend named."""
    subject = f"model {model.name}"
    assert model.backend is not None
    spec = plugins.backends.get(model.backend.plugin)
    if model.path is None:
        if spec.diagnose is not None:
            yield _devices(f"backend {spec.name}", spec, model, None, machine)[0]
        yield _elsewhere(subject, model, spec)
        return
    try:
        size = check_model_files(model.path)
    except ConfigError as error:
        remedy = "download or copy it again; `tinsmith serve NAME` downloads a model of the hub"
        yield Finding(subject, "problem", str(error), remedy)
        return
    yield Finding(subject, "ok", f"{gigabytes(size)} of weights in {model.path}")
    if lacks_tokenizer(model.path):
        yield Finding(subject, "note", WITHOUT_TEXT, "copy the tokenizer's files there")
    yield from _check_texts(subject, model.path)
    if spec.diagnose is not None:
        finding, answer = _devices(subject, spec, model, model.path, machine)
        yield finding
        if answer is not None:
            yield from (Finding(subject, "note", said, _UNREAD) for said in answer.announced)
            yield _memory(subject, size, answer.devices)


def _check_texts(subject: str, directory: Path) -> Iterator[Finding]:
    """Read the tokenizer as samplers do."""
    with announced() as said:
        try:
            StopRules.of_model(directory)
        except ConfigError as error:
            yield Finding(subject, "problem", str(error), "mend the file, or take it from another copy of the model")
    yield from (Finding(subject, "note", each, _UNREAD) for each in said)


def check_sampler(model: ModelSettings, plugins: Plugins, machine: Machine) -> Iterator[Finding]:
    """Ask a separate sampler for its devices; it may have an interpreter of its own."""
    if model.sampler is None:
        return
    spec = plugins.samplers.get(model.sampler.plugin)
    if spec.diagnose is None:
        return
    yield _sampler(f"sampler {spec.name} of {model.name}", spec, model.sampler, model.path, machine)


def _sampler(
    subject: str, spec: AnySamplerSpec, section: PluginSection | None, path: Path | None, machine: Machine
) -> Finding:
    try:
        devices = probe("samplers", spec.name, own_options(section, spec), path).devices
    except ServerError as error:
        return Finding(subject, "problem", str(error), "choose another sampler or model, or mend its environment")
    shown = ", ".join(_shown(device) for device in devices)
    return _too_few(subject, spec, section, devices, machine) or Finding(subject, "ok", shown)


def _elsewhere(subject: str, model: ModelSettings, spec: AnyBackendSpec) -> Finding:
    reference = HubReference.parse(model.source)
    if not spec.needs_model_path or reference is None:
        return Finding(subject, "ok", f"the backend {spec.name} brings it")
    try:
        size = download_size(reference)
    except (ConfigError, ServerError) as error:
        return Finding(subject, "problem", str(error))
    return Finding(subject, "note", f"{gigabytes(size)} will be downloaded from {hub_endpoint()}")


def _devices(
    subject: str, spec: AnyBackendSpec, model: ModelSettings, path: Path | None, machine: Machine
) -> tuple[Finding, Answer | None]:
    options = own_options(model.backend, spec)
    try:
        answer = probe("backends", spec.name, options, path)
    except ServerError as error:
        other = "choose another backend or model" if path is not None else f"reinstall the package of {spec.name}"
        remedy = f"{other}, or mend its environment"
        return Finding(subject, "problem", str(error), remedy), None
    devices = answer.devices
    shown = ", ".join(_shown(device) for device in devices)
    found = shown if path is None else f"supported by {spec.name}, on {shown}"
    return _too_few(subject, spec, model.backend, devices, machine) or Finding(subject, "ok", found), answer


def _too_few(
    subject: str, spec: AnySpec, section: PluginSection | None, devices: Sequence[Device], machine: Machine
) -> Finding | None:
    """Compare a framework's GPUs with the machine's, if models would be placed on them."""
    seen, there = sum(device.memory_bytes is not None for device in devices), len(machine.devices)
    if spec.demand is None or seen >= there:
        return None
    config = spec.config.model_validate(own_options(section, spec))
    if spec.demand(config, None, Placement(devices=machine.devices)).num_devices == 0:
        return None
    shown = ", ".join(_shown(device) for device in devices)
    remedy = f"see that the framework of {spec.name} suits this machine's driver, which `nvidia-smi` tells"
    return Finding(subject, "problem", f"{spec.name} sees {seen} of this machine's {there} GPUs: {shown}", remedy)


def _shown(device: Device) -> str:
    if device.memory_bytes is None:
        return f"{device.name} (no accelerator), {gigabytes(machine_memory())} of the machine's memory"
    return f"{device.name}, {gigabytes(device.memory_bytes)}"


def _memory(subject: str, size: int, devices: Sequence[Device]) -> Finding:
    """Compare the weights, as they are stored, with all there is: activations and adapters come on top."""
    known = [device.memory_bytes for device in devices if device.memory_bytes is not None]
    there = sum(known) if known else machine_memory()
    found = f"its weights take {gigabytes(size)} of {gigabytes(there)} of memory"
    if size > there:
        return Finding(subject, "problem", found, "choose a smaller model, or more devices")
    if size > 0.7 * there:
        return Finding(subject, "note", found, "little is left for training; lower max_batch_tokens if it runs out")
    return Finding(subject, "ok", found)


def check_hub() -> Finding:
    """Say whether downloads are allowed at all; whether they work is checked for each model that needs one."""
    if is_offline():
        return Finding("hub", "note", "HF_HUB_OFFLINE is set: nothing is downloaded")
    return Finding("hub", "ok", f"{hub_endpoint()} is asked for models that are not on this machine")
