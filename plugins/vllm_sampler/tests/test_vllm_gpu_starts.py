"""How vLLM's build for GPUs is started, with stand-ins for it, for torch and for the card."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from vllm_harness import LOSSES, make_sampler, settings

from tinsmith import BackendContext, ConfigError, Placement
from tinsmith_checkpoints.huggingface import known_config
from tinsmith_vllm import compat
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.demand import demand
from tinsmith_vllm.sampler import VllmSampler

STAND_INS = {
    "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
    "vllm/platforms.py": """
        class current_platform:
            is_unspecified = staticmethod(lambda: UNSPECIFIED)
            is_cuda_alike = staticmethod(lambda: not UNSPECIFIED)
            is_cpu = staticmethod(lambda: False)
    """,
    "vllm/engine/arg_utils.py": """
        import json
        def EngineArgs(**given):
            raise ERROR(json.dumps(given))
    """,
    "vllm/v1/engine/llm_engine.py": "LLMEngine = None",
    "vllm/v1/kv_cache_interface.py": "class KVCacheConfig: needs_kv_cache_zeroing = None",
    "torch/__init__.py": """
        class cuda:
            is_available = staticmethod(lambda: AVAILABLE)
            def init():
                raise RuntimeError("The NVIDIA driver on your system is too old.\\nUpdate it.")
    """,
}
CARD = Placement(devices=("0",), memory_bytes=80 * 2**30 * 92 // 100, device_bytes=80 << 30)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what puts stand-ins before the packages of the environment."""

    def written(*, unspecified: bool = False, available: bool = True, error: str = "TypeError") -> None:
        values = {"UNSPECIFIED": str(unspecified), "AVAILABLE": str(available), "ERROR": error}
        for name, text in STAND_INS.items():
            for word, value in values.items():
                text = text.replace(word, value)  # noqa: PLW2901
            file = tmp_path / "packages" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text))
        for directory in ("vllm", "vllm/engine", "vllm/v1", "vllm/v1/engine"):
            (tmp_path / "packages" / directory / "__init__.py").touch()

    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return written


@pytest.mark.parametrize("found", [{"unspecified": True}, {"available": False}])
def test_a_card_that_cannot_be_used_ends_the_start_in_the_words_of_torch(
    install: Callable[..., None], tiny_models: dict[str, Path], tmp_path: Path, found: dict[str, bool]
) -> None:
    """VLLM ended with "Device string must not be empty", or without a word of the driver, five times over."""
    install(**found)
    with pytest.raises(ConfigError) as refused:
        make_sampler(tiny_models["qwen3"], tmp_path)
    assert str(refused.value) == (
        "vllm replica 0 cannot start: UnsupportedVllmError: vllm 0.32.0 finds no GPU that it can use: The NVIDIA "
        "driver on your system is too old."
    )


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        (TypeError("EngineArgs.__init__() got an unexpected keyword argument 'max_batch'"), True),
        (NotImplementedError("no such layer"), True),
        (FileNotFoundError(2, "No such file or directory", "ninja"), True),
        (RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"), True),
        (RuntimeError("Device string must not be empty"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("Engine core initialization failed. See root cause above."), False),
        (AssertionError("Error in memory profiling."), False),
        (OSError(98, "Address already in use"), False),
    ],
)
def test_what_no_other_start_would_mend_is_told_from_what_passes(error: Exception, hopeless: bool) -> None:
    assert compat.is_hopeless(error) is hopeless


def engine_args(model: Path, cache: Path, placement: Placement = CARD, **changed: object) -> dict[str, object]:
    """Return what vLLM is given: the stand-in tells it in the error that it ends with."""
    config = VllmConfig.model_validate({**settings(kv_cache_bytes=None, max_model_len=None), **changed})
    context = BackendContext(model_name="m", model_path=model, cache_dir=cache, losses=LOSSES, placement=placement)
    with pytest.raises(ConfigError) as refused:
        VllmSampler(config, context)
    told: dict[str, object] = json.loads(str(refused.value).partition("TypeError: ")[2])
    return told


