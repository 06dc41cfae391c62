"""Links by which others read the curves of a run."""

from collections.abc import Mapping

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.subjects import audit
from tinsmith.store import ShareLink


def add(memory: Memory, link: ShareLink, *, by: Mapping[str, str] | None = None) -> None:
    run = memory.run(link.model_id)
    run.share_links[link.share_id] = link
    audit.note(memory, run.record.tenant, "share_link_create", by, model_id=link.model_id, share_id=link.share_id)


def find(memory: Memory, digest: str) -> ShareLink | None:
    links = (link for run in memory.runs.values() for link in run.share_links.values())
    return next((link for link in links if link.digest == digest), None)


def of_run(memory: Memory, model_id: str) -> list[ShareLink]:
    run = memory.runs.get(model_id)
    links = run.share_links.values() if run is not None else []
    return sorted(links, key=lambda link: (link.created_at, link.share_id))


def delete(memory: Memory, model_id: str, share_id: str, *, by: Mapping[str, str] | None = None) -> bool:
    run = memory.runs.get(model_id)
    if run is None or run.share_links.pop(share_id, None) is None:
        return False
    audit.note(memory, run.record.tenant, "share_link_delete", by, model_id=model_id, share_id=share_id)
    return True
