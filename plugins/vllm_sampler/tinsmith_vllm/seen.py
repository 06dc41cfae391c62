"""Facts about the interpreter of vLLM's environment. It may differ from the engine's, so it is asked itself."""

import json
from collections.abc import Iterator, Mapping, Sequence
from subprocess import SubprocessError
from typing import Any, Final

from tinsmith import ConfigError, Device
from tinsmith.machine import child_environment, count_gpus, find_compiler, lacks_gpus, run_tethered
from tinsmith_checkpoints.huggingface import Json
from tinsmith_vllm import compat
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.replica import interpreter

_LIMIT_S: Final = 100.0
_MARK: Final = "tinsmith-seen: "  # packages print, too
_VERSIONS: Final = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in NAMES:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
"""
_DEVICES: Final = """
import torch
gpus = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
found["devices"] = [[gpu.name, gpu.total_memory] for gpu in gpus]
if not gpus:
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        found["reason"] = str(error).strip().rstrip(".")
"""
REMEDY: Final = (
    "install a vllm that is built for CUDA and this driver, in the environment that `python` names, or a newer driver"
)
_NEEDED: Final = ("msgspec", "numpy")


def obstacles(config: VllmConfig) -> Iterator[str]:
    """Yield why vLLM cannot start there."""
    try:
        found = _ask(config, _VERSIONS)
        version, cpu = compat.installed_among(found, str(interpreter(config.python)))
        compat.check_version(version, str(interpreter(config.python)))
    except (ConfigError, compat.UnsupportedVllmError) as error:
        yield str(error)
        return
    if missing := [name for name in _NEEDED if name not in found]:
        yield f"python: {str(interpreter(config.python))!r} has no {', '.join(missing)}; install it there"
    compiles = not cpu if config.enforce_eager is None else not config.enforce_eager
    if compiles and find_compiler() is None:
        yield "vllm compiles, and there is no C++ compiler: install one (g++), or set enforce_eager: true"


def find_devices(config: VllmConfig) -> Sequence[Device]:
    """Return the devices that vLLM's interpreter sees, each with the versions there.

    Raise ConfigError if it cannot be asked, or sees no GPU where this machine has some.
    """
    found = _ask(config, _VERSIONS + _DEVICES)
    version, cpu = compat.installed_among(found, str(interpreter(config.python)))
    with_ = f"vllm {version} and torch {found.get('torch')}"
    if count_gpus() and (cpu or not found["devices"]):
        reason = "it is built for CPUs" if cpu else found.get("reason", "torch finds none")
        raise lacks_gpus(f"{with_} of {str(interpreter(config.python))!r}", reason, REMEDY)
    gpus = [Device(name=f"{name} with {with_}", memory_bytes=size) for name, size in found["devices"]]
    return gpus or [Device(name=f"cpu with {with_}")]


def _ask(config: VllmConfig, script: str) -> Mapping[str, Json]:
    """Run a script there that fills `found`, and return that. Raise ConfigError if it cannot be run."""
    python = interpreter(config.python)
    whole = f"NAMES = {(*compat.DISTRIBUTIONS, 'torch', *_NEEDED)!r}{script}print({_MARK!r} + json.dumps(found))"
    remedy = "set `python` to the interpreter of an environment with vllm"
    try:
        done = run_tethered([python, "-c", whole], env=child_environment(), timeout_s=_LIMIT_S)
    except (OSError, SubprocessError) as error:
        told = error.strerror if isinstance(error, OSError) else f"it does not answer within {_LIMIT_S:.0f} s"
        msg = f"python: {str(python)!r} cannot be run: {told}; {remedy}"
        raise ConfigError(msg) from error
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            found: Mapping[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    said = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    msg = f"python: {str(python)!r} ended with {done.returncode}: {said}; {remedy}"
    raise ConfigError(msg)
