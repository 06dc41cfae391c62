"""the experts of sampled sequences, for routing replay.

Revision ID: 0016
Revises: 0015
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "routed_experts",
        sa.Column("id", _KEY, nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("experts", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_routed_experts")),
        sa.UniqueConstraint("tenant", "model_id", "digest", name=op.f("uq_routed_experts_tenant_model_id_digest")),
    )
    op.create_index("ix_routed_experts_created_at", "routed_experts", ["created_at"])
    op.create_index("ix_routed_experts_tenant_id_num_bytes", "routed_experts", ["tenant", "id", "num_bytes"])


def downgrade() -> None:
    op.drop_table("routed_experts")
