"""Endpoints for clients of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx

from tinsmith_conformance.data import TOKENS, learned
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Tester
from tinsmith_conformance.verdicts import expect, skip

GROUP: Final = Group("endpoints", "Endpoints for clients of OpenAI's API, where the server has them.")

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
    """`n` gives so many choices, with their numbers.

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
    expect(answer.status_code in (400, 404), f"status {answer.status_code}")
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
