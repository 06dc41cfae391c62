"""Time to the first token and between tokens: OpenAI's client with a stream, beside `SamplingClient.sample` of the SDK.

    python benchmarks/first_token.py [--model tiny] [--tokens 64] [--rounds 20] [--backend jax|toy]

One server, one client process, and in each round every way once, in alternating order. All ways send the same prompt
and seed to the same checkpoint, and must get the same tokens, as many as they ask for. The SDK has no stream: its first
token comes with the last one, or alone if no other is asked for. Ratios are taken within rounds. Their median counts,
and the quartiles are beside it. On a busy machine, trust the ratios rather than the times.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import openai
import tinker
from comparison.shapes import SHAPES
from comparison.workbench import done

from tinsmith.loopback import exempt_loopback
from tinsmith.testing.served_process import served_process
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

KEY: Final = "tml-benchmark"
MODEL: Final = "model"
MESSAGES: Final[Any] = [{"role": "user", "content": "Tell a story about a tin can that wanted to be a kettle. " * 4}]
WARM_UPS: Final = 3
MOST_SEEDS: Final = 200


@dataclass(frozen=True)
class Drawn:
    """One answer: its tokens or its text, and when its pieces came, in seconds after the request."""

    said: object
    came_s: Sequence[float]

    @property
    def first_s(self) -> float:
        return self.came_s[0]

    @property
    def whole_s(self) -> float:
        return self.came_s[-1]


Way = Callable[[], Drawn]


class Bench:
    """The clients of one server, and what they ask for."""

    def __init__(self, url: str, *, tokens: int) -> None:
        self._tokens = tokens
        self._service = tinker.ServiceClient(base_url=url, api_key=KEY)
        training = done(self._service.create_lora_training_client(base_model=MODEL, rank=8, seed=1))
        self._path = done(training.save_weights_for_sampler("first-token")).path
        self._sampler = done(self._service.create_sampling_client(model_path=self._path))
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        ids = {"return_token_ids": True}
        chat = self._client.chat.completions.create(model=self._path, messages=MESSAGES, max_tokens=1, extra_body=ids)
        self._prompt: list[int] = (chat.model_extra or {})["prompt_token_ids"]
        self._seed = next(seed for seed in range(MOST_SEEDS) if len(self._sampled(seed, tokens)) == tokens)

    def close(self) -> None:
        self._client.close()
        done(self._service.close("success"))

    def ways(self) -> Mapping[str, Way]:
        return {
            "SDK": partial(self._sdk, self._tokens),
            "SDK, one token": partial(self._sdk, 1),
            "completions": self._completion,
            "chat": self._chat,
        }

    def check(self) -> None:
        """Fail unless both kinds of streams say what the SDK's tokens say."""
        ids: Any = {"return_token_ids": True}
        whole = self._client.completions.create(**self._asked(), prompt=self._prompt, extra_body=ids).choices[0]
        assert (whole.model_extra or {})["token_ids"] == self._sampled(self._seed, self._tokens)
        assert self._completion().said == self._chat().said == whole.text

    def _sampled(self, seed: int, tokens: int) -> list[int]:
        params = tinker.SamplingParams(max_tokens=tokens, seed=seed)
        (sequence,) = done(self._sampler.sample(tinker.ModelInput.from_ints(self._prompt), 1, params)).sequences
        return list(sequence.tokens)

    def _asked(self) -> dict[str, Any]:
        return {"model": self._path, "max_tokens": self._tokens, "seed": self._seed}

    def _sdk(self, tokens: int) -> Drawn:
        began = time.perf_counter()
        return Drawn(self._sampled(self._seed, tokens), [time.perf_counter() - began])

    def _completion(self) -> Drawn:
        began = time.perf_counter()
        stream = self._client.completions.create(**self._asked(), prompt=self._prompt, stream=True)
        return _heard(began, (chunk.choices[0].text for chunk in stream))

    def _chat(self) -> Drawn:
        began = time.perf_counter()
        stream = self._client.chat.completions.create(**self._asked(), messages=MESSAGES, stream=True)
        return _heard(began, (chunk.choices[0].delta.content or "" for chunk in stream))


def _heard(began: float, pieces: Any) -> Drawn:
    """Note when text comes. The last piece may have none: it says why the answer ended."""
    said, came_s = "", []
    for piece in pieces:
        if piece:
            came_s.append(time.perf_counter() - began)
            said += piece
    return Drawn(said, [*came_s, time.perf_counter() - began])


def measure(bench: Bench, rounds: int) -> dict[str, list[Drawn]]:
    ways = bench.ways()
    for _ in range(WARM_UPS):
        bench.check()
    found: dict[str, list[Drawn]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            found[name].append(ways[name]())
    return found


def report(found: Mapping[str, Sequence[Drawn]], tokens: int) -> dict[str, list[float]]:
    """Print the figures. Return the quartiles of each ratio."""
    sdk, one = found["SDK"], found["SDK, one token"]
    between = [(whole.whole_s - first.whole_s) / (tokens - 1) for whole, first in zip(sdk, one, strict=True)]
    print(f"SDK, {tokens} tokens   {_ms([each.whole_s for each in sdk])}")
    print(f"SDK, one token   {_ms([each.whole_s for each in one])}")
    print(f"SDK, per token   {_ms(between)}")
    ratios: dict[str, list[float]] = {}
    for name in ("completions", "chat"):
        streams = found[name]
        gaps = [(each.whole_s - each.first_s) / (tokens - 1) for each in streams]
        print(f"{name}: first token {_ms([each.first_s for each in streams])}; per token {_ms(gaps)}")
        print(f"{name}: {statistics.median(len(each.came_s) - 1 for each in streams):.0f} pieces of text")
        for what, values in {
            "first token / SDK's whole sample": [a.first_s / b.whole_s for a, b in zip(streams, sdk, strict=True)],
            "first token / SDK's sample of one": [a.first_s / b.whole_s for a, b in zip(streams, one, strict=True)],
            "last token / SDK's whole sample": [a.whole_s / b.whole_s for a, b in zip(streams, sdk, strict=True)],
            "between tokens / SDK's": [a / b for a, b in zip(gaps, between, strict=True)],
        }.items():
            low, middle, high = statistics.quantiles(values, n=4)
            ratios[f"{name}: {what}"] = [low, middle, high]
            print(f"{name}: {what}: {middle:.2f} ({low:.2f} to {high:.2f})")
    return ratios


def _ms(values_s: Sequence[float]) -> str:
    low, middle, high = (1000 * each for each in statistics.quantiles(values_s, n=4))
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def main() -> int:
    exempt_loopback(os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=list(SHAPES))
    parser.add_argument("--backend", default="jax", choices=["jax", "toy"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with tempfile.TemporaryDirectory() as made:
        directory, shape = Path(made), SHAPES[asked.model]
        write_tiny_model(directory / "model", shape)
        backend = {"plugin": asked.backend, **({"vocab_size": shape.vocab_size} if asked.backend == "toy" else {})}
        model = {"name": MODEL, "path": str(directory / "model"), "backend": backend}
        with served_process(directory, {"models": [model]}) as served:
            bench = Bench(served.url, tokens=asked.tokens)
            found = measure(bench, asked.rounds)
            bench.close()
    print(f"{asked.backend}, {asked.model}, {asked.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    ratios = report(found, asked.tokens)
    if asked.json:
        asked.json.write_text(json.dumps({**vars(asked), "json": None, "ratios": ratios}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
