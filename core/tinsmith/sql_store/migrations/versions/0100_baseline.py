"""The schema of 0.1.0.

Revision ID: 0100
"""

import sqlalchemy as sa
from alembic import op

revision = "0100"
down_revision = None

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
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("path", name=op.f("pk_checkpoints")),
    )
    op.create_index(op.f("ix_checkpoints_created_at"), "checkpoints", ["created_at"])
    op.create_index(op.f("ix_checkpoints_expires_at"), "checkpoints", ["expires_at"])
    _create_partial_index("ix_checkpoints_kept", "checkpoints", ["tenant", "size_bytes"], "deleted_at IS NULL")
    op.create_index("ix_checkpoints_newest", "checkpoints", ["model_id", "kind", "created_at", "path"])
    op.create_index(op.f("ix_checkpoints_tenant"), "checkpoints", ["tenant"])

    op.create_table(
        "engine_figures",
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("reported_at", sa.BigInteger(), nullable=False),
        sa.Column("report", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("base_model", name=op.f("pk_engine_figures")),
    )

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
        sa.Column("consistency", sa.JSON(), nullable=True),
        sa.Column("turn", sa.JSON(), nullable=True),
        sa.Column("sampler_trouble", sa.String(), nullable=True),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("base_model", name=op.f("pk_engines")),
    )

    op.create_table(
        "finished_samples",
        sa.Column("subject_id", sa.String(), nullable=False),
        sa.Column("clone", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("succeeded", sa.Boolean(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subject_id", "clone", "number", name=op.f("pk_finished_samples")),
    )
    op.create_index(op.f("ix_finished_samples_finished_at"), "finished_samples", ["finished_at"])

    op.create_table(
        "leases",
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("engine_id", sa.String(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("base_model", name=op.f("pk_leases")),
    )

    op.create_table(
        "operations",
        sa.Column("id", _KEY, nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("subject_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("ordered", sa.Boolean(), nullable=False),
        sa.Column("early", sa.Boolean(), nullable=False),
        sa.Column("arrival", sa.BigInteger(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("engine_id", sa.String(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("interruptions", sa.Integer(), nullable=False),
        sa.Column("alone", sa.Boolean(), nullable=False),
        sa.Column("cancel_told", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operations")),
        sa.UniqueConstraint("request_id", name=op.f("uq_operations_request_id")),
        sa.UniqueConstraint("subject_id", "seq_id", name=op.f("uq_operations_subject_id_seq_id")),
        sqlite_autoincrement=True,
    )
    _create_partial_index("ix_operations_alone", "operations", ["base_model", "id"], "state = 'queued' AND alone")
    _create_partial_index(
        "ix_operations_early", "operations", ["base_model", "subject_id", "created_at"], "state = 'queued' AND early"
    )
    op.create_index(op.f("ix_operations_finished_at"), "operations", ["finished_at"])
    _create_partial_index(
        "ix_operations_queued",
        "operations",
        ["base_model", "early", "ordered", "tenant", "arrival", "seq_id"],
        "state = 'queued'",
    )
    _create_partial_index("ix_operations_running", "operations", ["base_model", "id"], "state = 'running'")
    _create_partial_index("ix_operations_untold", "operations", ["base_model"], "NOT cancel_told")

    op.create_table(
        "pending_work",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "kind", "finished", name=op.f("pk_pending_work")),
    )

    op.create_table(
        "recovery_points",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name=op.f("pk_recovery_points")),
    )

    op.create_table(
        "retention",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("finished_before", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_retention")),
    )

    op.create_table(
        "metrics",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seq_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("numbers", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "step", "seq_id", name=op.f("pk_metrics")),
        sqlite_with_rowid=False,
    )

    op.create_table(
        "routed_experts",
        sa.Column("id", _KEY, nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("experts", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_routed_experts")),
        sa.UniqueConstraint("tenant", "model_id", "digest", name=op.f("uq_routed_experts_tenant_model_id_digest")),
    )
    op.create_index(op.f("ix_routed_experts_created_at"), "routed_experts", ["created_at"])
    op.create_index("ix_routed_experts_tenant_id_num_bytes", "routed_experts", ["tenant", "id", "num_bytes"])

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
        sa.Column("arrived_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("pruned_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("unload_seq_id", sa.BigInteger(), nullable=True),
        sa.Column("rebuilds", sa.Integer(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("metric_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_base_model"), "runs", ["base_model"])
    op.create_index(op.f("ix_runs_created_at"), "runs", ["created_at"])
    live = "state IN ('creating', 'ready', 'parked')"
    _create_partial_index("ix_runs_live", "runs", ["base_model", "created_at"], live)
    _create_partial_index("ix_runs_live_of_tenant", "runs", ["tenant"], live)
    op.create_index(op.f("ix_runs_session_id"), "runs", ["session_id"])
    op.create_index(op.f("ix_runs_tenant"), "runs", ["tenant"])

    op.create_table(
        "sample_counts",
        sa.Column("subject_id", sa.String(), nullable=False),
        sa.Column("clone", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subject_id", "clone", name=op.f("pk_sample_counts")),
    )

    op.create_table(
        "sampling_sessions",
        sa.Column("sampling_session_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_id", sa.String(), nullable=True),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.Column("checkpoint_created_at", sa.BigInteger(), nullable=True),
        sa.Column("only_while_public", sa.Boolean(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sampling_session_id", name=op.f("pk_sampling_sessions")),
    )
    op.create_index(op.f("ix_sampling_sessions_session_id"), "sampling_sessions", ["session_id"])
    _create_partial_index(
        "ix_sampling_sessions_sized", "sampling_sessions", ["session_id", "num_bytes"], "num_bytes > 0"
    )

    op.create_table(
        "secrets",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secrets")),
    )

    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_at", sa.BigInteger(), nullable=False),
        sa.Column("heard_since", sa.BigInteger(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("sdk_version", sa.String(), nullable=True),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("ended", sa.String(), nullable=True),
        sa.Column("end_detail", sa.String(), nullable=True),
        sa.Column("heard_by", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("tenant", "idempotency_key", name=op.f("uq_sessions_tenant_idempotency_key")),
    )
    op.create_index(op.f("ix_sessions_created_at"), "sessions", ["created_at"])
    op.create_index(op.f("ix_sessions_last_seen_at"), "sessions", ["last_seen_at"])
    _create_partial_index("ix_sessions_open", "sessions", ["tenant"], "ended IS NULL")
    op.create_index(op.f("ix_sessions_tenant"), "sessions", ["tenant"])

    op.create_table(
        "usage",
        sa.Column("hour", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefilled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("checkpoints", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("engine_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hour", "tenant", "base_model", name=op.f("pk_usage")),
    )

    op.create_table(
        "write_checks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_write_checks")),
    )

    op.create_table(
        "payloads",
        sa.Column("operation_id", _KEY, autoincrement=False, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name=op.f("fk_payloads_operation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_payloads")),
    )

    op.create_table(
        "results",
        sa.Column("operation_id", _KEY, autoincrement=False, nullable=False),
        sa.Column("result_kind", sa.String(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name=op.f("fk_results_operation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_results")),
    )


def _create_partial_index(name: str, table: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
