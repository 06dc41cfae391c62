"""Settings of the megatron backend: the `backend:` section of a model. No torch."""

from typing import Any, Final

from pydantic import Field, model_validator

from tinsmith_workers import TrainingWorkersConfig

_UNSUPPORTED: Final = {
    "context_parallel": "attention reads whole sequences here, and Megatron-core divides them with TransformerEngine "
    "alone; tensor_parallel divides sequences outside attention",
    "virtual_pipeline_parallel": "Megatron-core's interleaved schedule wants a multiple of pipeline_parallel "
    "micro-batches in every call, and calls here have any number",
}


class MegatronConfig(TrainingWorkersConfig):
    """`None` means that the device decides."""

    tensor_parallel: int = Field(
        1, ge=1, description="ranks that share each layer's matrices, and between these layers its sequence"
    )
    pipeline_parallel: int = Field(1, ge=1, description="stages, each of an equal number of layers")
    expert_parallel: int = Field(1, ge=1, description="ranks over which the experts of each layer are divided")
    max_lora_rank: int = Field(
        32, ge=0, le=512, description="greatest rank of a model; 0: adapters are not served, and need no base model"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, given: Any) -> Any:
        """Say why, rather than that there is no such setting."""
        for name in _UNSUPPORTED.keys() & (given if isinstance(given, dict) else {}):
            msg = f"{name} is not supported: {_UNSUPPORTED[name]}; `tinsmith megatron-plan` lists the layouts that fit"
            raise ValueError(msg)
        return given
