"""The JSON bodies of the Tinker API, field for field as SDK 0.38.0 sends and reads them.

In a body that changes numbers (`ExactBody`), a field that no SDK has is refused: `unknown_fields.py`. In all others it
is ignored, so that a newer SDK still works. `docs/field_status.py` has the status of each known one, `bounds.py` its
bounds. Protobuf bodies are in `tinsmith.protocol.proto`. Models of answers leave out what is None.
"""

from datetime import datetime
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from tinsmith.protocol import bounds
from tinsmith_checkpoints.values import Json

JsonMetadata = Annotated[dict[str, Json], BeforeValidator(bounds.metadata)]
TextMetadata = Annotated[dict[str, str], BeforeValidator(bounds.metadata)]
Name = Annotated[str, StringConstraints(max_length=bounds.MAX_NAME_CHARS), AfterValidator(bounds.plain)]
"""An id, a name, a path or the like."""
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Int64 = Annotated[int, Field(ge=0, lt=2**63)]
SeqId = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Integers = Annotated[
    np.ndarray[Any, np.dtype[np.int64]],
    PlainValidator(bounds.integers),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "maxItems": bounds.MAX_NUMBERS}),
]
"""A list of integers that may be long, as an array."""
Numbers = Annotated[
    np.ndarray[Any, np.dtype[np.float64]],
    PlainValidator(bounds.numbers),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "maxItems": bounds.MAX_NUMBERS}),
]
Shape = Annotated[list[Int64], Field(max_length=bounds.MAX_DIMENSIONS, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class ExactBody(Body):
    """Changes numbers, so nothing in it may be without effect. The `type` of a request repeats the endpoint."""

    model_config = ConfigDict(extra="forbid")


# Sessions -------------------------------------------------------------------------------------------------------------


class ClientConfigRequest(Body):
    sdk_version: Name = ""


class CreateSessionRequest(Body):
    tags: Annotated[list[Name], Field(max_length=bounds.MAX_TAGS, fail_fast=True)] = []
    user_metadata: JsonMetadata | None = None
    sdk_version: Name | None = None
    project_id: Name | None = None
    display_name: Name | None = None


class SessionRequest(Body):
    """Of session_heartbeat."""

    session_id: Name


class FinishReason(Body):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Body):
    reason: FinishReason
    detail: Annotated[str, AfterValidator(bounds.shortened)] | None = None


class ProjectRequest(Body):
    project_id: Name


# Searches: an unknown filter is refused, since it would let everything pass -------------------------------------------


class OwnSearchOwner(ExactBody):
    type: Literal["own"] = "own"


class AccessibleSearchOwner(ExactBody):
    type: Literal["accessible"]


class UserSearchOwner(ExactBody):
    type: Literal["user"]
    owner_urns: Annotated[list[Name], Field(min_length=1, max_length=bounds.MAX_OWNERS, fail_fast=True)]


SearchOwner = Annotated[OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")]
FilterNames = Annotated[list[Name], Field(max_length=bounds.MAX_TAGS, fail_fast=True)]
SearchLimit = Annotated[Int, Field(ge=1, le=bounds.MAX_FOUND)]


class ActiveStatusQuery(ExactBody):
    type: Literal["active"]


class CancelledStatusQuery(ExactBody):
    type: Literal["cancelled"]


class FailedStatusQuery(ExactBody):
    type: Literal["failed"]


class ClientFinishedStatusQuery(ExactBody):
    type: Literal["client_finished"]
    reasons: (
        Annotated[
            list[Literal["success", "errored", "interrupted"]],
            Field(min_length=1, max_length=bounds.MAX_TAGS, fail_fast=True),
        ]
        | None
    ) = None


StatusQuery = Annotated[
    ActiveStatusQuery | CancelledStatusQuery | FailedStatusQuery | ClientFinishedStatusQuery,
    Field(discriminator="type"),
]


class SessionCursor(ExactBody):
    last_created_at: AwareDatetime
    last_session_id: Name


class SessionSearchRequest(ExactBody):
    session_id: Name | None = None
    project_ids: FilterNames | None = None
    user_metadata: TextMetadata = {}
    display_name: Annotated[Name, Field(min_length=1)] | None = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[StatusQuery], Field(min_length=1, max_length=bounds.MAX_TAGS, fail_fast=True)] | None = (
        None
    )
    limit: SearchLimit = 50
    cursor: SessionCursor | None = None


class CheckpointCursor(ExactBody):
    """The hosted service identifies a checkpoint by a UUID, and this server by its path."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: Name


class CheckpointSearchRequest(ExactBody):
    project_ids: FilterNames | None = None
    user_metadata: TextMetadata = {}
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: FilterNames | None = None
    limit: SearchLimit = 50
    cursor: CheckpointCursor | None = None


# Models and training --------------------------------------------------------------------------------------------------


class LoraConfig(ExactBody):
    rank: Int
    seed: Seed | None = None
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


class CustomLossInput(ExactBody):
    name: Name
    rank: Int


class CustomLossNode(ExactBody):
    """Its arguments are encoded: `custom_losses/graph.py` reads them."""

    op: Name
    name: Name
    target: Name
    args: list[Any] = []  # Any: JSON
    kwargs: dict[str, Any] = {}


class CustomLossGraph(ExactBody):
    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(ExactBody):
    session_id: Name
    custom_loss_seq_id: Annotated[int, Field(ge=0, lt=bounds.MAX_CUSTOM_LOSSES)]
    name: Name
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


# Weights --------------------------------------------------------------------------------------------------------------


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


class UploadStartRequest(ExactBody):
    base_model: Name
    lora_config: LoraConfig
    destination_project_id: Name | None = None


class UploadFinishRequest(ExactBody):
    upload_id: Name


class WeightsInfoRequest(Body):
    tinker_path: Name


class TtlRequest(Body):
    ttl_seconds: Int | None = None


# Sampling -------------------------------------------------------------------------------------------------------------


class CreateSamplingSessionRequest(ExactBody):
    session_id: Name
    sampling_session_seq_id: Int64
    base_model: Name | None = None
    model_path: Name | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplingSessionRequest(Body):
    """Of join_sampling_session."""

    sampling_session_id: Name


class Chunk(ExactBody):
    """`encoded_text` with tokens; every other type is refused by its name."""

    type: Name = "encoded_text"
    tokens: Integers = Field(default_factory=lambda: np.zeros(0, np.int64))


class ModelInput(ExactBody):
    chunks: Annotated[list[Chunk], Field(max_length=bounds.MAX_CHUNKS, fail_fast=True)]


Stop = str | Annotated[list[Int], Field(fail_fast=True)] | Annotated[list[str], Field(fail_fast=True)]


class SamplingParams(ExactBody):
    max_tokens: Int | None = None
    seed: Seed | None = None
    stop: Annotated[Stop | None, BeforeValidator(bounds.stop)] = None
    temperature: float = 1.0
    top_k: Int = -1
    top_p: float = 1.0


class TensorData(ExactBody):
    data: Numbers
    dtype: Literal["int64", "float32"]
    shape: Shape | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None

    @property
    def num_bytes(self) -> int:
        """Return about how much memory the values take when they are made dense."""
        return self.data.nbytes + (8 * prod(self.shape or []) if self.sparse_crow_indices is not None else 0)


class SampleRequest(ExactBody):
    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams()
    sampling_session_id: Name | None = None
    seq_id: Int64 | None = None
    num_samples: Int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Int = 0
    topk_sample_logprobs: Int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Int = 0
    prompt_logprobs_last_n: Int | None = None
    record_stability_info: bool | None = None
    base_model: Name | None = None
    model_path: Name | None = None
    type: Literal["sample"] = "sample"

    @property
    def num_bytes(self) -> int:
        """Return about how much memory the numbers take."""
        targets = self.target_prompt_logprobs
        return sum(chunk.tokens.nbytes for chunk in self.prompt.chunks) + (targets.num_bytes if targets else 0)


# Futures --------------------------------------------------------------------------------------------------------------


class RetrieveFutureRequest(Body):
    request_id: Name
    allow_metadata_only: bool = False


class SamplingSessionTarget(Body):
    """One client of a sampling session; each clone numbers its samples from `cloned_sampler_id` * 10**9."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Name
    cloned_sampler_id: Annotated[int, Field(ge=0, le=2**63 // 10**9)] = 0


class RetrieveFuturesRequest(Body):
    target: SamplingSessionTarget
    prev_cursor: Int64 = 0
    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    retrieved_request_ids: Annotated[list[str], Field(fail_fast=True)] = []


class CancelFutureRequest(Body):
    request_id: Name


class TelemetryRequest(Body):
    """Accepted and dropped: nothing in it concerns a self-hosted server's work."""

    session_id: Name | None = None


# Answers --------------------------------------------------------------------------------------------------------------


class ClientConfig(BaseModel):
    """The configuration that the server gives the SDK. Unless noted, the defaults are the SDK's."""

    pjwt_auth_enabled: bool = True  # the key is exchanged for a token; `tinker auth whoami` reads it
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    proto_write_fwdbwd: bool = True  # up to SDK 0.24: as later ones always do
    fwd_via_fwdbwd: bool = True  # up to SDK 0.24: as later ones always do
    create_model_via_load_weights: bool = True  # up to SDK 0.36: as later ones always do
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    sample_max_concurrent_requests: int = 2000
    sample_use_retrieve_futures: bool = False
    sample_join_sampling_session: bool = False
    custom_loss_server_side: bool = True  # every backend that has cross_entropy runs custom losses


class ArchiveUrl(BaseModel):
    """Of a checkpoint as one tar file. `url` works without a key until it expires."""

    url: str
    expires: datetime


class AuthToken(BaseModel):
    jwt: str


class DynamicConfig(BaseModel):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class FutureCompletion(BaseModel):
    """`retrieve_future` has the result, or the failure, at once."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FuturesRetrieved(BaseModel):
    completions: list[FutureCompletion]
    cursor: int


class SupportedModel(BaseModel):
    model_name: str
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class ServerCapabilities(BaseModel):
    supported_models: list[SupportedModel]
    stand_ins: dict[str, str] | None = None  # by the loss that clients ask for: the one that is computed
    inflight: str = "request"  # inflight samplers take new weights when a request starts, not while it is drawn


class SessionCreated(BaseModel):
    session_id: str
    warning_message: str | None = None  # the SDK prints it
    error_message: str | None = None  # likewise
    type: Literal["create_session"] = "create_session"


class SessionHeartbeat(BaseModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionList(BaseModel):
    sessions: list[str]


class ClientFinishReason(BaseModel):
    type: Literal["success", "errored", "interrupted"]


class SessionStatus(BaseModel):
    type: Literal["active", "client_finished"]
    reason: ClientFinishReason | None = None
    detail: str | None = None


class SessionSummary(BaseModel):
    """`status` is missing if the session ended for want of heartbeats."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResult(BaseModel):
    sessions: list[SessionSummary]
    next_cursor: SessionCursor | None = None


class Session(BaseModel):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class Submitted(BaseModel):
    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class CustomLossCreated(BaseModel):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


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


class WeightsInfo(BaseModel):
    base_model: str
    optimizer_config: AdamOptimizer = AdamOptimizer()
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class SamplingSessionCreated(BaseModel):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplingSessionJoined(BaseModel):
    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


class Sampler(BaseModel):
    sampler_id: str
    base_model: str
    model_path: str | None = None


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


class CheckpointSearchResult(BaseModel):
    checkpoints: list[Checkpoint]
    next_cursor: CheckpointCursor | None = None


class CopiedWeights(BaseModel):
    tinker_path: str


class UploadUrl(BaseModel):
    url: str
    headers: dict[str, str] = {}


class UploadStarted(BaseModel):
    """`urls` work without a key until they expire. SDK 0.39 takes text, and later ones objects."""

    upload_id: str
    urls: dict[str, str] | dict[str, UploadUrl]
    expires: datetime


class Cursor(BaseModel):
    offset: int
    limit: int
    total_count: int


class CheckpointList(BaseModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(BaseModel):
    """`state` and `state_reason` are ours: the SDK's own type has `corrupted` alone, and leaves them out."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    state: str
    state_reason: str | None = None
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunList(BaseModel):
    training_runs: list[TrainingRun]
    cursor: Cursor


class ExternalWeightsUrls(BaseModel):
    urls: dict[str, str]
    expires: datetime


class OrgDetails(BaseModel):
    name: str


class UserDetails(BaseModel):
    email: str


class KeyDetails(BaseModel):
    org_details: OrgDetails
    user_details: UserDetails


class ApiKeyInfo(BaseModel):
    key_id: int
    name: str
    note: str
    details: KeyDetails


KeyText = Annotated[str, StringConstraints(max_length=200), AfterValidator(bounds.plain)]


class NewApiKey(ExactBody):
    name: Annotated[KeyText, Field(min_length=1)]
    note: KeyText = ""
    expires_in_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None  # default: never


class ApiKey(BaseModel):
    key_id: str
    name: str
    note: str
    tenant: str
    created_at: datetime
    expires_at: datetime | None = None
    key: str | None = None  # of a new one only: it is kept nowhere


class ApiKeys(BaseModel):
    api_keys: list[ApiKey]


class AuditLogEntry(BaseModel):
    timestamp: datetime
    event: str
    event_details: dict[str, str]
    model_id: str | None = None
    tinker_path: str | None = None


class AuditLog(BaseModel):
    entries: list[AuditLogEntry]
    next_offset: int | None = None  # of the following entries, if there are more


class BillingEventInfo(BaseModel):
    """Which of the numbers is set depends on the type."""

    type: Literal["training", "sampling_prefill", "sampling_sample", "checkpoint"]
    token_count: int | None = None
    cached: bool | None = None
    count: int | None = None


class BillingEvent(BaseModel):
    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str
    user_name: str
    event_info: BillingEventInfo


class BillingUsage(BaseModel):
    data: list[BillingEvent]


class StorageUsageItem(BaseModel):
    project_id: str | None = None
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class StorageUsage(BaseModel):
    data: list[StorageUsageItem]


class DiskUsageItem(BaseModel):
    """The storage of one tenant on the server's disk and in its database, and its limit."""

    tenant: str
    log_bytes: int
    checkpoint_bytes: int
    snapshot_bytes: int
    recovery_point_bytes: int
    routed_expert_bytes: int
    total_bytes: int
    allowed_bytes: int


class DiskUsage(BaseModel):
    data: list[DiskUsageItem]
    free_bytes: int
    reserve_bytes: int


class TelemetryAccepted(BaseModel):
    status: Literal["accepted"] = "accepted"


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class LineageOrigin(BaseModel):
    """A run took its weights from a checkpoint."""

    path: str
    source: str | None = None  # the run in the path, if it is in the lineage
    seq_id: int  # of the creation or the load
    step: int  # optimizer steps behind the weights, as the run counts on
    created_at: datetime


class LineageRun(BaseModel):
    run_id: str
    name: str | None = None
    base_model: str
    state: str
    state_reason: str | None = None
    steps: int
    created_at: datetime
    origins: list[LineageOrigin]  # oldest first


class SavedCheckpoint(BaseModel):
    path: str
    kind: str
    size_bytes: int
    created_at: datetime
    step: int
    public: bool
    expires_at: datetime | None = None


class Lineage(BaseModel):
    """Which of the caller's runs came from which. `checkpoints` are the run's own, newest first."""

    run_id: str
    runs: list[LineageRun]  # the run, and all that are connected with it, oldest first
    complete: bool  # or there are more than `runs`
    checkpoints: list[SavedCheckpoint]
    num_checkpoints: int


class TraceExport(BaseModel):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None  # works without a key for an hour
    error: str | None = None


class Trace(BaseModel):
    """Chrome's trace format, which Perfetto reads."""

    displayTimeUnit: str = "ms"
    traceEvents: list[dict[str, Any]]


class IterationTime(BaseModel):
    """Where the time of an iteration went, from the end of one optimizer step to that of the next."""

    seq_id: int  # of the optimizer step
    step: int | None = None  # how many came before it
    began_at: datetime
    wall_s: float
    attributed: float  # the part in a known phase, 0 to 1
    phases: dict[str, float]  # seconds


class TimeSpent(BaseModel):
    """Where the time of a run's last iterations went. `phases` and `wall_s` are sums over them."""

    run_id: str
    wall_s: float
    attributed: float
    phases: dict[str, float]
    meanings: dict[str, str]  # what happens in each of these phases
    iterations: list[IterationTime]


def as_text(metadata: dict[str, Json] | None) -> dict[str, str] | None:
    """Convert metadata for answers: the API takes any JSON values and returns strings."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in metadata.items()}


# Metrics --------------------------------------------------------------------------------------------------------------

MetricName = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(bounds.plain)]
MetricValue = Annotated[float, Field(allow_inf_nan=False)]


class LoggedPoint(ExactBody):
    """Values of one step. Null stands for one that is not finite."""

    step: Annotated[int, Field(ge=0, lt=2**53)]
    values: Annotated[dict[MetricName, MetricValue | None], Field(max_length=512)]


class LogMetricsRequest(ExactBody):
    points: Annotated[list[LoggedPoint], Field(min_length=1, max_length=1000)]


class ShareRequest(ExactBody):
    expires_in_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None  # default: when its run is deleted


class ShareLink(BaseModel):
    share_id: str
    created_at: datetime
    expires_at: datetime | None = None
    url: str | None = None  # of a new one only: its secret is kept nowhere


class ShareLinks(BaseModel):
    links: list[ShareLink]


class RunSummary(BaseModel):
    run_id: str
    base_model: str
    tenant: str
    state: str
    state_reason: str | None = None
    lora_rank: int
    steps: int
    created_at: datetime
    last_request_at: datetime
    name: str | None = None
    project_id: str | None = None
    tags: list[str]
    user_metadata: dict[str, str] | None = None
    ended: str | None = None


class RunSummaries(BaseModel):
    runs: list[RunSummary]
    cursor: Cursor


class Series(BaseModel):
    """One metric of a run. A null value is not finite."""

    name: str
    num_points: int  # measured; more than there are here if the series was thinned out
    steps: list[int]
    times: list[float]
    values: list[float | None]


class RunCurves(BaseModel):
    run_id: str
    steps: int
    series: list[Series]


class OperationReport(BaseModel):
    """An operation in the log. `metrics` and `notes` depend on its kind."""

    seq_id: int
    request_id: str
    kind: str
    state: str
    num_tokens: int
    created_at: datetime
    queued_s: float | None = None  # from arrival to claim
    run_s: float | None = None  # from claim to record
    attempts: int
    interruptions: int
    payload_bytes: int
    result_bytes: int
    metrics: dict[str, float | None]
    notes: list[str]
    error: str | None = None


class RecoveryPoint(BaseModel):
    seq_id: int
    size_bytes: int
    created_at: datetime


class LogTotals(BaseModel):
    """Of the operations of one kind and state."""

    kind: str
    state: str
    number: int
    num_tokens: int
    payload_bytes: int
    result_bytes: int
    queued_s: float
    run_s: float
    retried: int


class RunReport(BaseModel):
    run: RunSummary
    session_id: str
    seed: int
    applied_seq_id: int
    oldest_replayable: int | None = None  # the lowest seq_id that `tinsmith replay` can rebuild
    recovery_points: list[RecoveryPoint]
    checkpoints: list[SavedCheckpoint]
    lineage: list[LineageRun]  # the run, and those connected with it, oldest first
    num_logged: int
    first_seq_id: int | None = None
    last_seq_id: int | None = None
    operations: list[OperationReport]
    totals: list[LogTotals]


# Rollouts -------------------------------------------------------------------------------------------------------------

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class LogRewardsRequest(ExactBody):
    """Rewards by sequence: its digest is BLAKE2b, 16 bytes in hex, of its tokens as little-endian int32."""

    step: Annotated[int, Field(ge=0, lt=2**53)]
    rewards: Annotated[dict[Digest, MetricValue], Field(min_length=1, max_length=10_000)]


class RolloutSummary(BaseModel):
    rollout: str  # its name: {step}-{seq_id}-{number}
    reward: float | None = None  # if the client has logged one
    advantage: float | None  # mean over the sampled tokens
    kl: float | None  # of sampler and trainer, in nats for each sampled token
    prompt_tokens: int  # before the first sampled one
    sampled_tokens: int
    text: str | None = None  # how the sampled part begins; None: the server has no tokenizer of the base model


class RolloutList(BaseModel):
    """The rollouts of a step, the highest reward first, then the highest advantage."""

    run_id: str
    steps: list[int]  # of which rollouts are kept
    step: int | None = None
    number: int = 0  # of sequences that were trained in this step; more than there are here if not all are kept
    rollouts: list[RolloutSummary]


class RolloutPart(BaseModel):
    sampled: bool  # or given
    tokens: list[int]
    text: str | None = None


class RolloutView(RolloutSummary):
    run_id: str
    step: int
    parts: list[RolloutPart]


# Engines --------------------------------------------------------------------------------------------------------------


class PendingView(BaseModel):
    """Operations of one tenant and kind that are queued, or running."""

    tenant: str
    kind: str
    state: str  # queued or running
    number: int
    oldest_s: float  # since the oldest of them arrived


class ComparedSaves(BaseModel):
    """Saves for sampling since the engine started, by the consistency gate's verdict. Differences are in nats."""

    consistent: int
    inconsistent: int
    not_compared: int
    largest_difference: float | None = None


class GpuView(BaseModel):
    number: int
    name: str
    utilization: float | None = None  # part of the last second in which it computed, 0 to 1
    used_bytes: int
    total_bytes: int


class InterfaceView(BaseModel):
    """Traffic since the host started."""

    name: str
    received_bytes: int
    sent_bytes: int


class HostView(BaseModel):
    """A host of engines or their workers, as an engine reported it last."""

    host: str
    engines: list[str]  # base models of which the engine, or workers of it, are there
    workers: int = 0  # processes
    worker_bytes: int | None = None  # of memory
    worker_cpu_s: float | None = None
    reported_at: datetime
    gpus: list[GpuView]
    interfaces: list[InterfaceView]


class TimesView(BaseModel):
    """How often something happened since its process started, and how long it took."""

    number: int
    mean_s: float | None = None
    most_s: float | None = None  # 99 % took at most this, a bound of the histogram on /metrics


class EngineView(BaseModel):
    base_model: str
    state: str
    detail: str | None = None
    progress: float | None = None  # 0 to 1
    restarts: int
    restarted: str | None = None  # how the last process ended
    sampler: str | None = None  # why nothing can be sampled for now
    reported_s: float | None = None  # since its last report
    running_s: float | None = None  # since it took the oldest operation that it is running
    turn: str | None = None  # training or sampling, if they take turns on the devices
    turn_awaited: bool | None = None  # whether the other side waits
    saves: ComparedSaves | None = None
    last_failure: str | None = None  # how its last process ended that ended by itself
    models: int = 0  # that have a place on the backend
    models_waiting: int = 0  # for a place
    max_models: int | None = None  # places; None: not known yet
    resident_bytes: int | None = None  # memory of its process
    recoveries: TimesView | None = None  # starts at which it rebuilt models
    work: list[PendingView]


class EngineList(BaseModel):
    engines: list[EngineView]
    hosts: list[HostView] | None = None  # for operators
    commits: TimesView  # of this server
    storage: str | None = None  # why requests cannot be recorded now
    free_bytes: int
    reserve_bytes: int
