"""snapshots of training states, and operations that run alone.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "snapshots",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name=op.f("pk_snapshots")),
    )
    op.add_column("operations", sa.Column("alone", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("operations", "alone")
    op.drop_table("snapshots")
