"""The endpoints with OpenAI's own client, beside the SDK, on one server of a toy model."""

import hashlib
import itertools
import json
import re
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import tinker
from openai.types.chat import ChatCompletionMessageParam
from openai_served import END, Patient, PatientBackends, checkpoint, tokens_of, toy_model, train_to_say

from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_openai.streams import events_of
from tinsmith_openai.text_work import Asker

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what the SDK leaves open is its business

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
HI_TOKENS = [*tokens_of("[user] hi"), END, *tokens_of("[assistant] ")]
IDS = {"return_token_ids": True}
NEUTRAL = {
    "model": "toy",
    "prompt": "a",
    "max_tokens": 1,
    "best_of": 1,
    "repetition_penalty": 1,
    "top_k": 0,
    "min_p": 0,
    "service_tier": "auto",
    "skip_special_tokens": True,
    "seed": -1,
}
"""What says nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("openai")
    with running_server(directory / "data", models=[toy_model(directory / "toy")]) as server:
        yield server


@pytest.fixture(scope="module")
def service(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
    yield service
    service.close("success").result()


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return train_to_say(service, "abcabcabcabc")


@pytest.fixture(scope="module")
def path(trained: tinker.TrainingClient) -> str:
    return checkpoint(trained, "abc")


def client(server: RunningServer, key: str = "tml-ann", *, prefix: str = "/v1") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + prefix, api_key=key, max_retries=0)


def tenant_of(key: str) -> str:
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12]


@pytest.fixture
def ann(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client(server) as ann:
        yield ann


def sampled_by_sdk(
    service: tinker.ServiceClient, path: str | None, text: str, **params: object
) -> tinker.SampleResponse:
    sampler = service.create_sampling_client(model_path=path, base_model=None if path else "toy").result()
    prompt = tinker.ModelInput.from_ints(tokens_of(text))
    return sampler.sample(prompt, 2, tinker.SamplingParams(**params), topk_sample_logprobs=3).result()


@pytest.mark.parametrize("prefix", ["/v1", "/oai/api/v1"])
@pytest.mark.parametrize("name", ["toy", "{path}", "toy;{path}"])
def test_a_completion_has_the_tokens_and_logprobs_of_the_sdks_sample(
    server: RunningServer, service: tinker.ServiceClient, path: str, name: str, prefix: str
) -> None:
    model = name.format(path=path)
    expected = sampled_by_sdk(service, None if model == "toy" else path, "ab", seed=7, max_tokens=6, temperature=0.8)
    with client(server, prefix=prefix) as ann:
        got = ann.completions.create(
            model=model, prompt="ab", n=2, seed=7, max_tokens=6, temperature=0.8, logprobs=3, extra_body=IDS
        )
    for choice, sequence in zip(got.choices, expected.sequences, strict=True):
        assert choice.model_extra == {"prompt_token_ids": tokens_of("ab"), "token_ids": list(sequence.tokens)}
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(sequence.logprobs, abs=1e-6)
        assert [max(row.values()) for row in choice.logprobs.top_logprobs or ()] == pytest.approx(
            [row[0][1] for row in sequence.topk_logprobs or ()]
        )
        assert choice.finish_reason == sequence.stop_reason
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (
        2,
        sum(map(len, (s.tokens for s in expected.sequences))),
    )


def test_a_chat_goes_through_the_models_template(ann: openai.OpenAI, path: str) -> None:
    got = ann.chat.completions.create(
        model=path,
        messages=[*HI, {"role": "assistant", "content": "ab"}, *HI],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=IDS,
    )
    assert got.model_extra is not None
    expected = [*tokens_of("[user] hi"), END, *tokens_of("[assistant] ab"), END, *tokens_of("[user] hi"), END]
    assert got.model_extra["prompt_token_ids"] == [*expected, *tokens_of("[assistant] ")]
    (choice,) = got.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert tokens_of("".join(each.token for each in content)) == (choice.model_extra or {})["token_ids"]
    assert all(each.top_logprobs[0].logprob == each.logprob for each in content), "greedy"


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_says_what_an_answer_says(ann: openai.OpenAI, path: str, include_usage: bool) -> None:
    options = {"include_usage": include_usage}
    asked = {"model": path, "n": 2, "seed": 3, "max_tokens": 5}
    chat = ann.chat.completions.create(**asked, messages=HI)
    chunks = list(ann.chat.completions.create(**asked, messages=HI, stream=True, stream_options=options))
    parts = [choice for chunk in chunks for choice in chunk.choices]
    for choice in chat.choices:
        own = [part for part in parts if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert own[0].delta.role == "assistant"
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        assert own[-1].finish_reason
    assert [chunk.usage for chunk in chunks if chunk.usage is not None] == ([chat.usage] if include_usage else [])
    text = ann.completions.create(**asked, prompt="ab")
    pieces = [choice for piece in ann.completions.create(**asked, prompt="ab", stream=True) for choice in piece.choices]
    for choice in text.choices:
        own_pieces = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own_pieces) == choice.text
        assert own_pieces[-1].finish_reason == choice.finish_reason
    whole = list(ann.completions.create(**asked, prompt="ab", stream=True, logprobs=2))
    assert [choice for piece in whole for choice in piece.choices] == (
        ann.completions.create(**asked, prompt="ab", logprobs=2).choices
    ), "what needs whole choices"
    with pytest.raises(openai.NotFoundError):
        ann.completions.create(model=f"{path}-absent", prompt="ab", stream=True)


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": None}, {"role": "tool"}, {"role": "assistant", "tool_calls": []}]
)
def test_a_message_that_says_nothing_is_refused(ann: openai.OpenAI, message: ChatCompletionMessageParam) -> None:
    with pytest.raises(openai.BadRequestError, match="content is missing"):
        ann.chat.completions.create(model="toy", messages=[message])


def test_a_message_may_say_that_it_is_text(ann: openai.OpenAI) -> None:
    """lm-eval says so. Nothing is answered otherwise."""
    plain, typed = (
        ann.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "hi", **more}],  # type: ignore[list-item]
            max_tokens=1,
            temperature=0,
            extra_body=IDS,
        )
        for more in ({}, {"type": "text"})
    )
    assert (typed.model_extra or {})["prompt_token_ids"] == (plain.model_extra or {})["prompt_token_ids"] == HI_TOKENS


def test_a_role_that_no_template_knows_is_refused(ann: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'uer'"):
        ann.chat.completions.create(model="toy", messages=[{"role": "uer", "content": "hi"}])  # type: ignore[list-item]


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("patient")
    model = toy_model(directory / "toy", plugin="patient")
    with running_server(directory / "data", models=[model], extra_plugins=[PatientBackends()]) as server:
        yield server
        Patient.may_end.set()  # or the engine could not stop


def test_tokens_come_while_others_are_drawn(patient: RunningServer) -> None:
    """Of two sequences, three tokens each before the sampler may go on, and a stop string that they may begin."""
    Patient.may_end.clear()
    asked = {"model": "toy", "prompt": "ab", "n": 2, "seed": 3, "max_tokens": 9}
    with client(patient) as ann:
        stream = ann.completions.create(**asked, stream=True, timeout=300)
        texts = {0: "", 1: ""}
        while min(map(len, texts.values())) < 3:
            (choice,) = next(stream).choices
            texts[choice.index] += choice.text
        assert all(len(text) == 3 for text in texts.values())
        Patient.may_end.set()
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        whole = ann.completions.create(**asked)
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def test_a_stream_that_fails_ends_with_the_error(patient: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    Patient.may_end.clear()
    monkeypatch.setattr(Patient, "fails", True)
    with client(patient) as ann:
        stream = ann.chat.completions.create(model="toy", messages=HI, max_tokens=9, stream=True, timeout=300)
        assert next(stream).choices[0].delta.role == "assistant"
        Patient.may_end.set()
        with pytest.raises(openai.APIError, match="lost on the way"):
            list(stream)


def test_a_client_that_leaves_a_stream_cancels_its_sample(patient: RunningServer) -> None:
    Patient.may_end.clear()
    with client(patient, "tml-leaving") as leaving:
        stream = leaving.completions.create(model="toy", prompt="ab", max_tokens=9, stream=True, timeout=300)
        next(stream)
        stream.close()
    while any(each.tenant == tenant_of("tml-leaving") for each in patient.call(patient.store.list_pending())):
        time.sleep(0.01)
    assert Patient.cancelled.wait(300), "the sampler draws no further"
    Patient.may_end.set()  # ends its thread


def test_a_call_of_a_tool_is_streamed_whole() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    answer = {"object": "chat.completion", "choices": [choice], "usage": {}}
    said, ended, done = events_of(answer, Asker(), include_usage=False)
    chunk = json.loads(said.removeprefix("data: "))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"][0]["delta"] == {**message, "tool_calls": [{"index": 0, **call}]}
    assert json.loads(ended.removeprefix("data: "))["choices"][0]["finish_reason"] == "tool_calls"
    assert done == "data: [DONE]\n\n"


@pytest.mark.parametrize("seed", [None, -1])
def test_a_group_without_a_seed_is_not_one_answer(ann: openai.OpenAI, seed: int | None) -> None:
    """Six requests had one answer, and so no advantage to learn from."""
    asked = {"model": "toy", "prompt": "ab", "max_tokens": 6, "extra_body": IDS}
    texts = {ann.completions.create(**asked, seed=seed).choices[0].text for _ in range(6)}
    assert len(texts) == 6
    chats = [ann.chat.completions.create(model="toy", messages=HI, max_tokens=6, seed=seed) for _ in range(6)]
    assert len({chat.choices[0].message.content for chat in chats}) == 6


def test_answers_of_one_request_differ_and_of_one_seed_do_not(ann: openai.OpenAI) -> None:
    asked = {"model": "toy", "prompt": ["ab", "ab"], "max_tokens": 6, "seed": 7, "n": 3}
    texts, again = ([each.text for each in ann.completions.create(**asked).choices] for _ in range(2))
    assert len(set(texts)) == 6, "by prompt and by number"
    assert texts == again


def test_prompts_are_scored_without_drawing(ann: openai.OpenAI, service: tinker.ServiceClient, path: str) -> None:
    prompts = ["abcab", "ccc"]
    got = ann.completions.create(model=path, prompt=prompts, max_tokens=0, logprobs=1, echo=True)
    sampler = service.create_sampling_client(model_path=path).result()
    for choice, prompt in zip(got.choices, prompts, strict=True):
        expected = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens_of(prompt))).result()
        assert (choice.text, choice.logprobs and choice.logprobs.tokens) == (prompt, [*prompt])
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-6)


def test_a_stop_string_ends_a_text_and_is_not_part_of_it(ann: openai.OpenAI, path: str) -> None:
    got = ann.completions.create(
        model=path, prompt="ab", temperature=0, max_tokens=8, stop=["bc", "zz"], extra_body=IDS
    )
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason) == ("ca", "stop")
    assert (choice.model_extra or {})["token_ids"] == tokens_of("cabc"), "all that was sampled"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"model": "toy", "prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"model": "toy", "prompt": "a", "suffix": "b"}, 400, "suffix"),
        ({"model": "toy", "prompt": "a", "best_of": None, "logit_bias": {}, "max_tokens": 1}, 200, None),
        ({"model": "toy", "prompt": "a", "n": "many"}, 400, "n"),
        ({"model": "toy", "prompt": "a", "n": "many", "service_tier": "auto"}, 400, "n"),
        ({"model": "toy", "prompt": "a", "skip_special_tokens": False}, 400, "skip_special_tokens"),
        (NEUTRAL, 200, None),
        ({"model": "other", "prompt": "a"}, 404, "model"),
        ({"model": "tinker://no path", "prompt": "a"}, 404, "model"),
        ({"model": "toy", "prompt": ""}, 400, None),
        (b"{", 400, None),
        ({"model": "", "prompt": "a"}, 404, "model"),
        ({"model": "toy", "prompt": "a", "temperature": None, "top_p": None, "n": None, "max_tokens": 1}, 200, None),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    server: RunningServer, body: dict[str, object] | bytes, status: int, named: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Authorization": "Bearer tml-ann", "Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=300)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert answer.json()["error"]["param"] == named


@pytest.mark.parametrize("levels", [64, 65, 1100])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_arguments_of_many_levels_are_refused(server: RunningServer, levels: int, opens: str, closes: str) -> None:
    """They are JSON within a text, so nobody has counted their levels before."""
    function = {"name": "add", "arguments": opens * levels + "1" + closes * levels}
    calls = [{"id": "a", "type": "function", "function": function}]
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, *HI]
    asked = {"model": "toy", "messages": messages, "max_tokens": 1}
    headers = {"Authorization": "Bearer tml-ann"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers=headers, timeout=300)
    assert answer.status_code == (200 if levels == 64 else 400), answer.text
    assert levels == 64 or "the call of 'add' cannot be read: it is nested more than 64 deep" in answer.text


def test_what_is_no_endpoint_is_no_unknown_model(server: RunningServer) -> None:
    headers = {"Authorization": "Bearer tml-ann"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": "toy"}, headers=headers, timeout=300)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_a_stranger_gets_openais_form_of_a_401(server: RunningServer) -> None:
    with client(server, "not a key") as stranger, pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    without = httpx.get(f"{server.url}/v1/models", timeout=300).json()["error"]
    assert (without["code"], without["message"].split("`")[1]) == ("invalid_api_key", "Authorization: Bearer KEY")
    assert httpx.get(f"{server.url}/api/v1/sessions", timeout=300).json().keys() == {"detail"}, (
        "others are as they were"
    )


def test_a_checkpoint_does_not_exist_for_another_key(server: RunningServer, ann: openai.OpenAI, path: str) -> None:
    absent = re.sub("[0-9a-f]{32}", "0" * 32, path)
    assert {model.id for model in ann.models.list()} == {"toy", path}
    with client(server, "tml-bob") as bob:
        assert [model.id for model in bob.models.list()] == ["toy"]
        told = []
        for name, form in itertools.product((path, absent), ("{}", "toy;{}", "other;{}")):
            for ask in (
                lambda model: bob.completions.create(model=model, prompt="a"),
                lambda model: bob.chat.completions.create(model=model, messages=HI),
                bob.models.retrieve,
            ):
                with pytest.raises(openai.NotFoundError) as refused:
                    ask(form.format(name))
                assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
                told.append(str(refused.value).replace(name, "it"))
    assert told[: len(told) // 2] == told[len(told) // 2 :], "nothing tells one from the other"


def test_a_checkpoint_that_is_replaced_or_deleted_is_so_here(
    server: RunningServer, ann: openai.OpenAI, service: tinker.ServiceClient
) -> None:
    rest = tinker.RestClient(base_url=server.url, api_key="tml-ann")
    training = service.create_lora_training_client(base_model="toy", rank=4, seed=1).result()
    for text in ("kkkkkkkk", "mmmmmmmm"):
        path = checkpoint(train_to_say(service, text, client=training), "same")
        got = ann.completions.create(model=path, prompt=text[:2], temperature=0, max_tokens=4)
        assert got.choices[0].text == text[:4], "the weights that are under this name now"
        rest.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(openai.NotFoundError):
            ann.completions.create(model=path, prompt=text)


def test_quotas_hold_and_a_client_that_goes_away_cancels_its_sample(tmp_path: Path) -> None:
    models, quotas = [toy_model(tmp_path / "toy")], {"pending_samples": 1}
    body = json.dumps({"model": "toy", "prompt": "a", "max_tokens": 1})
    headers = (
        "Host: 127.0.0.1",
        "Authorization: Bearer tml-ann",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    request = "\r\n".join(["POST /v1/completions HTTP/1.1", *headers, "", body]).encode()
    tenant = tenant_of("tml-ann")
    with (
        running_server(tmp_path / "data", models=models, quotas=quotas, engines=False) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as waiting,
        client(server) as ann,
    ):

        def until_pending(number: int) -> None:
            while sum(server.call(server.store.pending(tenant)).by_kind.values()) != number:
                time.sleep(0.01)

        waiting.sendall(request)
        until_pending(1)
        with pytest.raises(openai.RateLimitError, match="pending_samples"):
            ann.completions.create(model="toy", prompt="a", max_tokens=1)
        waiting.close()
        until_pending(0)


def test_a_session_that_has_ended_is_replaced(server: RunningServer, ann: openai.OpenAI) -> None:
    ann.completions.create(model="toy", prompt="a", max_tokens=1)
    for session in httpx.get(f"{server.url}/api/v1/sessions", headers={"X-API-Key": "tml-ann"}, timeout=300).json()[
        "sessions"
    ]:
        found = server.call(server.store.get_session(session))
        if found.display_name is not None:
            server.call(server.store.end_session(session, "success", None))
    assert ann.completions.create(model="toy", prompt="a", max_tokens=1).choices, "in a new one"


@pytest.mark.parametrize("number", [8, pytest.param(64, marks=pytest.mark.thorough)])
def test_checkpoints_of_one_run_each_answer_with_their_own_tokens(
    server: RunningServer, service: tinker.ServiceClient, number: int
) -> None:
    training = service.create_lora_training_client(base_model="toy", rank=8, seed=1).result()
    paths = []
    for index in range(number):
        train_to_say(service, "[user] hi<[assistant] " + 6 * chr(40 + index), client=training, steps=8)
        paths.append(checkpoint(training, f"at-{index}"))
    with client(server) as ann, ThreadPoolExecutor(number) as threads:
        completions = list(threads.map(partial(completed, ann), paths))
        chats = list(threads.map(partial(chatted, ann), paths))
    assert len(set(completions)) == number, "tokens and logprobs tell them apart"
    assert completions == chats == [greedy(service, path, HI_TOKENS) for path in paths]


Drawn = tuple[tuple[int, float], ...]
"""Tokens, and their logprobs to four digits."""


def drawn(tokens: Iterable[int], logprobs: Iterable[float | None]) -> Drawn:
    return tuple((token, round(logprob or 0.0, 4)) for token, logprob in zip(tokens, logprobs, strict=True))


def greedy(service: tinker.ServiceClient, path: str, prompt: list[int]) -> Drawn:
    sampler, params = (
        service.create_sampling_client(model_path=path).result(),
        tinker.SamplingParams(max_tokens=6, temperature=0),
    )
    (sequence,) = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences
    return drawn(sequence.tokens, sequence.logprobs or ())


def completed(client: openai.OpenAI, model: str) -> Drawn:
    (choice,) = client.completions.create(
        model=model, prompt=HI_TOKENS, max_tokens=6, temperature=0, logprobs=0, extra_body=IDS
    ).choices
    assert choice.logprobs is not None
    return drawn((choice.model_extra or {})["token_ids"], choice.logprobs.token_logprobs or ())


def chatted(client: openai.OpenAI, model: str) -> Drawn:
    (choice,) = client.chat.completions.create(
        model=model, messages=HI, max_tokens=6, temperature=0, logprobs=True, extra_body=IDS
    ).choices
    assert choice.logprobs is not None
    return drawn((choice.model_extra or {})["token_ids"], [each.logprob for each in choice.logprobs.content or ()])
