"""Settings of the jax backend: the `backend:` section of a model. No jax."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tinsmith import BackendConfig
from tinsmith_workers import WorkersConfig


class MeshConfig(BackendConfig):
    """How a model is divided among devices. The product of the axes is the number of devices."""

    data: int = Field(1, ge=1, description="shards of the sequences; each holds all weights")
    fsdp: int = Field(1, ge=1, description="shards of the sequences and of the base weights")
    tensor: int = Field(1, ge=1, description="shards of each layer's matrices, and of the vocabulary")


class JaxConfig(WorkersConfig):
    """The defaults suit a small CPU machine and a single GPU. `None` means that the device decides.

    With `mesh`, workers have the devices; without, this process has one.
    """

    nproc_per_node: int | None = Field(
        None, ge=1, description="workers on each machine, which share its devices; default one, with `ray` one per GPU"
    )

    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="of base weights, and of what they are multiplied with; default bfloat16, on a CPU only if that is "
        "the model's own and the CPU has an instruction for it (README, Kernels), else float32",
    )
    max_lora_rank: int = Field(32, ge=1, le=512)
    max_models: int = Field(64, ge=1, description="models in training at a time, at most; fewer if memory is short")
    max_context_tokens: int | None = Field(
        None,
        ge=64,
        description="of one sequence; default the model's, at most 2048 on CPU, else 8192, less if memory is short",
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=64,
        description="of one training micro-batch, padding included; default 2048 on CPU, else 16384, less if "
        "memory is short",
    )
    mesh: MeshConfig | None = Field(None, description="several devices, on which worker processes run; default one")
    simulated_devices: int | None = Field(
        None, ge=1, description="run a mesh on the CPU, with that many devices for each worker, to try it out"
    )
    capture_buffer_bytes: int = Field(
        1 << 30,
        ge=1 << 26,
        description="host memory of each worker for states on their way to the disk; an optimizer step waits until "
        "what it replaces, and has not been written yet, fits",
    )
    decode_slots: int = Field(
        16,
        ge=1,
        le=1024,
        description="sequences sampled at a time, by each of data x fsdp shards; more wait in line; "
        "unless set, fewer if memory is short; the kernels for CPUs take twice as many of those that are short enough "
        "for the same memory",
    )
    decode_steps: int | None = Field(
        None, ge=1, le=64, description="tokens per sampling dispatch, after which others join; default 4 on CPU, else 8"
    )
    gather_once: bool | None = Field(
        None,
        description="sampling gathers the weights, which `fsdp` divides, once for each dispatch, not by layer for "
        "each token; every device needs room for them; default if that is at most a quarter of its memory",
    )
    prefill_tokens: int | None = Field(
        None,
        ge=64,
        description="prompt tokens that each shard reads between two sampling dispatches; default 2048 on a GPU, "
        "else 512",
    )
    max_topk_logprobs: int = Field(128, ge=1, description="alternatives per token that a sample may ask for")
    recompute: bool | None = Field(
        None, description="recompute activations in the backward pass to save memory; default off on CPU, else on"
    )
    kernels: Literal["device", "reference"] = Field(
        "device",
        description="those for the device, or the reference, to compare with if results look off: XLA's own on a CPU, "
        "and on accelerators",
    )
    warm_up: bool = Field(default=True, description="compile everything in the background after the start")

    @model_validator(mode="after")
    def _workers_have_a_mesh(self) -> Self:
        of_workers = {*WorkersConfig.model_fields, "simulated_devices", "capture_buffer_bytes"}
        given = sorted(of_workers & self.model_fields_set)
        if self.mesh is None and given:
            msg = f"{', '.join(given)}: only a mesh has workers; set mesh as well, or leave this out"
            raise ValueError(msg)
        return self


class JaxSamplerConfig(BackendConfig):
    """Settings of the jax sampler when another backend trains: the sampling settings of JaxConfig."""

    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="of base weights, and of what they are multiplied with; default float32 on CPU, as other trainers "
        "have there, else bfloat16",
    )
    max_lora_rank: int = Field(32, ge=1, le=512, description="at least that of the trainer")
    max_context_tokens: int | None = Field(
        None,
        ge=64,
        description="of one sequence; default the model's, at most 2048 on CPU, else 8192, less if memory is short",
    )
    mesh: MeshConfig | None = Field(None, description="several devices of this machine; default one")
    decode_slots: int = Field(
        16,
        ge=1,
        le=1024,
        description="sequences sampled at a time, by each of data x fsdp shards; more wait in line; "
        "unless set, fewer if memory is short; the kernels for CPUs take twice as many of those that are short enough "
        "for the same memory",
    )
    decode_steps: int | None = Field(
        None, ge=1, le=64, description="tokens per sampling dispatch, after which others join; default 4 on CPU, else 8"
    )
    gather_once: bool | None = Field(
        None,
        description="sampling gathers the weights, which `fsdp` divides, once for each dispatch, not by layer for "
        "each token; every device needs room for them; default if that is at most a quarter of its memory",
    )
    prefill_tokens: int | None = Field(
        None,
        ge=64,
        description="prompt tokens that each shard reads between two sampling dispatches; default 2048 on a GPU, "
        "else 512",
    )
    max_topk_logprobs: int = Field(128, ge=1, description="alternatives per token that a sample may ask for")
    warm_up: bool = Field(default=True, description="compile everything in the background after the start")


def as_trainer(config: JaxSamplerConfig) -> JaxConfig:
    """Return the same settings as a trainer's. Unset ones stay open."""
    return JaxConfig.model_validate(config.model_dump(exclude_unset=True))
