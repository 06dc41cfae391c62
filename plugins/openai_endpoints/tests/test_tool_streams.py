"""Calls of tools while they are drawn, and when they come back: in every form, as both APIs tell them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_served import encoded, prompt_of
from tokenizers import Tokenizer
from tool_forms import NAME, SCHEMA, WRITTEN, Arguments, byte_tokenizer, form_named, model_of

from tinsmith_openai.answers import chat_message, finished_text
from tinsmith_openai.bodies import ChatRequest
from tinsmith_openai.conversations import Conversation, keep_answer
from tinsmith_openai.growing_text import GrowingText
from tinsmith_openai.live_answers import EventForm, Listener, LiveAnswer
from tinsmith_openai.messages.answers import MessageEvents, content
from tinsmith_openai.messages.bodies import MessagesRequest
from tinsmith_openai.streams import OpenAiEvents
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import marks_of
from tinsmith_openai.transcripts import Transcripts

TOOL = {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}
ASK = {"role": "user", "content": "go"}
CALLS: list[Arguments] = [{"text": "a <b> \U0001fad6\n", "count": 3, "share": 1.5}, {}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


class Model:
    """A model of a family, and what it says: a thought with a call that it does not make, text, and two calls."""

    def __init__(self, directory: Path, case: str, tokenizer: Tokenizer) -> None:
        family, write = WRITTEN[case]
        self.form = form_named(family)
        self.text = model_of(directory, self.form, tokenizer)
        calls = write(CALLS)
        if self.form.whole is None:
            self.says = f"<think>{calls}</think>\n\n{'' if self.form.at_start else 'so'}\n{calls}"
        else:
            self.says = calls if calls.startswith(" ") else f"<|channel|>analysis<|message|>{calls[:9]}?<|end|>{calls}"

    def tokens(self, said: str) -> list[int]:
        """Return each character by itself, as no encoder would, and the end of the turn."""
        marks = sorted(marks_of(self.form, None), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", said)
        pieces = [piece for part in parts for piece in ([part] if part in marks else part)]
        return [token for piece in [*pieces, "<|stop|>"] for token in encoded(self.text, piece)]


@pytest.fixture(params=WRITTEN)
def model(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Tokenizer) -> Model:
    return Model(tmp_path / "model", request.param, tokenizer)


class Waiting:
    """A request whose client stays."""

    async def receive(self) -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError


async def events(text: ModelText, form: EventForm[Any], asked: Conversation, tokens: list[int], whole: object) -> str:
    async def answer(listener: Listener) -> Any:
        listener.reading = asked.reading
        for token in tokens:
            listener.hear(0, [token])
            await asyncio.sleep(0)
        listener.texts = [finished_text(text, tokens, (), marks=True)]
        return whole

    live = LiveAnswer(form, answer, lambda: GrowingText(text, (), marks=True))
    response: Any = await live.response(Waiting())  # type: ignore[arg-type]
    stream: AsyncIterator[str] = response.body_iterator
    return "".join([event async for event in stream])


def data(sent: str) -> Iterator[Any]:
    lines = (line.removeprefix("data: ") for line in sent.splitlines() if line.startswith("data: "))
    yield from (json.loads(line) for line in lines if line != "[DONE]")


def test_openais_deltas_add_up_to_the_message(model: Model) -> None:
    chat = ChatRequest.model_validate({"model": "tiny", "messages": [ASK], "tools": [TOOL], "stream": True})
    assert chat.streams_by_token
    asked = prompt_of(model.text, Transcripts(), "ann", chat)
    tokens = model.tokens(model.says)
    whole = asked.reading.read(0, finished_text(model.text, tokens, (), marks=True))
    assert [json.loads(call.arguments) for call in whole.calls] == CALLS
    form = OpenAiEvents({"object": "chat.completion.chunk"}, include_usage=False)
    answer = {"choices": [{"finish_reason": "tool_calls"}]}
    added: dict[str, Any] = {"role": "assistant", "content": ""}
    pieces = 0
    for chunk in data(asyncio.run(events(model.text, form, asked, tokens, answer))):
        (choice,) = chunk["choices"]
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                added[name] = added.get(name, "") + value if name != "role" else value
                continue
            (call,) = value
            calls = added.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({name: part for name, part in call.items() if name != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                pieces += 1
    assert choice["finish_reason"] == "tool_calls"
    assert {**added, "content": added["content"] or None} == chat_message(whole)
    assert pieces >= 4, "arguments come piece by piece"


def test_anthropics_blocks_add_up_to_the_message(model: Model) -> None:
    tools = [{"name": NAME, "input_schema": SCHEMA}]
    body = {"model": "tiny", "max_tokens": 9, "messages": [ASK], "tools": tools, "stream": True}
    asked = prompt_of(model.text, Transcripts(), "ann", MessagesRequest.model_validate(body).chat())
    tokens = model.tokens(model.says)
    whole = asked.reading.read(0, finished_text(model.text, tokens, (), marks=True))
    answer = {"stop_reason": "tool_use", "stop_sequence": None, "usage": {}}
    blocks: list[dict[str, Any]] = []
    for event in data(asyncio.run(events(model.text, MessageEvents({}), asked, tokens, answer))):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            kind, piece = event["delta"].values()
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
            blocks[event["index"]][name] += piece
        elif event["type"] == "content_block_stop":
            written = blocks[event["index"]].pop("json")
            if blocks[event["index"]]["type"] == "tool_use":
                blocks[event["index"]]["input"] = json.loads(written)
    assert blocks == content(whole)


@pytest.mark.parametrize("cut", ["length", "broken"])
def test_a_call_that_breaks_off_in_a_stream(tmp_path: Path, tokenizer: Tokenizer, cut: str) -> None:
    """At `max_tokens` it ends as Anthropic's do. Otherwise the client must learn that it is not what was sent."""
    model = Model(tmp_path / "model", "Hermes", tokenizer)
    chat = ChatRequest.model_validate({"model": "tiny", "messages": [ASK], "tools": [TOOL]})
    asked = prompt_of(model.text, Transcripts(), "ann", chat)
    tokens = model.tokens(f'<tool_call>{{"name": "{NAME}", "arguments": {{"text": "a')
    answer = {"stop_reason": "max_tokens" if cut == "length" else "end_turn", "stop_sequence": None, "usage": {}}
    *_, before, last = data(asyncio.run(events(model.text, MessageEvents({}), asked, tokens, answer)))
    if cut == "length":
        assert (before["type"], last["type"]) == ("message_delta", "message_stop")
    else:
        assert last["type"] == "error"
        assert NAME in last["error"]["message"]


