"""Settings of the vllm sampler: the `sampler:` section of a model. No vLLM."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tinsmith import BackendConfig

Adapters = Literal["auto", "apply", "merge"]
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]

_OURS = frozenset(
    {
        "model", "tokenizer", "skip_tokenizer_init", "dtype", "max_model_len", "enforce_eager", "max_num_seqs", "seed",
        "tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes",
        "kv_cache_dtype", "enable_prefix_caching", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank",
        "enable_moe_shared_loras",
        "logprobs_mode", "max_logprobs", "worker_extension_cls", "generation_config", "speculative_config",
    }
)  # fmt: skip


class VllmConfig(BackendConfig):
    """`None` means that the devices, their memory or vLLM decide."""

    python: Path | None = Field(
        None, description="Python interpreter of the environment with vLLM; default the engine's own"
    )
    replicas: int | None = Field(
        None,
        ge=1,
        le=64,
        description="vLLM processes that serve each snapshot, each with all weights; default as many as its devices "
        "suffice for",
    )
    full_replicas: int = Field(
        0,
        ge=0,
        le=64,
        description="further vLLM processes, for snapshots of fully trained models; each has the weights of one at a "
        "time. 0: refuse such snapshots, unless adapters are merged",
    )
    adapters: Adapters = Field(
        "auto",
        description="apply: vLLM computes with many adapters at a time. merge: it has the weights of one snapshot at a "
        "time, and loads others in place when those are sampled. auto: merge for models with experts on CPU, where "
        "vLLM has no kernels for their adapters, else apply",
    )
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="accelerators per replica; default as few as leave room beside the weights"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="of weights and activations; default float32 on CPU, else bfloat16"
    )
    max_model_len: int | None = Field(
        None, ge=16, description="tokens of one sequence, prompt plus sampled; default the model's, or what fits"
    )
    max_num_seqs: int = Field(256, ge=1, description="sequences sampled at a time by one replica; more wait in line")
    max_loras: int = Field(8, ge=1, description="adapters on the device at the same time; requests for others wait")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="adapters in host memory, at least max_loras; default twice max_loras"
    )
    max_lora_rank: LoraRank = Field(32, description="maximum rank of an adapter; memory and time grow with it")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the device's memory, weights included; default what the placement assigns, else 0.9, on "
        "CPU 0.5",
    )
    kv_cache_bytes: int | None = Field(
        None, ge=1 << 20, description="memory for keys and values; default the remainder of gpu_memory_utilization"
    )
    kv_cache_dtype: str = Field("auto", description="dtype of keys and values, as vLLM names it; auto: the model's")
    prefix_caching: bool = Field(default=True, description="share keys and values between prompts that start alike")
    enforce_eager: bool | None = Field(
        None, description="no compilation and no CUDA graphs; default on on CPU, else off"
    )
    max_topk_logprobs: int = Field(128, ge=1, description="alternatives per token that a sample may ask for")
    seed: int = Field(0, ge=0, description="seed of vLLM itself; every sample has its own")
    start_timeout_s: float = Field(1800.0, gt=0, description="time limit for the start; loading and compiling are slow")
    step_timeout_s: float = Field(300.0, gt=0, description="silence after which a busy vLLM is restarted")
    shared_memory_dir: Path | None = Field(
        None,
        description="directory for passing adapters to vLLM in files; default: in memory, on Linux, else files in the "
        "cache directory",
    )
    engine_args: dict[str, Any] = Field({}, repr=False, description="further EngineArgs of vLLM, by name")

    @field_validator("engine_args")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_OURS & value.keys())
        if taken:
            msg = f"{', '.join(taken)}: tinsmith sets these itself; see the settings beside engine_args"
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _sizes_fit(self) -> "VllmConfig":
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            msg = f"max_cpu_loras is {self.max_cpu_loras}; it must be at least max_loras, {self.max_loras}"
            raise ValueError(msg)
        return self
