"""What an accelerator changes, on a machine that has none: each decision is asked, with JAX's answers made up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax_harness import LOSSES, make_backend

from tinsmith import BackendContext, Device
from tinsmith_jax import head, plugin, runtime, sampling_only
from tinsmith_jax.compilation import compile_program
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig
from tinsmith_jax.devices import Facts
from tinsmith_jax.families import read_config
from tinsmith_jax.loss_table import LossTables
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_device import sampling_shape
from tinsmith_jax.train_step import TrainPrograms

GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", memory_stats=lambda: {"bytes_limit": 80 << 30})


@pytest.fixture
def model(tiny_models: dict[str, Path]) -> ModelConfig:
    return read_config(tiny_models["qwen3"])


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [GPU])
    monkeypatch.setattr(jax, "local_devices", lambda: [GPU])


def test_settings_that_are_left_open(model: ModelConfig) -> None:
    limits = runtime.decide(JaxConfig(), model, "gpu")
    assert (limits.platform, limits.dtype, limits.value_dtype) == ("gpu", "bfloat16", "bfloat16")
    assert (limits.recompute, limits.native, limits.exact, limits.call_tokens) == (True, False, False, 4096)
    assert head.chunk_rows(151_936, "gpu", 4096) > head.chunk_rows(151_936, "cpu", 4096)
    shape = sampling_shape(JaxConfig(), limits, model, num_shards=1)
    assert (shape.one_by_one, shape.max_steps, shape.dtype) == (False, 8, "bfloat16")
    on_cpu = sampling_shape(JaxConfig(), runtime.decide(JaxConfig(), model, "cpu"), model, num_shards=1)
    assert (on_cpu.one_by_one, on_cpu.max_steps) == (True, 4)
    assert max(shape.prefill_tiles) > max(on_cpu.prefill_tiles)


def programs(model: ModelConfig, limits: runtime.Limits) -> TrainPrograms:
    return TrainPrograms(config=model, limits=limits, losses=LossTables(LOSSES), base_shapes=None)


@pytest.mark.usefixtures("on_gpu")
def test_a_trainer_claims_no_bits(
    tiny_models: dict[str, Path], model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = runtime.divided(JaxConfig(), model, 80 << 30, trains=True, samples=True)
    assert not budget.costs.computing.on_cpu
    limits = runtime.decide(JaxConfig(), model, budget=budget)
    compiled = programs(model, limits)
    assert compiled.finds_not_finite
    facts = Facts(name="NVIDIA H100", limits=limits, buckets=compiled.buckets, budget=budget)
    devices = SimpleNamespace(facts=facts, training=SimpleNamespace(), sampling=None, close=lambda: None)
    monkeypatch.setattr("tinsmith_jax.backend.Devices", lambda *_: devices)
    found = make_backend(tiny_models["qwen3"], tmp_path).trainer_capabilities
    assert (found.device, found.dtype, found.deterministic, found.isolation) == (
        "NVIDIA H100", "bfloat16", False, "close",
    )  # fmt: skip


def options(*, on_cpu: bool = False) -> Any:
    lowered = SimpleNamespace(compile=lambda options: options)
    return compile_program(SimpleNamespace(lower=lambda: lowered), (), on_cpu=on_cpu)


def test_a_gpu_leaves_products_to_cublas_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert options() is None  # another accelerator
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert options() == {"xla_gpu_enable_triton_gemm": "False"}
    assert "xla_gpu_enable_triton_gemm" not in options(on_cpu=True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert options() is None


@pytest.mark.usefixtures("on_gpu")
def test_a_sampler_claims_no_bits(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device(budget: Any, limits: runtime.Limits, model: ModelConfig, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(shape=sampling_shape(budget.config, limits, model, num_shards=1))

    monkeypatch.setattr(runtime, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(sampling_only, "load_base", lambda *_, **__: None)
    monkeypatch.setattr(sampling_only, "sampling_device", device)
    monkeypatch.setattr(sampling_only.Sampler, "__init__", keep)
    context = BackendContext(
        model_name="tiny", model_path=tiny_models["qwen3"], cache_dir=tmp_path / "cache", losses=LOSSES
    )
    found: Any = sampling_only.JaxSampler(JaxSamplerConfig(warm_up=False), context)
    assert found.given["capabilities"].isolation == "close"


def keep(sampler: Any, *_: object, **given: object) -> None:
    sampler.given = given


@pytest.mark.usefixtures("on_gpu")
def test_doctor_names_the_gpu_whether_or_not_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_jax.diagnosis.find_compiler", lambda: None)
    assert plugin.diagnose(JaxConfig(), None) == [Device(name="NVIDIA H100", memory_bytes=80 << 30)]
