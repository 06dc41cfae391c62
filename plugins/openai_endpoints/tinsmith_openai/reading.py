"""From a chat's request to what reads its answers."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.chat_template import ChatTemplate
from tinsmith_openai.tool_calls import Reading

_SHORT: Final = 9
"""Letters and digits of an id, as Mistral's templates demand."""


def reading_of(template: ChatTemplate, tools: Sequence[Json], prompt: str) -> Reading:
    """Return what reads the answers behind a prompt. Each time, calls have other ids."""
    key, form = secrets.token_hex(), template.form
    if form is not None and not tools:
        form = replace(form, calls={}, at_start=None)
    short = form is not None and form.short_ids

    def make_id(choice: int, call: int) -> str:
        name = hashlib.sha256(f"{key} {choice} {call}".encode()).hexdigest()
        return name[:_SHORT] if short else f"call_{name[:24]}"

    begun = template.reasoning is not None and prompt.rstrip().endswith(template.reasoning[0])
    return Reading(form=form, reasoning=template.reasoning, in_reasoning=begun, tools=_schemas(tools), make_id=make_id)


def _schemas(tools: Sequence[Json]) -> dict[str, dict[str, Json]]:
    found: dict[str, dict[str, Json]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            schema = function.get("parameters")
            found[name] = schema if isinstance(schema, dict) else {}
    return found
