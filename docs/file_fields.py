"""The tables of docs/reference/files.md: what happens to each field of a file from elsewhere."""

from tinsmith_checkpoints.huggingface.adapter_fields import ADAPTER_CONFIG_FIELDS
from tinsmith_checkpoints.huggingface.fields import FileFields
from tinsmith_checkpoints.huggingface.tokenizer_fields import (
    ADDED_TOKEN_FIELDS,
    GENERATION_CONFIG_FIELDS,
    TOKENIZER_CONFIG_FIELDS,
    TOKENIZER_FIELDS,
    TOKENIZER_MODEL_FIELDS,
)

TABLES = {
    "adapter-config": ADAPTER_CONFIG_FIELDS,
    "tokenizer": TOKENIZER_FIELDS,
    "tokenizer-model": TOKENIZER_MODEL_FIELDS,
    "added-tokens": ADDED_TOKEN_FIELDS,
    "tokenizer-config": TOKENIZER_CONFIG_FIELDS,
    "generation-config": GENERATION_CONFIG_FIELDS,
}


def markdown(table: FileFields) -> str:
    """Return a table, in which fields with one status and note share a row."""
    rows = dict[tuple[str, str], list[str]]()
    for name, each in table.fields.items():
        rows.setdefault((each.described(), each.note), []).append(f"`{name}`")
    lines = [f"| Field of {table.file} | Status | Note |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {' | '.join(told)} |" for told, names in rows.items())])
