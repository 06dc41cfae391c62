"""SQLite and PostgreSQL: connections, durability, wake-ups, and removing deleted content from files."""
