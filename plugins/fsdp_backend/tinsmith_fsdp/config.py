"""Settings of the fsdp backend: the `backend:` section of a model. No torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tinsmith.workers import WorkersConfig


class FsdpConfig(WorkersConfig):
    """`None` means that the device decides."""

    device: Literal["cpu", "cuda"] | None = Field(None, description="default: cuda if there is a GPU, else cpu")
    tensor_parallel: int = Field(1, ge=1, description="ranks that share each layer's matrices; divides the ranks")
    shard_size: int | None = Field(
        None,
        ge=1,
        description="ranks that divide the model's weights among them; the others have replicas of these shards "
        "(hybrid sharding). Layers are gathered within such a group; with 1, those of a frozen model are not gathered. "
        "Default all, which takes the least memory and sends the most",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="of base weights and activations; default float32 on CPU, else bfloat16"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="in which ranks add up gradients: of fully trained models, and with fast isolation of adapters; "
        "bfloat16 sends half, and rounds each rank's part and each sum to 8 bits",
    )
    prefetch: bool | None = Field(
        None,
        description="gather the next layer before a layer of the forward pass is started, not after; default off on "
        "CPU, else on",
    )
    isolation: Literal["strict", "fast"] | None = Field(
        None,
        description="strict computes each sequence by itself, so that no bit depends on the others; fast packs all "
        "sequences into one stream; default strict on CPU, else fast",
    )
    max_lora_rank: int = Field(32, ge=1, le=512)
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
        description="recompute activations in the backward pass to save memory; default off on CPU, else in passes for "
        "which there is no room to keep them",
    )
    reshard_after_forward: bool = Field(
        default=True, description="free gathered layers between forward and backward; off is faster and takes memory"
    )
    compile: bool | None = Field(
        None, description="compile the layers with torch.compile; default off on CPU and with strict isolation, else on"
    )

    @model_validator(mode="after")
    def _tensor_parallel_divides_the_ranks(self) -> Self:
        if self.nproc_per_node is not None and (self.nproc_per_node * self.nnodes) % self.tensor_parallel:
            msg = (
                f"nproc_per_node ({self.nproc_per_node}) * nnodes ({self.nnodes}) must be a multiple of "
                f"tensor_parallel ({self.tensor_parallel})"
            )
            raise ValueError(msg)
        if self.nproc_per_node is not None:
            self.data_parallel(self.nproc_per_node * self.nnodes)
        return self

    def data_parallel(self, world: int) -> tuple[int, int]:
        """Return how many data-parallel ranks there are, and how many of them divide the weights.

        Raise ValueError if the settings do not divide the ranks.
        """
        if world % self.tensor_parallel:
            msg = f"the number of ranks ({world}) must be a multiple of tensor_parallel ({self.tensor_parallel})"
            raise ValueError(msg)
        ranks = world // self.tensor_parallel
        shards = self.shard_size or ranks
        if ranks % shards:
            possible = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            beside = f" after tensor_parallel ({self.tensor_parallel})" if self.tensor_parallel > 1 else ""
            msg = f"shard_size ({shards}) must divide the {ranks} data-parallel ranks{beside}: possible are {possible}"
            raise ValueError(msg)
        return ranks, shards
