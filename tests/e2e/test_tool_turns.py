"""Conversations that call a tool at every turn: an adapter of the jax backend draws the calls, OpenAI's client asks.

The adapter has learnt to write its calls in tokens and in JSON that no encoder and no template would write, so text
alone could not give them back.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import tinker
from few_programs import FEW_PROGRAMS, SHAPE
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall
from tokenizers import Tokenizer

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

KEY: Final = "tml-tools"
PAGE: Final = 64  # tokens that the cache of prefixes holds or drops together
TEMPLATE: Final = """\
{%- if tools %}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }} {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
TOOLS: Final[Any] = [{"type": "function", "function": {"name": "ou", "parameters": {"type": "object"}}}]
MOST_STEPS: Final = 1000
LEARNT: Final = -0.2  # logprob of each token that it is to say; greedy, it then says that one


CALL: Final = '{"arguments":{"a":1.0},  "name":"ou"}'
QUESTION: Final = "go " * 40
CONVERSATIONS: Final = 50
TURNS: Final = 20  # of each


@pytest.fixture
def model(tmp_path: Path) -> ModelSettings:
    write_tiny_model(tmp_path / "model", replace(SHAPE, hidden_size=64, intermediate_size=96))
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    limits = {**FEW_PROGRAMS, "max_context_tokens": 2048, "max_batch_tokens": 2048}
    backend = PluginSection.model_validate({"plugin": "jax", "warm_up": False, **limits})
    return ModelSettings(name="tiny", path=tmp_path / "model", backend=backend)


@pytest.fixture
def server(tmp_path: Path, model: ModelSettings) -> Iterator[RunningServer]:
    with running_server(tmp_path / "data", models=[model]) as server:
        yield server


class Text:
    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        (self.end,) = self.encoded("<|im_end|>")

    def encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def one_by_one(self, text: str) -> list[int]:
        """Encode each character alone, as no encoder does."""
        return [token for character in text for token in self.encoded(character)]


def conversation(text: Text) -> tuple[list[int], list[float]]:
    """Return the tokens of a conversation, and which of them the model says."""
    tokens = text.encoded(f"<|im_start|>user {QUESTION}<|im_end|><|im_start|>assistant ")
    weights = [0.0] * len(tokens)
    said = [*text.one_by_one(f"<tool_call>{CALL}</tool_call>"), text.end]
    assert said[:-1] != text.encoded(f"<tool_call>{CALL}</tool_call>")
    asked = text.encoded("<|im_start|>tool ok<|im_end|><|im_start|>assistant ")
    for turn in range(TURNS):
        more = said if turn == TURNS - 1 else [*said, *asked]
        tokens, weights = [*tokens, *more], [*weights, *([1.0] * len(said)), *([0.0] * (len(more) - len(said)))]
    return tokens, weights


def trained(service: tinker.ServiceClient, text: Text) -> str:
    training = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    tokens, weights = conversation(text)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )
    for _ in range(MOST_STEPS):
        passed = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        logprobs = passed.result().loss_fn_outputs[0]["logprobs"].data
        if all(logprob > LEARNT for logprob, weight in zip(logprobs, weights[1:], strict=True) if weight):
            break
    else:
        pytest.fail("it has not learnt its part")
    path = training.save_weights_for_sampler("calls").result().path
    assert path is not None
    return path


def test_tokens_of_a_transcript_are_the_tokens_sampled_and_come_from_the_cache(
    server: RunningServer, model: ModelSettings
) -> None:
    assert model.path is not None
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    path = trained(service, Text(model.path))
    tinker.RestClient(base_url=server.url, api_key=KEY).publish_checkpoint_from_tinker_path(path).result()
    turns, shares = 0, []
    for number in range(CONVERSATIONS):
        prompt: list[int] = []
        transcript: list[int] = []
        # a tenant of its own, since tenants share no prefix
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"{KEY}-{number}", max_retries=0) as client:
            for answer in turns_of(client, path, number):
                turns += 1
                more, usage = answer.model_extra or {}, answer.usage
                assert more["prompt_token_ids"][: len(transcript)] == transcript, (number, turns)
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                cached = usage.prompt_tokens_details.cached_tokens or 0
                if transcript:
                    assert 0 <= len(prompt) - 1 - cached < PAGE, "all pages that the last turn has read"
                    shares.append(cached / usage.prompt_tokens)
                else:
                    assert cached == 0
                prompt = more["prompt_token_ids"]
                transcript = [*prompt, *(answer.choices[0].model_extra or {})["token_ids"]]
    service.close("success").result()
    assert turns == CONVERSATIONS * TURNS == 1000
    assert min(shares[:: TURNS - 1]) > 0.5, "of a second turn's prompt"
    print(f"{turns} turns; cached: {shares[0]:.0%} of a second turn's prompt, {shares[TURNS - 2]:.0%} of a last one's")


def turns_of(client: openai.OpenAI, path: str, number: int) -> Iterator[ChatCompletion]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(
            model=path,
            messages=messages,
            tools=TOOLS,
            temperature=0,
            max_completion_tokens=len(CALL) + 30,
            extra_body={"return_token_ids": True},
        )
        yield answer
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls", (number, choice)
        messages += [choice.message, *results_of(choice.message.tool_calls or [])]


def results_of(calls: Sequence[Any]) -> Iterator[dict[str, str]]:
    for call in calls:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        yield {"role": "tool", "tool_call_id": call.id, "content": "ok"}
