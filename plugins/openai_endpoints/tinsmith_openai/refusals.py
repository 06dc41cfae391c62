"""Refusals whose code and words programs look for."""

from typing import ClassVar

from tinsmith import UserError


class NoSuchModelError(UserError):
    """No model of this name. Whether one does not exist or is another tenant's cannot be told."""

    http_status: ClassVar[int] = 404
    code: ClassVar[str | None] = "model_not_found"
    field = "model"


class TooLongError(UserError):
    """A prompt, or prompt and answer together, do not fit into the model's context.

    The message holds the phrases of both APIs, word for word: agents that find one shorten the conversation, or ask for
    fewer tokens. `tests/client_phrases.py` lists them.
    """

    code: ClassVar[str | None] = "context_length_exceeded"

    def __init__(
        self, *, num_prompt: int, max_context_tokens: int, max_tokens: int = 1, at_least: bool = False
    ) -> None:
        """`at_least`: the prompt is not encoded, and has that many tokens or more."""
        window = max_context_tokens
        number = f"at least {num_prompt}" if at_least else f"{num_prompt}"
        room = window - num_prompt
        if room < 1:
            begin = f"prompt is too long: {number} tokens > {window - 1} maximum"
            remedy = "reduce the length of the messages"
        else:
            begin = f"input length and `max_tokens` exceed context limit: {num_prompt} + {max_tokens} > {window}"
            remedy = f"lower max_tokens to {room}, or reduce the length of the messages"
        super().__init__(
            f"{begin}. This model's maximum context length is {window} tokens. However, you requested "
            f"{number} tokens in the prompt and {max_tokens} in the completion; {remedy}"
        )
