"""The plugin's offers: routes under the prefixes of OpenAI's API and of the hosted service, and `/chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import tinsmith
from tinsmith_openai.error_forms import anthropic_error_form, openai_error_form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import APIRouter

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
        context.error_forms[f"{prefix}/"] = openai_error_form
    context.error_forms["/anthropic/"] = anthropic_error_form
    return [
        *(endpoints.router(prefix) for prefix in PREFIXES),
        messages_router(serving, ANTHROPIC_PREFIX),
        chat_router(context),
    ]
