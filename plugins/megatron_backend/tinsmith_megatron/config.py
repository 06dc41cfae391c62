"""Settings of the megatron backend: the `backend:` section of a model. No torch."""

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from tinsmith.workers import WorkersConfig

_UNSUPPORTED: Final = {
    "context_parallel": "attention reads whole sequences here, and Megatron-core divides them with TransformerEngine "
    "alone; tensor_parallel divides sequences outside attention",
    "virtual_pipeline_parallel": "Megatron-core's interleaved schedule wants a multiple of pipeline_parallel "
    "micro-batches in every call, and calls here have any number",
}


class MegatronConfig(WorkersConfig):
    """`None` means that the device decides."""

    device: Literal["cpu", "cuda"] | None = Field(None, description="default: cuda if there is a GPU, else cpu")
    tensor_parallel: int = Field(
        1, ge=1, description="ranks that share each layer's matrices, and between these layers its sequence"
    )
    pipeline_parallel: int = Field(1, ge=1, description="stages, each of an equal number of layers")
    expert_parallel: int = Field(1, ge=1, description="ranks over which the experts of each layer are divided")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="of base weights and activations; default float32 on CPU, else bfloat16"
    )
    isolation: Literal["strict", "fast"] | None = Field(
        None,
        description="strict computes each sequence by itself, so that no bit depends on the others; fast packs the "
        "sequences of all models together; default strict on CPU, else fast",
    )
    max_lora_rank: int = Field(
        32, ge=0, le=512, description="greatest rank of a model; 0: adapters are not served, and need no base model"
    )
    max_models: int = Field(64, ge=1, description="models in training at the same time")
    max_full_models: int = Field(
        1, ge=0, description="of them with LoRA rank 0: each trains all weights of its own copy of the base model"
    )
    capture_buffer_bytes: int = Field(
        1 << 30,
        ge=1 << 26,
        description="host memory of each rank for the state of fully trained models on its way to the disk; an "
        "optimizer step waits until what it would overwrite, and has not been written yet, fits",
    )
    max_context_tokens: int | None = Field(
        None, ge=64, description="of one sequence; default the model's, at most 2048 on CPU, else 8192"
    )
    max_batch_tokens: int | None = Field(
        None, ge=64, description="of one micro-batch of one rank; default 2048 on CPU, else 16384"
    )
    activation_checkpointing: bool | None = Field(
        None,
        description="keep the input of each layer alone, and recompute its activations in the backward pass; default "
        "off on CPU, else on",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, given: Any) -> Any:  # Any: what the user wrote
        """Say why, rather than that there is no such setting."""
        for name in _UNSUPPORTED.keys() & (given if isinstance(given, dict) else {}):
            msg = f"{name} is not supported: {_UNSUPPORTED[name]}; `tinsmith-megatron plan` lists the layouts that fit"
            raise ValueError(msg)
        return given
