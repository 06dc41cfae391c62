"""The request store in an SQL database: SQLite or PostgreSQL.

The way of a write, for instance `submit`:

1. `parts/server_log.py`: the store's method hands `submitting.submit` and its arguments to a `Writer`.
2. `transactions/writer.py`: the writer collects all writes that are waiting, and runs them in one transaction.
3. `databases/sqlite.py` or `postgres.py`: the database runs the transaction in its connection's thread, and commits it.
4. `transactions/submitting.py`: `submit` inserts the row.
"""
