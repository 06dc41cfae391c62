"""Anthropic's endpoints with its own client, beside the SDK, on one server of a toy model."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import tinker
from openai_served import END, checkpoint, encoded, prompt_of, tokens_of, toy_model, train_to_say, write_model
from starlette.requests import ClientDisconnect

from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_openai.answers import chat_message
from tinsmith_openai.conversations import keep_answer
from tinsmith_openai.growing_text import GrowingText
from tinsmith_openai.live_answers import Listener, LiveAnswer
from tinsmith_openai.messages.answers import MessageEvents, content, events_of
from tinsmith_openai.messages.bodies import MessagesRequest
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import Said, ToolCall
from tinsmith_openai.transcripts import Transcripts

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what the SDK leaves open is its business

HI: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
HI_TOKENS = [*tokens_of("[user] hi"), END, *tokens_of("[assistant] ")]
GREEDY = {"temperature": 0, "return_token_ids": True}
TOOL: anthropic.types.ToolParam = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("anthropic")
    with running_server(directory / "data", models=[toy_model(directory / "toy")]) as server:
        yield server


@pytest.fixture(scope="module")
def service(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
    yield service
    service.close("success").result()


@pytest.fixture(scope="module")
def paths(service: tinker.ServiceClient) -> list[str]:
    """Two checkpoints of one run, which say different things."""
    training = service.create_lora_training_client(base_model="toy", rank=8, seed=1).result()
    said = ("[user] hi<[assistant] kkkkkk", "[user] hi<[assistant] mmmmmm")
    return [checkpoint(train_to_say(service, text, client=training, steps=8), text[-1]) for text in said]


def client(server: RunningServer, key: str = "tml-ann") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key=key, max_retries=0)


@pytest.fixture
def ann(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client(server) as ann:
        yield ann


def sdk_tokens(service: tinker.ServiceClient, path: str | None, **params: object) -> list[int]:
    sampler = service.create_sampling_client(model_path=path, base_model=None if path else "toy").result()
    prompt = tinker.ModelInput.from_ints(HI_TOKENS)
    (sequence,) = sampler.sample(prompt, 1, tinker.SamplingParams(**params)).result().sequences
    return list(sequence.tokens)


def test_messages_have_the_tokens_of_the_sdks_samples(
    ann: anthropic.Anthropic, service: tinker.ServiceClient, paths: list[str]
) -> None:
    """Two checkpoints of one run, by both kinds of names, and the base model: each with its own tokens."""
    seen = []
    for path, form in itertools.product((*paths, None), ("{}", "toy;{}")):
        model = "toy" if path is None else form.format(path)
        got = ann.messages.create(model=model, messages=HI, max_tokens=6, extra_body=GREEDY)
        more = got.model_extra or {}
        assert more["prompt_token_ids"] == HI_TOKENS
        assert more["token_ids"] == sdk_tokens(service, path, max_tokens=6, temperature=0)
        cached = got.usage.cache_read_input_tokens or 0
        assert (got.usage.input_tokens + cached, got.usage.output_tokens) == (len(HI_TOKENS), len(more["token_ids"]))
        seen.append(tuple(more["token_ids"]))
    assert len(set(seen)) == 3
    drawn = {"seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 20}
    got = ann.messages.create(model=paths[0], messages=HI, max_tokens=6, extra_body={**drawn, "return_token_ids": True})
    assert (got.model_extra or {})["token_ids"] == sdk_tokens(service, paths[0], max_tokens=6, **drawn)


def test_a_prompt_is_that_of_the_template_and_is_counted(ann: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "toy",
        "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL],
        "messages": [
            *HI,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "so"},
                ],
            },
        ],
    }
    got = ann.messages.create(**asked, max_tokens=1, extra_body=GREEDY)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    turns = ["tool add; [system] be", "[user] hi", f"[assistant] {call}", "[tool] 2", "[user] so"]
    expected = [token for turn in turns for token in (*tokens_of(turn), END)]
    assert (got.model_extra or {})["prompt_token_ids"] == [*expected, *tokens_of("[assistant] ")]
    assert ann.messages.count_tokens(**asked).input_tokens == len(expected) + len("[assistant] ")


def test_blocks_may_come_back_with_their_nulls(ann: anthropic.Anthropic) -> None:
    """As `model_dump()` of an answer writes them."""

    def counted(block: dict[str, Any], result: dict[str, Any]) -> int:
        call = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}, **block}
        back: Any = {"type": "tool_result", "tool_use_id": "t", "content": "2", **result}
        turns: Any = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [back]}]
        return ann.messages.count_tokens(model="toy", messages=turns, tools=[TOOL]).input_tokens

    assert counted({"caller": None}, {"is_error": None}) == counted({}, {})


@pytest.mark.parametrize(
    ("stops", "reason", "text"), [([], "max_tokens", "kkkkkk"), (["zz", "kkk"], "stop_sequence", "")]
)
def test_a_stream_says_what_a_message_says(
    ann: anthropic.Anthropic, paths: list[str], stops: list[str], reason: str, text: str
) -> None:
    asked: dict[str, Any] = {
        "model": paths[0],
        "messages": HI,
        "max_tokens": 6,
        "stop_sequences": stops,
        "extra_body": {"temperature": 0},
    }
    whole = ann.messages.create(**asked)
    assert (whole.stop_reason, whole.stop_sequence) == (reason, "kkk" if stops else None)
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    with ann.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.model_dump(exclude={"id", "usage"}) == whole.model_dump(exclude={"id", "usage"})
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_call_of_a_tool_is_a_block_and_comes_whole() -> None:
    call = ToolCall(name="add", arguments='{"a": 1}', id="call_1")
    blocks = content(Said(content="so", reasoning="well", calls=[call]))
    assert blocks == [
        {"type": "thinking", "thinking": "well", "signature": ""},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": call.id, "name": "add", "input": {"a": 1}},
    ]
    start = {"id": "msg_1", "content": [], "usage": {}}
    whole = {**start, "content": blocks, "stop_reason": "tool_use", "stop_sequence": None}
    events = [json.loads(event.partition("data: ")[2]) for event in events_of(start, whole)]
    assert [event["delta"] for event in events if event["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "well"},
        {"type": "text_delta", "text": "so"},
        {"type": "input_json_delta", "partial_json": '{"a": 1}'},
    ]
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("change", "status", "match"),
    [
        (
            {"thinking": {"type": "sometimes"}},
            400,
            "thinking.type: Input should be 'enabled', 'adaptive' or 'disabled'",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, 400, "disable_parallel_tool_use"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "image"),
        ({"messages": [*HI, {"role": "assistant", "content": "The answer is"}]}, 400, "continuing it is not offered"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "at least 1 item"),
        ({"model": "other"}, 404, "other"),
        ({"model": "tinker://no path"}, 404, "no path"),
    ],
)
def test_what_is_not_offered_is_refused_in_anthropics_form(
    server: RunningServer, change: dict[str, object], status: int, match: str
) -> None:
    answer = post(server, {"model": "toy", "messages": HI, "max_tokens": 1, **change})
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert re.search(match, answer.json()["error"]["message"])


def post(server: RunningServer, body: object, **headers: str) -> httpx.Response:
    url = f"{server.url}/anthropic/api/v1/messages"
    return httpx.post(url, json=body, headers={"x-api-key": "tml-ann", **headers}, timeout=300)


def test_thinking_may_be_switched_off(ann: anthropic.Anthropic) -> None:
    got = ann.messages.create(model="toy", messages=HI, max_tokens=1, thinking={"type": "disabled"}, extra_body=GREEDY)
    assert (got.model_extra or {})["prompt_token_ids"] == HI_TOKENS


def test_a_version_that_is_not_offered_is_refused(server: RunningServer) -> None:
    body = {"model": "toy", "messages": HI, "max_tokens": 1}
    refused = post(server, body, **{"anthropic-version": "2019-01-01"})
    assert (refused.status_code, "2023-06-01" in refused.text) == (400, True)
    assert post(server, body, **{"anthropic-version": "2023-06-01"}).status_code == 200


def test_keys_are_taken_from_either_header_and_open_only_their_own(server: RunningServer, paths: list[str]) -> None:
    absent = re.sub("[0-9a-f]{32}", "0" * 32, paths[0])
    with anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", auth_token="tml-ann", max_retries=0) as bearer:
        assert bearer.messages.create(model=paths[0], messages=HI, max_tokens=1).content
    with client(server, "not a key") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="toy", messages=HI, max_tokens=1)
    with client(server, "tml-bob") as bob:
        told = []
        for path in (paths[0], absent):
            for ask in (lambda **asked: bob.messages.create(**asked, max_tokens=1), bob.messages.count_tokens):
                with pytest.raises(anthropic.NotFoundError) as refused:
                    ask(model=path, messages=HI)
                told.append(str(refused.value).replace(path, "it"))
    assert told[:2] == told[2:], "nothing tells one from the other"


def test_a_message_that_is_sent_back_has_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    """With a call of a tool, whose arguments come back as other text."""
    text, kept = ModelText("toy", write_model(tmp_path / "toy")), Transcripts()

    def request(*more: dict[str, object]) -> MessagesRequest:
        asked = {"model": "toy", "max_tokens": 9, "tools": [TOOL], "messages": [*HI, *more]}
        return MessagesRequest.model_validate(json.loads(json.dumps(asked)))

    chat = request().chat()
    asked = prompt_of(text, kept, "ann", chat)
    said = encoded(text, '<tool_call>{"arguments":{"b":2.0,"a":1},   "name":"add"}</tool_call><end>')
    answer = asked.reading.read(0, text.decode(said))
    keep_answer(kept, "ann", asked, chat, chat_message(answer), said)
    result = {"type": "tool_result", "tool_use_id": answer.calls[0].id, "content": "ok"}
    later = request({"role": "assistant", "content": content(answer)}, {"role": "user", "content": [result]}).chat()
    transcript = [*asked.tokens.tolist(), *said]
    assert prompt_of(text, kept, "ann", later).tokens.tolist()[: len(transcript)] == transcript
    assert prompt_of(text, kept, "bob", later).tokens.tolist()[: len(transcript)] != transcript


class BrokenText(GrowingText):
    def add(self, tokens: object) -> str:
        raise ValueError("the decoder failed")


def live(tmp_path: Path, drawing: "asyncio.Future[None]", text: type[GrowingText]) -> LiveAnswer[dict[str, Any]]:
    model = ModelText("toy", write_model(tmp_path / "toy"))

    async def answer(listener: Listener) -> dict[str, Any]:
        listener.hear(0, tokens_of("ab"))
        await drawing
        return {}

    return LiveAnswer(MessageEvents({}), answer, lambda: text(model, ()))


class Waiting:
    """A request whose client stays."""

    async def receive(self) -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError


def test_whatever_fails_in_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async def events() -> Sequence[str]:
        response: Any = await live(tmp_path, asyncio.Future(), BrokenText).response(Waiting())  # type: ignore[arg-type]
        return [str(event) async for event in response.body_iterator]

    *_, last = asyncio.run(events())
    assert last.startswith("event: error\n")
    assert "the decoder failed" not in last, "the log has it"


def test_a_stream_that_cannot_begin_ends_its_drawing(tmp_path: Path) -> None:
    async def cancelled_after_a_lost_client() -> bool:
        drawing: asyncio.Future[None] = asyncio.Future()
        response = await live(tmp_path, drawing, GrowingText).response(Waiting())  # type: ignore[arg-type]

        async def lost(*_: object) -> Any:
            raise OSError

        with pytest.raises(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, lost, lost)
        for _ in range(3):  # the cancellation goes from task to task
            await asyncio.sleep(0)
        return drawing.cancelled()

    assert asyncio.run(cancelled_after_a_lost_client())
