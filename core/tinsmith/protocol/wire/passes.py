"""Passes in JSON, which `json_passes.py` turns into protobuf."""

from typing import Annotated

from pydantic import Field

from tinsmith.protocol.wire.fields import ExactBody, Int64, Name
from tinsmith.protocol.wire.sampling import ModelInput, TensorData


class TokenSpan(ExactBody):
    sequence_id: Name
    offset: Int64 = 0
    length: Int64


class ProvenanceSpan(ExactBody):
    """One of the two, as in protobuf."""

    prompt_tokens: TokenSpan | None = None
    sampled_tokens: TokenSpan | None = None


class Datum(ExactBody):
    model_input: ModelInput
    loss_fn_inputs: dict[Name, TensorData] = {}
    model_input_spans: list[ProvenanceSpan] = []
    loss_fn_input_spans: list[ProvenanceSpan] = []


class ForwardBackwardInput(ExactBody):
    data: list[Datum]
    loss_fn: Name
    loss_fn_config: dict[Name, Annotated[float, Field(strict=True)] | Name] = {}


class ForwardBackwardRequest(ExactBody):
    model_id: Name
    seq_id: Annotated[int, Field(ge=1, lt=2**31)]
    forward_backward_input: ForwardBackwardInput
    forward_only: bool = False
