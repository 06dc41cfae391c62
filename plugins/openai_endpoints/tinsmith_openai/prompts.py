"""The tokens of the prompts of `completions`."""

from typing import Final

import numpy as np

from tinsmith import TokenArray, UserError
from tinsmith_openai.bodies import CompletionRequest
from tinsmith_openai.refusals import TooLongError
from tinsmith_openai.text_work import Asker
from tinsmith_openai.texts import ModelText

_MOST_TOKENS: Final = 4 << 20
"""Of all prompts together, as a body can have as tokens."""


def read_prompts(text: ModelText, body: CompletionRequest, window: int, asker: Asker) -> list[TokenArray]:
    """Takes long for long ones. Raise TooLongError if one does not fit into a context of `window` tokens."""
    prompts: list[TokenArray] = []
    num_tokens = 0
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompts.append(text.encode(prompt, special=True, window=window, asker=asker))
        elif len(prompt) > window:
            raise TooLongError(num_prompt=len(prompt), max_context_tokens=window)
        else:
            prompts.append(np.array(prompt, np.int32))
        num_tokens += len(prompts[-1])
        if num_tokens > _MOST_TOKENS:
            msg = f"prompt: together, the prompts have more than {_MOST_TOKENS} tokens; send fewer at a time"
            raise UserError(msg)
    return prompts
