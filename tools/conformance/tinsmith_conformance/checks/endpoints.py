"""Endpoints for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx

from tinsmith_conformance.data import TOKENS, learned
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Tester
from tinsmith_conformance.verdicts import expect, skip

GROUP: Final = Group("endpoints", "Endpoints for clients of OpenAI's and Anthropic's APIs, where the server has them.")

_PREFIXES: Final = ("oai/api/v1", "v1")


class _OpenAI:
    """Calls as OpenAI's client makes them."""

    def __init__(self, t: Tester) -> None:
        headers = {"Authorization": f"Bearer {t.key}"}
        for prefix in _PREFIXES:
            self.http = httpx.Client(base_url=f"{t.target.url}/{prefix}/", headers=headers, timeout=60)
            if self.http.get("models").status_code != 404:
                return
        skip("the server has no endpoints of OpenAI's API")

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        expect(answer.is_success, f"{path}: status {answer.status_code}, {answer.text[:300]}")
        return answer.json()

    def complete(self, model: str, **body: Any) -> Any:
        whole = {"prompt": list(TOKENS), "max_tokens": 4, "temperature": 0, "return_token_ids": True, **body}
        return self.post("completions", model=model, **whole)

    def chat(self, model: str, **body: Any) -> Any:
        whole = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1, **body}
        return self.post("chat/completions", model=model, **whole)


@GROUP.check
def models(t: Tester) -> None:
    """The list of models holds the model under test.

    Clients that offer a choice show nothing.
    """
    found = [each["id"] for each in _OpenAI(t).http.get("models").json()["data"]]
    expect(t.target.model in found, f"they are {found[:10]}")


@GROUP.check
def completions(t: Tester) -> None:
    """A completion has text, a reason for its end, and usage.

    OpenAI's clients cannot complete text.
    """
    answer = _OpenAI(t).complete(t.target.model)
    expect(answer["object"] == "text_completion", f"object is {answer['object']}")
    choice = answer["choices"][0]
    expect(isinstance(choice["text"], str) and choice["finish_reason"] in ("stop", "length"), f"it is {choice}")
    expect(answer["usage"]["prompt_tokens"] == len(TOKENS), f"usage is {answer['usage']}")


@GROUP.check
def chats(t: Tester) -> None:
    """A chat answers as an assistant.

    OpenAI's clients cannot chat.
    """
    message = _OpenAI(t).chat(t.target.model)["choices"][0]["message"]
    expect(message["role"] == "assistant", f"it is {message}")


@GROUP.check
def counted_choices(t: Tester) -> None:
    """`n` gives n choices, with their numbers.

    Evaluations with several tries have one.
    """
    indices = [each["index"] for each in _OpenAI(t).complete(t.target.model, n=3, temperature=1)["choices"]]
    expect(indices == [0, 1, 2], f"they are {indices}")


@GROUP.check
def adapters_are_applied(t: Tester) -> None:
    """A completion of a saved snapshot comes from its adapter, not from the base model.

    A trained adapter is served as the base model.
    """
    openai, model = _OpenAI(t), t.model()
    before = openai.complete(t.target.model, logprobs=1)["choices"][0]
    for _ in range(3):
        model.step([learned()], learning_rate=0.1)
    after = openai.complete(model.save_for_sampling(), logprobs=1)["choices"][0]
    expect(before["logprobs"]["token_logprobs"] != after["logprobs"]["token_logprobs"], "both score the same")


@GROUP.check
def each_its_own(t: Tester) -> None:
    """Two snapshots of one run are served each with its own weights.

    All checkpoints of a run are served as the first one loaded.
    """
    openai, model = _OpenAI(t), t.model()
    scores = []
    for number in range(2):
        model.step([learned()], learning_rate=0.1)
        answer = openai.complete(model.save_for_sampling(f"at-{number}"), logprobs=1)
        scores.append(answer["choices"][0]["logprobs"]["token_logprobs"])
    expect(scores[0] != scores[1], "both score the same")


@GROUP.check
def same_as_sampling(t: Tester) -> None:
    """A greedy completion has the tokens of a greedy sample.

    The endpoints serve another model than the SDK samples.
    """
    choice = _OpenAI(t).complete(t.target.model)["choices"][0]
    if "token_ids" not in choice:
        skip("the server returns no token ids")
    wanted = t.sampler().draw(max_tokens=4, temperature=0)[0]
    found = choice["token_ids"]
    expect(found == wanted[: len(found)], f"{found}, and {wanted}")


@GROUP.check
def seeds(t: Tester) -> None:
    """One seed gives the same chat again.

    Evaluations cannot be repeated.
    """
    openai = _OpenAI(t)
    first, again = (openai.chat(t.target.model, seed=5)["choices"][0]["message"]["content"] for _ in range(2))
    expect(first == again, f"'{first}', then '{again}'")


