"""What `compile-check` is asked: passed to the process that compiles, and kept with the results."""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tinsmith import ConfigError
from tinsmith_jax.config import MeshConfig

TRAINING: Final = ("gradients", "score", "step")
SAMPLING: Final = ("prefill", "decode")
PROGRAMS: Final = (*TRAINING, *SAMPLING)


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    topology: str = Field(description="of the slice, for example v6e:4x4")
    model: str = Field(description="a directory with config.json, or the name of a shape")
    mesh: MeshConfig
    tenants: int = Field(ge=1, description="models in training; at most eight of them share a call")
    rank: int = Field(ge=1, description="of every adapter")
    context: int = Field(ge=64, description="tokens of the longest sequence")
    tokens: int = Field(ge=128, description="of one stream in a call; a power of two")
    slots: int = Field(ge=0, description="sequences sampled at a time, by each stream; 0: training alone")
    recompute: bool = True
    gather_once: bool | None = Field(None, description="of decoding, as in the settings")
    kernels: Literal["device", "reference"] = "device"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


def read_mesh(text: str) -> MeshConfig:
    """Read "fsdp=4,tensor=4". Raise ConfigError if an axis is unknown or its size is no number."""
    sizes = dict(part.partition("=")[::2] for part in text.split(","))
    for axis, size in sizes.items():
        if axis not in MeshConfig.model_fields or not size.isdecimal() or not int(size):
            msg = f"mesh {text!r}: {axis}={size} is not one of {', '.join(MeshConfig.model_fields)} with a size"
            raise ConfigError(msg)
    return MeshConfig.model_validate(sizes)
