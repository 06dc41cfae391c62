"""A pass in JSON, as the protobuf message that the SDK would send for it: checks, refusals and repeats are the same."""

from tinsmith.errors import UserError
from tinsmith.protocol import wire
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.tensors import tensor_to_proto, to_bytes, tokens_from_json


def as_protobuf(request: wire.ForwardBackwardRequest) -> bytes:
    """Return a ForwardBackwardRequest. Raises UserError if the message could not hold what was sent."""
    given = request.forward_backward_input
    message = pb.ForwardBackwardRequest(
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=given.loss_fn, forward_only=request.forward_only
    )
    for name, value in given.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = value
    for index, datum in enumerate(given.data):
        try:
            _write(message.data.add(), datum)
        except UserError as error:
            msg = f"data[{index}]: {error}"
            raise type(error)(msg) from error
    body: bytes = message.SerializeToString(deterministic=True)
    return body


def _write(message: pb.Datum, datum: wire.Datum) -> None:
    tokens = tokens_from_json("model_input", datum.model_input.chunks)
    message.model_input.add().encoded_text.tokens = to_bytes(tokens, "<i4")
    for name, tensor in datum.loss_fn_inputs.items():
        message.loss_fn_inputs[name].CopyFrom(tensor_to_proto(f"loss_fn_inputs: {name}", tensor))
    message.model_input_spans.extend(_span("model_input_spans", span) for span in datum.model_input_spans)
    message.loss_fn_input_spans.extend(_span("loss_fn_input_spans", span) for span in datum.loss_fn_input_spans)


def _span(where: str, span: wire.ProvenanceSpan) -> pb.ProvenanceSpan:
    prompt, sampled = span.prompt_tokens, span.sampled_tokens
    if (prompt is None) == (sampled is None):
        msg = f"{where}: a span holds either prompt_tokens or sampled_tokens"
        raise UserError(msg)
    if prompt is not None:
        return pb.ProvenanceSpan(prompt_tokens=pb.PromptProvenanceSpan(**prompt.model_dump()))
    assert sampled is not None
    return pb.ProvenanceSpan(sampled_tokens=pb.SampledProvenanceSpan(**sampled.model_dump()))
