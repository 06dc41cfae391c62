"""Models, their optimizers and their losses."""

from typing import Literal

from pydantic import BaseModel

from tinsmith.protocol.wire.fields import Body, ExactBody, Int, JsonMetadata, Name, Seed, SeqId


class LoraConfig(ExactBody):
    rank: Int
    seed: Seed = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(ExactBody):
    """`adamw`; every other type is refused by its name."""

    type: Name = "adamw"


class CreateModelRequest(ExactBody):
    session_id: Name
    model_seq_id: SeqId
    base_model: Name
    user_metadata: JsonMetadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    type: Literal["create_model"] = "create_model"


class ModelRequest(Body):
    """Of get_info and unload_model."""

    model_id: Name


class ModelData(BaseModel):
    arch: str | None = None
    model_name: str
    tokenizer_id: str


class AdamOptimizer(BaseModel):
    type: Literal["adamw"] = "adamw"


class ModelInfo(BaseModel):
    model_id: str
    model_data: ModelData
    optimizer_config: AdamOptimizer = AdamOptimizer()
    is_lora: bool = True
    lora_rank: int
    model_name: str
    type: Literal["get_info"] = "get_info"


class AdamParams(ExactBody):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(ExactBody):
    """`adam_params`, or `optimizer_params` of another family."""

    model_id: Name
    seq_id: SeqId
    adam_params: AdamParams | None = None
    optimizer_params: JsonMetadata | None = None
    type: Literal["optim_step"] = "optim_step"
