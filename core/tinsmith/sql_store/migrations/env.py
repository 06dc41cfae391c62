"""Run by alembic: migrate over the connection that `migrate` hands over."""

from alembic import context

from tinsmith.sql_store.tables import Table

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Table.metadata, render_as_batch=True
)
context.run_migrations()
