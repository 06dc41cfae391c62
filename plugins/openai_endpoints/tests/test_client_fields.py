"""Every field that OpenAI's and Anthropic's packages and vLLM know has a status, and does what the status says."""

import importlib
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import anthropic
import pytest
from pydantic import BaseModel, ValidationError

from tinsmith import OtherField, UserError
from tinsmith.protocol.unknown_fields import validated
from tinsmith_openai import bodies
from tinsmith_openai.messages import bodies as messages

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "toy", "messages": MESSAGES}
COMPLETION: dict[str, Any] = {"model": "toy", "prompt": "hi"}
MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 1}

TYPES: list[tuple[str, type[BaseModel]]] = [
    ("openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming", bodies.ChatRequest),
    ("openai.types.chat.completion_create_params.CompletionCreateParamsStreaming", bodies.ChatRequest),
    ("openai.types.completion_create_params.CompletionCreateParamsNonStreaming", bodies.CompletionRequest),
    ("openai.types.completion_create_params.CompletionCreateParamsStreaming", bodies.CompletionRequest),
    ("openai.types.chat.ChatCompletionStreamOptionsParam", bodies.StreamOptions),
    *(
        (f"openai.types.chat.ChatCompletion{role}MessageParam", bodies.Message)
        for role in ("Developer", "System", "User", "Assistant", "Tool")
    ),
    ("openai.types.chat.ChatCompletionContentPartTextParam", bodies.TextPart),
    ("openai.types.chat.ChatCompletionMessageFunctionToolCallParam", bodies.ToolCall),
    ("openai.types.chat.ChatCompletionFunctionToolParam", bodies.Tool),
    *(
        (f"anthropic.types.{beta}{module}", model)
        for beta in ("", "beta.")
        for module, model in (
            ("message_create_params.MessageCreateParamsNonStreaming", messages.MessagesRequest),
            ("message_create_params.MessageCreateParamsStreaming", messages.MessagesRequest),
            ("message_count_tokens_params.MessageCountTokensParams", messages.CountTokensRequest),
        )
    ),
    *(
        (f"anthropic.types.{beta}{name}Param", model)
        for beta in ("", "beta.Beta")
        for name, model in (
            ("TextBlock", messages.TextBlock),
            ("ThinkingBlock", messages.ThinkingBlock),
            ("RedactedThinkingBlock", messages.RedactedThinkingBlock),
            ("ToolUseBlock", messages.ToolUseBlock),
            ("ToolResultBlock", messages.ToolResultBlock),
            ("Tool", messages.Tool),
            ("ToolChoiceAuto", messages.ToolChoice),
            ("ToolChoiceNone", messages.ToolChoice),
            ("ThinkingConfigEnabled", messages.Thinking),
            ("ThinkingConfigAdaptive", messages.Thinking),
            ("ThinkingConfigDisabled", messages.Thinking),
            ("OutputConfig", messages.OutputConfig),
        )
    ),
]

OF_VLLM = frozenset(
    """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words
    structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
    add_special_tokens best_of seed n stream stream_options temperature top_p user max_tokens stop logit_bias
    presence_penalty frequency_penalty guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend logits_processors response_format
    """.split()  # noqa: SIM905 - as a table
)
"""The extra ones of both endpoints in November 2026, and of some releases before."""
OF_VLLMS_CHATS = frozenset(
    """
    reasoning_effort include_reasoning echo add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    parallel_tool_calls
    """.split()  # noqa: SIM905 - as a table
)
OF_VLLMS_COMPLETIONS = frozenset({"echo", "suffix", "prompt_embeds"})


def fields_of(path: str) -> set[str]:
    """Return the names of a TypedDict's fields."""
    module, _, name = path.rpartition(".")
    return set(get_type_hints(getattr(importlib.import_module(module), name)))


def others_of(model: type[BaseModel]) -> dict[str, OtherField]:
    return dict(getattr(model, "other_fields", {}))


@pytest.mark.parametrize(("path", "model"), TYPES, ids=[path for path, _ in TYPES])
def test_every_field_of_the_clients_has_a_status(path: str, model: type[BaseModel]) -> None:
    fields = fields_of(path)
    assert fields, "the walk finds them"
    assert fields - model.model_fields.keys() - others_of(model).keys() == set()


def test_every_field_of_vllm_has_a_status() -> None:
    for model, names in (
        (bodies.ChatRequest, OF_VLLM | OF_VLLMS_CHATS),
        (bodies.CompletionRequest, OF_VLLM | OF_VLLMS_COMPLETIONS),
    ):
        assert names - model.model_fields.keys() - others_of(model).keys() == set()


