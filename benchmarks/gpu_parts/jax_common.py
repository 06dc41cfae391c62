"""What the parts of the jax backend share. No torch: it would take memory of the card."""

import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from gpu_parts.common import Options, Report, queued_seconds
from tinsmith import BUILTIN_LOSSES, BackendContext, Placement
from tinsmith_jax import devices
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.compilation import Program
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.weights import base_shapes

# Any below: jax arrays and pytrees of them, and compiler options.
_STD = 0.02


def start(options: Options) -> None:
    """Start JAX. Raise RuntimeError if it sees no GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if options.toy:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        msg = f"jax sees {jax.devices()}, and no GPU"
        raise RuntimeError(msg)


@contextmanager
def made_backend(options: Options, settings: Mapping[str, object], *, samples: bool) -> Iterator[JaxBackend]:
    """Make a backend of the model's shape, with random weights. It compiles nothing before it is used."""
    if options.toy:
        settings = {**settings, "kernels": "reference"}
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(devices, "load_base", _random_base):
        model, cache = Path(directory) / "model", Path(directory) / "cache"
        options.write_model(model)
        config = JaxConfig.model_validate({"max_lora_rank": options.rank, "warm_up": False, **settings})
        context = BackendContext(
            model_name="model",
            model_path=model,
            cache_dir=cache,
            losses={spec.name: spec for spec in BUILTIN_LOSSES},
            placement=Placement(samples=samples),
        )
        backend = JaxBackend(config, context)
        try:
            yield backend
        finally:
            backend.close()


def _random_base(_directory: Path, config: ModelConfig, dtype: str, *_: object, **__: object) -> Any:
    """Make on the device what weights.load_base would read."""

    def made(path: tuple[Any, ...], shape: Any) -> Any:
        if "norm" in path[-1].key:
            return jnp.ones(shape.shape, shape.dtype)
        seed = sum(ord(letter) for letter in path[-1].key)
        matrix = shape.shape[-2:]
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), shape.size // (matrix[0] * matrix[1]))
        one = partial(jax.random.normal, shape=matrix, dtype=shape.dtype)
        return lax.map(lambda key: one(key) * jnp.asarray(_STD, shape.dtype), keys).reshape(shape.shape)

    shapes = base_shapes(config, dtype, None)
    base: Any = jax.jit(lambda: jax.tree_util.tree_map_with_path(made, shapes))()
    if config.tied:
        base["head"] = base["embed"]
    return jax.block_until_ready(base)


@contextmanager
def compiled_with(compiler_options: Mapping[str, Any]) -> Iterator[None]:
    """Give the compiler these options as well."""
    compile_lowered = jax.stages.Lowered.compile

    def compiled(lowered: jax.stages.Lowered, given: Mapping[str, Any] | None = None) -> Any:
        return compile_lowered(lowered, {**(given or {}), **compiler_options})

    with mock.patch.object(jax.stages.Lowered, "compile", compiled):
        yield


def compile_seconds(backend: JaxBackend, program: Program) -> float:
    """Compile a program if it is not there yet. Return how long that took, with tracing."""
    assert isinstance(backend.devices, devices.Devices)
    started = time.perf_counter()
    backend.devices.programs.get(program)
    return time.perf_counter() - started


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Run once to warm up, then return the median."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def matmul_limit(options: Options) -> float:
    """Return the FLOP per second of a large product of random matrices."""
    size = 512 if options.toy else 8192
    keys = jax.random.split(jax.random.key(0, impl="rbg"))
    a, b = (jax.random.normal(key, (size, size), jnp.float32 if options.toy else jnp.bfloat16) for key in keys)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / queued_seconds(lambda: product(a, b), jax.block_until_ready)


def bandwidth_limit(options: Options) -> float:
    """Return the bytes per second of a copy: those read, and those written."""
    source = jnp.zeros(1 << (18 if options.toy else 28), jnp.float32)
    copied = jax.jit(lambda array: array + 1)
    return 2 * source.nbytes / queued_seconds(lambda: copied(source), jax.block_until_ready)


def peak_gib() -> float | None:
    """Return the most memory that JAX's arrays and programs have taken so far."""
    found = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if found is None else found / 2**30


def kernel_times(work: Callable[[], object], most: int = 16) -> Report:
    """Return what the device did meanwhile: milliseconds and launches by kernel, the longest first."""
    profile = jax.profiler.ProfileOptions()
    profile.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        jax.profiler.start_trace(directory, profiler_options=profile)
        started = time.perf_counter()
        jax.block_until_ready(work())
        took = time.perf_counter() - started
        jax.profiler.stop_trace()
        (file,) = Path(directory).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        ms, launches = Counter[str](), Counter[str]()
        for plane in data.planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    name = re.sub(r"[._]\d+$", "", event.name)[:70]
                    ms[name] += event.duration_ns / 1e6
                    launches[name] += 1
    found: Report = {"took_ms": 1000 * took, "busy_ms": sum(ms.values()), "launches": sum(launches.values())}
    return found | {name: f"{value:.2f} ms, {launches[name]} x" for name, value in ms.most_common(most)}