@pytest.mark.parametrize(("turns", "length"), [(4, 2), pytest.param(1000, 10, marks=pytest.mark.thorough)])
def test_answers_that_come_back_have_the_tokens_that_were_sampled(model: Model, turns: int, length: int) -> None:
    """Clients write arguments anew, and some, here in every other conversation, leave reasoning out."""
    kept, messages = Transcripts(tenant_tokens=1 << 30), [ASK]
    transcript: list[int] = []
    tokens = model.tokens(model.says)
    for turn in range(turns):
        if turn % length == 0:
            messages, transcript = [{**ASK, "content": f"go {turn}"}], []
        body = ChatRequest.model_validate({"model": "tiny", "messages": messages, "tools": [TOOL]})
        asked = prompt_of(model.text, kept, "ann", body)
        assert asked.tokens.tolist()[: len(transcript)] == transcript
        transcript = [*asked.tokens.tolist(), *tokens]
        answer: Any = chat_message(asked.reading.read(0, finished_text(model.text, tokens, (), marks=True)))
        keep_answer(kept, "ann", asked, body, answer, tokens)
        results = []
        for call in answer["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
            results.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        if turn // length % 2:
            answer.pop("reasoning_content", None)
        messages = [*messages, answer, *results]


def test_reasoning_that_was_changed_is_not_what_was_sampled(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model, kept = Model(tmp_path / "model", "Hermes", tokenizer), Transcripts()
    body = ChatRequest.model_validate({"model": "tiny", "messages": [ASK], "tools": [TOOL]})
    asked, tokens = prompt_of(model.text, kept, "ann", body), model.tokens(model.says)
    answer = chat_message(asked.reading.read(0, finished_text(model.text, tokens, (), marks=True)))
    keep_answer(kept, "ann", asked, body, answer, tokens)
    changed = {**answer, "reasoning_content": "other thoughts"}
    later = ChatRequest.model_validate({"model": "tiny", "messages": [ASK, changed, ASK], "tools": [TOOL]})
    assert prompt_of(model.text, kept, "ann", later).known is None


def test_special_tokens_that_mark_calls_are_not_lost_in_text(model: Model) -> None:
    tokens = model.tokens(model.says)
    assert finished_text(model.text, tokens, (), marks=True) == model.says
    growing = GrowingText(model.text, (), marks=True)
    assert "".join(growing.add([token]) for token in tokens) == model.says
