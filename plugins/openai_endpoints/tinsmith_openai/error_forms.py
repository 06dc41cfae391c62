"""Errors in the words of OpenAI's and Anthropic's clients, which decide by them whether to ask again, and for what.

Both APIs answer 400 to a body that cannot be read: LiteLLM takes a 422 of Anthropic's for a lost connection.
"""

from collections.abc import Mapping
from typing import Final

from tinsmith import ErrorAnswer
from tinsmith_checkpoints.huggingface import Json

_STATUSES: Final = {422: 400}
_KINDS: Final = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error_form(answer: ErrorAnswer) -> tuple[int, Mapping[str, Json]]:
    """Return status and body as OpenAI's clients read them."""
    kind, code = _KINDS.get(answer.status, ("server_error" if answer.status >= 500 else "invalid_request_error", None))
    error = {"message": answer.detail, "type": kind, "param": answer.field, "code": answer.code or code}
    return _STATUSES.get(answer.status, answer.status), {"error": error}


def anthropic_error_form(answer: ErrorAnswer) -> tuple[int, Mapping[str, Json]]:
    """Return status and body as Anthropic's clients read them."""
    kind = _ANTHROPIC_KINDS.get(answer.status, "api_error" if answer.status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": answer.detail}
    return _STATUSES.get(answer.status, answer.status), {"type": "error", "error": error}
