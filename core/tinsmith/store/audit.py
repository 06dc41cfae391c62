"""What the audit log says of a change, in every store."""

from collections.abc import Iterator

from tinsmith.store.records import CheckpointRecord


def changes_of(before: CheckpointRecord, after: CheckpointRecord) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the events of a change to a checkpoint, with their details."""
    if after.public != before.public:
        yield f"checkpoint_{'publish' if after.public else 'unpublish'}", {}
    if after.expires_at != before.expires_at:
        yield (
            "checkpoint_set_ttl",
            {"expires_at": "never" if after.expires_at is None else after.expires_at.isoformat()},
        )
