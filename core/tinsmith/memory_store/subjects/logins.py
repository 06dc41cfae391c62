"""Sessions of browsers that have ended before their time. Others are known by their signed cookies alone."""

from collections.abc import Mapping
from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.subjects import audit


def end(memory: Memory, login_id: str, *, tenant: str, until: datetime, by: Mapping[str, str] | None = None) -> None:
    now = datetime.now(UTC)
    memory.ended_logins = {name: last for name, last in memory.ended_logins.items() if last >= now}
    if login_id not in memory.ended_logins:
        memory.ended_logins[login_id] = until
        audit.note(memory, tenant, "user_logout", by)


def is_ended(memory: Memory, login_id: str) -> bool:
    return login_id in memory.ended_logins
