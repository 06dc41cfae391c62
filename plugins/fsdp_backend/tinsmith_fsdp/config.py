"""Settings of the fsdp backend: the `backend:` section of a model. No torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tinsmith_workers import TrainingWorkersConfig


class FsdpConfig(TrainingWorkersConfig):
    """`None` means that the device decides."""

    tensor_parallel: int = Field(1, ge=1, description="ranks that share each layer's matrices; divides the ranks")
    shard_size: int | None = Field(
        None,
        ge=1,
        description="ranks that divide the model's weights among them; the others have replicas of these shards "
        "(hybrid sharding). Layers are gathered within such a group; with 1, those of a frozen model are not gathered. "
        "Default all, which takes the least memory and sends the most",
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
