"""Rollouts: the sequences that a run was trained on, and their rewards."""

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from tinsmith.protocol.wire.fields import ExactBody
from tinsmith.protocol.wire.runs import MetricValue

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class LogRewardsRequest(ExactBody):
    """Rewards by sequence: its digest is BLAKE2b, 16 bytes in hex, of its tokens as little-endian int32."""

    step: Annotated[int, Field(ge=0, lt=2**53)]
    rewards: Annotated[dict[Digest, MetricValue], Field(min_length=1, max_length=10_000)]


class RolloutSummary(BaseModel):
    rollout: str  # its name: {step}-{seq_id}-{number}; of one that was not trained, {step}-{request_id}-{number}
    trained: bool = True  # whether a pass of the run had it
    reward: float | None = None  # if the client has logged one
    advantage: float | None = None  # mean over the sampled tokens
    kl: float | None = None  # of sampler and trainer, in nats for each sampled token
    prompt_tokens: int  # before the first sampled one
    sampled_tokens: int
    text: str | None = None  # how the sampled part begins; None: the server has no tokenizer of the base model


class RolloutList(BaseModel):
    """The rollouts of a step, the highest reward first, then the highest advantage."""

    run_id: str
    steps: list[int]  # of which rollouts are kept
    step: int | None = None
    number: int = 0  # of sequences that were trained in this step; more than there are here if not all are kept
    untrained: int = 0  # of those here that were sampled during the step, and trained in no pass
    more_samples: bool = False  # not all samples of the step were looked at: they take too much room
    rollouts: list[RolloutSummary]


class RolloutPart(BaseModel):
    sampled: bool  # or given
    tokens: list[int]
    text: str | None = None


class RolloutView(RolloutSummary):
    run_id: str
    step: int
    parts: list[RolloutPart]
