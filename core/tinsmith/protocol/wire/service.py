"""What a client learns of the server, and the configuration that it gets."""

from typing import Literal

from pydantic import BaseModel

from tinsmith.protocol.wire.fields import Body, Name


class ClientConfigRequest(Body):
    sdk_version: Name = ""


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
    custom_loss_server_side: bool = False  # `forward_backward_custom` computes the loss in the client


class DynamicConfig(BaseModel):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class AuthToken(BaseModel):
    jwt: str


class SupportedModel(BaseModel):
    model_name: str
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    inflight: Literal["between_requests", "between_tokens"] | None = None  # when its inflight samplers take new weights


class ServerCapabilities(BaseModel):
    supported_models: list[SupportedModel]
    stand_ins: dict[str, str] | None = None  # by the loss that clients ask for: the one that is computed


class TelemetryRequest(Body):
    """Accepted and dropped: nothing in it concerns a self-hosted server's work."""

    session_id: Name | None = None


class TelemetryAccepted(BaseModel):
    status: Literal["accepted"] = "accepted"


class Health(BaseModel):
    status: Literal["ok"] = "ok"
