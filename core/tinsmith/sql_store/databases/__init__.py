"""What differs between SQLite and PostgreSQL, and how each wakes its waiters."""
