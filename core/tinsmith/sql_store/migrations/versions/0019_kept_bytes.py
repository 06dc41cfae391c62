"""how many bytes each tenant keeps: of its log, counted as it changes, and of its sampling snapshots.

Revision ID: 0019
Revises: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_SIZED = sa.text("num_bytes > 0")
_COUNT = sa.text(
    "INSERT INTO pending_work (tenant, kind, finished, number, num_bytes, stored_bytes) "
    "SELECT tenant, kind, false, 0, 0, sum(coalesce(length(payload), 0) + coalesce(length(result), 0)) "
    "FROM operations LEFT JOIN payloads ON payloads.operation_id = operations.id "
    "LEFT JOIN results ON results.operation_id = operations.id WHERE true GROUP BY tenant, kind "
    "ON CONFLICT (tenant, kind, finished) DO UPDATE SET stored_bytes = excluded.stored_bytes"
)


def upgrade() -> None:
    size = sa.Column("stored_bytes", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("pending_work", size)
    op.execute(_COUNT)
    op.add_column("sampling_sessions", sa.Column("num_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index(
        "ix_sampling_sessions_sized",
        "sampling_sessions",
        ["session_id", "num_bytes"],
        sqlite_where=_SIZED,
        postgresql_where=_SIZED,
    )


def downgrade() -> None:
    op.drop_index("ix_sampling_sessions_sized", "sampling_sessions")
    op.drop_column("sampling_sessions", "num_bytes")
    op.drop_column("pending_work", "stored_bytes")
