"""The tables of docs/reference/files.md: what happens to each field of a file from elsewhere."""

from collections.abc import Mapping

from tinsmith_checkpoints.huggingface.adapter_fields import ADAPTER_CONFIG_FIELDS
from tinsmith_checkpoints.huggingface.config_fields import COMMON_FIELDS, ROPE_FIELDS, WHOLE_FIELDS
from tinsmith_checkpoints.huggingface.fields import FileFields
from tinsmith_checkpoints.huggingface.tokenizer_fields import (
    ADDED_TOKEN_FIELDS,
    GENERATION_CONFIG_FIELDS,
    TOKENIZER_CONFIG_FIELDS,
    TOKENIZER_FIELDS,
    TOKENIZER_MODEL_FIELDS,
)
from tinsmith_checkpoints.huggingface.weight_fields import INDEX_FIELDS, METADATA_FIELDS
from tinsmith_jax import families
from tinsmith_megatron import config_fields

TABLES = {
    "adapter-config": ADAPTER_CONFIG_FIELDS,
    "tokenizer": TOKENIZER_FIELDS,
    "tokenizer-model": TOKENIZER_MODEL_FIELDS,
    "added-tokens": ADDED_TOKEN_FIELDS,
    "tokenizer-config": TOKENIZER_CONFIG_FIELDS,
    "generation-config": GENERATION_CONFIG_FIELDS,
    "weights": METADATA_FIELDS,
    "weights-index": INDEX_FIELDS,
    "config": FileFields("config.json", COMMON_FIELDS),
    "config-rope": ROPE_FIELDS,
    "config-whole": WHOLE_FIELDS,
}


def markdown(table: FileFields) -> str:
    """Return a table, in which fields with one status and note share a row."""
    rows = dict[tuple[str, str], list[str]]()
    for name, each in table.fields.items():
        rows.setdefault((each.described(), each.note), []).append(f"`{name}`")
    lines = [f"| Field of {table.file} | Status | Note |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {' | '.join(told)} |" for told, names in rows.items())])


def jax_families() -> str:
    """Return the rows of each of the jax backend's families, beyond those of all decoders."""
    return _of_families({name: families.fields_of(name) for name in families.built_in()})


def megatron_families() -> str:
    """Do the same of the megatron backend's."""
    return _of_families({name: config_fields.fields_of(name) for name in config_fields.FIELDS})


def _of_families(tables: Mapping[str, FileFields]) -> str:
    """Return one table, in which families with the same rows stand together."""
    alike = dict[tuple[tuple[str, str, str], ...], list[str]]()
    for name, table in tables.items():
        own = {field: each for field, each in table.fields.items() if COMMON_FIELDS.get(field) != each}
        rows = dict[tuple[str, str], list[str]]()
        for field, each in own.items():
            if field not in GENERATION_CONFIG_FIELDS.fields:
                rows.setdefault((each.described(), each.note), []).append(f"`{field}`")
        alike.setdefault(tuple((", ".join(fields), *told) for told, fields in rows.items()), []).append(f"`{name}`")
    lines = ["| Family | Field of config.json | Status | Note |", "|---|---|---|---|"]
    for rows, names in alike.items():
        for first, row in zip((", ".join(names), *[""] * len(rows)), rows, strict=False):
            lines.append(f"| {first} | {' | '.join(row)} |")
    return "\n".join(lines)
