"""Lineage: from which checkpoints runs took their weights."""

from collections.abc import Collection

from tinsmith.memory_store.memory import Memory
from tinsmith.store import Origin


def of_runs(memory: Memory, model_ids: Collection[str]) -> list[Origin]:
    return [each for each in _oldest_first(memory) if each.model_id in model_ids]


def derived_from(memory: Memory, model_ids: Collection[str]) -> list[Origin]:
    return [each for each in _oldest_first(memory) if each.source_id in model_ids]


def _oldest_first(memory: Memory) -> list[Origin]:
    found = [each for run in memory.runs.values() for each in run.origins.values()]
    return sorted(found, key=lambda each: (each.created_at, each.model_id, each.seq_id))
