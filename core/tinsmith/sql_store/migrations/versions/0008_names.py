"""tables and columns are named after what they hold: recovery points, sampling sessions, subjects.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_NUMBERED_BY_SUBJECT = ("operations", "finished_samples", "sample_counts")


def upgrade() -> None:
    _make_recovery_points("recovery_points")
    _move("snapshots", "recovery_points")
    _make_sampling_sessions("sampling_sessions")
    _move("samplers", "sampling_sessions")
    for table in _NUMBERED_BY_SUBJECT:
        op.alter_column(table, "stream", new_column_name="subject_id")


def downgrade() -> None:
    for table in _NUMBERED_BY_SUBJECT:
        op.alter_column(table, "subject_id", new_column_name="stream")
    _make_sampling_sessions("samplers")
    _move("sampling_sessions", "samplers")
    _make_recovery_points("snapshots")
    _move("recovery_points", "snapshots")


def _make_recovery_points(name: str) -> None:
    op.create_table(
        name,
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name=op.f(f"pk_{name}")),
    )


def _make_sampling_sessions(name: str) -> None:
    op.create_table(
        name,
        sa.Column("sampling_session_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_id", sa.String(), nullable=True),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("sampling_session_id", name=op.f(f"pk_{name}")),
    )
    op.create_index(op.f(f"ix_{name}_session_id"), name, ["session_id"])


def _move(old: str, new: str) -> None:
    """Rows are few: a model keeps some recovery points, a session some sampling sessions."""
    columns = [column["name"] for column in sa.inspect(op.get_bind()).get_columns(new)]
    listed = ", ".join(columns)
    op.execute(f"INSERT INTO {new} ({listed}) SELECT {listed} FROM {old}")
    op.drop_table(old)
