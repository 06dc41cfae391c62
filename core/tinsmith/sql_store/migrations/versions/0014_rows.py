"""which seq_id the end of a session gave to the unloading of each model.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("unload_seq_id", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "unload_seq_id")
