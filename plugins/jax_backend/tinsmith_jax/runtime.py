"""Process-wide settings of JAX, applied before the first computation."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
from jax._src import (
    compiler,  # no public setting has every process write entries
    hardware_utils,  # no public API counts TPU chips
)
from jax._src.compilation_cache import put_executable_and_time  # no public API writes entries
from jaxlib import _jax  # no public setting says where gloo listens

from tinsmith import ConfigError
from tinsmith.machine import count_gpus, lacks_gpus
from tinsmith_jax import native
from tinsmith_jax.admission import Budget, budget_of, computing_of, require_enough, targets_of
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.costs import Computing
from tinsmith_jax.kernels.choice import Kernels, choose
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.program_cache import verify_programs

DEVICES = Path("/dev")
_PASSING: Final = ("already in use", "ABORTED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
"""Part of the message if a device may be available at the next start."""
_REMEDY: Final = (
    "install JAX for CUDA with the extra that suits the driver, tinsmith-jax[cuda13] (580 or newer) or [cuda12] (525 "
    "or newer); JAX_PLATFORMS=cpu computes on the CPU"
)
_TPU_REMEDY: Final = "install JAX for TPUs with the extra tinsmith-jax[tpu]; JAX_PLATFORMS=cpu computes on the CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The settings, with every default resolved for the device and model."""

    platform: str
    dtype: str
    max_lora_rank: int
    max_context_tokens: int
    max_batch_tokens: int  # a power of two, at least 128; holds a sequence of the maximum context
    max_targets: int  # per token
    recompute: bool
    reference_kernels: bool = False
    native: bool = False  # the kernels in C++ are there, and sample such a model
    trains_natively: bool = False  # and train it
    call_tokens: int = 32  # the cost of starting a call, in tokens of work; weighs padding against more calls

    @property
    def exact(self) -> bool:
        """Return whether other tenants are known not to change a tenant's bits.

        That is tested on CPUs, for XLA in float32 and for the kernels in C++.
        """
        return self.platform == "cpu" and (self.dtype == "float32" or self.kernels.native)

    @property
    def value_dtype(self) -> str:
        """Return the type of what sampling computes and keeps. The kernels in C++ round for products alone."""
        return "float32" if self.native else self.dtype

    @property
    def kernels(self) -> Kernels:
        chosen = choose(self.platform, longest=self.max_context_tokens, reference=self.reference_kernels)
        native = self.native and self.trains_natively
        return replace(chosen, native=native, rounds=native and self.dtype == "bfloat16")


def computing_platform() -> str:
    """Return the platform that JAX computes on.

    Raise ConfigError if the one that was asked for will not be there, or the CPU would take an accelerator's place.
    """
    try:
        found = str(jax.default_backend())
    except RuntimeError as error:
        if any(each in str(error) for each in _PASSING):
            raise
        msg = f"JAX has no such platform here: {str(error).splitlines()[0]}; set or unset JAX_PLATFORMS"
        raise ConfigError(msg) from error
    told = jax.config.jax_platforms  # type: ignore[attr-defined]  # jax adds its settings when it is imported
    if found == "cpu" and not told:
        _refuse_instead_of_accelerators()
    return found


def _refuse_instead_of_accelerators() -> None:
    name = f"jax {jax.__version__}"
    if count_gpus() and (reason := _why_not("cuda")):
        raise lacks_gpus(name, reason, _REMEDY)
    chips = _count_tpus()
    if chips and (reason := _why_not("tpu")):
        offered = f"this machine offers {chips} TPU chip{'' if chips == 1 else 's'}"
        msg = f"{name} sees no TPU ({reason}), and {offered}: {_TPU_REMEDY}"
        raise ConfigError(msg)


def _why_not(platform: str) -> str | None:
    """Say why JAX sees none of these devices: nothing that computes there is installed, or it failed."""
    try:
        jax.devices(platform)
    except RuntimeError as error:
        if any(each in str(error) for each in _PASSING):
            raise
        return str(error).splitlines()[0].rstrip(".")
    return None


def _count_tpus() -> int:
    """Return the number of TPU chips that this process may open. The bus shows other containers' chips, too."""
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    files = sum(len(list(DEVICES.glob(pattern))) for pattern in ("accel[0-9]*", "vfio/[0-9]*"))
    return min(int(chips), files)


