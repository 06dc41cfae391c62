"""The processes of servers and engines: how they start, are supervised, hold their leases, and report."""
