"""indexes of what counts towards a tenant's limits.

Revision ID: 0010
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0008"
branch_labels = None
depends_on = None

_LIVE = sa.text("state IN ('creating', 'ready')")


def upgrade() -> None:
    _add("ix_runs_live", "runs", ["base_model", "created_at"], _LIVE)
    _add("ix_runs_live_of_tenant", "runs", ["tenant"], _LIVE)


def downgrade() -> None:
    op.drop_index("ix_runs_live_of_tenant", "runs")
    op.drop_index("ix_runs_live", "runs")


def _add(name: str, table: str, columns: list[str], where: sa.TextClause) -> None:
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
