"""Sampling sessions, prompts and samples."""

from math import prod
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from tinsmith.protocol import bounds
from tinsmith.protocol.wire.fields import Body, ExactBody, Int, Int64, Integers, Name, Numbers, Seed, Shape


class CreateSamplingSessionRequest(ExactBody):
    session_id: Name
    sampling_session_seq_id: Int64
    base_model: Name | None = None
    model_path: Name | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplingSessionCreated(BaseModel):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplingSessionRequest(Body):
    """Of join_sampling_session."""

    sampling_session_id: Name


class SamplingSessionJoined(BaseModel):
    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


class Sampler(BaseModel):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class Chunk(ExactBody):
    """`encoded_text` with tokens; every other type is refused by its name."""

    type: Name = "encoded_text"
    tokens: Integers = Field(default_factory=lambda: np.zeros(0, np.int64))


class ModelInput(ExactBody):
    chunks: Annotated[list[Chunk], Field(max_length=bounds.MAX_CHUNKS, fail_fast=True)]


Stop = str | Annotated[list[Int], Field(fail_fast=True)] | Annotated[list[str], Field(fail_fast=True)]


class SamplingParams(ExactBody):
    max_tokens: Int | None = None
    seed: Seed = None
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
