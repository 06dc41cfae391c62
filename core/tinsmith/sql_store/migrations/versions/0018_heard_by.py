"""which of several servers heard a session last.

Revision ID: 0018
Revises: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("heard_by", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("sessions", "heard_by")
