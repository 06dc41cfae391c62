"""what tenants have used is counted by the hour; what was counted by the day stands in its first hour.

Revision ID: 0015
Revises: 0014
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_COUNTS = ("trained_tokens", "prefilled_tokens", "sampled_tokens", "checkpoints", "stored_bytes", "engine_us")


def upgrade() -> None:
    op.execute("ALTER TABLE usage RENAME COLUMN day TO hour")
    op.execute("UPDATE usage SET hour = hour || 'T00'")


def downgrade() -> None:
    op.execute("CREATE TEMPORARY TABLE hours AS SELECT * FROM usage")
    op.execute("DELETE FROM usage")
    op.execute("ALTER TABLE usage RENAME COLUMN hour TO day")
    sums = ", ".join(f"SUM({name})" for name in _COUNTS)
    op.execute(
        f"INSERT INTO usage (day, tenant, base_model, {', '.join(_COUNTS)}) "
        f"SELECT SUBSTR(hour, 1, 10), tenant, base_model, {sums} FROM hours GROUP BY 1, 2, 3"
    )
    op.execute("DROP TABLE hours")
