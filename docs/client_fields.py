"""The tables of docs/reference/client-fields.md: the fields of OpenAI's and Anthropic's clients that have no effect."""

import json
from collections.abc import Mapping

from tinsmith import OtherField
from tinsmith_openai import other_fields
from tinsmith_openai.messages import other_fields as anthropic

Table = Mapping[str, OtherField]


def _more(table: Table, than: Table) -> Table:
    return {name: field for name, field in table.items() if than.get(name) != field}


TABLES: dict[str, dict[str, Table]] = {
    "openai": {
        "both": other_fields.OF_SAMPLING,
        "completions": _more(other_fields.OF_COMPLETIONS, other_fields.OF_SAMPLING),
        "chats": _more(other_fields.OF_CHATS, other_fields.OF_SAMPLING),
        "`stream_options`": other_fields.OF_STREAM_OPTIONS,
        "messages": other_fields.OF_MESSAGES,
        "parts of a message": other_fields.OF_PARTS,
        "`tool_calls`": other_fields.OF_CALLS,
        "`tools`": other_fields.OF_TOOLS,
    },
    "anthropic": {
        "requests": anthropic.OF_REQUESTS,
        "blocks": anthropic.OF_BLOCKS,
        "`tools`": _more(anthropic.OF_TOOLS, anthropic.OF_ALL),
        "`tool_choice`": _more(anthropic.OF_TOOL_CHOICES, anthropic.OF_ALL),
        "`thinking`": _more(anthropic.OF_THINKING, anthropic.OF_ALL),
        "`output_config`": _more(anthropic.OF_OUTPUT, anthropic.OF_ALL),
    },
}


def markdown(tables: Mapping[str, Table]) -> str:
    lines = ["| Of | Field | Taken | Otherwise |", "|---|---|---|---|"]
    rows = ((of, name, field) for of, table in tables.items() for name, field in table.items())
    return "\n".join([*lines, *(f"| {of} | `{name}` | {_taken(field)} | {field.note} |" for of, name, field in rows)])


def _taken(field: OtherField) -> str:
    if field.neutral is None:
        return "anything"
    values = [each for each in field.neutral if each or isinstance(each, bool) or each == 0]
    nothing = len(values) < len(field.neutral)
    named = [f"`{json.dumps(each)}`" for each in values if each or not nothing]
    return " or ".join([*(["nothing"] if nothing else []), *named]) or "null"
