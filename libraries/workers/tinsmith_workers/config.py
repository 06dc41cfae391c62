"""Settings of a backend that runs in workers: how many there are, on how many machines, and what starts them."""

from dataclasses import dataclass
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from tinsmith.backend import BackendConfig, Placement

_ELSEWHERE: Final = ("scheduler", "ray")  # launchers that choose the devices themselves

LauncherName = Literal["local", "ray", "scheduler"]


class WorkersConfig(BackendConfig):
    """Base class of such a backend's settings."""

    nproc_per_node: int | None = Field(
        None, ge=1, description="workers on each machine; default one per GPU, or one on a machine without GPUs"
    )
    nnodes: int = Field(1, ge=1, description="number of machines")
    launcher: LauncherName = Field(
        "local",
        description="what starts the workers: `local` processes on this machine; a `ray` cluster; or a `scheduler` "
        "that runs `tinsmith worker` on each machine, such as Kubernetes or Slurm",
    )
    control_address: str | None = Field(
        None, description="host:port at which workers on other machines reach the engine; required for several nodes"
    )
    ray_address: str | None = Field(
        None, description="address of a Ray cluster that runs and asks for a token, or `auto`; default RAY_ADDRESS"
    )
    start_timeout_s: float = Field(900, gt=0, description="time limit for all workers to join")

    @field_validator("launcher", mode="before")
    @classmethod
    def _not_torchrun(cls, name: object) -> object:
        if name == "torchrun":
            msg = (
                "tinsmith has no launcher torchrun any more, because whoever reached the agent's port could run code: "
                "choose local for one machine; for several, choose scheduler, run `tinsmith worker` on each, and "
                "remove rdzv_endpoint"
            )
            raise ValueError(msg)
        return name

    @model_validator(mode="after")
    def _workers_elsewhere_need_an_address(self) -> Self:
        if self.nnodes > 1 and self.launcher == "local":
            msg = (
                f"nnodes is {self.nnodes}, and the launcher `local` starts workers on this machine alone: choose "
                "ray or scheduler"
            )
            raise ValueError(msg)
        if self.control_address is None and (self.nnodes > 1 or self.launcher == "scheduler"):
            msg = (
                f"nnodes is {self.nnodes} and the launcher {self.launcher}: set control_address to host:port of this "
                "machine, as the workers' machines reach it"
            )
            raise ValueError(msg)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings of workers that train, with the device's defaults for those that are left open."""

    dtype: str
    strict: bool  # compute each sequence by itself
    checkpointing: bool  # recompute activations
    batch_tokens: int  # of a micro-batch, unless memory is short
    longest: int  # tokens of a sequence, if the model, the memory and `max_context_tokens` allow


class TrainingWorkersConfig(WorkersConfig):
    """Base class of the settings of a backend whose workers train. `None` means that the device decides."""

    device: Literal["cpu", "cuda"] | None = Field(None, description="default: cuda if there is a GPU, else cpu")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="of base weights and activations; default float32 on CPU, else bfloat16"
    )
    isolation: Literal["strict", "fast"] | None = Field(
        None,
        description="strict computes each sequence by itself, so that no bit depends on the others; fast packs the "
        "sequences of all models together; default strict on CPU, else fast",
    )
    max_lora_rank: int = Field(32, ge=1, le=512, description="greatest rank of a model")
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
        description="keep the input of each layer alone, and recompute its activations in the backward pass, to save "
        "memory; default off on CPU, else on",
    )

    def resolved(self, *, on_cpu: bool) -> Resolved:
        """Decide what is left to the device."""
        checkpointing = self.activation_checkpointing
        return Resolved(
            dtype=self.dtype or ("float32" if on_cpu else "bfloat16"),
            strict=on_cpu if self.isolation is None else self.isolation == "strict",
            checkpointing=not on_cpu if checkpointing is None else checkpointing,
            batch_tokens=self.max_batch_tokens or (2048 if on_cpu else 16_384),
            longest=2048 if on_cpu else 8192,
        )

    @property
    def num_devices(self) -> int | None:
        """How many devices the server is to place. None: as many as there are."""
        return 0 if self.device == "cpu" or self.launcher in _ELSEWHERE else self.nproc_per_node

    def computes_on_cpu(self, placement: Placement) -> bool:
        """True if the workers will do so in this placement."""
        here = self.launcher not in _ELSEWHERE
        return self.device == "cpu" or (self.device is None and not placement.devices and here)

    def world(self, placement: Placement, *, least: int = 1) -> int:
        """Return how many workers there will be. least: on a machine without GPUs."""
        return self.nnodes * (self.nproc_per_node or len(placement.devices) or least)
