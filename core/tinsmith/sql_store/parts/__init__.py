"""The SQL store's methods, in the groups of the store's interface: each hands a transaction to a connection."""
