"""Claude Code's requests: taken, refused by name, or answered so that it asks again for what there is."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import claude_code
import httpx
import pytest
from openai_served import CONTEXT, encoded, prompt_of, toy_model, write_model

from tinsmith.protocol.unknown_fields import validated
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_openai.answers import chat_message
from tinsmith_openai.conversations import keep_answer
from tinsmith_openai.messages.answers import content
from tinsmith_openai.messages.bodies import MessagesRequest
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import Said, ToolCall
from tinsmith_openai.transcripts import Transcripts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("claude")
    with running_server(directory / "data", models=[toy_model(directory / "toy")]) as server:
        yield server


def post(server: RunningServer, body: object, path: str = "messages") -> httpx.Response:
    url = f"{server.url}/anthropic/api/v1/{path}?beta=true"
    headers = {**claude_code.HEADERS, "authorization": "Bearer tml-ann"}
    return httpx.post(url, json=body, headers=headers, timeout=300)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("name", claude_code.TAKEN)
def test_a_request_is_answered(server: RunningServer, name: str) -> None:
    body = claude_code.TAKEN[name]
    answer = post(server, body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        assert answer.json()["stop_reason"] in {"max_tokens", "end_turn"}
        return
    found = events(answer)
    kinds = [event["type"] for event in found]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    edited = {"applied_edits": []} if "context_management" in body else None
    assert found[0]["message"].get("context_management") == edited


@pytest.mark.parametrize("name", claude_code.REFUSED)
def test_what_cannot_be_done_is_refused_by_name(server: RunningServer, name: str) -> None:
    body, named = claude_code.REFUSED[name]
    answer = post(server, body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert named in answer.json()["error"]["message"]


def test_an_answer_that_has_no_room_is_asked_for_again_with_fewer_tokens(server: RunningServer) -> None:
    refused = post(server, claude_code.MAIN)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    numbers = re.search(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", message)
    assert numbers is not None
    prompt, asked, window = map(int, numbers.groups())
    assert (asked, window) == (32000, CONTEXT)
    counted = {name: claude_code.MAIN[name] for name in claude_code.MAIN.keys() - {"max_tokens", "metadata", "stream"}}
    assert post(server, counted, "messages/count_tokens").json() == {"input_tokens": prompt}
    assert post(server, {**claude_code.MAIN, "max_tokens": window - prompt, "stop_sequences": ["a"]}).status_code == 200


def test_a_turn_with_thoughts_and_calls_comes_back_with_its_tokens(tmp_path: Path) -> None:
    text, kept = ModelText("toy", write_model(tmp_path / "toy")), Transcripts()
    chat = validated(MessagesRequest, json.loads(json.dumps(claude_code.MAIN))).chat()
    asked = prompt_of(text, kept, "ann", chat)
    calls = [
        ToolCall(id="toolu_1", name="Bash", arguments='{"command": "ls"}'),
        ToolCall(id="toolu_2", name="Read", arguments="{}"),
    ]
    said = Said(content="let me look", reasoning="ls does it", calls=calls)
    sampled = encoded(text, "other tokens<end>")
    keep_answer(kept, "ann", asked, chat, chat_message(said), sampled)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]
    cached = [{**block, **claude_code.CACHED} for block in content(said) if isinstance(block, dict)]
    turns = [{"role": "assistant", "content": cached}, {"role": "user", "content": results}]
    more = {**claude_code.MAIN, "messages": [*claude_code.MAIN["messages"], *turns]}
    later = validated(MessagesRequest, json.loads(json.dumps(more))).chat()
    transcript = [*asked.tokens.tolist(), *sampled]
    assert prompt_of(text, kept, "ann", later).tokens.tolist()[: len(transcript)] == transcript
