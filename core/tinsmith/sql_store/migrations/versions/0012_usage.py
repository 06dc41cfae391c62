"""what tenants have used, and indexes of what they have waiting, open and kept.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_INDEXES = (
    ("ix_operations_pending", "operations", ["tenant", "kind"], "state IN ('queued', 'running')"),
    ("ix_sessions_open", "sessions", ["tenant"], "ended IS NULL"),
    ("ix_checkpoints_kept", "checkpoints", ["tenant", "size_bytes"], "deleted_at IS NULL"),
)
_USED = ("trained_tokens", "prefilled_tokens", "sampled_tokens", "checkpoints", "stored_bytes", "engine_us")


def upgrade() -> None:
    for name, table, columns, condition in _INDEXES:
        where = sa.text(condition)
        op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "usage",
        sa.Column("day", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _USED),
        sa.PrimaryKeyConstraint("day", "tenant", "base_model", name=op.f("pk_usage")),
    )


def downgrade() -> None:
    op.drop_table("usage")
    for name, table, _, _ in reversed(_INDEXES):
        op.drop_index(name, table)
