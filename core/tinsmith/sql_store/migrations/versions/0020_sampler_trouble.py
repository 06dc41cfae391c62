"""why nothing can be sampled for now, while training goes on.

Revision ID: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("sampler_trouble", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("engines", "sampler_trouble")
