"""Long texts: refused before they are encoded, encoded beside everything else, in turns, and only while asked for."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinsmith import UserError
from tinsmith_openai.bodies import MOST_MESSAGES, ChatRequest, CompletionRequest
from tinsmith_openai.conversations import read_conversation
from tinsmith_openai.drawing import refuse_many_logprobs, sampling_params
from tinsmith_openai.json_pieces import as_json
from tinsmith_openai.messages.bodies import CountTokensRequest
from tinsmith_openai.prompts import read_prompts
from tinsmith_openai.refusals import TooLongError
from tinsmith_openai.stop_strings import StopStrings
from tinsmith_openai.text_work import SMALL, Asker, NobodyWaitsError, TextWork
from tinsmith_openai.texts import ModelText
from tinsmith_openai.transcripts import Transcripts

WORDS = "the quick brown fox jumps over the lazy dog and comes back again "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """A byte-level tokenizer whose longest token has six characters. Its template refuses every conversation."""
    directory = tmp_path_factory.mktemp("model")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([WORDS], trainer)
    made.save(str(directory / "tokenizer.json"))
    template = {"chat_template": "{{ raise_exception('it was rendered') }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(template))
    return ModelText("toy", directory)


def chat(*contents: str) -> ChatRequest:
    return ChatRequest.model_validate(
        {"model": "toy", "messages": [{"role": "user", "content": each} for each in contents]}
    )


def read(text: ModelText, body: ChatRequest, window: int) -> None:
    read_conversation(text, Transcripts(), "ann", body, window=window, asker=Asker())


def test_other_threads_run_while_a_text_is_encoded(text: ModelText) -> None:
    """`Tokenizer.encode` lets none run: nobody wakes up before it has ended."""
    began, ended = threading.Event(), threading.Event()

    def encode() -> None:
        began.set()
        text.encode(WORDS * 20_000, special=False, window=1 << 24, asker=Asker())
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    began.wait()
    wakeups = 0
    while not ended.is_set():
        time.sleep(0.001)
        wakeups += 1
    thread.join()
    assert wakeups > 10


@pytest.mark.parametrize("window", [8, 2048])
def test_tokens_are_the_tokenizers_or_too_many(text: ModelText, window: int, tmp_path: Path) -> None:
    expected = text.encode(WORDS * 300, special=False, window=1 << 20, asker=Asker()).tolist()
    assert text.decode(expected) == WORDS * 300
    fits = text.encode(WORDS * 300, special=False, window=len(expected), asker=Asker())
    assert fits.tolist() == expected
    with pytest.raises(TooLongError, match=rf"requested {len(expected)} tokens"):
        text.encode(WORDS * 300, special=False, window=len(expected) - 1, asker=Asker())
    with pytest.raises(TooLongError, match="requested at least") as refused:
        text.encode(WORDS * 3000, special=False, window=window, asker=Asker())
    assert refused.value.code == "context_length_exceeded"


def test_too_long_a_conversation_is_refused_before_anything_is_made_of_it(text: ModelText) -> None:
    """Its template would say otherwise."""
    with pytest.raises(UserError, match="it was rendered"):
        read(text, chat("hi"), 100)
    tools = {"id": "1", "function": {"name": "f", "arguments": "x" * 10_000}}
    called = {"role": "assistant", "content": None, "tool_calls": [tools]}
    for body in (
        chat("x" * 10_000),
        chat(*["hi"] * 101),
        ChatRequest.model_validate({"model": "toy", "messages": [called, {"role": "user", "content": "hi"}]}),
    ):
        with pytest.raises(TooLongError, match="at least"):
            read(text, body, 100)


def test_a_conversation_has_a_bounded_number_of_messages() -> None:
    """Its list is read at once, and nothing else runs meanwhile."""
    message = {"role": "user", "content": "hi"}
    for body in (ChatRequest, CountTokensRequest):
        body.model_validate({"model": "toy", "messages": [message] * MOST_MESSAGES})
        with pytest.raises(ValidationError, match=f"at most {MOST_MESSAGES} items"):
            body.model_validate({"model": "toy", "messages": [message] * (MOST_MESSAGES + 1)})


def test_prompts_are_bounded_one_by_one_and_together(text: ModelText) -> None:
    def prompts(prompt: object, window: int) -> list[list[int]]:
        body = CompletionRequest.model_validate({"model": "toy", "prompt": prompt})
        return [each.tolist() for each in read_prompts(text, body, window, Asker())]

    assert prompts([[1, 2], [3]], 8) == [[1, 2], [3]]
    with pytest.raises(TooLongError, match="requested 9 tokens"):
        prompts([[1], [2] * 9], 8)
    with pytest.raises(UserError, match="together, the prompts have more than 4194304 tokens"):
        prompts([[1] * (1 << 20)] * 5, 1 << 23)


def test_an_answer_too_large_is_refused_before_it_is_drawn() -> None:
    refuse_many_logprobs(1 << 18, 3)
    with pytest.raises(UserError, match=r"could have 1048580 logprobs, and 1048576 are allowed; lower max_tokens, n"):
        refuse_many_logprobs((1 << 18) + 1, 3)
    stops = CompletionRequest.model_validate({"model": "toy", "prompt": "a", "stop": ["a" * 1024] * 17})
    with pytest.raises(UserError, match="stop: the strings have 17408 characters together; allowed: 16384"):
        sampling_params(stops, max_tokens=1)


# Turns ----------------------------------------------------------------------------------------------------------------


def test_a_tenant_with_much_to_do_leaves_a_thread_to_others() -> None:
    let_go = threading.Event()
    done: list[str] = []

    async def together() -> None:
        work = TextWork()
        anns = [asyncio.create_task(work.run("ann", SMALL, lambda _: let_go.wait())) for _ in range(5)]
        await asyncio.sleep(0)
        for number in range(3):
            await work.run("bob", SMALL, lambda _, number=number: done.append(f"bob {number}"))
        assert not any(each.done() for each in anns)
        let_go.set()
        await asyncio.gather(*anns)

    asyncio.run(together())
    assert done == ["bob 0", "bob 1", "bob 2"]


def test_work_that_nobody_waits_for_ends_at_its_next_check() -> None:
    began, ended = threading.Event(), list[str]()

    def work(asker: Asker) -> None:
        began.set()
        try:
            for _ in itertools.repeat(None):
                asker.check()
        except NobodyWaitsError:
            ended.append("left")
            raise

    async def leave() -> None:
        works = TextWork()
        asked = asyncio.create_task(works.run("ann", SMALL, work))
        await asyncio.to_thread(began.wait)
        waiting = asyncio.create_task(works.run("ann", SMALL, lambda _: ended.append("ran")))
        await asyncio.sleep(0)
        waiting.cancel()
        asked.cancel()
        await asyncio.gather(asked, waiting, return_exceptions=True)
        assert await works.run("ann", SMALL, lambda _: "next") == "next"

    asyncio.run(leave())
    assert ended == ["left"]


def test_encoding_ends_when_nobody_waits(text: ModelText) -> None:
    asker = Asker()
    asker.leave()
    with pytest.raises(NobodyWaitsError):
        text.encode("hello", special=False, window=100, asker=asker)


# Stop strings and JSON ------------------------------------------------------------------------------------------------


def found_and_begun(strings: Sequence[str], text: str) -> tuple[int | None, int]:
    """As `StopStrings`, by looking everywhere."""
    at = min((at for each in strings if (at := text.find(each)) >= 0), default=None)
    begun = max(
        (n for each in strings for n in range(len(each)) if n <= len(text) and text.endswith(each[:n])), default=0
    )
    return at, begun


def test_stop_strings_are_found_where_a_search_finds_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        strings = ["".join(rng.choice(list("ab"), size=rng.integers(1, 7))) for _ in range(rng.integers(1, 4))]
        stops, so_far = StopStrings(strings), ""
        while True:
            piece = "".join(rng.choice(list("abc"), p=[0.48, 0.48, 0.04], size=rng.integers(0, 4)))
            at = stops.read(piece)
            expected, begun = found_and_begun(strings, so_far + piece)
            assert (None if at is None else len(so_far) + at) == expected, (strings, so_far, piece)
            so_far += piece
            if expected is not None:
                break
            assert stops.num_begun == begun, (strings, so_far)


def test_json_in_pieces_says_the_same() -> None:
    rows = [
        {"token": f"é{row}", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "a"}]} for row in range(700)
    ]
    choice = {"index": 0, "logprobs": {"content": rows, "empty": []}, "message": {"content": 'a "b"', "tool_calls": []}}
    for answer in ({"choices": [choice, choice], "n": 1, "none": {}}, {"content": [{"deep": {"deeper": {"a": [1]}}}]}):
        assert json.loads(as_json(answer, Asker())) == answer
    with pytest.raises(ValueError, match="JSON"):
        as_json({"a": [[float("nan")]]}, Asker())
