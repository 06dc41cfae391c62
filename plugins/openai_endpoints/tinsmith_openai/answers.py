"""The JSON of answers, field for field as OpenAI's clients read it.

`token_ids` and `prompt_token_ids` are not OpenAI's: other servers name them so.
"""

import math
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence, Sized

from tinsmith import FloatArray, SampledSequence, SampleOutput, TokenArray, TopLogprobs
from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import Said

Object = dict[str, Json]


def head(kind: str, prefix: str, model: str) -> Object:
    """Return what every answer begins with."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompts: Iterable[Sized], outputs: Sequence[SampleOutput]) -> Object:
    num_prompt = sum(map(len, prompts))
    num_sampled = sum(len(sequence.tokens) for output in outputs for sequence in output.sequences)
    cached = sum(output.prompt_cache_hit_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finished_text(text: ModelText, tokens: Sequence[int], stop_strings: Sequence[str], *, marks: bool = False) -> str:
    """Return the text of sampled tokens, without special tokens and without the stop string that ended it.

    `marks`: with those special tokens that mark reasoning and calls.
    """
    whole = text.decode(tokens, marks=marks)
    ends = [at for stop in stop_strings if (at := whole.find(stop)) >= 0]
    return whole[: min(ends)] if ends else whole


def tokens_of(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in sequence.tokens]


# /completions ---------------------------------------------------------------------------------------------------------


def completion_logprobs(
    text: ModelText,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Object | None],
) -> Object:
    """Return the logprobs of tokens. `prompt`: the tokens before them, if they are shown."""
    behind = len(text.decode(prompt))
    offsets = [*_offsets(text, prompt), *(behind + at for at in _offsets(text, tokens))]
    return {
        "tokens": [text.piece(token) for token in (*prompt, *tokens)],
        "token_logprobs": [*logprobs],
        "top_logprobs": [*tops],
        "text_offset": [*offsets],
    }


def _offsets(text: ModelText, tokens: Sequence[int]) -> Iterator[int]:
    """Yield where in their text each token begins.

    A special token takes no room there, and the parts of a character begin where it does.
    """
    step, at = text.stepwise(), 0
    for token in tokens:
        yield at
        at += len(step(token) or "")


def numbers(values: FloatArray) -> list[float | None]:
    """Return logprobs for JSON, where NaN, an unscored token, becomes null."""
    return [None if math.isnan(value) else float(value) for value in values]


def best_tokens(text: ModelText, top: TopLogprobs | None, length: int) -> list[Object | None]:
    """Return the alternatives at each position by their text. Of two with one text, the better one counts."""
    if top is None:
        return [None] * length
    rows: list[Object | None] = []
    for ids, values in zip(top.token_ids, top.logprobs, strict=True):
        row: Object = {}
        for token, value in zip(ids, values, strict=True):
            row.setdefault(text.piece(int(token)), float(value))
        rows.append(row)
    return rows


# /chat/completions ----------------------------------------------------------------------------------------------------


def chat_logprobs(text: ModelText, sequence: SampledSequence, num_top: int) -> Object:
    rows: list[Json] = []
    for at, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
        row: Object = _scored(text, int(token), float(logprob))
        row["top_logprobs"] = [] if sequence.top_logprobs is None else _top(text, sequence.top_logprobs, at, num_top)
        rows.append(row)
    return {"content": rows, "refusal": None}


def _top(text: ModelText, top: TopLogprobs, at: int, num_top: int) -> list[Json]:
    found = zip(top.token_ids[at][:num_top], top.logprobs[at][:num_top], strict=True)
    return [_scored(text, int(token), float(logprob)) for token, logprob in found]


def _scored(text: ModelText, token: int, logprob: float) -> Object:
    spelled = text.bytes_of(token)
    return {"token": text.piece(token), "logprob": logprob, "bytes": None if spelled is None else [*spelled]}


def chat_message(said: Said) -> Object:
    message: Object = {"role": "assistant", "content": said.content or (None if said.calls else "")}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return message


def as_list(tokens: TokenArray | Sequence[int]) -> list[Json]:
    return [int(token) for token in tokens]
