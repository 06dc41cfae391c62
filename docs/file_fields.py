"""The tables of docs/reference/files.md: what happens to each field of a file from elsewhere."""

from tinsmith_checkpoints.huggingface.adapter_fields import ADAPTER_CONFIG_FIELDS
from tinsmith_checkpoints.huggingface.fields import FileFields

TABLES = {"adapter-config": ADAPTER_CONFIG_FIELDS}


def markdown(table: FileFields) -> str:
    lines = [f"| Field of `{table.file}` | Status | Note |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {each.described()} | {each.note} |" for name, each in table.fields.items())]
    )
