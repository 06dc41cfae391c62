"""Samples that are legal and as dear as can be, and a neighbour that has many of them waiting at any time."""

import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from attacker import Attacker, Request

CONTEXT, VOCAB = 128, 64
SHORT = 8  # tokens of a prompt
MOST_SAMPLES, MOST_STOP_STRINGS, MOST_TOP_K = 128, 256, 2**31 - 1
ORDINARY: Mapping[str, Any] = {"max_tokens": 32}
DEPTH = 24
"""How many requests the neighbour has waiting at any time."""

KINDS: Mapping[str, Mapping[str, Any]] = {
    "longest prompts": {"prompt": CONTEXT - 1, "max_tokens": 1},
    "most samples": {"num_samples": MOST_SAMPLES, "max_tokens": 16},
    "most stop strings": {"stop": [f"never {number}" for number in range(MOST_STOP_STRINGS)]},
    "smallest top_k": {"top_k": 1, "topk_sample_logprobs": 1},
    "largest top_k": {"top_k": MOST_TOP_K, "temperature": 2.0, "top_p": 0.999999},
}
"""What differs from `asked`: by default all that fits into the context is drawn."""


def asked(
    sampler_id: str,
    number: int,
    *,
    prompt: int = SHORT,
    num_samples: int = 1,
    topk_sample_logprobs: int = 0,
    **params: Any,
) -> Request:
    """Return a sample whose random prompt nobody has sent before: it is in no cache."""
    tokens = np.random.default_rng(number).integers(1, VOCAB - 2, prompt)
    return Request.json(
        "asample",
        sampling_session_id=sampler_id,
        seq_id=number,
        prompt={"chunks": [{"type": "encoded_text", "tokens": tokens.tolist()}]},
        num_samples=num_samples,
        topk_sample_logprobs=topk_sample_logprobs,
        sampling_params={"max_tokens": CONTEXT - prompt, "seed": number, **params},
    )


@contextmanager
def busy_neighbour(url: str, key: str, base_model: str, fields: Mapping[str, Any]) -> Iterator[Counter[str]]:
    """Let a process send such requests from when all that it has waiting are accepted until the block ends.

    The value then counts what became of them.
    """
    spawn = multiprocessing.get_context("spawn")
    accepted, over, ended = spawn.Semaphore(0), spawn.Event(), spawn.SimpleQueue()
    process = spawn.Process(target=_keep_busy, args=(url, key, base_model, fields, accepted, over, ended))
    process.start()
    found = Counter[str]()
    try:
        for _ in range(DEPTH):
            accepted.acquire()
        yield found
    finally:
        over.set()
        found.update(ended.get())
        process.join()


def _keep_busy(
    url: str, key: str, base_model: str, fields: Mapping[str, Any], accepted: Any, over: Any, ended: Any
) -> None:
    numbers, found = count(1), Counter[str]()
    with Attacker(url, key, base_model) as attacker:
        sampler_id = attacker.new_sampler()

        def one(_: int) -> None:
            is_first = True
            while not over.is_set():
                answer = attacker.send_until_accepted(asked(sampler_id, next(numbers), **fields))
                if is_first:
                    accepted.release()
                    is_first = False
                result = attacker.result(answer.request_id) if answer.request_id else answer
                found[result.error_category or str(result.status)] += 1

        with ThreadPoolExecutor(DEPTH) as pool:
            list(pool.map(one, range(DEPTH)))
    ended.put(found)
