"""engines that are killed from outside, models that cannot be rebuilt, checkpoints that were deleted.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("interruptions", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("runs", sa.Column("rebuilds", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("checkpoints", sa.Column("deleted_at", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "deleted_at")
    op.drop_column("runs", "rebuilds")
    op.drop_column("operations", "interruptions")