def prepare(cache_dir: Path, *, kernels: bool) -> None:
    """Keep compiled programs in `cache_dir` across restarts. The directory is private because they are code.

    `kernels`: have those in C++ there as well, where a CPU computes. Compiling them takes many seconds.
    """
    # At INFO it reports every kind of device that this machine lacks as if that were a problem.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    compiled = cache_dir / "compiled"
    compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
    verify_programs()
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if computing_platform() == "cpu":
        if kernels:
            native.load(cache_dir)
        # XLA keeps autotuning results, which only GPUs have, in a directory beside the programs. Its path is part of
        # every program's cache key: if the directory moved, no program would be found again.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def exchange_on_loopback() -> None:
    """Make CPUs exchange arrays over loopback. By default, gloo listens at the host name, without a key."""
    _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")


def keep_own_programs() -> None:
    """Keep the programs of each process of a mesh in its own directory.

    JAX leaves that to the first, so that processes that share a directory do not write the same files. The others would
    compile everything again at each start.
    """
    own = compiler._cache_write  # noqa: SLF001 - an error here if JAX renames it

    def write(cache_key: str, seconds: float, module_name: str, backend: Any, executable: Any, *others: Any) -> None:
        if jax.process_index() == 0:
            own(cache_key, seconds, module_name, backend, executable, *others)  # before JAX 0.11, host callbacks
        else:
            put_executable_and_time(cache_key, module_name, executable, backend, int(seconds))

    compiler._cache_write = write  # type: ignore[assignment]  # noqa: SLF001 - as above; its parameters changed


def divided(config: JaxConfig, model: ModelConfig, memory: int | None, *, trains: bool, samples: bool) -> Budget:
    """Divide the memory of this process's devices. Raise ConfigError if it is not enough.

    Where trainer and sampler are two backends, each keeps to float32 on a CPU unless it is told otherwise: neither
    knows how the other rounds.
    """
    platform, alone = jax.default_backend(), trains and samples
    computing = _computing(config, model, platform, alone=alone)
    budget = budget_of(config, model, computing, memory, trains=trains, samples=samples)
    require_enough(budget)
    return budget


def decide(config: JaxConfig, model: ModelConfig, platform: str | None = None, budget: Budget | None = None) -> Limits:
    """Resolve the settings that are left open, for this machine's devices or for another platform.

    Raise ConfigError for a context in which this is another model: its family says up to which length it describes it.
    """
    if model.longest is not None and (config.max_context_tokens or 0) > model.longest:
        msg = (
            f"max_context_tokens is {config.max_context_tokens}, and {model.class_name} computes otherwise beyond "
            f"{model.longest} tokens, which is not supported; set it to at most {model.longest}"
        )
        raise ConfigError(msg)
    platform = platform or jax.default_backend()
    on_cpu = platform == "cpu"
    budget = budget or budget_of(config, model, _computing(config, model, platform), None)
    dtype = budget.costs.computing.dtype
    return Limits(
        platform=platform,
        dtype=dtype,
        max_lora_rank=config.max_lora_rank,
        max_context_tokens=budget.context_tokens,
        max_batch_tokens=budget.micro_tokens,
        max_targets=targets_of(config),
        reference_kernels=config.kernels == "reference",
        native=_suits_native(config, model, dtype, platform),
        trains_natively=native.trains(config, model),
        recompute=budget.costs.computing.recompute,
        call_tokens=32 if on_cpu else 4096,  # a few thousand tokens are needed to keep an accelerator busy
    )


def _computing(config: JaxConfig, model: ModelConfig, platform: str, *, alone: bool = True) -> Computing:
    """Resolve how the devices compute: in bfloat16 on a CPU as well, if the model is of that type and it pays.

    If it does not, the kernels in C++ still keep such a model in that type.
    """
    computing = computing_of(config, on_cpu=platform == "cpu")
    stored = "float32" if model.int8 is not None else model.dtype  # 8-bit integers stand for more than bfloat16 holds
    pays = alone and config.dtype is None and native.multiplies_bfloat16()
    if pays and stored == "bfloat16" and _suits_native(config, model, "bfloat16", platform):
        computing = replace(computing, dtype="bfloat16")
    if not (native.trains(config, model) and _suits_native(config, model, computing.dtype, platform)):
        return computing
    return replace(computing, native=True, stored="bfloat16" if stored == "bfloat16" else None)


def _suits_native(config: JaxConfig, model: ModelConfig, dtype: str, platform: str) -> bool:
    return platform == "cpu" and native.suits(config, model, dtype) and native.loaded()
