"""API keys made over HTTP."""

from collections.abc import Mapping
from datetime import datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import newest_first
from tinsmith.memory_store.subjects import audit
from tinsmith.store import IssuedKey


def add(memory: Memory, key: IssuedKey, *, by: Mapping[str, str] | None = None) -> None:
    memory.api_keys[key.key_id] = key
    audit.note(memory, key.tenant, "key_create", by, made_key_id=key.key_id, name=key.name)


def find(memory: Memory, key_id: str) -> IssuedKey | None:
    return memory.api_keys.get(key_id)


def list_all(memory: Memory, tenant: str | None, *, limit: int, offset: int) -> list[IssuedKey]:
    found = [each for each in memory.api_keys.values() if tenant in (None, each.tenant)]
    return newest_first(found, lambda each: (each.created_at, each.key_id))[offset : offset + limit]


def count(memory: Memory, tenant: str) -> int:
    return sum(each.tenant == tenant for each in memory.api_keys.values())


def delete(memory: Memory, key_id: str, *, tenant: str | None, by: Mapping[str, str] | None = None) -> bool:
    known = memory.api_keys.get(key_id)
    if known is None or tenant not in (None, known.tenant):
        return False
    del memory.api_keys[key_id]
    audit.note(memory, known.tenant, "key_delete", by, deleted_key_id=key_id, name=known.name)
    return True


def prune(memory: Memory, expired_before: datetime) -> None:
    kept = {
        key_id: each
        for key_id, each in memory.api_keys.items()
        if each.expires_at is None or each.expires_at >= expired_before
    }
    memory.api_keys = kept
