"""how an engine's last process ended, with what only the operator may read.

Revision ID: 0021
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("failure", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("engines", "failure")