def test_a_shared_card_is_not_measured_and_steps_are_long(
    install: Callable[..., None], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """What the trainer took while vLLM measured counted as vLLM's own; and vLLM made steps of 2,048 tokens."""
    install()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(known_config("Qwen3-8B")))
    half = Placement(devices=("0",), memory_bytes=37 << 30, device_bytes=80 << 30)
    config = VllmConfig.model_validate(settings(kv_cache_bytes=None, max_model_len=None))
    planned = demand(config, known_config("Qwen3-8B"), half).fixed
    given = engine_args(model, tmp_path, half)
    assert given["kv_cache_memory_bytes"] == planned["keys and values"]
    assert sum(planned.values()) <= 37 << 30
    assert given["max_num_batched_tokens"] == 8192
    assert planned["longer steps, of 8192 tokens"] == 6144 * (4 * 4096 + 4096 + 2 * 1024 + 3 * 12288) * 2
    assert given["logprobs_mode"] == "processed_logprobs", "else vLLM compiles FlashInfer's sampler, which is replaced"


def test_a_card_of_its_own_is_measured() -> None:
    from tinsmith_vllm.demand import planned_key_values

    model = known_config("Qwen3-8B")
    half = Placement(devices=("0",), memory_bytes=37 << 30, device_bytes=80 << 30)
    assert planned_key_values(VllmConfig(), model, CARD) is None
    assert planned_key_values(VllmConfig(gpu_memory_utilization=0.4), model, half) is None, "as asked"
    assert planned_key_values(VllmConfig(), model, half)


def test_steps_are_long_if_there_is_memory() -> None:
    model = known_config("Qwen3-8B")

    def row(size: int, **engine_args: int) -> list[str]:
        given = Placement(devices=("0",), memory_bytes=size << 30, device_bytes=80 << 30)
        found = demand(VllmConfig(engine_args=engine_args), model, given).fixed
        return [f"{name}: {size >> 20}" for name, size in found.items() if "steps" in name]

    assert row(37) == ["longer steps, of 8192 tokens: 696"]
    assert row(22) == ["longer steps, of 2048 tokens: 0"]
    open_memory = Placement(devices=("0",), device_bytes=80 << 30)
    assert demand(VllmConfig(), model, open_memory).least_bytes < 21 << 30, "with short steps, if need be"
    assert row(37, max_num_batched_tokens=16_384) == ["longer steps, of 16384 tokens: 1624"]


IN_VLLM = """
import json, types
from unittest import mock
from tinsmith_vllm import compat
import vllm.v1.sample.ops.topk_topp_sampler as ops
from vllm.v1.sample.sampler import Sampler
found = {}
card = mock.Mock(is_cuda=lambda: True, is_cpu=lambda: False, is_xpu=lambda: False)
for mode in ("raw_logprobs", compat.FIXED_ARGS["logprobs_mode"]):
    with mock.patch.object(ops, "current_platform", card), mock.patch.object(
        ops, "flashinfer_sampler_supported", lambda: True
    ), mock.patch.object(ops, "register_top_k_top_p_warmups"):
        sampler = Sampler(mode)
    found[mode] = sampler.topk_topp_sampler.forward.__name__
from vllm.v1.worker import gpu_worker
profiled = []
worker = mock.Mock(cache_config=types.SimpleNamespace(kv_cache_memory_bytes=7 << 30))
worker.model_runner.profile_run = lambda **given: profiled.append(given)
worker.init_snapshot = types.SimpleNamespace(free_memory=1)
with mock.patch.object(gpu_worker, "memory_profiling", side_effect=AssertionError("measured")), mock.patch.object(
    gpu_worker, "maybe_apply_startup_plan"
), mock.patch.object(gpu_worker, "reserve_mm_ipc_gpu_memory", lambda size, *_: size), mock.patch.object(
    gpu_worker, "set_current_vllm_config"
):
    found["bytes"] = gpu_worker.Worker.determine_available_memory(worker)
print(json.dumps([found, len(profiled)]))
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_vllm_itself_neither_asks_for_flashinfer_nor_measures() -> None:
    """By vLLM's own rules, with a mocked platform."""
    done = subprocess.run([sys.executable, "-c", IN_VLLM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        {"raw_logprobs": "forward_cuda", "processed_logprobs": "forward_native", "bytes": 7 << 30},
        1,
    ]