def test_no_field_is_honoured_and_has_no_effect() -> None:
    for _, model in TYPES:
        assert model.model_fields.keys() & others_of(model).keys() == set()


@pytest.mark.parametrize(
    ("model", "body"),
    [(bodies.ChatRequest, CHAT), (bodies.CompletionRequest, COMPLETION), (messages.MessagesRequest, MESSAGE)],
)
def test_a_field_is_taken_at_its_neutral_values_and_refused_at_any_other(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    plain = validated(model, dict(body))
    for name, other in others_of(model).items():
        for value in (None, *(("anything", 7, [1], {"a": 1}) if other.neutral is None else other.neutral)):
            assert validated(model, {**body, name: value}) == plain, (name, value)
        if other.neutral is not None:
            for value in ("something else", 7, 0.5, -7, [7], {"a": 7}):
                with pytest.raises(UserError, match=re.escape(other.note)) as refused:
                    validated(model, {**body, name: value})
                assert refused.value.field == name


@pytest.mark.parametrize(
    "value", [{"skip_special_tokens": False}, {"detokenize": False}, {"prompt_logprobs": 0}, {"best_of": 0}]
)
def test_what_holds_nothing_may_still_ask_for_something(value: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not offered"):
        validated(bodies.CompletionRequest, {**COMPLETION, **value})


@pytest.mark.parametrize(
    "neutral",
    [
        {"best_of": 1, "repetition_penalty": 1, "top_k": 0, "min_p": 0.0, "service_tier": "auto"},
        {"repetition_penalty": 1.0, "top_k": -1, "skip_special_tokens": True, "logit_bias": {}, "n": 1, "store": False},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "seed": -1, "user": "ann", "metadata": {"a": "b"}},
    ],
)
def test_requests_that_say_what_is_so_anyhow_are_the_same(neutral: dict[str, Any]) -> None:
    for model, body in ((bodies.ChatRequest, CHAT), (bodies.CompletionRequest, COMPLETION)):
        assert validated(model, {**body, **neutral}) == validated(model, dict(body))


def test_a_strict_tool_is_the_same_tool() -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    one, other = (
        validated(bodies.ChatRequest, {**CHAT, "tools": [{"type": "function", "function": {**function, **more}}]})
        for more in ({}, {"strict": True})
    )
    assert one == other
    tool = {"name": "add", "input_schema": {"type": "object"}}
    one, other = (
        validated(messages.MessagesRequest, {**MESSAGE, "tools": [{**tool, **more}]})
        for more in ({}, {"strict": True, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}})
    )
    assert one == other


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": 7}}, {"enable_thinking": 7}),
        ({}, {}),
    ],
)
def test_anthropics_thinking_goes_to_the_template(asked: dict[str, Any], options: dict[str, Any]) -> None:
    request = validated(messages.MessagesRequest, {**MESSAGE, **asked})
    assert request.chat().template_options == options


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
def test_openais_effort_goes_to_the_template(effort: str, thinks: bool) -> None:
    request = validated(bodies.ChatRequest, {**CHAT, "reasoning_effort": effort})
    assert request.template_options == {"reasoning_effort": effort, "enable_thinking": thinks}


def test_what_was_thought_comes_back_as_such() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        {"type": "text", "text": "so"},
    ]
    asked = {**MESSAGE, "messages": [*MESSAGES, {"role": "assistant", "content": blocks}, *MESSAGES]}
    said = validated(messages.MessagesRequest, asked).chat().messages[1]
    assert (said.reasoning_content, said.content) == ("hm", "so")


def types_in(name: str) -> Iterator[str]:
    """Yield the `type` of each block that a union knows."""
    for each in get_args(getattr(anthropic.types, name)):
        yield from get_args(get_type_hints(each)["type"])


def test_blocks_of_other_types_are_refused_by_their_type() -> None:
    kinds, taken = set(types_in("ContentBlockParam")), set()
    assert {"text", "image", "thinking", "tool_use", "server_tool_use"} <= kinds
    for kind in kinds:
        block = {"type": kind, "text": "t", "thinking": "t", "data": "d", "id": "i", "name": "n", "input": {}}
        turns = [*MESSAGES, {"role": "assistant", "content": [block]}, *MESSAGES]
        with pytest.raises((ValidationError, UserError)) as refused:
            validated(messages.MessagesRequest, {**MESSAGE, "messages": turns})
        if f"Input tag {kind!r} found using 'type' does not match" not in str(refused.value):
            taken.add(kind)
    assert taken == {"text", "thinking", "redacted_thinking", "tool_use"}
