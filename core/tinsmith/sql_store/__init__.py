"""The request store in an SQL database: SQLite or PostgreSQL.

The way of a write, for instance `submit`:

1. `store.py`: the store's method asks the connection for durable writes to run `submitting.submit`.
2. `group_commit.py`: the writer collects all writes that are waiting, and runs them in one transaction.
3. `databases/sqlite.py` or `postgres.py`: the database runs the transaction in its connection's thread, and commits it.
4. `subjects/submitting.py`: `submit` inserts the row.
"""
