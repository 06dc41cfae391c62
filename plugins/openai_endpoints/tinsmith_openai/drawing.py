"""From a request to samples: parameters, and several samples at a time that end together."""

import asyncio
import secrets
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from fastapi import Request

from tinsmith import SamplingParams, UserError
from tinsmith_openai.bodies import SamplingBody

T = TypeVar("T")

CLIENT_GONE: Final = 499
"""The status that nobody reads."""

_SEEDS: Final = 2**63 - 1
_MOST_STOP_CHARS: Final = 16 << 10
"""Of all stop strings together, as in the SDK's requests: each token is compared with them."""
_MOST_LOGPROBS: Final = 1 << 20
"""Of one answer: in JSON, each takes a hundred bytes, and in memory several times as much."""


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


def sampling_params(body: SamplingBody, *, max_tokens: int, index: int = 0) -> SamplingParams:
    """`index`: which of the request's prompts it is. Each has a seed of its own, which follows from the request's."""
    if (num_chars := sum(map(len, body.stop_strings))) > _MOST_STOP_CHARS:
        msg = f"stop: the strings have {num_chars} characters together; allowed: {_MOST_STOP_CHARS}"
        raise UserError(msg)
    seed = secrets.randbelow(_SEEDS) if body.seed is None else (body.seed + index) % _SEEDS
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop_strings=body.stop_strings,
        stop_tokens=tuple(body.stop_token_ids),
    )


def refuse_many_logprobs(num_rows: int, num_top: int) -> None:
    """Raise UserError if an answer with so many tokens, and so many alternatives for each, would be too large."""
    number = num_rows * (1 + num_top)
    if number > _MOST_LOGPROBS:
        msg = (
            f"the answer could have {number} logprobs, and {_MOST_LOGPROBS} are allowed; lower max_tokens, n, the "
            "number of prompts, or the number of alternatives"
        )
        raise UserError(msg)


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all of them return, in order. If one fails, end the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns. If the client goes away first, end the work and raise ClientGoneError."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
