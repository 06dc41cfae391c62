"""Weights: saving, loading, copying, uploading and downloading them; checkpoints."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from tinsmith.protocol import bounds
from tinsmith.protocol.wire.fields import Body, Cursor, ExactBody, Int, Int64, JsonMetadata, Name, SeqId, TextMetadata
from tinsmith.protocol.wire.training import AdamOptimizer, LoraConfig, OptimizerConfig


class SaveWeightsRequest(ExactBody):
    model_id: Name
    seq_id: SeqId
    path: Name | None = None
    ttl_seconds: Int | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(ExactBody):
    """With `path` persisted, without ephemeral."""

    model_id: Name
    seq_id: SeqId
    path: Name | None = None
    sampling_session_seq_id: Int64 | None = None
    kind: Name = "snapshot"
    ttl_seconds: Int | None = None
    user_metadata: TextMetadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(ExactBody):
    model_id: Name
    seq_id: SeqId
    path: Name | None = None
    ttl_seconds: Int | None = None
    age_encryption_recipients: Annotated[list[Name], Field(max_length=bounds.MAX_RECIPIENTS, fail_fast=True)] | None = (
        None
    )
    type: Literal["save_weights_external"] = "save_weights_external"


class ExternalWeightsUrls(BaseModel):
    urls: dict[str, str]
    expires: datetime


class LoadWeightsRequest(ExactBody):
    """Makes a new model (`session_id`, `model_seq_id`), or loads into an existing one (`model_id`, `seq_id`)."""

    path: Name
    optimizer: bool
    session_id: Name | None = None
    model_seq_id: SeqId | None = None
    model_id: Name | None = None
    seq_id: SeqId | None = None
    base_model: Name | None = None
    user_metadata: JsonMetadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Name | None = None
    type: Literal["load_weights"] = "load_weights"


class CopyWeightsRequest(ExactBody):
    """The copy goes to a new session (of `destination_project_id`), or to one that exists (`session_id`)."""

    source_path: Name
    destination_project_id: Name | None = None
    session_id: Name | None = None
    model_seq_id: SeqId | None = None
    ttl_seconds: Int | None = None
    weights_access_token: Annotated[str, StringConstraints(max_length=bounds.MAX_NAME_CHARS)] | None = None


class CopiedWeights(BaseModel):
    tinker_path: str


class UploadStartRequest(ExactBody):
    base_model: Name
    lora_config: LoraConfig
    destination_project_id: Name | None = None


class UploadUrl(BaseModel):
    url: str
    headers: dict[str, str] = {}


class UploadStarted(BaseModel):
    """`urls` work without a key until they expire. SDK 0.39 takes text, and later ones objects."""

    upload_id: str
    urls: dict[str, str] | dict[str, UploadUrl]
    expires: datetime


class UploadFinishRequest(ExactBody):
    upload_id: Name


class WeightsInfoRequest(Body):
    tinker_path: Name


class WeightsInfo(BaseModel):
    base_model: str
    optimizer_config: AdamOptimizer = AdamOptimizer()
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class TtlRequest(Body):
    ttl_seconds: Int | None = None


class Checkpoint(BaseModel):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    base_model: str


class CheckpointList(BaseModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ArchiveUrl(BaseModel):
    """Of a checkpoint as one tar file. `url` works without a key until it expires."""

    url: str
    expires: datetime
