"""Futures: the requests whose results are fetched later."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tinsmith.protocol.wire.fields import Body, Int64, Name


class Submitted(BaseModel):
    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


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


class FutureCompletion(BaseModel):
    """`retrieve_future` has the result, or the failure, at once."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FuturesRetrieved(BaseModel):
    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(Body):
    request_id: Name
