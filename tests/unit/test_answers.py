"""Results, read back by the SDK's own decoders."""

import json

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import CreateModelResponse, OptimStepResponse
from tinker.types._pydantic_types.load_weights_response import LoadWeightsResponse

from tinsmith import operations as ops
from tinsmith.errors import ServerError
from tinsmith.protocol import answers


def test_a_pass_of_ragged_data_survives_the_sdk() -> None:
    data = [np.arange(3, dtype=np.float32), np.array([np.nan, np.inf], np.float32), np.ones((2, 4), np.float32)]
    output = ops.ForwardBackwardOutput(
        loss_fn_outputs=tuple({"logprobs": each} for each in data), metrics={"loss:sum": float("nan"), "a:mean": 2.0}
    )
    answer = answers.answer(output)
    assert answer.media_type == "application/x-protobuf"
    read = deserialize_forward_backward_output(answer.body)
    assert len(read.loss_fn_outputs) == 3
    for got, expected in zip(read.loss_fn_outputs, data, strict=True):
        np.testing.assert_array_equal(got["logprobs"].to_numpy(), expected)
        assert got["logprobs"].shape == list(expected.shape)
    assert np.isnan(read.metrics["loss:sum"])
    assert read.metrics["a:mean"] == 2.0


def test_a_pass_without_outputs_keeps_the_number_of_data() -> None:
    output = ops.ForwardBackwardOutput(loss_fn_outputs=({}, {}), metrics={"loss:sum": 0.0})
    assert deserialize_forward_backward_output(answers.answer(output).body).loss_fn_outputs == [{}, {}]


def test_an_output_no_client_could_read_is_our_fault() -> None:
    output = ops.ForwardBackwardOutput(loss_fn_outputs=({"logprobs": np.zeros(1, bool)},), metrics={})
    with pytest.raises(ServerError, match="'logprobs' has dtype bool"):
        answers.answer(output)


def test_a_sample_survives_the_sdk() -> None:
    top = ops.TopLogprobs(
        token_ids=np.array([[1, 2], [3, 4]], np.int32), logprobs=np.array([[-1, -2], [-3, -4]], np.float32)
    )
    output = ops.SampleOutput(
        sequences=(
            ops.SampledSequence(
                tokens=np.array([7, 8], np.int32),
                logprobs=np.array([-0.5, -1.5], np.float32),
                stop_reason="length",
                top_logprobs=top,
            ),
            ops.SampledSequence(
                tokens=np.array([9], np.int32), logprobs=np.array([-2.0], np.float32), stop_reason="stop"
            ),
        ),
        prompt_logprobs=np.array([np.nan, -1.0, -2.0], np.float32),
        top_prompt_logprobs=top,
        target_prompt_logprobs=np.array([[0.0, -1.0]], np.float32),
        prompt_cache_hit_tokens=3,
    )
    read = deserialize_sample_response(answers.answer(output).body)
    first, second = read.sequences
    assert first.tokens == [7, 8]
    assert first.logprobs == [-0.5, -1.5]
    assert (first.stop_reason, second.stop_reason) == ("length", "stop")
    assert first.topk_logprobs == [[(1, -1.0), (2, -2.0)], [(3, -3.0), (4, -4.0)]]
    assert read.prompt_logprobs == [None, -1.0, -2.0]
    np.testing.assert_array_equal(read.target_prompt_logprobs.to_numpy(), [[0.0, -1.0]])
    assert read.prompt_cache_hit_tokens == 3


def test_numbers_json_has_no_word_for_become_words_the_sdk_reads() -> None:
    metrics = {"grad_norm": float("nan"), "a": float("inf"), "b": float("-inf"), "c": 1.5}
    body = answers.answer(ops.OptimStepOutput(metrics=metrics)).body
    norm = {"grad_norm": "nan", "unclipped_grad_l2:mean": "nan"}  # the second is the name on hosted Tinker
    assert json.loads(body)["metrics"] == norm | {"a": "inf", "b": "-inf", "c": 1.5}
    read = OptimStepResponse.model_validate_json(body)
    assert read.metrics is not None
    assert np.isnan(read.metrics["grad_norm"])
    assert read.metrics["a"] == np.inf


def test_a_created_model_is_an_answer_to_both_ways_of_creating_one() -> None:
    body = answers.answer(ops.ModelCreated(model_id="m")).body
    assert CreateModelResponse.model_validate_json(body).model_id == "m"
    assert LoadWeightsResponse.model_validate_json(body).model_id == "m"


def test_failures_say_what_and_whose_fault() -> None:
    body = answers.answer(ops.Failed(message="boo", category="server")).body
    assert json.loads(body) == {"error": "boo", "category": "server"}


@pytest.mark.parametrize(
    "result",
    [
        ops.ModelCreated(model_id="m"),
        ops.WeightsSaved(path="p", size_bytes=3),
        ops.WeightsSaved(sampling_session_id="s"),
        ops.WeightsLoaded(model_id="m", path="p"),
        ops.ModelUnloaded(model_id="m"),
        ops.OptimStepOutput(),
    ],
)
def test_success_never_holds_the_word_error(result: ops.Result) -> None:
    """The SDK takes the key for a failure, even if it is null."""
    assert "error" not in json.loads(answers.answer(result).body)
