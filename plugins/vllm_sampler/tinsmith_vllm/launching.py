"""From settings to processes: vLLM's arguments, and each replica's environment."""

from collections.abc import Iterator
from pathlib import Path

from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.messages import Start
from tinsmith_vllm.replica import Launch, interpreter, package_path


def launches(config: VllmConfig, model_path: Path, cache_dir: Path) -> Iterator[Launch]:
    """Describe the process of each replica."""
    start = Start(
        engine_args=_engine_args(config, model_path),
        float32_on_cpu=config.dtype is None,
        eager_on_cpu=config.enforce_eager is None,
        half_the_memory_on_cpu=config.gpu_memory_utilization is None,
    )
    package = package_path(cache_dir)
    for number in range(config.replicas):
        yield Launch(
            python=interpreter(config.python),
            start=start,
            environment=_environment(config, number),
            log=cache_dir / f"vllm-{number}.log",
            package_path=package,
            start_timeout_s=config.start_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )


def _engine_args(config: VllmConfig, model_path: Path) -> dict[str, object]:
    arguments: dict[str, object] = {
        "model": str(model_path),
        "dtype": config.dtype or "auto",
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization or 0.9,
        "kv_cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": bool(config.enforce_eager),
        "seed": config.seed,
        "max_logprobs": config.max_topk_logprobs,
        "enable_lora": True,
        "max_loras": config.max_loras,
        "max_cpu_loras": config.max_cpu_loras or 2 * config.max_loras,
        "max_lora_rank": config.max_lora_rank,
    }
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if config.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_bytes
    return {**arguments, **config.engine_args}


def _environment(config: VllmConfig, number: int) -> dict[str, str]:
    """Give each replica its own devices if there are several replicas."""
    size = config.tensor_parallel_size
    devices = config.devices or tuple(map(str, range(size * config.replicas)))
    if config.replicas == 1 and not config.devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[number * size : (number + 1) * size])}
