"""what waits is found by tenant and turn, apart from what a missing seq_id holds up; operations know their size.

Revision ID: 0013
Revises: 0012
"""

from itertools import groupby

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_QUEUED = sa.text("state = 'queued'")
_EARLY = sa.text("state = 'queued' AND early")
_ALONE = sa.text("state = 'queued' AND alone")

_ARRIVED = sa.text(
    "SELECT operations.subject_id, operations.seq_id, runs.next_seq_id FROM operations "
    "JOIN runs ON runs.model_id = operations.subject_id WHERE operations.ordered "
    "AND operations.seq_id >= runs.next_seq_id ORDER BY operations.subject_id, operations.seq_id"
)
_UNFINISHED = sa.text(
    "SELECT subject_id, id FROM operations WHERE ordered AND state IN ('queued', 'running') ORDER BY subject_id, seq_id"
)


def upgrade() -> None:
    op.add_column("operations", sa.Column("num_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("operations", sa.Column("early", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("operations", sa.Column("turn", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("runs", sa.Column("arrived_seq_id", sa.BigInteger(), nullable=False, server_default="-1"))
    op.add_column("sessions", sa.Column("heard_since", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE operations SET turn = id")
    op.execute("UPDATE runs SET arrived_seq_id = next_seq_id - 1")
    _find_gaps(op.get_bind())
    _keep_models_in_order(op.get_bind())
    op.drop_index("ix_operations_queued", "operations")
    queued = ["base_model", "early", "ordered", "tenant", "turn", "seq_id"]
    _create_index("ix_operations_queued", queued, _QUEUED)
    _create_index("ix_operations_early", ["base_model", "subject_id", "created_at"], _EARLY)
    _create_index("ix_operations_alone", ["base_model", "id"], _ALONE)


def downgrade() -> None:
    op.drop_index("ix_operations_alone", "operations")
    op.drop_index("ix_operations_early", "operations")
    op.drop_index("ix_operations_queued", "operations")
    _create_index("ix_operations_queued", ["base_model", "ordered", "tenant", "id"], _QUEUED)
    op.drop_column("sessions", "heard_since")
    op.drop_column("runs", "arrived_seq_id")
    for column in ("turn", "early", "num_bytes"):
        op.drop_column("operations", column)


def _create_index(name: str, columns: list[str], where: sa.TextClause) -> None:
    op.create_index(name, "operations", columns, sqlite_where=where, postgresql_where=where)


def _find_gaps(connection: sa.Connection) -> None:
    """Mark what waits behind the first missing seq_id of each model."""
    for model_id, rows in groupby(connection.execute(_ARRIVED).all(), key=lambda row: row.subject_id):
        arrived = -2
        for number, row in enumerate(rows):
            if row.seq_id != row.next_seq_id + number:
                break
            arrived = row.seq_id
        values = {"model": model_id, "arrived": arrived}
        connection.execute(
            sa.text("UPDATE runs SET arrived_seq_id = :arrived WHERE model_id = :model AND arrived_seq_id < :arrived"),
            values,
        )
        connection.execute(
            sa.text(
                "UPDATE operations SET early = true WHERE subject_id = :model AND state = 'queued' AND seq_id > "
                "(SELECT arrived_seq_id FROM runs WHERE model_id = :model)"
            ),
            values,
        )


def _keep_models_in_order(connection: sa.Connection) -> None:
    """Where operations of a model arrived out of order, let each have its turn after those before it."""
    late = []
    for _, rows in groupby(connection.execute(_UNFINISHED).all(), key=lambda row: row.subject_id):
        turn = 0
        for row in rows:
            turn = max(turn, row.id)
            if turn > row.id:
                late.append({"key": row.id, "turn": turn})
    if late:
        connection.execute(sa.text("UPDATE operations SET turn = :turn WHERE id = :key"), late)
