"""What the plugin offers: the same routes under the prefixes of OpenAI's API and of the hosted service, and `/chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import tinsmith

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import APIRouter

    from tinsmith.huggingface import Json

PREFIXES: Final = ("/v1", "/oai/api/v1")


@tinsmith.hookimpl
def tinsmith_register_routes(settings: tinsmith.Settings, context: tinsmith.RoutesContext) -> Sequence[APIRouter]:
    from tinsmith_openai.chat_page import chat_router  # here, since only servers need them
    from tinsmith_openai.routes import Endpoints

    endpoints = Endpoints(settings, context)
    for prefix in PREFIXES:
        context.error_forms[f"{prefix}/"] = error_form
    return [*(endpoints.router(prefix) for prefix in PREFIXES), chat_router(context)]


def error_form(answer: tinsmith.ErrorAnswer) -> Mapping[str, Json]:
    """Return the body of an error as OpenAI's clients read it."""
    kind, code = _KINDS.get(answer.status, ("server_error" if answer.status >= 500 else "invalid_request_error", None))
    return {"error": {"message": answer.detail, "type": kind, "param": answer.field, "code": code}}


_KINDS: Final = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
