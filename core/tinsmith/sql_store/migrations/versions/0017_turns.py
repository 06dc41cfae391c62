"""who has the devices that trainer and sampler take turns on.

Revision ID: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("turn", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("engines", "turn")