@GROUP.check
def streams(t: Tester) -> None:
    """A streamed chat comes as events, which end with [DONE] and add up to the whole.

    Chat windows stay empty.
    """
    openai = _OpenAI(t)
    whole = openai.chat(t.target.model, seed=2)["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 2, "stream": True}
    answer = openai.http.post("chat/completions", json={"model": t.target.model, **body})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    expect(lines and lines[-1] == "[DONE]", f"the stream ends with {lines[-1:]}")
    pieces = [each for line in lines[:-1] for each in json.loads(line)["choices"]]
    text = "".join(each["delta"].get("content") or "" for each in pieces)
    expect(text == (whole or ""), f"'{text}' streamed, and '{whole}' whole")


@GROUP.check
def unknown_models(t: Tester) -> None:
    """A model that is not there gets a 404, in the form of OpenAI's errors.

    Clients show no reason.
    """
    body = {"model": "no-such/model", "prompt": "hi", "max_tokens": 1}
    answer = _OpenAI(t).http.post("completions", json=body)
    expect(answer.status_code == 404, f"status {answer.status_code}")
    expect("message" in answer.json().get("error", {}), f"the body is {answer.text[:200]}")


@GROUP.check
def no_key(t: Tester) -> None:
    """A call of these endpoints without a key gets a 401.

    Anybody in the network uses the server.
    """
    openai = _OpenAI(t)
    status = httpx.get(f"{openai.http.base_url}models", timeout=30).status_code
    expect(status in (401, 403), f"status {status}")


@GROUP.check
def unknown_fields(t: Tester) -> None:
    """A field that means nothing to the server is refused.

    Settings that users rely on are ignored without a word.
    """
    body = {"model": t.target.model, "prompt": "hi", "max_tokens": 1, "no_such_field": 1}
    status = _OpenAI(t).http.post("completions", json=body).status_code
    expect(status in (400, 422), f"status {status}")


class _Anthropic:
    """Calls as Anthropic's client makes them."""

    def __init__(self, t: Tester) -> None:
        headers = {"x-api-key": t.key, "anthropic-version": "2023-06-01"}
        self.http = httpx.Client(base_url=f"{t.target.url}/anthropic/api/v1/", headers=headers, timeout=60)
        if self.http.post("messages/count_tokens", json={}).status_code in (404, 405):
            skip("the server has no endpoints of Anthropic's API")

    def send(self, model: str, path: str = "messages", **body: Any) -> httpx.Response:
        whole = {"model": model, "messages": [{"role": "user", "content": "hi"}], **body}
        return self.http.post(path, json=whole if path.endswith("count_tokens") else {"max_tokens": 4, **whole})

    def answer(self, model: str, path: str = "messages", **body: Any) -> Any:
        answer = self.send(model, path, **body)
        expect(answer.is_success, f"{path}: status {answer.status_code}, {answer.text[:300]}")
        return answer.json()

    def refused(self, allowed: tuple[int, ...], model: str, **body: Any) -> str:
        answer = self.send(model, **body)
        expect(
            answer.status_code in allowed, f"it must be refused by {allowed}: {answer.status_code}, {answer.text[:300]}"
        )
        error = answer.json()
        expect(error.get("type") == "error" and {"type", "message"} <= set(error["error"]), f"the error is {error}")
        return str(error["error"]["message"])


@GROUP.check
def messages(t: Tester) -> None:
    """A message answers as an assistant, with a reason for its end, and usage that the count of tokens tells before.

    Anthropic's clients cannot chat, or count what a request will cost as something else.
    """
    anthropic = _Anthropic(t)
    answer = anthropic.answer(t.target.model)
    expect((answer["type"], answer["role"]) == ("message", "assistant"), f"it is {answer}")
    expect(answer["stop_reason"] in ("end_turn", "max_tokens"), f"stop_reason is {answer['stop_reason']}")
    counted = anthropic.answer(t.target.model, "messages/count_tokens")["input_tokens"]
    expect(answer["usage"]["input_tokens"] == counted, f"{answer['usage']}, and {counted} were counted")


@GROUP.check
def adapters_answer_messages(t: Tester) -> None:
    """A message to a saved snapshot is answered by its adapter, as a chat of OpenAI's API is.

    A trained adapter is served as the base model on one of the two.
    """
    openai, anthropic, model = _OpenAI(t), _Anthropic(t), t.model()
    for _ in range(3):
        model.step([learned()], learning_rate=0.1)
    path = model.save_for_sampling()
    one, other = (
        openai.chat(path, temperature=0)["choices"][0]["message"]["content"],
        "".join(each["text"] for each in anthropic.answer(path, temperature=0)["content"]),
    )
    expect(one == other, f"'{one}', and '{other}'")


@GROUP.check
def streams_of_messages(t: Tester) -> None:
    """A streamed message has the events of Anthropic's API in their order, and the text of one that is not streamed.

    Clients that stream raise, or show another text.
    """
    anthropic = _Anthropic(t)
    whole = anthropic.answer(t.target.model, temperature=0)
    lines = anthropic.send(t.target.model, temperature=0, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
    kinds = [each["type"] for each in events if each["type"] != "ping"]
    expect(kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], f"they are {kinds}")
    text = "".join(each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta")
    expect(text == "".join(each["text"] for each in whole["content"]), f"'{text}', and {whole['content']}")


@GROUP.check
def refused_messages(t: Tester) -> None:
    """What messages refuse is refused in the form of Anthropic's errors, and named.

    Clients cannot say what is wrong, or a field does nothing in silence.
    """
    anthropic = _Anthropic(t)
    anthropic.refused((404,), "no-such/model")
    words = anthropic.refused((400,), t.target.model, no_such_field=1)
    expect("no_such_field" in words, f"the refusal does not name the field: {words}")


@GROUP.check
def messages_without_a_key(t: Tester) -> None:
    """A message without a key gets a 401.

    Anybody in the network uses the server.
    """
    anthropic = _Anthropic(t)
    anthropic.http.headers.pop("x-api-key")
    anthropic.refused((401,), t.target.model)
