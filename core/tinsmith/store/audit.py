"""What the audit log says of a change, in every store."""

from collections.abc import Iterator

from tinsmith.store.records.checkpoints import CheckpointRecord
from tinsmith.store.records.sessions import SessionRecord


def changes_of(before: CheckpointRecord, after: CheckpointRecord) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the events of a change to a checkpoint, with their details."""
    if after.public != before.public:
        yield f"checkpoint_{'publish' if after.public else 'unpublish'}", {}
    if after.expires_at != before.expires_at:
        yield (
            "checkpoint_set_ttl",
            {"expires_at": "never" if after.expires_at is None else after.expires_at.isoformat()},
        )


def moved(session: SessionRecord, project_id: str | None) -> dict[str, str]:
    """Return the details of a move to another project, or to none."""
    return {
        "session_id": session.session_id,
        "from_project_id": session.project_id or "",
        "project_id": project_id or "",
    }
