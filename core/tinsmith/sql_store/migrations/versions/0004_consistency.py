"""engines say how saves for sampling compared.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("consistency", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("engines", "consistency")
