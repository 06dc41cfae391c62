"""Finds tool calls in a model's text, in the form that its chat template shows it."""

import json
import secrets
from dataclasses import dataclass, field
from typing import Final

from tinsmith_openai.chat_template import ChatTemplate

_OPENS: Final = "<tool_call>"
_CLOSES: Final = "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


def find_tool_calls(template: ChatTemplate, said: str) -> tuple[str | None, list[ToolCall]]:
    """Return the text outside calls, and the calls. An unreadable call stays text.

    If the template has `<tool_call>`, a call is a JSON object between these tags (Hermes, Qwen). Otherwise it is a JSON
    object with a name and parameters, and nothing else (Llama).
    """
    content, calls = "", list[ToolCall | None]()
    if _OPENS in template.source:
        content, *tagged = said.split(_OPENS)
        calls = [_call(each.partition(_CLOSES)[0]) if _CLOSES in each else None for each in tagged]
    elif said.lstrip().startswith("{"):
        calls = [_call(said)]
    known = [call for call in calls if call is not None]
    if not known or len(known) < len(calls):
        return said, []
    return content.strip() or None, known


def _call(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return ToolCall(name=name, arguments=arguments if isinstance(arguments, str) else json.dumps(arguments))
