"""the order in which samples finished.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "finished_samples",
        sa.Column("stream", sa.String(), nullable=False),
        sa.Column("clone", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("succeeded", sa.Boolean(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "clone", "number", name=op.f("pk_finished_samples")),
    )
    op.create_index(op.f("ix_finished_samples_finished_at"), "finished_samples", ["finished_at"])
    op.create_table(
        "sample_counts",
        sa.Column("stream", sa.String(), nullable=False),
        sa.Column("clone", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "clone", name=op.f("pk_sample_counts")),
    )


def downgrade() -> None:
    op.drop_table("sample_counts")
    op.drop_table("finished_samples")
