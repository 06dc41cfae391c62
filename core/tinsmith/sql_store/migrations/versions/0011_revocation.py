"""which checkpoint a sampling session was opened on, and by which right.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sampling_sessions", sa.Column("checkpoint_created_at", sa.BigInteger(), nullable=True))
    op.add_column(
        "sampling_sessions", sa.Column("only_while_public", sa.Boolean(), nullable=False, server_default=sa.false())
    )


def downgrade() -> None:
    op.drop_column("sampling_sessions", "only_while_public")
    op.drop_column("sampling_sessions", "checkpoint_created_at")
