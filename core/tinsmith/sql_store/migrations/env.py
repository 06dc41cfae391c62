"""Run by alembic: migrate one schema over the connection that `migrate` hands over."""

from alembic import context

given = context.config.attributes
context.configure(
    connection=given["connection"],
    target_metadata=given["metadata"],
    version_table=given["version_table"],
    render_as_batch=True,
)
context.run_migrations()
