"""Too long a conversation, in the words that agents look for. Their own code says the same where it is installed."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from client_phrases import ANTHROPIC, OPENAI, TOO_LONG, Looks
from openai_served import CONTEXT, toy_model

from tinsmith.testing.harness import RunningServer, running_server

KEY = "tml-ann"
LONG = "a" * CONTEXT
ROUTES = {
    "/v1/chat/completions": (OPENAI, {"messages": [{"role": "user", "content": LONG}]}),
    "/oai/api/v1/chat/completions": (OPENAI, {"messages": [{"role": "user", "content": LONG}]}),
    "/v1/completions": (OPENAI, {"prompt": LONG}),
    "/anthropic/api/v1/messages": (ANTHROPIC, {"messages": [{"role": "user", "content": LONG}]}),
}
SHORT = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
KINDS: dict[str, dict[str, Any]] = {"prompt": {"max_tokens": 8}, "answer": {"max_tokens": CONTEXT}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("long")
    with running_server(directory / "data", models=[toy_model(directory / "toy")]) as server:
        yield server


@pytest.fixture(scope="module")
def errors(server: RunningServer) -> dict[tuple[str, str, bool], httpx.Response]:
    """By route, by whether the prompt alone is too long, and by whether a stream was asked for."""
    headers = {"authorization": f"Bearer {KEY}"}
    found = {}
    for route, (_form, asked) in ROUTES.items():
        for kind, more in KINDS.items():
            for stream in (False, True):
                said = asked if kind == "prompt" else {name: SHORT[name] for name in asked}
                body = {"model": "toy", "stream": stream, **said, **more}
                found[route, kind, stream] = httpx.post(server.url + route, json=body, headers=headers, timeout=300)
    return found


@pytest.mark.parametrize("looks", TOO_LONG, ids=lambda looks: looks.program)
def test_each_program_finds_what_it_looks_for(
    errors: dict[tuple[str, str, bool], httpx.Response], looks: Looks
) -> None:
    for (route, kind, stream), answer in errors.items():
        if ROUTES[route][0] == looks.form and kind in looks.kinds:
            assert answer.status_code == 400
            assert looks.finds(answer.json()["error"]), (route, kind, stream, answer.text)


def test_the_clients_of_both_apis_have_the_code_and_the_words(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as ann:
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT} tokens") as refused:
            ann.chat.completions.create(model="toy", messages=[{"role": "user", "content": LONG}])
        assert (refused.value.code, refused.value.type) == ("context_length_exceeded", "invalid_request_error")
    with (
        anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key=KEY, max_retries=0) as bob,
        pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {CONTEXT - 1} maximum"),
    ):
        bob.messages.create(model="toy", messages=[{"role": "user", "content": LONG}], max_tokens=1)


def test_the_length_of_the_context_is_listed(server: RunningServer) -> None:
    """Agents shorten a conversation before it is too long, if they know it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as ann:
        assert [model.model_extra for model in ann.models.list()] == [{"max_model_len": CONTEXT}]


def test_the_numbers_leave_room_for_the_answer(errors: dict[tuple[str, str, bool], httpx.Response]) -> None:
    text = errors["/v1/completions", "answer", False].json()["error"]["message"]
    assert f"2 + {CONTEXT} > {CONTEXT}" in text
    assert f"lower max_tokens to {CONTEXT - 2}" in text
