"""Answers that clients send back as their libraries write them: each must find the tokens that were sampled."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai_served import encoded, prompt_of, write_model

from tinsmith.protocol.unknown_fields import validated
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_openai.answers import completion_logprobs
from tinsmith_openai.bodies import ChatRequest
from tinsmith_openai.conversations import keep_answer
from tinsmith_openai.texts import ModelText
from tinsmith_openai.transcripts import Transcripts

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PLAIN = {"role": "assistant", "content": "so"}
FUNCTION = {"name": "add", "arguments": '{"a": 1, "b": [2]}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
LITELLM = {"provider_specific_fields": {"refusal": None}, "annotations": [], "function_call": None, "audio": None}


def changed(call: dict[str, Any], **function: str) -> dict[str, Any]:
    return {**call, "function": {**FUNCTION, **function}}


@pytest.mark.parametrize(
    ("answer", "echo"),
    [
        pytest.param(PLAIN, PLAIN, id="as it was"),
        pytest.param(PLAIN, ChatCompletionMessage.model_validate(PLAIN).model_dump(), id="openai, with its nulls"),
        pytest.param(PLAIN, {**PLAIN, "tool_calls": []}, id="an empty list of calls"),
        pytest.param(PLAIN, {**PLAIN, "tool_calls": None, "name": None, "refusal": None}, id="nulls"),
        pytest.param(PLAIN, {**PLAIN, "reasoning_content": ""}, id="no reasoning"),
        pytest.param(PLAIN, {**PLAIN, "content": [{"type": "text", "text": "so"}]}, id="parts"),
        pytest.param(PLAIN, {**PLAIN, **LITELLM}, id="LiteLLM"),
        pytest.param(CALLING, ChatCompletionMessage.model_validate(CALLING).model_dump(), id="openai, with a call"),
        pytest.param(CALLING, {**CALLING, "content": ""}, id="an empty text"),
        pytest.param(CALLING, {key: CALLING[key] for key in ("role", "tool_calls")}, id="no text"),
        pytest.param(CALLING, {**CALLING, "tool_calls": [{**CALL, "index": 0}]}, id="a call as it was streamed"),
        pytest.param(
            CALLING,
            {**CALLING, "tool_calls": [changed(CALL, arguments='{"b":[2],"a":1}')]},
            id="arguments written anew",
        ),
    ],
)
def test_an_answer_that_comes_back_has_its_tokens(tmp_path: Path, answer: dict[str, Any], echo: dict[str, Any]) -> None:
    text, kept = ModelText("toy", write_model(tmp_path / "toy")), Transcripts()
    first = ChatRequest.model_validate({"model": "toy", "messages": HI})
    asked = prompt_of(text, kept, "ann", first)
    said = encoded(text, "other tokens<end>")
    keep_answer(kept, "ann", asked, first, answer, said)
    messages = json.loads(json.dumps([*HI, echo, *HI]))
    later = validated(ChatRequest, {"model": "toy", "messages": messages})
    transcript = [*asked.tokens.tolist(), *said]
    assert prompt_of(text, kept, "ann", later).tokens.tolist()[: len(transcript)] == transcript


@pytest.mark.parametrize("echo", [{**PLAIN, "content": "no"}, {**CALLING, "tool_calls": [changed(CALL, name="sub")]}])
def test_another_answer_has_other_tokens(tmp_path: Path, echo: dict[str, Any]) -> None:
    text, kept = ModelText("toy", write_model(tmp_path / "toy")), Transcripts()
    first = ChatRequest.model_validate({"model": "toy", "messages": HI})
    asked = prompt_of(text, kept, "ann", first)
    for answer in (PLAIN, CALLING):
        keep_answer(kept, "ann", asked, first, answer, encoded(text, "other tokens<end>"))
    later = ChatRequest.model_validate({"model": "toy", "messages": [*HI, echo, *HI]})
    assert "other" not in text.decode(prompt_of(text, kept, "ann", later).tokens.tolist())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("echoed", [0, 3])
def test_offsets_count_the_characters_of_the_text(tmp_path: Path, family: str, echoed: int) -> None:
    """Of divided characters, and of special tokens, which are not in the text."""
    write_tiny_model(tmp_path / "model", TinyShape(family=family, num_layers=1, hidden_size=16))
    text, said = ModelText("tiny", tmp_path / "model"), "naïve 漢字 🫖!\n"
    special = next(token for token in range(512) if text.is_special(token))
    tokens = encoded(text, said)
    tokens[5:5] = [special]
    prompt, drawn = tokens[:echoed], tokens[echoed:]
    shown = completion_logprobs(text, prompt, drawn, [0.0] * len(tokens), [None] * len(tokens))
    whole, before = text.decode(prompt) + text.decode(drawn), len(text.decode(prompt))
    expected = [len(text.decode(prompt[:at]).rstrip("\N{REPLACEMENT CHARACTER}")) for at in range(len(prompt))]
    expected += [before + len(text.decode(drawn[:at]).rstrip("\N{REPLACEMENT CHARACTER}")) for at in range(len(drawn))]
    assert shown["text_offset"] == expected
    assert expected[-1] < len(whole) < sum(len(text.piece(token)) for token in tokens), "pieces do not add up to it"
