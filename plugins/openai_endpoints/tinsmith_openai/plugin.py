"""The plugin's offers: routes under the prefixes of OpenAI's API and of the hosted service, and `/chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import tinsmith

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import APIRouter

    from tinsmith_checkpoints.huggingface import Json

PREFIXES: Final = ("/v1", "/oai/api/v1")
ANTHROPIC_PREFIX: Final = "/anthropic/api/v1"


@tinsmith.hookimpl
def tinsmith_register_routes(settings: tinsmith.Settings, context: tinsmith.RoutesContext) -> Sequence[APIRouter]:
    from tinsmith_openai.chat_page import chat_router  # here, since only servers need them
    from tinsmith_openai.messages.routes import messages_router
    from tinsmith_openai.routes import Endpoints
    from tinsmith_openai.serving import Serving

    serving = Serving(context)
    endpoints = Endpoints(settings, serving)
    for prefix in PREFIXES:
        context.error_forms[f"{prefix}/"] = error_form
    context.error_forms["/anthropic/"] = anthropic_error_form
    return [
        *(endpoints.router(prefix) for prefix in PREFIXES),
        messages_router(serving, ANTHROPIC_PREFIX),
        chat_router(context),
    ]


def error_form(answer: tinsmith.ErrorAnswer) -> Mapping[str, Json]:
    """Return the body of an error as OpenAI's clients read it."""
    kind, code = _KINDS.get(answer.status, ("server_error" if answer.status >= 500 else "invalid_request_error", None))
    return {"error": {"message": answer.detail, "type": kind, "param": answer.field, "code": answer.code or code}}


_KINDS: Final = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def anthropic_error_form(answer: tinsmith.ErrorAnswer) -> Mapping[str, Json]:
    """Return the body of an error as Anthropic's clients read it."""
    kind = _ANTHROPIC_KINDS.get(answer.status, "api_error" if answer.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": answer.detail}}


_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
