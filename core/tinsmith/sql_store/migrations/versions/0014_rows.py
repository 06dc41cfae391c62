"""what is pending is counted as it changes; seq_ids of unloading by the end of a session; a run's newest checkpoints.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_PENDING = sa.text("state IN ('queued', 'running')")
_SIZES = sa.text(
    "UPDATE operations SET payload_bytes = "
    "coalesce((SELECT length(payload) FROM payloads WHERE payloads.operation_id = operations.id), 0) "
    "WHERE state IN ('queued', 'running')"
)
_COUNTS = sa.text(
    "INSERT INTO pending_work (tenant, kind, finished, number, num_bytes) "
    "SELECT tenant, kind, false, count(*), sum(payload_bytes) FROM operations "
    "WHERE state IN ('queued', 'running') GROUP BY tenant, kind"
)


def upgrade() -> None:
    op.add_column("runs", sa.Column("unload_seq_id", sa.BigInteger(), nullable=True))
    op.add_column("operations", sa.Column("payload_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "pending_work",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "kind", "finished", name=op.f("pk_pending_work")),
    )
    op.execute(_SIZES)
    op.execute(_COUNTS)
    op.drop_index("ix_operations_pending", "operations")
    op.create_index("ix_checkpoints_newest", "checkpoints", ["model_id", "kind", "created_at", "path"])
    op.drop_index("ix_checkpoints_model_id", "checkpoints")


def downgrade() -> None:
    op.create_index("ix_checkpoints_model_id", "checkpoints", ["model_id"])
    op.drop_index("ix_checkpoints_newest", "checkpoints")
    op.create_index(
        "ix_operations_pending", "operations", ["tenant", "kind"], sqlite_where=_PENDING, postgresql_where=_PENDING
    )
    op.drop_table("pending_work")
    op.drop_column("operations", "payload_bytes")
    op.drop_column("runs", "unload_seq_id")
