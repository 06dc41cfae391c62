"""the first schema.

Revision ID: 0001
Revises: nothing
"""

import sqlalchemy as sa
from alembic import op

_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("path", name=op.f("pk_checkpoints")),
    )
    op.create_index(op.f("ix_checkpoints_created_at"), "checkpoints", ["created_at"])
    op.create_index(op.f("ix_checkpoints_expires_at"), "checkpoints", ["expires_at"])
    op.create_index(op.f("ix_checkpoints_model_id"), "checkpoints", ["model_id"])
    op.create_index(op.f("ix_checkpoints_tenant"), "checkpoints", ["tenant"])

    op.create_table(
        "engines",
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.String(), nullable=False),
        sa.Column("progress", sa.Float(), nullable=True),
        sa.Column("engine_id", sa.String(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("base_model", name=op.f("pk_engines")),
    )
    op.create_table(
        "operations",
        sa.Column("id", _KEY, nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("stream", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("ordered", sa.Boolean(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("engine_id", sa.String(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("cancel_told", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operations")),
        sa.UniqueConstraint("request_id", name=op.f("uq_operations_request_id")),
        sa.UniqueConstraint("stream", "seq_id", name=op.f("uq_operations_stream_seq_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_operations_finished_at"), "operations", ["finished_at"])
    op.create_index(
        "ix_operations_queued",
        "operations",
        ["base_model", "ordered", "tenant", "id"],
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_operations_running",
        "operations",
        ["base_model", "id"],
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_operations_untold",
        "operations",
        ["base_model"],
        sqlite_where=sa.text("NOT cancel_told"),
        postgresql_where=sa.text("NOT cancel_told"),
    )

    op.create_table(
        "retention",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("finished_before", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_retention")),
    )
    op.create_table(
        "runs",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_request_at", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("state_reason", sa.String(), nullable=True),
        sa.Column("next_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("applied_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("pruned_seq_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_base_model"), "runs", ["base_model"])
    op.create_index(op.f("ix_runs_created_at"), "runs", ["created_at"])
    op.create_index(op.f("ix_runs_session_id"), "runs", ["session_id"])
    op.create_index(op.f("ix_runs_tenant"), "runs", ["tenant"])

    op.create_table(
        "samplers",
        sa.Column("sampling_session_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_id", sa.String(), nullable=True),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("sampling_session_id", name=op.f("pk_samplers")),
    )
    op.create_index(op.f("ix_samplers_session_id"), "samplers", ["session_id"])

    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_at", sa.BigInteger(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("sdk_version", sa.String(), nullable=True),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("ended", sa.String(), nullable=True),
        sa.Column("end_detail", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("tenant", "idempotency_key", name=op.f("uq_sessions_tenant_idempotency_key")),
    )
    op.create_index(op.f("ix_sessions_created_at"), "sessions", ["created_at"])
    op.create_index(op.f("ix_sessions_last_seen_at"), "sessions", ["last_seen_at"])
    op.create_index(op.f("ix_sessions_tenant"), "sessions", ["tenant"])

    op.create_table(
        "payloads",
        sa.Column("operation_id", _KEY, autoincrement=False, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["operation_id"],
            ["operations.id"],
            name=op.f("fk_payloads_operation_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_payloads")),
    )
    op.create_table(
        "results",
        sa.Column("operation_id", _KEY, autoincrement=False, nullable=False),
        sa.Column("result_kind", sa.String(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["operation_id"],
            ["operations.id"],
            name=op.f("fk_results_operation_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_results")),
    )


def downgrade() -> None:
    for table in (
        "results",
        "payloads",
        "operations",
        "sessions",
        "samplers",
        "runs",
        "checkpoints",
        "engines",
        "retention",
    ):
        op.drop_table(table)
