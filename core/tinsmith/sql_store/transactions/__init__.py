"""The store's transactions, grouped by subject."""
