"""The request store on SQL: SQLite by default, PostgreSQL with the same code."""
